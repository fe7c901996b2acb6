"""Reuse-param on real megatron-core, on the CPU: a BF16 model by itself, and its own optimizers."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core.testing import bitwise_equal
from ascend_reuse_param import ReuseParamConfig, reuse_param
from tests_integration.megatron_cpu import gpt, loss_of, megatron_on_cpu, tokens

pytestmark = [
    # megatron-core's own layers leave the group of tensor parallelism to its default.
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
    pytest.mark.usefixtures("megatron"),
]

STEPS, RESUMED_AT = 5, 3
FORMS: dict[str, dict[str, Any]] = {"for-loop": {}, "fused": {"fused": True}}


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small are the tensors
    with megatron_on_cpu():
        yield
    torch.set_num_threads(threads)


def bf16_gpt() -> nn.Module:
    return gpt(bf16=True, params_dtype=torch.bfloat16).bfloat16()


def train_step(model: nn.Module, number: int) -> Tensor:
    """Forward and backward of a step; its dropout and its data follow from its number."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1 + number, force_reset_rng=True)
    loss = loss_of(model, tokens())
    loss.backward()
    return loss.detach()


class Trained(NamedTuple):
    """Losses of all steps, and what there is at the end."""

    losses: list[Tensor]
    weights: list[Tensor]
    masters: list[Tensor]


@functools.cache
def by_hand(form: str) -> Trained:
    """FP32 masters beside the weights, as one writes it."""
    model = bf16_gpt()
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    adamw = optim.AdamW(masters, lr=1e-2, **FORMS[form])
    losses = []
    for number in range(STEPS):
        losses.append(train_step(model, number))
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        adamw.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
                weight.grad = None
    return Trained(losses, [w.detach() for w in weights], [m.detach() for m in masters])


def made(form: str, times: int = 16) -> tuple[nn.Module, optim.Optimizer]:
    model = bf16_gpt()
    adamw = optim.AdamW(model.parameters(), lr=1e-2, **FORMS[form])
    return model, reuse_param(adamw, ReuseParamConfig(times=times))


def saved(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Through a file, with plain types and tensors alone."""
    file = io.BytesIO()
    weights = {name: value for name, value in model.state_dict().items() if value is not None}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("resumes", [False, True], ids=["in one go", "resumed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gpt_trains_as_with_masters_by_hand(form: str, resumes: bool) -> None:
    plain = by_hand(form)
    model, optimizer = made(form)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    losses = []
    for number in range(STEPS):
        if resumes and number == RESUMED_AT:
            checkpoint = saved(model, optimizer)
            model, optimizer = made(form, times=3)
            left = model.load_state_dict(checkpoint["model"], strict=False)
            assert all(name.endswith("_extra_state") for name in left.missing_keys)
            optimizer.load_state_dict(checkpoint["optimizer"])
        losses.append(train_step(model, number))
        optimizer.step()
        optimizer.zero_grad()
    weights = list(model.parameters())
    masters = [optimizer.state[weight]["master_param"] for weight in weights]
    for ours, expected in ((losses, plain.losses), (masters, plain.masters)):
        assert all(map(bitwise_equal, ours, expected))
    assert all(bitwise_equal(w.detach(), e) for w, e in zip(weights, plain.weights, strict=True))
