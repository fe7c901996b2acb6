"""Runs one test on every device that this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ascend_core.device import available_backends, get_backend
from ascend_core.errors import UnavailableError

if TYPE_CHECKING:
    from pytest import MarkDecorator

__all__ = ["available_devices", "parametrize_devices"]


def available_devices() -> tuple[torch.device, ...]:
    """One device of each backend that this machine has: the CPU, and an accelerator's first."""
    names = sorted(available_backends(), key=lambda name: name != "cpu")
    return tuple(get_backend(name).device(None if name == "cpu" else 0) for name in names)


def parametrize_devices(argument: str = "device") -> MarkDecorator:
    """Parametrize a pytest test over `available_devices()`.

        @parametrize_devices()
        def test_a_copy_is_equal(device: torch.device) -> None: ...

    Args:
        argument: Name of the test's argument.

    Raises:
        UnavailableError: When pytest is not installed.
    """
    try:
        import pytest
    except ImportError as error:
        raise UnavailableError(
            "tests cannot be parametrized over devices: pytest is not installed.",
            instead='install "ascend-core[testing]", or loop over available_devices().',
        ) from error
    return pytest.mark.parametrize(argument, available_devices(), ids=str)
