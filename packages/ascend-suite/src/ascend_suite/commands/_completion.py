"""What a shell offers while a word is typed. What cannot be found out is not offered."""

from __future__ import annotations

from pathlib import Path

from ascend_core.errors import AscendError
from ascend_core.feature import discover
from ascend_suite.rules import RULES

__all__ = [
    "complete_feature",
    "complete_feature_list",
    "complete_plan",
    "complete_rule",
    "complete_subject",
]

_PLANS = (".toml", ".yaml", ".yml", ".json")


def complete_feature(incomplete: str) -> list[str]:
    """Offer the installed features whose names begin so."""
    try:
        return [name for name in discover() if name.startswith(incomplete)]
    except AscendError:
        return []


def complete_feature_list(incomplete: str) -> list[str]:
    """Offer names for the last place of a list with commas; none that is there already."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [before + comma + name for name in complete_feature(last) if name not in taken]


def complete_rule(incomplete: str) -> list[tuple[str, str]]:
    """Offer the rules that can be allowed, with what they say."""
    return [
        (rule.id, rule.what)
        for rule in RULES
        if rule.proof is not None and rule.id.startswith(incomplete)
    ]


def complete_subject(incomplete: str) -> list[str]:
    """Offer features, and what else rules are about."""
    names = dict.fromkeys([*complete_feature(incomplete), *(rule.subject for rule in RULES)])
    return [name for name in names if name.startswith(incomplete)]


def complete_plan(incomplete: str) -> list[str]:
    """Offer files that may hold a plan, and folders on the way to one."""
    folder, _, start = incomplete.rpartition("/")
    offered = []
    try:
        for path in sorted(Path(folder or ("/" if incomplete[:1] == "/" else ".")).iterdir()):
            if path.name.startswith(start) and (path.is_dir() or path.suffix in _PLANS):
                prefix = incomplete[: len(incomplete) - len(start)]
                offered.append(f"{prefix}{path.name}{'/' if path.is_dir() else ''}")
    except OSError:
        return []
    return offered
