"""Devices to test on."""

from __future__ import annotations

import subprocess
import sys

import torch

from ascend_core.testing import available_devices, parametrize_devices


def test_the_cpu_is_first_and_every_device_works() -> None:
    devices = available_devices()
    assert devices[0] == torch.device("cpu")
    for device in devices:
        assert torch.ones(2, device=device).sum().item() == 2


@parametrize_devices("place")
def test_a_test_gets_each_device(place: torch.device) -> None:
    assert place in available_devices()


def test_the_harness_needs_pytest_for_this_alone() -> None:
    script = """
import sys
sys.modules["pytest"] = None
import ascend_core.testing
from ascend_core.errors import UnavailableError
assert ascend_core.testing.available_devices()
try:
    ascend_core.testing.parametrize_devices()
except UnavailableError as error:
    assert "pytest is not installed" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
