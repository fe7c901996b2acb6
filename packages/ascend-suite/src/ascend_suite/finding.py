"""What the check of a plan found. Imports no torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from ascend_core.errors import AscendError, ConfigError

__all__ = ["Finding", "IncompatiblePlanError", "Severity", "errors_of"]


class Severity(enum.StrEnum):
    """How grave a finding is."""

    ERROR = "error"
    """The plan is refused."""
    WARNING = "warning"
    """It runs, and is likely not what was meant."""
    NOTE = "note"
    """Worth knowing."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is to be said about a plan.

    Attributes:
        severity: How grave it is.
        subject: The feature or the option that it is about.
        what: One sentence: what is the matter.
        why: The reason.
        instead: What the user can do about it.
        rule: Id of the rule that says so; None where a value was wrong by itself.
    """

    severity: Severity
    subject: str
    what: str
    why: str | None = None
    instead: str | None = None
    rule: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return dataclasses.asdict(self)


class IncompatiblePlanError(ConfigError):
    """A plan that cannot work: every finding about it, together.

    Args:
        findings: All that was found, errors and others.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        errors = errors_of(findings)
        texts = (str(AscendError(f.what, why=f.why, instead=f.instead)) for f in errors)
        super().__init__("\n".join(texts))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.findings,)


def errors_of(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings for which a plan is refused."""
    return tuple(finding for finding in findings if finding.severity is Severity.ERROR)
