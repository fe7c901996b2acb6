"""Suggestions: they fit, nothing looked at is cheaper, and more memory never costs more."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_core.errors import ConfigError
from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite import Estimate, ModelShape, Suggestion, estimate, suggest
from ascend_suite.check import check
from ascend_suite.families import training_of
from ascend_suite.finding import errors_of
from ascend_suite.plan import Plan
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, ffn=11008, seq=4096, vocab=32000, positions="rotary",
    tied=False, dtype="bfloat16", masters=True,
)  # fmt: skip
SMALL = ModelShape(layers=6, hidden=256, heads=4, seq=512, vocab=512, micro_batch=8)
GIB = 2**30


def anything(_: Plan) -> bool:
    return True


def seconds(found: Suggestion) -> float:
    return float("inf") if found.chosen is None else found.chosen.estimate.time.seconds


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 6),
    hidden=st.sampled_from([64, 256, 1024]),
    heads=st.sampled_from([2, 8]),
    seq=st.sampled_from([64, 512, 2048]),
    vocab=st.sampled_from([256, 32000]),
    micro_batch=st.integers(1, 8),
    micro_batches=st.integers(1, 3),
    activation=st.sampled_from(["swiglu", "gelu"]),
    norm=st.sampled_from(["rms", "layer"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    masters=st.booleans(),
    dp=st.sampled_from([1, 4]),
)
parts = st.floats(0.05, 1.2)


@settings(max_examples=12, deadline=None)
@given(shape=shapes, part=parts, device=st.sampled_from(["cpu", "npu"]))
def test_what_is_suggested_fits_and_is_cheapest(
    shape: ModelShape, part: float, device: str
) -> None:
    hbm = max(1, int(part * estimate(shape, device=device).peak_bytes))  # type: ignore[arg-type]
    found = suggest(shape, hbm=hbm, device=device, permits=anything)  # type: ignore[arg-type]
    if found.chosen is None:
        assert found.short_by > 0 and found.runners_up
        assert found.short_by == found.runners_up[0].estimate.peak_bytes - hbm
        return
    plan = found.chosen.estimate.plan
    assert estimate(shape, plan, device=device).peak_bytes <= hbm  # type: ignore[arg-type]
    for other in found.runners_up:
        assert other.estimate.peak_bytes <= hbm
        assert other.estimate.time.seconds >= seconds(found)
    if part >= 1:
        assert not plan.features or seconds(found) < found.plain.time.seconds


@settings(max_examples=12, deadline=None)
@given(shape=shapes, few=parts, many=parts)
def test_more_memory_never_costs_more(shape: ModelShape, few: float, many: float) -> None:
    plain = estimate(shape).peak_bytes
    found = [
        suggest(shape, hbm=max(1, int(part * plain)), permits=anything)
        for part in sorted((few, many))
    ]
    assert seconds(found[1]) <= seconds(found[0])


def price(one: Estimate) -> tuple[float, ...]:
    return one.time.seconds, one.peak_bytes, one.host_bytes


@settings(max_examples=12, deadline=None)
@given(shape=shapes, part=parts)
def test_each_runner_up_takes_less_of_something(shape: ModelShape, part: float) -> None:
    hbm = max(1, int(part * estimate(shape).peak_bytes))
    found = suggest(shape, hbm=hbm, permits=anything, runners_up=100)
    chosen = () if found.chosen is None else (found.chosen,)
    shown = [price(candidate.estimate) for candidate in (*chosen, *found.runners_up)]
    for number, one in enumerate(shown):
        for other in shown[:number]:
            assert any(mine < theirs for mine, theirs in zip(one, other, strict=True))


STAGES = ModelShape(
    layers=6, hidden=256, heads=4, seq=512, vocab=4096, dtype="bfloat16", masters=True,
    micro_batch=4, micro_batches=4, pp=2,
)  # fmt: skip
RANKS = dataclasses.replace(STAGES, pp=1, layers=3, dp=8)


def every_plan(shape: ModelShape) -> Iterator[Plan]:
    """Of every choice of features and layers, with the default of the other options."""
    masters = shape.masters and shape.dtype == "bfloat16"
    swaps = [
        {"swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=times, master_weights=masters)}
        for times in (None, 128)
    ]
    states: list[dict[str, Any]] = [{}, *swaps]
    states += [{"reuse-fp32-param": ReuseParamConfig()}] if masters else []
    ranks: list[dict[str, Any]] = [{}]
    if shape.dp > 1:
        shards = {"reduce-gradients": DDPConfig(mode="reduce-scatter")}
        ranks += [{"reduce-gradients": DDPConfig()}, {**shards, "shard-optimizer": ShardedConfig()}]
    layers = shape.layers // shape.pp
    activations = [
        {"recompute-activation": RecomputeActivationConfig()},
        {"recompute-norm": RecomputeNormConfig()},
        {"swap-attention": SwapAttentionConfig()},
    ]
    for chosen in itertools.product(*([{}, one] for one in activations), states, ranks):
        features: dict[str, Any] = {name: one for part in chosen for name, one in part.items()}
        yield Plan(features, training_of(shape))
        # Where all layers run again there is nothing left for what works on the others.
        last = layers if not any(chosen[:3]) else layers - 1
        for number in range(1, last + 1):
            again = {"recompute-layers": RecomputeLayersConfig(num_layers=number)}
            yield Plan({**features, **again}, training_of(shape))


@pytest.mark.parametrize("shape", [SMALL, STAGES, RANKS], ids=["one", "stages", "ranks"])
def test_no_plan_that_goes_together_is_cheaper(shape: ModelShape) -> None:
    plans = [plan for plan in every_plan(shape) if not errors_of(check(plan))]
    found = [estimate(shape, plan) for plan in plans]
    least, most = min(one.peak_bytes for one in found), estimate(shape).peak_bytes
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        hbm = int(least + part * (most - least))
        cheapest = min(one.time.seconds for one in found if one.peak_bytes <= hbm)
        assert seconds(suggest(shape, hbm=hbm)) == cheapest


def test_it_is_the_same_each_time() -> None:
    assert suggest(LLAMA, hbm=64 * GIB).as_json() == suggest(LLAMA, hbm=64 * GIB).as_json()


def test_a_device_that_is_large_enough_needs_nothing() -> None:
    found = suggest(LLAMA, hbm=200 * GIB)
    assert found.chosen is not None
    assert found.chosen.estimate.plan.features == {}
    assert "nothing has to be done" in found.chosen.why


def test_no_more_layers_run_again_than_must() -> None:
    tight = int(0.5 * estimate(SMALL, device="cpu").peak_bytes)
    found = suggest(SMALL, hbm=tight, device="cpu")
    assert found.chosen is not None
    features = dict(found.chosen.estimate.plan.features)
    config = features["recompute-layers"]
    fewer = dataclasses.replace(config, num_layers=config.num_layers - 1)
    less = Plan({**features, "recompute-layers": fewer})
    assert estimate(SMALL, less, device="cpu").peak_bytes > tight


def test_rules_and_the_host_are_heeded() -> None:
    asked = suggest(LLAMA, hbm=64 * GIB, permits=lambda plan: "swap-optimizer" in plan.features)
    assert asked.chosen is not None and "swap-optimizer" in asked.chosen.estimate.plan.features
    refused = suggest(LLAMA, hbm=64 * GIB, permits=lambda plan: False)
    assert refused.chosen is None  # only plain, which needs no permission, was looked at
    short = suggest(LLAMA, hbm=64 * GIB, host=GIB)
    assert short.chosen is None and suggest(LLAMA, hbm=64 * GIB).chosen is not None
    assert all(one.estimate.host_bytes <= GIB for one in short.runners_up)
    assert short.short_by == short.runners_up[0].estimate.peak_bytes - 64 * GIB > 0


def test_a_plan_that_the_rules_refuse_is_not_suggested() -> None:
    for shape in (LLAMA, dataclasses.replace(LLAMA, dp=8)):
        found = suggest(shape, hbm=40 * GIB)
        assert found.chosen is not None
        for one in (found.chosen, *found.runners_up):
            assert not errors_of(check(one.estimate.plan))


def test_what_rounds_otherwise_is_suggested_where_it_is_asked_for_alone() -> None:
    shape = dataclasses.replace(LLAMA, masters=False)
    hbm = int(0.8 * estimate(shape).peak_bytes)
    exact, other = (suggest(shape, hbm=hbm, bitwise=bitwise) for bitwise in (True, False))
    assert exact.chosen is not None and other.chosen is not None
    shown = (exact.chosen, *exact.runners_up)
    assert not any("fused-ops" in one.estimate.plan.features for one in shown)
    assert "fused-ops" in other.chosen.estimate.plan.features
    assert seconds(other) < seconds(exact)
    assert not errors_of(check(other.chosen.estimate.plan))
    classic = dataclasses.replace(shape, activation="gelu", norm="layer")
    assert suggest(classic, hbm=hbm, bitwise=False) == suggest(classic, hbm=hbm)


def test_what_would_help_where_nothing_fits() -> None:
    found = suggest(dataclasses.replace(LLAMA, micro_batch=2), hbm=20 * GIB)
    assert found.chosen is None
    assert found.short_by > 0
    assert any(text.startswith("a micro-batch half as large") for text in found.advice)
    assert any(text.startswith("tp=2") and "fits" in text for text in found.advice)


def test_what_cannot_be_divided_is_not_advised() -> None:
    odd = ModelShape(
        layers=3, hidden=96, heads=6, seq=63, vocab=32, tp=2, sequence_parallel=False, flash=False
    )
    found = suggest(odd, hbm=1)
    assert found.chosen is None and found.advice == ()
    cut = suggest(dataclasses.replace(odd, heads=8, seq=66, sequence_parallel=True), hbm=1)
    assert cut.advice == ()


def test_it_takes_less_than_a_second() -> None:
    begin = time.process_time()
    suggest(LLAMA, hbm=48 * GIB)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_memory_is_a_whole_number(bad: float) -> None:
    with pytest.raises(ConfigError, match="hbm is"):
        suggest(LLAMA, hbm=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "word"), [(1, "more"), (8, "less")])
def test_the_price_is_said_in_words(ranks: int, word: str) -> None:
    """Eight ranks that share the optimizer's step are done sooner than plain ones."""
    found = suggest(dataclasses.replace(LLAMA, dp=ranks), hbm=64 * GIB)
    assert found.chosen is not None
    assert f" % {word} time by the model" in found.chosen.why
    assert "-" not in found.chosen.why
