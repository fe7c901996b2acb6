"""What each elementwise optimizer of torch keeps for a parameter.

The arithmetic of a step is always torch's own: only what it reads and writes is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import optim

from ascend_core.errors import ConfigError

__all__ = ["Entry", "Rule", "rule_for"]


class Entry(NamedTuple):
    """One thing that an optimizer keeps for each parameter.

    Attributes:
        name: Its key in the optimizer's `state`.
        fill: What it is before the first step; None when the first step makes it.
        is_scalar: Whether it is one number for the parameter, and not one for each element.
    """

    name: str
    fill: float | None = 0.0
    is_scalar: bool = False


Rule = Callable[[Mapping[str, Any]], tuple[Entry, ...]]
"""What is kept for a parameter of a group with these options."""

_STEP = Entry("step", is_scalar=True)


def _adam(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    entries = (_STEP, Entry("exp_avg"), Entry("exp_avg_sq"))
    return (*entries, Entry("max_exp_avg_sq")) if group["amsgrad"] else entries


def _sgd(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    return (Entry("momentum_buffer", fill=None),) if group["momentum"] != 0 else ()


def _rmsprop(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    entries = [_STEP, Entry("square_avg")]
    if group["momentum"] > 0:
        entries.append(Entry("momentum_buffer"))
    if group["centered"]:
        entries.append(Entry("grad_avg"))
    return tuple(entries)


def _adagrad(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    return _STEP, Entry("sum", fill=float(group["initial_accumulator_value"]))


def _adamax(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    return _STEP, Entry("exp_avg"), Entry("exp_inf")


def _nadam(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    product = Entry("mu_product", fill=1.0, is_scalar=True)
    return _STEP, product, Entry("exp_avg"), Entry("exp_avg_sq")


def _radam(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    return _STEP, Entry("exp_avg"), Entry("exp_avg_sq")


def _adadelta(group: Mapping[str, Any]) -> tuple[Entry, ...]:
    return _STEP, Entry("square_avg"), Entry("acc_delta")


_RULES: Mapping[type[optim.Optimizer], Rule] = {
    optim.AdamW: _adam,
    optim.Adam: _adam,
    optim.SGD: _sgd,
    optim.RMSprop: _rmsprop,
    optim.Adagrad: _adagrad,
    optim.Adamax: _adamax,
    optim.NAdam: _nadam,
    optim.RAdam: _radam,
    optim.Adadelta: _adadelta,
}

# Why a window of these would not be a window of the whole.
_NOT_ELEMENTWISE: Mapping[str, str] = {
    "Muon": "it orthogonalises each weight matrix as a whole.",
    "LBFGS": "it works with inner products over all parameters at once.",
    "Adafactor": "it keeps row and column sums of each weight matrix.",
    "SparseAdam": "it steps only the rows that a sparse gradient names.",
}


def rule_for(optimizer: optim.Optimizer) -> Rule:
    """Find what an optimizer keeps.

    A subclass is taken for what it derives from as long as its step is the same.

    Raises:
        ConfigError: When its step is not known to work on each element alone.
    """
    kind = type(optimizer)
    for base in kind.__mro__:
        if base in _RULES and unhooked_step(base) is unhooked_step(kind):
            return _RULES[base]
    known = ", ".join(rule.__name__ for rule in _RULES)
    raise ConfigError(
        f"{kind.__name__} cannot be stepped in windows.",
        why=_NOT_ELEMENTWISE.get(
            kind.__name__, "it is not known to work on each element of a parameter alone."
        ),
        instead=f"use one of {known}, or keep {kind.__name__} as it is.",
    )


def unhooked_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class without the hooks that torch wraps around it once per class."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    unhooked: Callable[..., Any] = step
    return unhooked


def scalar_dtype() -> torch.dtype:
    """The dtype of what torch counts steps in; see `torch.optim.optimizer._get_scalar_dtype`."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
