"""The table of constraints: every rule there is, in order. Data; imports no torch.

Earlier rules are reported before later ones of the same severity.
"""

from __future__ import annotations

from ascend_suite.rule import Rule
from ascend_suite.rules.activations import ACTIVATION_RULES
from ascend_suite.rules.gradients import GRADIENT_RULES
from ascend_suite.rules.model import MODEL_RULES
from ascend_suite.rules.operators import OPERATOR_RULES
from ascend_suite.rules.optimizers import OPTIMIZER_RULES
from ascend_suite.rules.pairs import PAIR_RULES
from ascend_suite.rules.recompute import RECOMPUTE_RULES
from ascend_suite.rules.software import SOFTWARE_RULES

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    *SOFTWARE_RULES,
    *MODEL_RULES,
    *PAIR_RULES,
    *OPTIMIZER_RULES,
    *ACTIVATION_RULES,
    *RECOMPUTE_RULES,
    *OPERATOR_RULES,
    *GRADIENT_RULES,
)
