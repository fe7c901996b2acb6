"""All packages of the suite in one, and the command that shows what they do.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "Estimate": "ascend_suite.estimation.result",
    "Finding": "ascend_suite.finding",
    "Hardware": "ascend_suite.estimation.hardware",
    "IncompatiblePlanError": "ascend_suite.finding",
    "ModelShape": "ascend_suite.shape",
    "Plan": "ascend_suite.plan",
    "RULES": "ascend_suite.rules",
    "Rule": "ascend_suite.rule",
    "Session": "ascend_suite.session",
    "SessionReport": "ascend_suite.report",
    "Severity": "ascend_suite.finding",
    "Suggestion": "ascend_suite.suggestion",
    "VOCABULARY": "ascend_suite.vocabulary",
    "Verdict": "ascend_suite.explain",
    "__version__": "ascend_suite._version",
    "apply": "ascend_suite.applying",
    "estimate": "ascend_suite.estimation.estimate",
    "read_plan": "ascend_suite.plan",
    "suggest": "ascend_suite.suggestion",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_suite._version import __version__ as __version__
    from ascend_suite.applying import apply as apply
    from ascend_suite.estimation.estimate import estimate as estimate
    from ascend_suite.estimation.hardware import Hardware as Hardware
    from ascend_suite.estimation.result import Estimate as Estimate
    from ascend_suite.explain import Verdict as Verdict
    from ascend_suite.finding import Finding as Finding
    from ascend_suite.finding import IncompatiblePlanError as IncompatiblePlanError
    from ascend_suite.finding import Severity as Severity
    from ascend_suite.plan import Plan as Plan
    from ascend_suite.plan import read_plan as read_plan
    from ascend_suite.report import SessionReport as SessionReport
    from ascend_suite.rule import Rule as Rule
    from ascend_suite.rules import RULES as RULES
    from ascend_suite.session import Session as Session
    from ascend_suite.shape import ModelShape as ModelShape
    from ascend_suite.suggestion import Suggestion as Suggestion
    from ascend_suite.suggestion import suggest as suggest
    from ascend_suite.vocabulary import VOCABULARY as VOCABULARY
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
