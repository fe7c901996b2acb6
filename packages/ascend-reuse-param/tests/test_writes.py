"""A weight that somebody else wrote becomes its own master, whoever it was. (PR-13)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.testing import bitwise_equal, parametrize_devices
from ascend_reuse_param import ReuseParamConfig, reuse_param


def by_load_state_dict(weight: nn.Parameter, value: torch.Tensor) -> None:
    holder = nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": value})


def by_vector(weight: nn.Parameter, value: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(value.flatten(), [weight])


def by_ema(weight: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([weight.data], [value], 1.0)


WRITES: dict[str, Callable[[nn.Parameter, torch.Tensor], object]] = {
    "copy": lambda weight, value: weight.detach().copy_(value),
    "data.copy": lambda weight, value: weight.data.copy_(value),
    "data=": lambda weight, value: setattr(weight, "data", value.clone()),
    "load_state_dict": by_load_state_dict,
    "vector_to_parameters": by_vector,
    "ema": by_ema,
    "storage": lambda weight, value: weight.untyped_storage().copy_(value.untyped_storage()),
}


@parametrize_devices()
@pytest.mark.parametrize("write", WRITES)
def test_the_written_value_is_the_master(write: str, device: torch.device, run: Any) -> None:
    trained = run("reuse", [(65, 130)], device=device, fused=True).train(3)
    (weight,) = trained.weights
    value = torch.randn(65, 130, generator=torch.Generator().manual_seed(9)).bfloat16().to(device)
    WRITES[write](weight, value)
    trained.optimizer.param_groups[0]["lr"] = 0.0
    trained.train(1, first=3)
    assert bitwise_equal(weight.detach(), value)
    assert bitwise_equal(trained.masters()[0], value.float().cpu())


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": lambda w: w.view(torch.int16).bitwise_xor(one_hot(w)).view(torch.bfloat16),
    "doubled": lambda w: w * 2,
    "negated": lambda w: -w,
    "negated in a chequer": lambda w: w * chequer(w),
    "turned round": lambda w: w.flip(0),
    "rolled by one": lambda w: w.roll(1),
    "two rows swapped": lambda w: w[torch.randperm(64, generator=torch.Generator().manual_seed(0))],
    "transposed": lambda w: w.t().contiguous(),
    "zero": lambda w: w * 0,
    "negative zero": lambda w: w * 0 * -1,
}


def one_hot(weight: torch.Tensor) -> torch.Tensor:
    hot = torch.zeros(weight.shape, dtype=torch.int16)
    hot.view(-1)[-1] = 1
    return hot


def chequer(weight: torch.Tensor) -> torch.Tensor:
    signs = torch.ones(weight.shape, dtype=torch.bfloat16)
    signs.view(-1)[1::2] = -1
    return signs


@pytest.mark.parametrize("form", [{}, {"fused": True}])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_goes_unnoticed(change: str, form: dict[str, bool], run: Any) -> None:
    trained = run("reuse", [(64, 64)], config=ReuseParamConfig(times=1), **form).train(2)
    (weight,) = trained.weights
    value = CHANGES[change](weight.detach().clone())
    weight.data.copy_(value)
    assert bitwise_equal(trained.masters()[0], value.float())
    trained.optimizer.param_groups[0]["lr"] = 0.0
    trained.train(1, first=2)
    assert torch.equal(weight.detach(), value)  # (a step of 0 turns -0 into 0)
    assert torch.equal(trained.masters()[0], value.float())


def test_only_the_blocks_that_were_written_lose_their_residuals(run: Any) -> None:
    trained = run("reuse", [(3 * 4096,)], config=ReuseParamConfig(times=1)).train(3)
    (weight,) = trained.weights
    before = trained.masters()[0]
    weight.data[5000] += 1
    after = trained.masters()[0]
    assert bitwise_equal(before[:4096], after[:4096])
    assert bitwise_equal(before[8192:], after[8192:])
    assert bitwise_equal(after[4096:8192], weight.detach()[4096:8192].float())


def test_a_flat_buffer_that_the_weights_alias(run: Any) -> None:
    """As a DDP bucket or megatron-core's parameter buffer: views at any offset, written from it."""
    flat = torch.randn(7 + 4097 + 65).bfloat16()
    copies = [flat.clone(), flat.clone()]
    ends = []
    for how, buffer in zip(("beside", "reuse"), copies, strict=True):
        weights = [nn.Parameter(part) for part in buffer.split([7, 4097, 65])]
        assert all(w.untyped_storage().data_ptr() == buffer.data_ptr() for w in weights)
        ends.append(run(how, weights=weights).train(3))
    assert ends[1].same_as(ends[0])
    gathered = torch.randn(flat.shape).bfloat16()
    copies[1].copy_(gathered)
    ends[1].optimizer.param_groups[0]["lr"] = 0.0
    ends[1].train(1, first=3)
    assert bitwise_equal(copies[1], gathered)


def test_a_loaded_module_that_assigns_new_parameters(run: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 30).bfloat16()
    optimizer = reuse_param(optim.AdamW(model.parameters(), lr=0.0))
    other = nn.Linear(20, 30).bfloat16()
    for _ in range(2):
        model.load_state_dict(other.state_dict(), assign=True)
        model(torch.randn(4, 20).bfloat16()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bitwise_equal(optimizer.state[model.weight]["master_param"], other.weight.float())


def test_shards_of_two_ranks_keep_half_of_the_residual_each(run: Any) -> None:
    """A sharded optimizer steps slices of a flat buffer: 2 bytes / DP are saved on each rank."""
    whole = torch.randn(2, 5001).bfloat16()
    for shard in whole.clone().view(2, -1):
        ranked = run("reuse", weights=[nn.Parameter(shard)]).train(1)
        assert ranked.optimizer.report()["residual_bytes"] == 2 * whole.numel() // 2


@pytest.mark.parametrize("times", [1, 16])
def test_shapes_that_are_not_plain(times: int, run: Any) -> None:  # PR-12
    def weights() -> list[nn.Parameter]:
        torch.manual_seed(0)
        drawn = [
            torch.randn(9, 31).t(),
            torch.randn(()),
            torch.empty(0, 3),
            torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
            torch.randn(1000)[3:],
        ]
        return [nn.Parameter(one.bfloat16()) for one in drawn]

    plain = run("beside", weights=weights()).train(5)
    config = ReuseParamConfig(times=times)
    assert run("reuse", weights=weights(), config=config).train(5).same_as(plain)
