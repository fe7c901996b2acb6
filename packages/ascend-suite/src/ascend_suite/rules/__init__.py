"""The table of constraints: every rule there is, in order. Data; imports no torch.

Earlier rules are reported before later ones of the same severity.
"""

from __future__ import annotations

from ascend_suite.rule import Rule
from ascend_suite.rules.pairs import PAIR_RULES

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (*PAIR_RULES,)
