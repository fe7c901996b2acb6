"""swap-optimizer on the simulated NPU: its steps are the plain optimizer's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_sim

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

STEPS = 20
SIZES = (1, 7, 4097, 100_003)

FORMS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_plain_adamw(form: str, training: Any, same: Any) -> None:
    plain = training(SIZES, **FORMS[form]).train(STEPS)
    for times in (1, 3, 16, 64):
        assert same(training(SIZES, times, **FORMS[form]).train(STEPS), plain), times


@pytest.mark.parametrize("form", FORMS)
def test_with_bf16_weights_and_masters_they_are_those_of_the_resident_facade(
    form: str, training: Any, same: Any
) -> None:
    kind = {"dtype": torch.bfloat16, "master_weights": True, **FORMS[form]}
    resident = training(SIZES, 1, resident=True, **kind).train(STEPS)
    for times in (3, 16):
        assert same(training(SIZES, times, **kind).train(STEPS), resident), times


@pytest.mark.parametrize(
    "form",
    [
        "fused",
        pytest.param("foreach", marks=pytest.mark.nightly),
        pytest.param("for-loop", marks=pytest.mark.nightly),
    ],
)
def test_a_large_parameter_steps_as_with_plain_adamw(form: str, training: Any, same: Any) -> None:
    sizes = (1, 7, 4097, 1_000_003)
    plain = training(sizes, **FORMS[form]).train(STEPS)
    for times in (1, 3, 16, 64):
        assert same(training(sizes, times, **FORMS[form]).train(STEPS), plain), times
