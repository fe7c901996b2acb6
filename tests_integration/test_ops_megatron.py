"""Fused operators in real megatron-core, on the CPU: near the plain run, and equal where they may.

RMSNorm and ALiBi attention add in another order than torch's own operators: losses of a few steps
of Adam are near one another. SwiGLU is equal to the bit where torch's operators compute it.
"""

from __future__ import annotations

import argparse
import functools
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_core.testing import assert_bitwise_equal, record_run
from ascend_ops import reference
from tests_integration.megatron_cpu import BATCH, HEADS, HIDDEN, LAYERS, SEQUENCE, loss_of, tokens
from tests_integration.megatron_npu import launch
from tests_integration.megatron_npu.configurations import OPS_1, OPS_2
from tests_integration.megatron_npu.configurations import reference as plain_of
from tests_integration.megatron_npu.launch import Outcome

# megatron-core's own layers leave the group of tensor parallelism to its default.
pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")


# Ranks -------------------------------------------------------------------------------------------


@functools.cache
def trained(world: int) -> dict[str, Outcome]:
    names = list({1: OPS_1, 2: OPS_2}[world])
    plain = dict.fromkeys(plain_of(name, world) for name in names)
    return launch.run(list(dict.fromkeys([*plain, *names])), world=world, device="cpu")


def near(one: Outcome, other: Outcome, bound: float, norms: float | None = None) -> None:
    """Losses, of which each rank with the last layer tells all, and norms of gradients.

    Args:
        one: Of either number of ranks.
        other: Of as many, or of one.
        bound: Of the relative difference.
        norms: That of the norms; the same when left out.
    """
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert len(one.losses) == len(one.norms) == 3
    bounds = [bound] * 3 + [bound if norms is None else norms] * 3
    ours_and_theirs = zip(one.losses + one.norms, other.losses[:3] + other.norms[:3], strict=True)
    for (ours, theirs), allowed in zip(ours_and_theirs, bounds, strict=True):
        found, expected = ([float.fromhex(number) for number in x.split()] for x in (ours, theirs))
        expected *= len(found) // len(expected)
        for a, b in zip(found, expected, strict=True):
            assert math.isclose(a, b, rel_tol=allowed), (found, expected)


# FP32: after three steps of Adam, which divides by small roots, units in the last place of the
# gradients have become 1e-5 of the loss. BF16: a norm is rounded once, and the plain one twice; in
# the third step weights have moved apart, which the norm of the gradients feels more than the loss.
@pytest.mark.parametrize(
    ("world", "name", "bound", "norms"),
    [
        (1, "ops", 1e-5, 1e-5),
        (1, "ops, bf16", 2**-7, 2**-5),
        (2, "ops, tp2, sequence parallel", 1e-5, 1e-5),
    ],
)
def test_training_is_near_the_plain_one(world: int, name: str, bound: float, norms: float) -> None:
    near(trained(world)[name], trained(world)[plain_of(name, world)], bound, norms)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("ops, alibi, tp2", "ops, alibi"),
        ("ops, alibi, tp2, grouped queries, sequence parallel", "ops, alibi, grouped queries"),
        ("ops, alibi, pp2", "ops, alibi"),
    ],
)
def test_alibi_on_two_ranks_is_alibi_on_one(name: str, alone: str) -> None:
    """Each rank has its slice of all slopes: rank 1 with those of rank 0 would train otherwise."""
    near(trained(2)[name], trained(1)[alone], 1e-5)


def test_the_gradients_of_norms_are_summed_over_the_ranks() -> None:
    for name in ("ops, tp2, sequence parallel", "ops, alibi, tp2"):
        reports = trained(2)[name].reports
        assert len({report["norms"] for report in reports}) == 1
    pipeline = trained(2)["ops, alibi, pp2"].reports
    assert len({report["norms"] for report in pipeline}) == 2


def test_all_operators_are_called() -> None:
    for world in (1, 2):
        for name in {1: OPS_1, 2: OPS_2}[world]:
            for report in trained(world)[name].reports:
                calls = report["calls"]
                here = 2 if "pp2" in name else 4  # layers
                times = 3 * 4 * here  # steps, sequences
                assert calls["ascend_ops::swiglu"] == calls["ascend_ops::swiglu_backward"] == times
                norms = calls["ascend_ops::rms_norm"]
                assert norms == calls["ascend_ops::rms_norm_backward"] >= 2 * times
                if "alibi" in name:
                    assert calls["ascend_ops::alibi_attention"] == times
                    assert calls["ascend_ops::alibi_attention_backward"] == times


# One process -------------------------------------------------------------------------------------


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "use_cpu_initialization": True, "hidden_dropout": 0.1, "attention_dropout": 0.0,
        "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "gated_linear_unit": True, "activation_func": F.silu,
        "normalization": "RMSNorm", **options,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that megatron-core itself finds outdated
        return TransformerConfig(**options)


def layer_spec(**options: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_gpt_layer_local_spec(normalization="RMSNorm", **options)


def gpt(
    *operators: str,
    positions: str = "rope",
    before: Callable[[Any], Any] = lambda spec: spec,
    after: Callable[[Any], Any] = lambda spec: spec,
    **options: Any,
) -> nn.Module:
    """A model; `before` and `after` change its spec around the operators."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel

    from ascend_ops.integrations.megatron import with_fused_ops

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    backend = options.pop("backend", None)
    config = config_of(**options)
    spec = before(layer_spec(qk_layernorm=options.get("qk_layernorm")))
    if operators:
        spec = with_fused_ops(spec, config, operators, backend=backend)
    spec = after(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPTModel(config, spec, 64, SEQUENCE, position_embedding_type=positions)


one_process = pytest.mark.usefixtures("megatron")


@one_process
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused by megatron-core"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_swiglu_is_equal_to_the_bit(bias: bool, fused: bool) -> None:
    options = {"add_bias_linear": bias}
    if not fused:
        options["activation_func_clamp_value"] = 0.02  # which some of the activations are beyond
    ours = record_run(lambda: gpt("swiglu", backend="eager", **options), tokens, forward=loss_of)
    plain = record_run(lambda: gpt(**options), tokens, forward=loss_of)
    assert_bitwise_equal(plain, ours)
    if fused:  # megatron-core's own fusion computes the gradient by another formula
        theirs = record_run(
            lambda: gpt(**options, bias_activation_fusion=True), tokens, forward=loss_of
        )
        assert theirs.losses[0] == ours.losses[0]


@one_process
def test_a_model_of_the_spec_has_the_plain_ones_state() -> None:
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from ascend_ops.integrations.megatron import AlibiCoreAttention, FusedRMSNorm, FusedSwiGLUMLP

    plain = gpt(positions="none", qk_layernorm=True)
    ours = gpt("swiglu", "rms_norm", "alibi_attention", positions="alibi", qk_layernorm=True)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    for layer in ours.decoder.layers:
        assert type(layer) is TransformerLayer
        assert type(layer.mlp) is FusedSwiGLUMLP
        assert isinstance(layer.mlp, MLP)
        assert layer.mlp.tp_group is not None
        assert type(layer.self_attention.core_attention) is AlibiCoreAttention
    norms = [module for module in ours.modules() if isinstance(module, FusedRMSNorm)]
    assert len(norms) == 4 * LAYERS + 1
    assert ours.sharded_state_dict().keys() == plain.sharded_state_dict().keys()


@one_process
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_with_swapped_attention(first: bool) -> None:
    from megatron.core.transformer.mlp import MLP

    from ascend_ops.integrations.megatron import FusedSwiGLUMLP
    from ascend_swap import SwapAttentionConfig
    from ascend_swap.integrations.megatron import with_swapped_attention

    handles: list[Any] = []

    def swap(spec: Any) -> Any:
        swapped, handle = with_swapped_attention(
            spec, SwapAttentionConfig(min_bytes=1, keep_last=0)
        )
        handles.append(handle)
        return swapped

    def run(**changes: Any) -> Any:
        every = ("swiglu", "rms_norm", "alibi_attention")
        return record_run(lambda: gpt(*every, positions="none", **changes), tokens, forward=loss_of)

    ours = run(**{"before" if first else "after": swap})
    assert_bitwise_equal(run(), ours)
    assert all(handles[0].report()["moved_bytes_by_layer"].values())
    model = gpt("swiglu", **{"before" if first else "after": swap})
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    assert [type(mlp) for mlp in mlps] == [FusedSwiGLUMLP] * LAYERS


@one_process
def test_the_given_spec_stays_as_it_is_and_blocks_too() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from ascend_ops.integrations.megatron import with_fused_ops

    spec, config = layer_spec(), config_of()
    before = [spec.module, *vars(spec.submodules).values(), spec.submodules.mlp.module]
    core = spec.submodules.self_attention.submodules.core_attention
    every = ("swiglu", "rms_norm", "alibi_attention")
    block = with_fused_ops(spec, config, every)
    assert isinstance(block, TransformerBlockSubmodules)
    assert len(block.layer_specs) == LAYERS
    assert len({id(layer) for layer in block.layer_specs}) == 1
    with_fused_ops(TransformerBlockSubmodules([spec, spec]), config, every)
    assert before == [spec.module, *vars(spec.submodules).values(), spec.submodules.mlp.module]
    assert spec.submodules.self_attention.submodules.core_attention is core
    only = with_fused_ops(spec, config, ("swiglu",))
    assert only.submodules.mlp.module is spec.submodules.mlp.module  # known by its class
    assert only.module is not spec.module


@one_process
def test_the_weight_of_a_norm_says_that_it_sees_a_part_of_the_sequence() -> None:
    from ascend_ops.integrations.megatron import FusedRMSNorm

    config = SimpleNamespace(
        normalization="RMSNorm", sequence_parallel=True, layernorm_zero_centered_gamma=False
    )
    assert FusedRMSNorm(config, 8).weight.sequence_parallel is True
    config.sequence_parallel = False
    config.layernorm_zero_centered_gamma = True
    norm = FusedRMSNorm(config, 8, eps=1e-5, persist_layer_norm=False)
    assert norm.weight.sequence_parallel is False
    assert not norm.weight.any()
    x = torch.randn(3, 8)
    assert torch.allclose(norm(x), F.rms_norm(x, (8,), eps=1e-5), atol=1e-6)


# Attention ---------------------------------------------------------------------------------------


class Ranks:
    """Stands for the group of tensor parallelism."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def core(kind: str = "causal", *, rank: int = 0, size: int = 1, **options: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from ascend_ops.integrations.megatron import AlibiCoreAttention

    groups = SimpleNamespace(tp=Ranks(rank, size))
    config = config_of(**options)
    return AlibiCoreAttention(config, 1, AttnMaskType[kind], "self", pg_collection=groups)


def inputs(heads: int = HEADS, groups: int = HEADS) -> list[Tensor]:
    return [torch.randn(SEQUENCE, BATCH, n, 8) for n in (heads, groups, groups)]


def expected(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options: Any) -> Tensor:
    """The reference, of [s, b, h, d]."""
    found = reference.alibi_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), slopes, **options
    )
    return found.permute(2, 0, 1, 3).flatten(2)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # another order of addition


@one_process
def test_each_kind_of_mask() -> None:
    q, k, v = inputs(groups=2)
    slopes = ascend_ops.alibi_slopes(HEADS)
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    for mask in (None, causal, causal.expand(BATCH, -1, -1, -1)):
        close(core(num_query_groups=2)(q, k, v, mask), expected(q, k, v, slopes))
    close(core("no_mask")(q, k, v, None), expected(q, k, v, slopes, causal=False))
    padded = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    padded[0, ..., :3] = True
    counts = ~padded[:, 0, 0]
    for kind, is_causal in (("padding", False), ("padding_causal", True)):
        found = core(kind)(q, k, v, padded)
        close(found, expected(q, k, v, slopes, causal=is_causal, mask=counts))
        close(core(kind)(q, k, v, None), expected(q, k, v, slopes, causal=is_causal))


@one_process
def test_windows_and_scales() -> None:
    q, k, v = inputs()
    slopes = ascend_ops.alibi_slopes(HEADS)
    close(core(window_size=(3, 0))(q, k, v, None), expected(q, k, v, slopes, window=4))
    found = core("no_mask", window_size=(3, 3))(q, k, v, None)
    close(found, expected(q, k, v, slopes, window=4, causal=False))
    close(core(window_size=(-1, 0))(q, k, v, None), expected(q, k, v, slopes))
    skipped = core(window_size=(3, 0), window_attn_skip_freq=1)  # no layer has it
    close(skipped(q, k, v, None), expected(q, k, v, slopes))


@one_process
@pytest.mark.parametrize(("heads", "size"), [(8, 2), (12, 4)])
def test_a_rank_has_its_slice_of_all_slopes(heads: int, size: int) -> None:  # AB-04
    whole = ascend_ops.alibi_slopes(heads)
    options = {"num_attention_heads": heads, "kv_channels": 8}
    found = [core(rank=rank, size=size, **options).slopes for rank in range(size)]
    assert torch.equal(torch.cat(found), whole)
    assert not torch.equal(found[0], found[1])


@one_process
def test_slopes_stay_in_fp32_and_out_of_the_state() -> None:  # AB-08, AB-12
    module = core(num_attention_heads=12, kv_channels=8, hidden_size=96)
    assert module.bfloat16().slopes.dtype == torch.float32
    assert torch.equal(module.half().float().slopes, ascend_ops.alibi_slopes(12))
    assert not module.state_dict()
    assert module.to("meta").slopes.is_meta
    assert torch.equal(module.to_empty(device="cpu").slopes, ascend_ops.alibi_slopes(12))


REFUSED_CALLS = {
    "attention_dropout is 0.1": ({"attention_dropout": 0.1}, {}),
    "attention_mask is not the causal one": (
        {},
        {"attention_mask": torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)},
    ),
    "attention_mask is": (
        {"kind": "padding"},
        {"attention_mask": torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)},
    ),
    "the mask is arbitrary": ({"kind": "arbitrary"}, {}),
    "attention_bias or packed_seq_params": ({}, {"attention_bias": torch.zeros(1)}),
}


@one_process
@pytest.mark.parametrize("match", REFUSED_CALLS)
def test_calls_that_are_refused(match: str) -> None:
    options, call = REFUSED_CALLS[match]
    with pytest.raises(ConfigError, match=match):
        core(**options)(*inputs(), **{"attention_mask": None, **call})


@one_process
def test_dropout_is_no_matter_outside_of_training() -> None:
    q, k, v = inputs()
    found = core(attention_dropout=0.1).eval()(q, k, v, None)
    close(found, expected(q, k, v, ascend_ops.alibi_slopes(HEADS)))


# What is refused ---------------------------------------------------------------------------------


REFUSED: dict[str, tuple[tuple[str, ...] | str, dict[str, Any]]] = {
    "operators is 'swiglu'": ("swiglu", {}),
    "operators is \\(\\)": ((), {}),
    "operators is \\('rotary',\\)": (("rotary",), {}),
    "gated_linear_unit is False": (("swiglu",), {"gated_linear_unit": False}),
    "activation_func is gelu": (("swiglu",), {"activation_func": F.gelu}),
    "glu_linear_offset is 1.0": (("swiglu",), {"glu_linear_offset": 1.0}),
    "use_te_activation_func is True": (("swiglu",), {"use_te_activation_func": True}),
    "activation_func_fp8_input_store is True": (
        ("swiglu",),
        {"activation_func_fp8_input_store": True},
    ),
    "activation_func_clamp_value is given": (
        ("swiglu",),
        {"activation_func_clamp_value": 7.0, "bias_activation_fusion": True},
    ),
    "normalization is 'LayerNorm'": (("rms_norm",), {"normalization": "LayerNorm"}),
    "context_parallel_size is 2": (("alibi_attention",), {"context_parallel_size": 2}),
    "softmax_type is 'off-by-one'": (("alibi_attention",), {"softmax_type": "off-by-one"}),
}


@one_process
@pytest.mark.parametrize("match", REFUSED)
def test_what_a_config_asks_for_and_no_operator_does(match: str) -> None:
    from ascend_ops.integrations.megatron import with_fused_ops

    operators, options = REFUSED[match]
    with pytest.raises(ConfigError, match=match):
        with_fused_ops(layer_spec(), config_of(**options), operators)


@one_process
def test_specs_in_which_there_is_nothing_to_do() -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    from ascend_ops.integrations.megatron import with_fused_ops

    config, spec = config_of(), layer_spec()
    with pytest.raises(ConfigError, match="the spec builds Linear"):
        with_fused_ops(nn.Linear, config)
    with pytest.raises(ConfigError, match="the spec builds MLP"):
        with_fused_ops(spec.submodules.mlp, config, ("swiglu",))
    with pytest.raises(ConfigError, match=r"window_size is \(3, 1\)"):
        core(window_size=(3, 1))
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.mlp = IdentityOp
    spec.submodules.self_attention.submodules.core_attention = IdentityOp
    for operator in ("swiglu", "rms_norm", "alibi_attention"):
        with pytest.raises(ConfigError, match=f"{operator} has nothing to do"):
            with_fused_ops(spec, config, (operator,))


# Options -----------------------------------------------------------------------------------------


@one_process
def test_options_of_a_script() -> None:
    from ascend_ops.integrations.megatron import (
        AlibiCoreAttention,
        FusedRMSNorm,
        add_ops_arguments,
        ops_by_options,
    )

    config, spec = config_of(), layer_spec()
    other = argparse.ArgumentParser()
    other.add_argument("--position-embedding-type", choices=["rope", "none"], default="rope")
    for parser in (argparse.ArgumentParser(), other):
        add_ops_arguments(parser)
        assert ops_by_options(spec, config, parser.parse_args([])) is spec
        assert parser.parse_args(["--position-embedding-type", "rope"])
        for flag in ("--use-fused-swiglu", "--used-fused-swiglu"):  # as the document writes it
            found = ops_by_options(spec, config, parser.parse_args([flag]))
            assert found.module is not spec.module
        line = ["--use-fused-rmsnorm", "--position-embedding-type", "alibi"]
        found = ops_by_options(spec, config, parser.parse_args(line))
        assert found.layer_norm is FusedRMSNorm
        attention = found.layer_specs[0].submodules.self_attention.submodules
        assert attention.core_attention is AlibiCoreAttention
    both = SimpleNamespace(position_embedding_type="alibi", use_rotary_position_embeddings=True)
    with pytest.raises(ConfigError, match="use_rotary_position_embeddings and"):
        ops_by_options(spec, config, both)
    assert ops_by_options(spec, config, SimpleNamespace()) is spec
