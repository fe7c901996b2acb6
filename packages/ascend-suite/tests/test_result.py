from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from ascend_suite.demo.result import DemoResult, Run, Status
from ascend_suite.demo.settings import DemoSettings

FALLING = (5.0, 4.0, 3.0)


def run(feature: str, **changes: Any) -> Run:
    known = {"losses": FALLING, "peak_bytes": 10, "bitwise_equal": True}
    return Run(feature, **{**known, **changes})


def full(feature: str) -> Run:
    return Run(feature, status=Status.OUT_OF_MEMORY, reason="tried to allocate 1 PiB")


def result(*runs: Run) -> DemoResult:
    return DemoResult(DemoSettings(), "cpu", "2.13.0", 1, runs, {})


def test_falling_losses_and_equal_bits_are_a_success() -> None:
    assert result(run("plain"), run("move")).failures == ()


def test_a_broken_promise_of_equal_bits_fails_and_says_where() -> None:
    broken = run("move", bitwise_equal=False, difference="the weight w differs")
    [failure] = result(run("plain"), broken).failures
    assert failure == "move promises the plain run's bits, but the weight w differs"


def test_other_bits_without_a_promise_are_no_failure() -> None:
    openly = run("approximate", bitwise_equal=False, bitwise_promised=False, difference="x")
    assert result(run("plain"), openly).failures == ()


@pytest.mark.parametrize("losses", [(3.0, 4.0, 5.0), (5.0, 5.0, 5.0), (5.0, 4.0, math.nan)])
def test_a_loss_that_does_not_fall_is_a_failure(losses: tuple[float, ...]) -> None:
    [failure] = result(run("plain", losses=losses)).failures
    assert failure.startswith("the loss of plain did not fall: it began at")


def test_thirds_are_compared_so_that_one_bad_batch_at_the_end_is_none() -> None:
    assert run("plain", losses=(5.0, 5.0, 4.0, 4.0, 3.0, 5.1)).loss_fell
    assert not run("plain", losses=(3.0, 5.0, 4.0, 4.0, 5.0, 3.1)).loss_fell


def test_a_feature_that_saves_the_day_is_a_success() -> None:
    assert result(full("plain"), run("move", bitwise_equal=None)).failures == ()


def test_running_out_of_memory_where_plain_did_not_is_a_failure() -> None:
    [failure] = result(run("plain"), full("move")).failures
    assert failure == "move ran out of memory where the plain run did not"


def test_a_demo_in_which_nothing_finished_is_a_failure() -> None:
    [failure] = result(full("plain"), full("move")).failures
    assert failure.startswith("no run finished")


def test_a_feature_for_other_hardware_is_no_failure() -> None:
    absent = Run("fused", status=Status.NOT_AVAILABLE, reason="needs an NPU")
    assert result(run("plain"), absent).failures == ()


def test_json_has_the_fields_that_are_promised_and_nothing_that_json_lacks() -> None:
    odd = run(
        "move",
        losses=(5.0, math.nan),
        saved_bytes=-3,
        step_time_ratio=1.5,
        report={"bytes": 3, "share": 0.25, "where": [1, 2], "what": object},
    )
    values = json.loads(json.dumps(result(run("plain"), odd).as_json(), allow_nan=False))
    plain, moved = values["runs"]
    assert plain["feature"] == "plain" and plain["final_loss"] == 3.0
    assert moved["losses"] == [5.0, None] and moved["final_loss"] is None
    assert moved["saved_bytes"] == -3 and moved["step_time_ratio"] == 1.5
    assert moved["report"] == {"bytes": 3, "share": 0.25, "where": [1, 2], "what": str(object)}
    assert set(plain) >= {field.name for field in dataclasses.fields(Run)}
    assert values["settings"]["layers"] == DemoSettings().layers
    assert values["failures"] == list(result(run("plain"), odd).failures)
