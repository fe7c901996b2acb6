from __future__ import annotations

import dataclasses
from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import distributed

from ascend_core.device import available_backends
from ascend_core.errors import AscendError, ConfigError, FeatureNotFoundError, UnavailableError
from ascend_core.feature import discover
from ascend_suite.demo.choice import choose_features
from ascend_suite.demo.result import Status
from ascend_suite.demo.runner import run_demo
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.variants import planned_steps


@pytest.mark.parametrize("device", available_backends())
def test_a_feature_that_keeps_its_promises_saves_memory_and_changes_no_bit(
    features: ModuleType, device: str
) -> None:
    settings = DemoSettings(
        layers=2, hidden=64, seq=64, batch=8, steps=6, memory_steps=2, time_rounds=1
    )
    result = run_demo(settings, features={"honest": features.HONEST}, device=device)
    plain, honest = result.runs
    assert result.failures == ()
    assert torch.device(result.device).type == device
    assert (plain.saved_bytes, plain.step_time_ratio, plain.bitwise_equal) == (0, 1.0, True)
    assert honest.bitwise_equal is True and honest.difference is None
    assert honest.losses == plain.losses and len(plain.losses) == 6
    # All wide tensors but those of the layer in whose backward the peak is: 4 of BSF in fp32.
    assert honest.saved_bytes == plain.peak_bytes - honest.peak_bytes
    assert honest.saved_bytes > 0.8 * (8 * 64 * 4 * 64 * 4) * 4
    assert honest.report == {"undone": False, "share": 0.5}


def test_the_peak_covers_weights_gradients_and_both_moments(tiny: DemoSettings) -> None:
    result = run_demo(tiny, features={})
    [plain] = result.runs
    assert plain.peak_bytes is not None and plain.peak_bytes > 16 * result.parameters
    timeline = result.timelines["plain"]
    assert timeline.peak <= plain.peak_bytes


def test_a_broken_promise_is_found_and_told(tiny: DemoSettings, features: ModuleType) -> None:
    result = run_demo(tiny, features={"wrong": features.WRONG})
    [failure] = result.failures
    assert result.runs[1].bitwise_equal is False
    assert failure.startswith("wrong promises the plain run's bits, but the loss of step 2 is")


def test_other_bits_without_a_promise_are_reported_but_no_failure(
    tiny: DemoSettings, features: ModuleType
) -> None:
    result = run_demo(tiny, features={"openly": features.OPENLY_WRONG})
    assert result.runs[1].bitwise_equal is False
    assert result.runs[0].loss_difference == 0
    difference = result.runs[1].loss_difference
    assert difference is not None and 0 < difference < 1
    assert result.failures == ()


def test_a_loss_that_climbs_is_a_failure(tiny: DemoSettings, features: ModuleType) -> None:
    [failure] = run_demo(tiny, features={"up": features.CLIMBING}).failures
    assert failure.startswith("the loss of up did not fall")


@pytest.mark.parametrize("device", available_backends())
def test_a_run_out_of_memory_is_a_row_and_the_others_go_on(
    tiny: DemoSettings, features: ModuleType, device: str
) -> None:
    given = {"greedy": features.GREEDY, "honest": features.HONEST}
    result = run_demo(tiny, features=given, device=device)
    _, greedy, honest = result.runs
    assert greedy.status is Status.OUT_OF_MEMORY
    assert greedy.reason is not None and "allocate" in greedy.reason
    assert greedy.peak_bytes is greedy.step_time_ratio is greedy.bitwise_equal is None
    assert honest.status is Status.FINISHED and honest.bitwise_equal is True
    assert list(result.timelines) == ["plain", "greedy, out of memory", "honest"]
    assert result.failures == ("greedy ran out of memory where the plain run did not",)


def test_a_feature_for_other_hardware_is_a_row(tiny: DemoSettings, features: ModuleType) -> None:
    result = run_demo(tiny, features={"absent": features.ABSENT})
    assert result.runs[1].status is Status.NOT_AVAILABLE
    assert result.runs[1].reason == "this needs a [quantum] device."
    assert list(result.timelines) == ["plain"]
    assert result.failures == ()


def test_a_feature_that_finds_nothing_to_do_is_a_row(
    tiny: DemoSettings, features: ModuleType
) -> None:
    result = run_demo(tiny, features={"idle": features.IDLE})
    assert result.runs[1].status is Status.NOTHING_TO_DO
    assert result.runs[1].reason == "this model has nothing of the kind."
    assert list(result.timelines) == ["plain"]
    assert result.failures == ()


def test_any_other_refusal_ends_the_demo(tiny: DemoSettings, features: ModuleType) -> None:
    with pytest.raises(ConfigError, match="no such layer"):
        run_demo(tiny, features={"picky": features.PICKY})


def test_progress_adds_up_also_when_a_run_breaks_off(
    tiny: DemoSettings, features: ModuleType
) -> None:
    done: Counter[str] = Counter()
    parts: dict[str, set[str]] = {}

    def note(name: str, part: str, steps: int) -> None:
        done[name] += steps
        parts.setdefault(name, set()).add(part)

    run_demo(tiny, features={"greedy": features.GREEDY}, on_steps=note)
    assert done == {"plain": tiny.steps_per_run, "greedy": tiny.steps_per_run}
    assert parts == {"plain": {"memory", "training", "time"}, "greedy": {"out of memory"}}


def test_random_state_and_determinism_setting_are_those_of_before(tiny: DemoSettings) -> None:
    state = torch.get_rng_state()
    run_demo(tiny, features={})
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_whole_demo_repeats_from_its_seed(tiny: DemoSettings) -> None:
    torch.manual_seed(1)
    first = run_demo(tiny, features={}).runs[0]
    torch.manual_seed(2)
    again = run_demo(tiny, features={}).runs[0]
    other = run_demo(dataclasses.replace(tiny, seed=5), features={}).runs[0]
    assert first.losses == again.losses != other.losses


def test_batches_that_do_not_fit_are_a_clear_error(tiny: DemoSettings) -> None:
    huge = dataclasses.replace(tiny, batch=2**45)
    with pytest.raises(UnavailableError, match="cpu has no memory for the batches") as caught:
        run_demo(huge, features={}, device="cpu")
    assert caught.value.why is not None and "allocate" in caught.value.why
    assert caught.value.instead


@pytest.mark.parametrize("device", ["tpu", "cpu:x", ""])
def test_a_device_that_cannot_be_is_a_clear_error(tiny: DemoSettings, device: str) -> None:
    with pytest.raises(AscendError) as caught:
        run_demo(tiny, features={}, device=device)
    assert caught.value.why and caught.value.instead


def test_the_chosen_features_come_in_the_order_that_was_asked_for(features: ModuleType) -> None:
    installed = {"a": features.HONEST, "b": features.WRONG, "c": features.GREEDY}
    assert list(choose_features(["c", "a"], installed)) == ["c", "a"]
    assert choose_features(None, installed) == installed
    assert choose_features() == discover()


def test_features_are_compared_with_what_they_are_for(tiny: DemoSettings) -> None:
    """BF16 weights with BF16 weights, and what needs ranks has one."""
    names = ["reuse-fp32-param", "reduce-gradients", "shard-optimizer"]
    done: Counter[str] = Counter()

    def note(name: str, part: str, steps: int) -> None:
        done[name] += steps

    chosen = choose_features(names)
    result = run_demo(tiny, features=chosen, device="cpu", on_steps=note)
    assert result.failures == ()
    assert [run.feature for run in result.runs] == ["plain", "plain bf16", *names]
    plain, bf16, reuse, reduce, shard = result.runs
    assert [run.against for run in result.runs] == ["plain", *["plain bf16"] * 2, *["plain"] * 2]
    assert all(run.bitwise_equal is True for run in result.runs)
    assert reuse.losses == bf16.losses != plain.losses[: len(bf16.losses)]
    assert bf16.peak_bytes is not None and reuse.peak_bytes is not None
    # Two bytes of each parameter, and what a step has beside.
    assert reuse.saved_bytes == bf16.peak_bytes - reuse.peak_bytes
    assert reuse.saved_bytes > result.parameters
    assert reduce.report["collectives"] > 0 and shard.report["gathers"] > 0
    assert shard.features == ("reduce-gradients", "shard-optimizer")
    assert not distributed.is_initialized()
    assert sum(done.values()) == planned_steps(tiny, chosen)


def test_the_best_combination_is_measured_behind_its_features(tiny: DemoSettings) -> None:
    chosen = choose_features(
        ["recompute-norm", "recompute-layers", "fused-ops", "reduce-gradients"]
    )
    done: Counter[str] = Counter()

    def note(name: str, part: str, steps: int) -> None:
        done[name] += steps

    settings = dataclasses.replace(tiny, layers=4, seq=64, batch=8)
    result = run_demo(settings, features=chosen, device="cpu", on_steps=note)
    names = ["plain", "recompute-norm", "recompute-layers", "fused-ops", "best combination"]
    assert [run.feature for run in result.runs] == [*names, "reduce-gradients"]
    layers, best = result.runs[2], result.runs[4]
    assert best.features == ("fused-ops", "recompute-layers")
    assert best.peak_bytes is not None and layers.peak_bytes is not None
    assert best.peak_bytes < layers.peak_bytes
    assert best.step_time_ratio is not None and not best.bitwise_promised
    assert set(best.report) >= {"fused", "layers"}
    assert list(result.timelines) == [run.feature for run in result.runs]
    assert sum(done.values()) == planned_steps(settings, chosen)


def test_one_feature_alone_is_no_combination(tiny: DemoSettings) -> None:
    chosen = choose_features(["recompute-layers", "swap-optimizer"])
    done: Counter[str] = Counter()

    def note(name: str, part: str, steps: int) -> None:
        done[name] += steps

    result = run_demo(tiny, features=chosen, device="cpu", on_steps=note)
    assert [run.feature for run in result.runs] == ["plain", *chosen]  # on a CPU swap only costs
    assert sum(done.values()) == planned_steps(tiny, chosen)


def test_an_unknown_feature_is_answered_with_those_that_are_installed(
    features: ModuleType,
) -> None:
    with pytest.raises(FeatureNotFoundError, match="the installed packages offer: a, b"):
        choose_features(["a", "z"], {"a": features.HONEST, "b": features.WRONG})
