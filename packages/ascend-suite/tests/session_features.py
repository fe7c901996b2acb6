"""Features that the tests of sessions install: they write down what happens to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ascend_core.feature import Feature

HAPPENED: list[str] = []
"""What happened, in order; a test clears it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a feature.

    Attributes:
        on: What turning it on raises.
        off: What turning it off raises, each time one; then it works.
        report: What it reports.
    """

    on: BaseException | None = None
    off: tuple[BaseException, ...] = ()
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class On:
    def __init__(self, name: str, options: Options, **arguments: object) -> None:
        if options.on is not None:
            raise options.on
        self.name, self.options, self.arguments = name, options, arguments
        self.failures = list(options.off)
        HAPPENED.append(f"{name} on")

    def report(self) -> Mapping[str, Any]:
        return self.options.report

    def remove(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        HAPPENED.append(f"{self.name} off")


def early(model: nn.Module, options: Options, **arguments: object) -> On:
    return On("early", options, **arguments)


def middle(model: nn.Module, options: Options) -> On:
    return On("middle", options)


class Stepping(torch.optim.SGD):
    """An optimizer that is a handle."""

    def report(self) -> Mapping[str, Any]:
        return {"state_bytes": 3}

    def remove(self) -> None:
        HAPPENED.append("late off")


def late(optimizer: torch.optim.Optimizer, options: Options) -> Stepping:
    if options.on is not None:
        raise options.on
    HAPPENED.append("late on")
    return Stepping(optimizer.param_groups)


EARLY = Feature("test-early", "First.", Options, "session_features:early", "model")
MIDDLE = Feature("test-middle", "Second.", Options, "session_features:middle", "model")
LATE = Feature("test-late", "Third.", Options, "session_features:late", "optimizer")
