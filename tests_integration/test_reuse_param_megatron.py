"""Reuse-param on real megatron-core, on the CPU: a BF16 model by itself, and its own optimizers."""

from __future__ import annotations

import functools
import io
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core import ConfigError, FeatureError
from ascend_core.testing import bitwise_equal
from ascend_reuse_param import ReuseParamConfig, reuse_param
from tests_integration.megatron_cpu import gpt, loss_of, tokens
from tests_integration.megatron_npu.worker import type_of_cuda

pytestmark = [
    # megatron-core's own layers leave the group of tensor parallelism to its default.
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
    pytest.mark.usefixtures("megatron"),
]

STEPS, RESUMED_AT, CLIP = 5, 3, 0.5
FORMS: dict[str, dict[str, Any]] = {"for-loop": {}, "fused": {"fused": True}}


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


def saved(model: nn.Module, optimizer: Any) -> dict[str, Any]:
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


# megatron-core's own optimizers ------------------------------------------------------------------


@pytest.fixture
def own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know a parameter by the name of its type on CUDA."""
    monkeypatch.setattr(torch.Tensor, "type", type_of_cuda("torch."))


def in_ddp(model: nn.Module, *, sharded: bool = False, fp32: bool = True) -> nn.Module:
    """megatron-core's DistributedDataParallel, with gradients in FP32 or BF16."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32, use_distributed_optimizer=sharded
    )
    return DistributedDataParallel(model.config, config, model)


def own_config(clip: float) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="adam", bf16=True, params_dtype=torch.bfloat16, lr=1e-2, clip_grad=clip
    )


def mixed_precision(adamw: optim.Optimizer, clip: float = CLIP) -> Any:
    """The one that keeps FP32 masters of its own, whole."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    return Float16OptimizerWithFloat16Params(adamw, own_config(clip), None, None)


def single_precision(adamw: optim.Optimizer, clip: float = CLIP) -> Any:
    """The one that keeps none."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    return FP32Optimizer(adamw, own_config(clip), None)


def distributed(adamw: optim.Optimizer, model: Any) -> Any:
    """The one that keeps shards of them."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    group = parallel_state.get_data_parallel_group()
    buffers = {0: model.buffers}
    return DistributedOptimizer(
        adamw, own_config(CLIP), None, None, [model], buffers, group, None, 0, 0
    )


def train_own(model: Any, optimizer: Any) -> tuple[list[Tensor], list[float]]:
    """Losses, and norms before clipping; 0 where nothing is clipped."""
    losses, norms = [], []
    for number in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(train_step(model, number))
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        norms.append(float(norm or 0))
    return losses, norms


@pytest.mark.usefixtures("own_optimizers")
@pytest.mark.parametrize(("fp32", "clip"), [(True, CLIP), (False, 0.0)], ids=["FP32", "BF16"])
@pytest.mark.parametrize("form", FORMS)
def test_megatrons_optimizer_without_masters_trains_as_the_one_with(
    form: str, fp32: bool, clip: float
) -> None:
    """With gradients of either kind. Those in BF16 megatron-core does not clip."""
    plain_model = in_ddp(bf16_gpt(), fp32=fp32)
    adamw = optim.AdamW(plain_model.parameters(), lr=1e-2, **FORMS[form])
    expected = train_own(plain_model, mixed_precision(adamw, clip))

    model, facade = made(form)
    for parameter in model.parameters():
        parameter.grad_dtype = None  # it may have an FP32 gradient
    ours = train_own(in_ddp(model, fp32=fp32), single_precision(facade, clip))
    assert all(map(bitwise_equal, ours[0], expected[0]))
    assert ours[1] == expected[1]
    assert all(norm > clip for norm in ours[1]) is fp32
    for weight, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert bitwise_equal(weight.detach(), other.detach())
        assert bitwise_equal(facade.state[weight]["master_param"], other.main_param.detach())
    assert facade.report()["residual_bytes"] == 2 * sum(p.numel() for p in model.parameters())


# Without these a group is none of megatron-core's, whose optimizers do not load it then.
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def made_own() -> tuple[nn.Module, Any]:
    model = bf16_gpt()
    for parameter in model.parameters():
        parameter.grad_dtype = None
    adamw = optim.AdamW([{"params": list(model.parameters()), **GROUP}], lr=1e-2)
    return in_ddp(model), single_precision(reuse_param(adamw))


@pytest.mark.usefixtures("own_optimizers")
def test_megatrons_optimizer_is_saved_and_loaded() -> None:
    model, optimizer = made_own()
    train_own(model, optimizer)
    checkpoint = saved(model, optimizer)
    other_model, other = made_own()
    other_model.load_state_dict(checkpoint["model"], strict=False)
    other.load_state_dict(checkpoint["optimizer"])
    assert train_own(other_model, other) == train_own(model, optimizer)
    for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
        assert bitwise_equal(one.detach(), two.detach())
        masters = [
            o.optimizer.state[p]["master_param"] for o, p in ((optimizer, one), (other, two))
        ]
        assert bitwise_equal(*masters)


@pytest.mark.usefixtures("own_optimizers")
def test_megatrons_optimizers_with_masters_of_their_own_are_refused() -> None:
    """They put FP32 parameters into the groups, which would be stepped, and nothing saved."""
    model, facade = made("for-loop")
    with pytest.raises(ConfigError, match="no parameter of the optimizer is BF16 any more"):
        distributed(facade, in_ddp(model, sharded=True))

    model, facade = made("for-loop")
    wrapped = in_ddp(model)
    with pytest.raises(ConfigError, match="no parameter of the optimizer is BF16 any more"):
        train_own(wrapped, mixed_precision(facade))


@pytest.mark.usefixtures("own_optimizers")
def test_one_that_was_stepped_before_is_refused_too() -> None:
    model, facade = made("for-loop")
    train_step(model, 0)
    facade.step()
    with pytest.raises(FeatureError, match="cannot be replaced entry by entry"):
        mixed_precision(facade)
