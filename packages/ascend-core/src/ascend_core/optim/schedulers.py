"""Learning-rate schedulers of an optimizer that another one steps for."""

from __future__ import annotations

from typing import Any

from torch import optim

__all__ = ["tell_schedulers"]


def tell_schedulers(optimizer: optim.Optimizer) -> None:
    """Let schedulers that were made of an optimizer know that its parameters are stepped.

    torch's scheduler wraps the `step` of the optimizer that it is made of, which notes that it was
    called, and warns at its own first step where it was not.

    Args:
        optimizer: The one that another steps for.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        told: Any = optimizer
        told._opt_called = True
