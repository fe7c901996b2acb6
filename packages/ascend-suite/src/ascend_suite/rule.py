"""What a rule of compatibility is: data. Imports no torch.

[Note: a predicate is data]
A rule holds no function: its predicate is built from the classes here, so that a test can ask which
features and options a rule names, the documentation can print it, and a rule that names an option
that does not exist is found without firing it. A predicate that reads an option that the plan does
not name is *unknown*, and a rule fires only on what is known to hold.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from ascend_suite.finding import Severity
from ascend_suite.plan import Plan

__all__ = ["Predicate", "Relation", "Rule", "Scope"]

Relation = Literal["requires", "conflicts", "order", "value"]
Scope = Literal["pytorch", "megatron-core", "both"]


class Predicate(Protocol):
    """A condition on a plan."""

    def holds(self, plan: Plan) -> bool | None:
        """Whether it holds; None where the plan does not say."""

    def names(self) -> frozenset[str]:
        """The features, and the options as `feature.option` or `training.option`, it reads."""

    def __str__(self) -> str:
        """The condition in words, for the documentation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of compatibility.

    Attributes:
        id: What it is called, in `allow` and in the documentation: `"reuse-fp32-param/bf16"`.
        subject: The feature or option that it limits.
        relation: Its kind.
        fires_when: What a plan must be for the rule to speak.
        what: One sentence for users.
        because: Why.
        instead: What to do.
        source: Where it comes from: rows of the table of constraints, a measurement, a test.
        scope: Whose training it concerns.
        severity: How grave it is.
        proof: The test that shows that the plan works all the same; only such a rule can be
            allowed. None where nothing shows it.
    """

    id: str
    subject: str
    relation: Relation
    fires_when: Predicate
    what: str
    because: str
    instead: str
    source: str
    scope: Scope = "both"
    severity: Severity = Severity.ERROR
    proof: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Return the rule as JSON values; the condition in words."""
        fields = (field.name for field in dataclasses.fields(self))
        values = {name: getattr(self, name) for name in fields}
        return {name: None if value is None else str(value) for name, value in values.items()}
