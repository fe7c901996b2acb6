"""Estimates against published formulae and counts, and what each feature takes away."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from ascend_core.errors import ConfigError
from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite import Hardware, ModelShape, estimate
from ascend_suite.estimation.block import TapeMaker
from ascend_suite.estimation.kernels import KERNELS
from ascend_suite.estimation.layer import LayerBytes, layer_bytes
from ascend_suite.estimation.pipeline import bubble, chunks_in_flight
from ascend_suite.estimation.tape import Node, Tape, Value, walk_backward
from ascend_suite.estimation.time import layer_flops
from ascend_suite.estimation.treatment import Treatment
from ascend_suite.plan import Plan
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

MIB = 2**20
LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, ffn=11008, seq=4096, vocab=32000, positions="rotary",
    tied=False, dtype="bfloat16", masters=True,
)  # fmt: skip
GPT3 = ModelShape(
    layers=96, hidden=12288, heads=96, seq=2048, vocab=51200, activation="gelu", norm="layer",
    biases="all", dtype="bfloat16",
)  # fmt: skip
GPT2 = dataclasses.replace(GPT3, layers=12, hidden=768, heads=12, seq=1024, vocab=50257)


def with_(shape: ModelShape, **values: Any) -> ModelShape:
    return dataclasses.replace(shape, **values)


def plain(shape: ModelShape, kind: str = "cuda") -> dict[str, int]:
    """What a block holds, by origin."""
    tape = TapeMaker(shape, KERNELS[kind], frozenset()).block()  # type: ignore[index]
    return dict(layer_bytes(tape, Treatment()).held)


def block(shape: ModelShape, treatment: Treatment, fused: tuple[str, ...] = ()) -> LayerBytes:
    tape = TapeMaker(shape, KERNELS["cuda"], frozenset(fused)).block()
    return layer_bytes(tape, treatment)


# Parameters.


def test_published_numbers_of_parameters() -> None:
    assert estimate(LLAMA).parameters == 6_738_415_616  # of meta-llama/Llama-2-7b
    assert estimate(GPT2).parameters == 124_439_808  # of openai-community/gpt2
    grouped = with_(LLAMA, kv_heads=8, ffn=14336, vocab=128256)
    assert estimate(grouped).parameters == 8_030_261_248  # of meta-llama/Meta-Llama-3-8B


def test_parameters_of_narayanan_2021() -> None:
    layers, h, s, vocab = GPT3.layers, GPT3.hidden, GPT3.seq, GPT3.vocab
    # 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)), which leaves the last norm out.
    formula = 12 * layers * h**2 + 13 * layers * h + (vocab + s) * h
    assert estimate(GPT3).parameters == formula + 2 * h


def test_ranks_divide_the_parameters() -> None:
    cut = estimate(with_(LLAMA, tp=8))
    norms = (2 * LLAMA.layers + 1) * LLAMA.hidden
    assert cut.parameters_per_device == (cut.parameters - norms) // 8 + norms
    assert cut.parameters == estimate(LLAMA).parameters
    stage = estimate(with_(LLAMA, pp=4, micro_batches=8))
    assert stage.parameters_per_device < cut.parameters / 3


# Activations.


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_of_korthikanti_2022(tp: int, sequence_parallel: bool) -> None:
    shape = with_(
        GPT3, micro_batch=2, flash=False, dropout=True, tp=tp, sequence_parallel=sequence_parallel
    )
    s, b, h, a = shape.seq, shape.micro_batch, shape.hidden, shape.heads
    whole = s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    if sequence_parallel:
        whole = s * b * h * (34 + 5 * a * s / h) / tp
    # Each norm keeps a mean and a scale for each token, which the paper leaves out.
    statistics = 2 * 2 * 4 * s * b // (tp if sequence_parallel else 1)
    assert sum(plain(shape).values()) == whole + statistics


def test_what_a_layer_of_llama_saves() -> None:
    held = plain(LLAMA)
    tokens, hidden = LLAMA.seq, 2 * LLAMA.seq * LLAMA.hidden
    wide = 2 * tokens * LLAMA.ffn_size
    assert held["MLP gate"] == held["MLP up"] == wide == 86 * MIB
    assert held["MLP activation"] == 2 * wide  # 172 MiB, as activation-recompute.md says
    assert held["qkv"] == 3 * hidden
    assert held["attention"] == hidden + 4 * tokens * LLAMA.heads
    assert held["norm"] == 4 * hidden + 2 * 4 * tokens
    assert "dropout" not in held
    # 18.75 hidden states, as layer-recompute.md says, and numbers for each token.
    small = 2 * 4 * tokens + 4 * tokens * LLAMA.heads
    assert sum(held.values()) - small == 18.75 * hidden


def test_devices_differ_in_what_they_save() -> None:
    cpu, npu = plain(LLAMA, "cpu"), plain(LLAMA, "npu")
    hidden = 2 * LLAMA.seq * LLAMA.hidden
    # Two norms: the input and the normalised value in FP32, and the output.
    assert cpu["norm"] == 2 * (2 + 2 + 1) * hidden + 2 * 4 * LLAMA.seq
    assert npu["attention"] > cpu["attention"] + 4 * MIB  # the mask


def test_each_feature_takes_away_what_its_page_says() -> None:
    before = block(LLAMA, Treatment())
    hidden, wide = 2 * LLAMA.seq * LLAMA.hidden, 2 * LLAMA.seq * LLAMA.ffn_size
    saved = {
        "activation": Treatment(rebuilds=frozenset({"recompute-activation"})),
        "norm": Treatment(rebuilds=frozenset({"recompute-norm"})),
        "layer": Treatment(replays=True),
        "attention": Treatment(moves=frozenset({"self_attention"})),
    }
    less = {k: before.held_bytes - block(LLAMA, t).held_bytes for k, t in saved.items()}
    assert less["activation"] == 2 * wide
    assert less["norm"] == 2 * hidden
    assert less["layer"] == before.held_bytes - hidden
    assert less["attention"] == 5 * hidden + 4 * LLAMA.seq * LLAMA.heads  # 10 s h + 4 s n
    fused = block(LLAMA, Treatment(), ("swiglu",))
    assert before.held_bytes - fused.held_bytes == wide
    assert block(LLAMA, saved["attention"]).moved == less["attention"]


def test_groups_hold_one_input_each() -> None:
    shape = with_(LLAMA, layers=8)
    held = {}
    for size in (1, 4):
        config = RecomputeLayersConfig(method="uniform", num_layers=size)
        one = estimate(shape, Plan({"recompute-layers": config}), device="cuda")
        loss = next(m for m in one.moments if m.name == "loss")
        held[size] = loss.bytes["activations: norm"]
    assert held[1] - held[4] == (8 - 2) * 2 * shape.seq * shape.hidden


# The walk over backward.


def test_the_walk_counts_what_is_alive_together() -> None:
    values = {name: Value(size, name) for name, size in (("x", 1), ("a", 10), ("b", 100))}
    tape = Tape(values)
    tape.nodes = [
        Node("m", ("x",), "a", ("x",), parameters=1000),
        Node("m", ("a",), "b", ("a",), working=10_000),
    ]
    peak = walk_backward(tape, tape.saved())
    # Its own gradient, the one it makes, its temporaries, and all that is saved.
    assert peak.total == 100 + 10 + 10_000 + (1 + 10)
    tape.nodes[1] = dataclasses.replace(tape.nodes[1], working=0)
    peak = walk_backward(tape, tape.saved())
    assert (peak.total, peak.gradients, peak.working) == (10 + 1 + 1000 + 1, 1000, 11)
    assert walk_backward(tape, tape.saved(), accumulates=True).working == 1011
    # What is not there is rebuilt for the node that asks for it.
    tape.nodes[0] = dataclasses.replace(tape.nodes[0], parameters=0)
    without = {"x": values["x"]}
    assert walk_backward(tape, without).total == 100 + 10 + 10 + 1


def test_a_gradient_that_is_handed_on_counts_once() -> None:
    tape = Tape({name: Value(1, name) for name in ("x", "branch", "sum")})
    tape.nodes = [Node("m", ("x",), "branch"), Node("m", ("x", "branch"), "sum", passes=True)]
    assert walk_backward(tape, {}).total == 2


# The optimizer.


def bytes_of(shape: ModelShape, plan: Plan, kind: str) -> int:
    return estimate(shape, plan, device="cuda").moments[-1].bytes.get(kind, 0)


def test_bytes_for_each_parameter() -> None:
    count = estimate(LLAMA).parameters
    per = {
        kind: bytes_of(LLAMA, Plan(), kind) / count
        for kind in ("weights", "gradients", "masters", "moments")
    }
    assert per == pytest.approx({"weights": 2, "gradients": 2, "masters": 4, "moments": 8}, 1e-5)
    reuse = Plan({"reuse-fp32-param": ReuseParamConfig()})
    assert bytes_of(LLAMA, reuse, "masters") == 0
    assert bytes_of(LLAMA, reuse, "residuals") / count == pytest.approx(2 + 1 / 512, 1e-5)
    swap = Plan({"swap-optimizer": SwapOptimizerConfig(master_weights=True)})
    assert bytes_of(LLAMA, swap, "moments") == bytes_of(LLAMA, swap, "masters") == 0
    assert estimate(LLAMA, swap).host_bytes == 12 * count
    assert bytes_of(with_(LLAMA, optimizer="sgd"), Plan(), "moments") == 0


def test_a_swapped_step_takes_a_ring_and_scratch() -> None:
    gib = {}
    for times in (4, 16, 64):
        config = SwapOptimizerConfig(swap_optimizer_times=times, master_weights=True)
        working = estimate(LLAMA, Plan({"swap-optimizer": config}), device="cuda").moments[-1]
        gib[times] = working.bytes["working: optimizer step"] / 2**30
    # 4 bytes of a window more where the step is not fused.
    count = estimate(LLAMA).parameters / 2**30
    assert gib == pytest.approx({t: (43 + 4) * count / t for t in (4, 16, 64)}, 1e-4)
    default = Plan({"swap-optimizer": SwapOptimizerConfig(master_weights=True)})
    fused = estimate(with_(LLAMA, fused_step=True), default, device="cuda").moments[-1]
    assert round(fused.bytes["working: optimizer step"] / 2**30, 1) == 16.9  # swap-optimizer.md


def test_a_sharded_optimizer_divides_its_state() -> None:
    shape = with_(LLAMA, dtype="float32", masters=False, dp=8)
    sharded = {
        "reduce-gradients": DDPConfig(mode="reduce-scatter"),
        "shard-optimizer": ShardedConfig(),
    }
    whole = bytes_of(shape, Plan(), "moments")
    assert bytes_of(shape, Plan(sharded), "moments") == pytest.approx(whole / 8, 1e-4)
    assert bytes_of(shape, Plan(sharded), "reduced gradients") == pytest.approx(whole / 16, 1e-4)
    assert bytes_of(shape, Plan(), "DDP buckets") == whole / 2
    assert bytes_of(shape, Plan({"reduce-gradients": DDPConfig()}), "DDP buckets") == 0


# Pipelines.


def test_micro_batches_in_flight() -> None:
    shape = with_(LLAMA, pp=4, micro_batches=16)
    assert [chunks_in_flight(shape, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert chunks_in_flight(with_(shape, micro_batches=2), 0) == 2
    interleaved = with_(shape, vpp=2)
    in_layers = chunks_in_flight(interleaved, 0) * shape.layers / (4 * 2)
    assert in_layers == shape.layers * (1 + (4 - 1) / (4 * 2))  # Korthikanti et al. 2022, 4.2.3
    assert bubble(shape) == 3 / 16 and bubble(interleaved) == 3 / 32


def test_the_first_stage_holds_as_much_as_the_whole_model_would() -> None:
    one = estimate(with_(LLAMA, micro_batches=8), device="cuda")
    four = estimate(with_(LLAMA, micro_batches=8, pp=4), device="cuda")
    for kind in ("activations: qkv", "activations: MLP gate"):
        highest = [max(m.bytes.get(kind, 0) for m in e.moments) for e in (one, four)]
        assert highest[0] == highest[1]


# Time.


def test_operations_of_narayanan_2021() -> None:
    b, s, h = GPT3.micro_batch, GPT3.seq, GPT3.hidden
    assert layer_flops(GPT3) == 24 * b * s * h**2 + 4 * b * s**2 * h


def test_layers_that_run_again_cost_up_to_a_third() -> None:
    plan = Plan({"recompute-layers": RecomputeLayersConfig()})
    fast = Hardware(memory_bytes=1e18, link_bytes=1e18)
    ratio = estimate(with_(LLAMA, vocab=64), plan, hardware=fast).time.ratio
    assert ratio == pytest.approx(4 / 3, 1e-3)
    cheap = Plan({"recompute-activation": RecomputeActivationConfig()})
    assert 1 < estimate(LLAMA, cheap).time.ratio < 1.05
    slow_link = Plan({"swap-attention": SwapAttentionConfig()})
    ratios = [
        estimate(LLAMA, slow_link, hardware=Hardware(link_bytes=rate)).time.ratio
        for rate in (1e9, 1e10, 1e12)
    ]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 2 and ratios[-1] == 1


# What a user sees.


def test_nothing_moves_on_a_cpu() -> None:
    moving = Plan({"swap-attention": SwapAttentionConfig(min_bytes=1)})
    assert (
        estimate(LLAMA, moving, device="cpu").peak_bytes == estimate(LLAMA, device="cpu").peak_bytes
    )
    assert estimate(LLAMA, moving, device="cpu").host_bytes == 0


def test_counts_of_layers_are_heeded() -> None:
    def peak(**features: Any) -> int:
        named = {name.replace("_", "-"): config for name, config in features.items()}
        return estimate(LLAMA, Plan(named), device="cuda").moments[1].total

    norms = [peak(recompute_norm=RecomputeNormConfig(num_layers=n)) for n in (1, 2, 3)]
    assert norms[0] - norms[1] == norms[1] - norms[2] == 2 * 2 * LLAMA.seq * LLAMA.hidden
    named = peak(recompute_norm=RecomputeNormConfig(layers=[4, 7]))
    assert named == norms[1]
    # Layers that run again come first, and the others are counted after them.
    both = peak(
        recompute_layers=RecomputeLayersConfig(num_layers=31),
        recompute_norm=RecomputeNormConfig(num_layers=5),
    )
    one = peak(
        recompute_layers=RecomputeLayersConfig(num_layers=31),
        recompute_norm=RecomputeNormConfig(num_layers=1),
    )
    assert both == one


def test_json_and_notes() -> None:
    plan = Plan({"fused-ops": FusedOpsConfig(), "alibi": object()})
    found = estimate(with_(LLAMA, pp=2, micro_batches=4), plan)
    figures = found.as_json()
    assert figures["peak_bytes"] == sum(found.peak.bytes.values()) == found.peak.total
    assert any("alibi is not counted" in note for note in found.notes)
    assert any("pipeline stage" in note for note in found.notes)


def test_errors_say_what_instead() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        estimate(LLAMA, device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layers=32 cannot be split into pp \\* vpp=5"):
        with_(LLAMA, pp=5)
    with pytest.raises(ConfigError, match="hidden is 0"):
        with_(LLAMA, hidden=0)
    with pytest.raises(ConfigError, match="norm is 'batch'"):
        with_(LLAMA, norm="batch")
    with pytest.raises(ConfigError, match="flops is 0"):
        Hardware(flops=0)


def test_estimating_loads_no_torch() -> None:
    code = (
        "import sys; from ascend_suite import ModelShape, estimate, suggest;"
        "s = ModelShape(layers=2, hidden=64, heads=2, seq=64, vocab=64); estimate(s);"
        "suggest(s, hbm=2**30); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_time_is_of_the_slowest_stage_whichever_is_the_fullest() -> None:
    """With more micro-batches the first stage takes most memory; the last still has the head."""
    shape = with_(LLAMA, layers=8, hidden=1024, heads=16, ffn=None, seq=2048, pp=4, tp=4, dp=8)
    one, two = (estimate(with_(shape, micro_batches=n)) for n in (1, 2))
    assert one.notes != two.notes  # another stage takes most
    assert two.time.seconds > one.time.seconds
    again = Plan({"recompute-layers": RecomputeLayersConfig()})
    assert estimate(shape, again).time.ratio > 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kv_heads": 5}, "heads=32 cannot be split into kv_heads=5"),
        ({"kv_heads": 64}, "heads=32 cannot be split into kv_heads=64"),
        ({"tp": 32, "sequence_parallel": True, "seq": 48}, "seq=48 cannot be split into cp"),
        ({"tied": "no"}, "tied is 'no'"),
        ({"masters": 1}, "masters is 1"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_(LLAMA, **values)
