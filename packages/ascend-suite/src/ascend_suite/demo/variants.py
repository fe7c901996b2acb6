"""The runs of a demo: which there are, and what each is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_core.feature import Feature, get_feature
from ascend_core.memory import PeakMeasurement
from ascend_suite.demo.result import PLAIN, PLAIN_BF16, Status
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.training import Outcome

__all__ = ["Variant", "named", "of_plain", "planned_steps", "steps_for_best", "variants_of"]

_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "shard-optimizer": {"reduce-gradients": {"mode": "reduce-scatter"}}
}
"""Options that a feature demands of the one whose handle it takes."""


def planned_steps(settings: DemoSettings, features: Mapping[str, Feature]) -> int:
    """How many steps a demo of these features reports."""
    steps = sum(variant.steps_left for variant in variants_of(settings, features))
    return steps + steps_for_best(settings, of_plain(features))


@dataclasses.dataclass
class Variant:
    """One run of the demo while it is being measured.

    Attributes:
        name: Of its row.
        settings: Its own.
        features: Those that are on.
        against: The name of the run that it is compared with.
        bf16: Whether its weights are BF16.
        steps_left: Steps that it has not done yet.
        status: How it goes.
        reason: Why it does not.
        parameters: Of its model.
        memory: What it took.
        outcome: What it came to.
        report: What its features said.
        round_seconds: Of a step, in each round.
    """

    name: str
    settings: DemoSettings
    features: tuple[Feature, ...] = ()
    against: str = PLAIN
    bf16: bool = False
    steps_left: int = -1
    status: Status = Status.FINISHED
    reason: str | None = None
    parameters: int = 0
    memory: PeakMeasurement | None = None
    outcome: Outcome | None = None
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    round_seconds: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps_left < 0:
            self.steps_left = self.settings.steps_per_run

    @property
    def configs(self) -> dict[str, Any]:
        """Options of its features that are not their defaults."""
        by_name = {feature.name: feature for feature in self.features}
        return {
            name: by_name[name].config(**options)
            for feature in self.features
            for name, options in _NEEDED.get(feature.name, {}).items()
            if name in by_name
        }


def variants_of(settings: DemoSettings, features: Mapping[str, Feature]) -> list[Variant]:
    """The runs, but for the best combination: plain ones, and each feature beside its own."""
    slow = settings.slowly()
    found = [Variant(PLAIN, settings)]
    found += [Variant(name, settings, (one,)) for name, one in of_plain(features).items()]
    in_bf16 = {name: one for name, one in features.items() if one.needs_bf16}
    if in_bf16:
        found.append(Variant(PLAIN_BF16, slow, against=PLAIN_BF16, bf16=True))
    for name, one in in_bf16.items():
        found.append(Variant(name, slow, (one,), PLAIN_BF16, bf16=True))
    for name, one in features.items():
        if one.needs_ranks and not one.needs_bf16:
            taken = () if one.takes is None else (get_feature(one.takes),)
            found.append(Variant(name, settings.briefly(), (*taken, one)))
    return found


def of_plain(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Those that run on the plain run's model, in a single process."""
    return {n: one for n, one in features.items() if not (one.needs_bf16 or one.needs_ranks)}


def steps_for_best(settings: DemoSettings, candidates: Mapping[str, Feature]) -> int:
    """Steps that finding, training and timing the best combination takes at most."""
    if len(candidates) < 2:
        return 0
    trials = (len(candidates) - 1) * settings.memory_steps
    return trials + settings.steps_per_run - settings.memory_steps


def named(variants: Sequence[Variant], name: str) -> Variant:
    """The run of that name, which is there."""
    return next(variant for variant in variants if variant.name == name)
