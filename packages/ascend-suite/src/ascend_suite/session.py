"""A plan that is on: its handles, what they did, and the way back.

[Note: the way back]
Features are undone in the reverse of the order in which they came on, each of them, whatever an
earlier one raises. An error that was under way before is the one that is seen: what could not be
undone is written beside it. Otherwise one failure is raised as it is, and several together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn, optim

from ascend_core.device import device_of
from ascend_core.errors import AscendError, FeatureError
from ascend_core.feature import Feature, Handle
from ascend_suite._advice import is_out_of_memory, plan_that_fits
from ascend_suite._shape_reading import SeenTokens, read_shape
from ascend_suite.finding import Finding
from ascend_suite.plan import Plan
from ascend_suite.report import FeatureReport, SessionReport
from ascend_suite.shape import ModelShape

__all__ = ["Session"]


class _On(NamedTuple):
    """A feature that is on.

    Attributes:
        feature: Which.
        handle: What its verb returned.
        seconds: That turning it on took.
    """

    feature: Feature
    handle: Handle
    seconds: float


class Session:
    """What `apply` returns. As a context manager it turns its features off at the end.

    Attributes:
        plan: The plan, with what was read off the model, the optimizer and the process.
        findings: What the check of the plan found: warnings and notes.
        model: The model, or the chunks, as `apply` was given it.
        optimizer: The optimizer to train with: the given one, or what stands for it now.
    """

    def __init__(
        self,
        plan: Plan,
        findings: Sequence[Finding],
        model: nn.Module | Sequence[nn.Module],
        optimizer: optim.Optimizer | None,
        shape: ModelShape | None,
    ) -> None:
        self.plan = plan
        self.findings = tuple(findings)
        self.model = model
        self.optimizer = self._given = optimizer
        self._first = model if isinstance(model, nn.Module) else model[0]
        self._device = _device_of(self._first)
        self._shape = shape
        self._seen = SeenTokens(self._first) if shape is None else None
        self._on: list[_On] = []
        self._last: SessionReport | None = None

    def turn_on(self, features: Sequence[Feature], arguments: Mapping[str, Any]) -> None:
        """Turn features on, in this order; for `apply`.

        Those for the optimizer that come behind one that wraps are applied to what that one steps.

        Args:
            features: In their order.
            arguments: Keyword arguments of verbs, by the feature's name.
        """
        for number, feature in enumerate(features):
            behind = features[number + 1 :] if feature.wraps else ()
            self._turn_on(feature, arguments, behind)
            if behind:
                return

    def __getitem__(self, feature: str) -> Handle:
        """The handle of a feature.

        Raises:
            FeatureError: When it is not on.
        """
        for one in self._on:
            if one.feature.name == feature:
                return one.handle
        raise FeatureError(
            f"{feature} is not on in this session.",
            why=f"what is on: {', '.join(self) or 'nothing'}."
            if feature not in self.plan.features
            else "the session is over, or this rank has no part of what it works on.",
            instead="put it into the plan, or ask `in` before.",
        )

    def __contains__(self, feature: object) -> bool:
        return any(one.feature.name == feature for one in self._on)

    def __iter__(self) -> Iterator[str]:
        """The names of the features that are on, in the order in which they came on."""
        return (one.feature.name for one in self._on)

    def report(self) -> SessionReport:
        """What each feature did: bytes, times and notes. That of the end, when it is over."""
        if self._last is not None:
            return self._last
        subjects = {one.feature.name for one in self._on}
        rows = [
            FeatureReport.of(
                one.feature.name,
                _reported(one.handle),
                one.seconds,
                [f.what for f in self.findings if f.subject == one.feature.name],
            )
            for one in self._on
        ]
        remarks = tuple(f.what for f in self.findings if f.subject not in subjects)
        return SessionReport(tuple(rows), remarks)

    def metrics(self) -> dict[str, int | float]:
        """The numbers of the report, flat: `"ascend/swap-optimizer/host_state_bytes"`.

        What is not known yet is left out: a rate, as long as nothing was counted.
        """
        return self.report().metrics()

    def remove(self) -> None:
        """Turn every feature off, the last one first. A second call does nothing.

        Raises:
            BaseException: What a feature raised; all of them as a group, where several did. The
                others are off then, and a second call tries those again.
        """
        failures = self._undo()
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup("features could not be turned off", failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.remove()
        else:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Turn every feature off because of an error, which is told what there is to say.

        Where the device was out of memory, that is the plan that would fit.

        Args:
            error: The error; the caller raises it.
        """
        if is_out_of_memory(error):
            error.add_note(plan_that_fits(self._known_shape(), self._device, self.plan))
        for failure in self._undo():
            error.add_note(
                "ascend-suite: beside, a feature could not be turned off: "
                f"{type(failure).__name__}: {failure}"
            )

    def _turn_on(
        self, feature: Feature, arguments: Mapping[str, Any], behind: Sequence[Feature] = ()
    ) -> None:
        given = dict(arguments.get(feature.name, {}))
        if feature.takes is not None and feature.takes in self:
            given["taken"] = self[feature.takes]
        if behind:
            given["wrap"] = lambda parts: self._wrapped(parts, behind, arguments)
        target = self.model if feature.target == "model" else self.optimizer
        begin = time.perf_counter()
        handle = feature.apply(target, self.plan.features[feature.name], **given)
        # What is inside of it was turned on meanwhile: it is undone behind it.
        self._on.append(_On(feature, handle, time.perf_counter() - begin))
        if isinstance(handle, optim.Optimizer):
            self.optimizer = handle

    def _wrapped(
        self, parts: optim.Optimizer, features: Sequence[Feature], arguments: Mapping[str, Any]
    ) -> optim.Optimizer:
        """The optimizer of a rank's parts, with features on it."""
        for feature in features:
            begin = time.perf_counter()
            given = arguments.get(feature.name, {})
            handle = feature.apply(parts, self.plan.features[feature.name], **given)
            self._on.append(_On(feature, handle, time.perf_counter() - begin))
            if isinstance(handle, optim.Optimizer):
                parts = handle
        return parts

    def _undo(self) -> list[BaseException]:
        """Turn off what is on, the last one first; what failed stays, for another attempt."""
        if self._on and self._last is None:
            self._last = self.report()
        failures: list[BaseException] = []
        left: list[_On] = []
        for one in reversed(self._on):
            try:
                one.handle.remove()
            except BaseException as failure:
                failures.append(failure)
                left.insert(0, one)
        self._on = left
        self.optimizer = self._given
        if self._seen is not None:
            self._seen.remove()
        return failures

    def _known_shape(self) -> ModelShape | tuple[str, ...]:
        if self._shape is not None:
            return self._shape
        try:
            return read_shape(self._first, self._given, self.plan, self._seen)
        except Exception as error:  # also one of the model's own code: another error is under way
            what = error.what if isinstance(error, AscendError) else str(error)
            return (f"shape ({what.rstrip('.')})",)


def _device_of(model: nn.Module) -> torch.device:
    return device_of(next(model.parameters(), torch.empty(0)))


def _reported(handle: Handle) -> Mapping[str, Any]:
    """What a handle reports; why it does not, where it cannot: that must not stop the way back."""
    try:
        return handle.report()
    except Exception as error:
        return {"no_report": str(error).partition("\n")[0]}
