"""Swap-attention on real megatron-core, on the CPU: each rank's bits are those of the plain run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ConfigError
from ascend_core.testing import RunRecord, assert_bitwise_equal, held_bytes, record_run
from ascend_swap import SwapAttentionConfig, swap_attention
from tests_integration.megatron_cpu import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    MASK,
    POSITIONS,
    SEQUENCE,
    gpt,
    loss_of,
    tokens,
)
from tests_integration.megatron_npu import launch
from tests_integration.megatron_npu.configurations import BY_WORLD, SWAP_1, SWAP_2, reference
from tests_integration.megatron_npu.launch import Outcome

ONE = SEQUENCE * BATCH * HIDDEN * 4  # bytes of one hidden state in FP32
SCORES = BATCH * HEADS * SEQUENCE * SEQUENCE  # of attention
ALL = SwapAttentionConfig(min_bytes=1)

# megatron-core's own layers leave the group of tensor parallelism to its default.
pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")


# Ranks -------------------------------------------------------------------------------------------


@functools.cache
def trained(world: int) -> dict[str, Outcome]:
    """The configurations with swap-attention, and the plain ones that they must equal."""
    names = list({1: SWAP_1, 2: SWAP_2}[world])
    plain = dict.fromkeys(reference(name, world) for name in names)
    return launch.run([*plain, *names], world=world, device="cpu")


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in BY_WORLD for name in (SWAP_1, SWAP_2)[world - 1]]
)
def test_every_rank_trains_as_without(world: int, name: str) -> None:
    expected, ours = trained(world)[reference(name, world)], trained(world)[name]
    assert ours.error is None, ours.error
    assert expected.error is None, expected.error
    assert len(ours.losses) >= 3
    assert ours.losses == expected.losses
    assert ours.norms == expected.norms
    assert ours.digests == expected.digests
    assert all(ours.digests)
    whole_layers = "uniform" in name  # nothing is saved that could move
    assert all((report["moved_bytes"] > 0) is not whole_layers for report in ours.reports)


@pytest.mark.parametrize("name", [name for name in SWAP_2 if ", pp2" in name])
def test_the_first_stage_of_a_pipeline_learns_its_schedule_in_one_step(name: str) -> None:
    report = trained(2)[name].reports[0]
    asked = report["prefetch_hits"] + report["prefetch_misses"]
    steps = BY_WORLD[2][name].steps
    assert report["prefetch_misses"] * steps <= asked
    assert report["kept_bytes"] == 0


def test_the_last_stage_keeps_its_last_layer() -> None:
    for name in ("swap-attention, pp2", "swap-attention, pp2, vpp2, bf16, overlap"):
        report = trained(2)[name].reports[1]
        assert report["kept_bytes"] == report["moved_bytes"] > 0


def test_what_is_recomputed_is_moved_by_its_input_alone() -> None:
    of = {name: report.reports[0] for name, report in trained(1).items() if report.reports[0]}
    plain, mlps = of["swap-attention"], of["swap-attention, MLPs"]
    hidden = 32 * 64 * 4  # bytes
    saved = plain["moved_bytes"] + plain["kept_bytes"]
    mask = 32 * 32  # which all layers save: it moves once, and stays in each that stays
    assert mlps["moved_bytes"] == saved - mask + 2 * hidden
    assert of["swap-attention, selective"]["moved_bytes"] < saved
    block = of["swap-attention, block recompute"]["moved_bytes_by_layer"]
    assert [size > 0 for size in block.values()] == [False, False, True, True]


# One process -------------------------------------------------------------------------------------


one_process = pytest.mark.usefixtures("megatron")


@functools.cache
def plain() -> RunRecord:
    return record_run(gpt, tokens, forward=loss_of, accumulate=2)


def train(make: Any, apply: Any = None) -> RunRecord:
    return record_run(
        make, tokens, forward=loss_of, accumulate=2, apply=lambda model, _: apply and apply(model)
    )


@one_process
def test_five_steps_with_dropout() -> None:
    config = SwapAttentionConfig(min_bytes=1, recompute_num_layers=2)
    ours = train(gpt, lambda model: swap_attention(model, config))
    assert_bitwise_equal(plain(), ours)
    assert ours.report["modules"] == [f"decoder.layers.{n}.self_attention" for n in range(LAYERS)]
    assert ours.report["recomputed"] == ["decoder.layers.0.mlp", "decoder.layers.1.mlp"]


class DroppingMLP(nn.Module):
    """An MLP with dropout from megatron-core's tracker, as that of a parallel region is."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = mlp.linear_fc1, mlp.linear_fc2
        self.config = mlp.config

    def forward(self, x: Tensor, **_: Any) -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        hidden, bias = self.linear_fc1(x)
        with get_cuda_rng_tracker().fork():
            hidden = F.dropout(F.gelu(hidden + bias), 0.3)
        return self.linear_fc2(hidden)


@one_process
def test_an_mlp_that_is_recomputed_draws_the_same_numbers_from_the_tracker() -> None:
    from megatron.core.transformer.mlp import MLP

    class Dropping(MLP):  # type: ignore[misc]
        forward = DroppingMLP.forward

    def make() -> nn.Module:
        def change(spec: Any) -> Any:
            spec.submodules.mlp.module = Dropping
            return spec

        return gpt(change_spec=change)

    config = SwapAttentionConfig(min_bytes=1, recompute_num_layers=LAYERS)
    ours = train(make, lambda model: swap_attention(model, config))
    assert_bitwise_equal(train(make), ours)
    assert ours.steps[0].losses["0"] != plain().steps[0].losses["0"]


@one_process
def test_what_attention_saved_is_not_on_the_device() -> None:
    # On the CPU "the device" and the host are one, so pool and activations are told apart.
    model, (batch, _) = gpt(attention_dropout=0.0), tokens()

    def held() -> int:
        return held_bytes(lambda: model(batch, POSITIONS, MASK))

    model(batch, POSITIONS, MASK)  # what megatron-core caches is there
    before = held()
    handle = swap_attention(model, dataclasses.replace(ALL, keep_last=0))
    reserved = handle.report()["host_reserved_bytes"]
    after = held()
    report = handle.report()
    assert report["host_reserved_bytes"] > reserved
    # The input, which queries, keys and values share, and what core attention returned; queries,
    # keys, values and weights of attention.
    assert min(report["moved_bytes_by_layer"].values()) >= 5 * ONE + 4 * SCORES
    dropped = before - (after - report["host_reserved_bytes"])
    assert 0 < report["moved_bytes"] - report["in_vain_bytes"] - dropped < ONE * LAYERS


# Spec --------------------------------------------------------------------------------------------


def swapped_gpt(spec: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    from ascend_swap.integrations.megatron import with_swapped_attention

    handles = []

    def change(spec: Any) -> Any:
        swapped, handle = with_swapped_attention(spec, ALL)
        handles.append(handle)
        return swapped

    return gpt(change_spec=change, **options), handles[0]


@one_process
def test_a_model_of_the_spec_is_the_plain_one_but_for_its_attention() -> None:
    ours = train(lambda: swapped_gpt()[0])
    assert_bitwise_equal(plain(), ours)
    model, handle = swapped_gpt()
    kinds = [type(module) for module in model.decoder.layers[0].modules()][1:]
    assert kinds == [type(module) for module in gpt().decoder.layers[0].modules()][1:]
    assert list(model.state_dict()) == list(gpt().state_dict())
    loss_of(model, tokens()).backward()
    report = handle.report()
    assert report["modules"] == [f"{n}.self_attention" for n in range(LAYERS)]
    assert all(report["moved_bytes_by_layer"].values())
    handle.remove()
    assert [type(module) for module in model.modules()] == [
        type(module) for module in gpt().modules()
    ]


@one_process
def test_a_spec_may_build_several_models() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from ascend_swap.integrations.megatron import with_swapped_attention

    spec = get_gpt_layer_local_spec()
    ours, handle = with_swapped_attention(spec, ALL)
    assert spec.module is not ours.module
    assert spec.module.__name__ == ours.module.__name__
    with pytest.raises(ConfigError, match="no layer was built from the spec"):
        handle.report()
    first = gpt(change_spec=lambda _: ours)
    loss_of(first, tokens()).backward()
    moved = handle.report()["moved_bytes"]
    assert moved > 0
    second = gpt(change_spec=lambda _: ours, num_layers=2)
    assert len(handle.report()["layers"]) == 2
    loss_of(second, tokens()).backward()
    assert 0 < handle.report()["moved_bytes"] < moved
    handle.remove()
    third = gpt(change_spec=lambda _: ours)
    assert type(third.decoder.layers[0]) is type(second.decoder.layers[0]) is spec.module


@one_process
def test_a_spec_of_a_block_and_what_is_none() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from ascend_swap.integrations.megatron import with_swapped_attention

    spec = get_gpt_layer_local_spec()
    block = TransformerBlockSubmodules(layer_specs=[spec, spec])
    ours, _ = with_swapped_attention(block)
    assert block.layer_specs == [spec, spec]
    assert all(issubclass(one.module, spec.module) for one in ours.layer_specs)
    assert all(one.module is not spec.module for one in ours.layer_specs)
    for wrong in (spec.submodules.mlp, nn.Linear):
        with pytest.raises(ConfigError, match="the spec builds"):
            with_swapped_attention(wrong)


@one_process
def test_what_a_spec_cannot_do_is_said_when_it_is_first_called() -> None:
    from ascend_swap.integrations.megatron import with_swapped_attention

    config = SwapAttentionConfig(min_bytes=1, recompute_num_layers=LAYERS + 1)
    model = gpt(change_spec=lambda spec: with_swapped_attention(spec, config)[0])
    for _ in range(2):
        with pytest.raises(ConfigError, match="recompute_num_layers is 5, and there are 4 layers"):
            loss_of(model, tokens())


# Options -----------------------------------------------------------------------------------------


def by_options(model: Any, **options: Any) -> Any:
    from ascend_swap.integrations.megatron import swap_by_options

    return swap_by_options(model, SimpleNamespace(swap_attention=True, **options), config=ALL)


@one_process
def test_options_of_a_script() -> None:
    from ascend_swap.integrations.megatron import add_swap_arguments, swap_by_options

    model, other = gpt(), argparse.ArgumentParser()
    other.add_argument("--recompute-num-layers", type=int)
    for parser in (argparse.ArgumentParser(), other):
        add_swap_arguments(parser)
        assert swap_by_options(model, parser.parse_args([])) is None
        line = "--swap-attention --swap-modules self_attention --recompute-num-layers 3"
        handle = swap_by_options(model, parser.parse_args(line.split()))
        assert handle is not None
        assert len(handle.report()["recomputed"]) == 3
        assert len(handle.report()["modules"]) == LAYERS
        handle.remove()


@one_process
def test_the_modules_that_mindspeed_names_by_default() -> None:
    handle = by_options(gpt(), swap_modules="input_norm,self_attention,post_attention_norm")
    assert len(handle.report()["modules"]) == LAYERS
    with pytest.raises(ConfigError, match="no module called 'input_norm'"):
        by_options(gpt(), swap_modules="input_norm,self_attention")
    handle = by_options(gpt(), swap_modules="input_layernorm,self_attention")
    assert len(handle.report()["modules"]) == 2 * LAYERS


@one_process
def test_all_chunks_of_a_stage_are_one() -> None:
    chunks = [gpt(num_layers=2), gpt(num_layers=2)]
    handle = by_options(chunks, recompute_num_layers=3)
    report = handle.report()
    assert report["layers"] == ["0", "1", "2", "3"]
    assert report["recomputed"] == ["0.mlp", "1.mlp", "2.mlp"]
    with pytest.raises(ConfigError, match="recompute_num_layers is 5, and there are 4 layers"):
        by_options(chunks, recompute_num_layers=5)


@one_process
@pytest.mark.parametrize("own", [False, True], ids=["of the script", "of the model"])
def test_the_number_of_layers_is_that_of_full_recompute_where_it_is_on(own: bool) -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    }
    model = gpt(**(full if own else {}))
    assert by_options(model, **full).report()["recomputed"] == []


@one_process
def test_beside_an_offload_of_megatron_cores_own_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="fine_grained_activation_offloading cannot"):
        by_options(gpt(), fine_grained_activation_offloading=True)
    model = gpt()
    model.config.cpu_offloading = True
    with pytest.raises(ConfigError, match="swap_attention and cpu_offloading cannot"):
        by_options(model)


# Attributes of weights ---------------------------------------------------------------------------


class Fused(torch.autograd.Function):
    """A linear layer that adds its weight's gradient to `main_grad`, as megatron-core's kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grads[0].flatten(0, -2).t() @ x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return grads[0] @ weight, None


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Fused.apply(x, self.weight)
        return out


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.proj = Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v))
        return out


def test_main_grad_is_seen_in_backward() -> None:  # SA-15
    def gradients(*, swap: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(FusedAttention() for _ in range(3)))
        for weight in model.parameters():
            weight.main_grad = torch.zeros_like(weight)
        config = SwapAttentionConfig(min_bytes=1, swap_modules=[FusedAttention], keep_last=0)
        handle = swap_attention(model, config) if swap else None
        for _ in range(3):
            model(torch.randn(BATCH, SEQUENCE, HIDDEN).requires_grad_()).square().mean().backward()
        assert all(weight.grad_added_to_main_grad for weight in model.parameters())
        assert all(weight.grad is None for weight in model.parameters())
        return [weight.main_grad for weight in model.parameters()], handle and handle.report()

    (expected, _), (ours, report) = gradients(swap=False), gradients(swap=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))
    assert report["moved_bytes"] > 0
