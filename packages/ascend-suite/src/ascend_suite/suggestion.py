"""The cheapest plan that fits a device. Imports no torch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ascend_core.errors import ConfigError
from ascend_core.options import check_count
from ascend_suite.estimation.blueprint import Blueprint
from ascend_suite.estimation.estimate import Estimator, estimate
from ascend_suite.estimation.hardware import DeviceKind, Hardware
from ascend_suite.estimation.result import Estimate
from ascend_suite.families import Family, families
from ascend_suite.finding import errors_of
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape
from ascend_suite.size import size_text

__all__ = ["Candidate", "Suggestion", "suggest"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that was looked at.

    Attributes:
        estimate: What it takes; the plan is in it.
        why: One sentence: what it gives and what it costs, beside the plain training.
    """

    estimate: Estimate
    why: str


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What was found for a device.

    Attributes:
        hbm: Bytes of the device that was asked for.
        plain: The estimate without any feature.
        chosen: The cheapest plan that fits; None when none does.
        runners_up: Other plans that fit, the cheapest first; when none fits, those that need
            least, of those that have room on the host. Each takes less than those before it of
            something: of the device, of the host, or of time.
        short_by: Bytes by which the plan that needs least does not fit; 0 when one fits.
        advice: When none fits, what would help, each with what it would come to.
    """

    hbm: int
    plain: Estimate
    chosen: Candidate | None
    runners_up: tuple[Candidate, ...]
    short_by: int = 0
    advice: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the findings as JSON values."""
        return {
            "hbm": self.hbm,
            "plain": self.plain.as_json(),
            "chosen": None if self.chosen is None else _as_json(self.chosen),
            "runners_up": [_as_json(candidate) for candidate in self.runners_up],
            "short_by": self.short_by,
            "advice": list(self.advice),
        }


def _as_json(candidate: Candidate) -> dict[str, Any]:
    return {**candidate.estimate.as_json(), "why": candidate.why}


def suggest(
    shape: ModelShape,
    *,
    hbm: int,
    host: int | None = None,
    device: DeviceKind = "npu",
    hardware: Hardware | None = None,
    permits: Callable[[Plan], bool] | None = None,
    runners_up: int = 4,
    bitwise: bool = True,
) -> Suggestion:
    """Find the plan that fits and costs the least time.

    Args:
        shape: The model and its training.
        hbm: Bytes of the device.
        host: Bytes of host memory for each device; no limit when left out.
        device: The kind of device.
        hardware: The machine's rates, for the time.
        permits: Whether a plan is allowed; those that the rules of compatibility do not refuse when
            left out.
        runners_up: How many others to show.
        bitwise: Whether all of them are to train to the plain run's bits. Without, `fused-ops` is
            looked at too.

    Returns:
        The plan, or by how much none fits. Of plans that cost the same,
        the one with fewer features.

    Raises:
        ConfigError: When `hbm` or `host` is no whole number above 0.
    """
    check_count("hbm", hbm)
    if host is not None:
        check_count("host", host)
    search = _Search(Estimator(Blueprint(shape, device), hardware or Hardware()), hbm, host)
    allowed = permits or _without_errors
    found: list[Estimate] = []
    least: list[Estimate] = []
    for family in families(shape, device, bitwise=bitwise):
        if family.features and not allowed(family.plan(0)):
            continue
        dial = 0 if not allowed(family.plan(family.turns)) else family.turns
        fitting, smallest = search.first_that_fits(family, dial)
        least += [smallest] if search.has_host(smallest) else []
        found += [fitting] if fitting is not None else []
    plain = search.plain
    found.sort(key=_cost)
    if found:
        shown = [Candidate(one, _why(one, plain)) for one in _worth_it(found)[: runners_up + 1]]
        return Suggestion(hbm, plain, shown[0], tuple(shown[1:]))
    least.sort(key=lambda one: (one.peak_bytes, _cost(one)))
    return Suggestion(
        hbm,
        plain,
        None,
        tuple(Candidate(one, _why(one, plain)) for one in _worth_it(least)[:runners_up]),
        short_by=max(0, least[0].peak_bytes - hbm),
        advice=tuple(_advice(least[0], hbm)),
    )


class _Search:
    """Looks for the first plan of a family that fits."""

    def __init__(self, estimator: Estimator, hbm: int, host: int | None) -> None:
        self._estimator = estimator
        self._hbm, self._host = hbm, host
        self.plain = estimator.estimate(Plan())

    def first_that_fits(self, family: Family, turns: int) -> tuple[Estimate | None, Estimate]:
        """Halve the dial.

        Returns:
            The plan with the fewest layers that run again; and the smallest that was looked at.
        """
        none = self._estimator.estimate(family.plan(0))
        if self._fits(none) or not turns:
            return (none if self._fits(none) else None), none
        best = self._estimator.estimate(family.plan(turns))
        smallest = min(none, best, key=lambda one: (not self.has_host(one), one.peak_bytes))
        if not self._fits(best):
            return None, smallest
        low, high = 0, turns
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._estimator.estimate(family.plan(middle))
            if self._fits(tried):
                high, best = middle, tried
            else:
                low = middle
        return best, smallest

    def _fits(self, one: Estimate) -> bool:
        return one.peak_bytes <= self._hbm and self.has_host(one)

    def has_host(self, one: Estimate) -> bool:
        """Whether the host has room for what a plan moves there."""
        return self._host is None or one.host_bytes <= self._host


def _without_errors(plan: Plan) -> bool:
    """Whether no rule of compatibility refuses a plan."""
    from ascend_suite.check import check

    return not errors_of(check(plan))


def _cost(one: Estimate) -> tuple[float, int, int, list[str]]:
    names = sorted(one.plan.features)
    return one.time.seconds, len(names), one.peak_bytes, names


def _worth_it(found: Sequence[Estimate]) -> list[Estimate]:
    """Those that take less of something than each of those before them, in their order."""
    kept: list[Estimate] = []
    for one in found:
        price = _price(one)
        if not any(all(map(operator.le, _price(other), price)) for other in kept):
            kept.append(one)
    return kept


def _price(one: Estimate) -> tuple[float, ...]:
    """What a plan takes, of each kind."""
    return one.time.seconds, one.peak_bytes, one.host_bytes


def _why(one: Estimate, plain: Estimate) -> str:
    if not one.plan.features:
        return f"nothing has to be done: {size_text(one.peak_bytes)} at the highest."
    text = f"{size_text(one.peak_bytes)} instead of {size_text(plain.peak_bytes)}"
    change = 100 * (one.time.ratio - 1)
    text += f", for {abs(change):.1f} % {'more' if change >= 0 else 'less'} time by the model"
    if one.host_bytes:
        text += f", and {size_text(one.host_bytes)} of the host"
    return f"{text}; highest in {one.peak.name}."


def _advice(least: Estimate, hbm: int) -> Iterator[str]:
    """What would help where no plan fits, and what the smallest plan would come to then."""
    shape = least.shape
    changes: dict[str, dict[str, Any]] = {
        "a micro-batch half as large": {"micro_batch": shape.micro_batch // 2},
        f"tp={2 * shape.tp}": {"tp": 2 * shape.tp},
        f"pp={2 * shape.pp}": {"pp": 2 * shape.pp},
        f"cp={2 * shape.cp}": {"cp": 2 * shape.cp},
    }
    for words, values in changes.items():
        try:
            changed = dataclasses.replace(shape, **values)
        except ConfigError:  # it cannot be divided further
            continue
        other = estimate(changed, least.plan, device=least.device)
        enough = "fits" if other.peak_bytes <= hbm else "is not enough"
        yield f"{words}: {size_text(other.peak_bytes)}, which {enough}."
