"""The check of a plan: every rule at once, before anything is built. Imports no torch.

[Note: which rules are asked]
A rule of one framework's scope is left out where the plan says that training is another's. Where it
does not say, all are asked: a rule speaks of options that the plan names, and who names an option
of megatron-core means it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_suite._suggestion import nearest
from ascend_suite.finding import Finding, IncompatiblePlanError, Severity, errors_of
from ascend_suite.plan import Plan
from ascend_suite.rule import Rule
from ascend_suite.rules import RULES

__all__ = ["check", "require"]

_GRAVITY = tuple(Severity)


def check(plan: Plan, *, rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Find everything that is to be said about a plan. The plan stays as it is.

    A rule that the plan allows, and that can be allowed, is reported as a note.

    Args:
        plan: The features that are to be on, and what is known of training.
        rules: The table; all rules of the suite when left out.

    Returns:
        The findings, the gravest first, and in the order of the table then.
    """
    firing = [rule for rule in rules if _is_asked(rule, plan) and rule.fires_when.holds(plan)]
    findings = [_finding(rule, allowed=rule.id in plan.allow) for rule in firing]
    findings += _about_allow(plan, rules, {rule.id for rule in firing})
    return tuple(sorted(findings, key=lambda finding: _GRAVITY.index(finding.severity)))


def require(plan: Plan, *, rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Check a plan, and refuse it where there is an error.

    Args:
        plan: As for `check`.
        rules: As for `check`.

    Returns:
        The warnings and notes.

    Raises:
        IncompatiblePlanError: Naming all errors together.
    """
    findings = check(plan, rules=rules)
    if errors_of(findings):
        raise IncompatiblePlanError(findings)
    return findings


def _is_asked(rule: Rule, plan: Plan) -> bool:
    return rule.scope == "both" or plan.training.get("framework") in (None, rule.scope)


def _finding(rule: Rule, *, allowed: bool) -> Finding:
    if allowed and rule.proof is not None:
        return Finding(
            Severity.NOTE,
            rule.subject,
            rule.what,
            why=f"the plan allows it. {rule.because[0].upper()}{rule.because[1:]} It works all "
            f"the same, as {rule.proof} shows.",
            instead=rule.instead,
            rule=rule.id,
        )
    instead = rule.instead
    if rule.proof is not None:
        instead += f" It works all the same: allow = [{rule.id!r}] lets it pass."
    return Finding(
        rule.severity, rule.subject, rule.what, why=rule.because, instead=instead, rule=rule.id
    )


def _about_allow(plan: Plan, rules: Sequence[Rule], firing: set[str]) -> Iterator[Finding]:
    known = {rule.id: rule for rule in rules}
    for name in dict.fromkeys(plan.allow):
        rule = known.get(name)
        if rule is None:
            near = nearest(name, known, within=False)
            yield Finding(
                Severity.ERROR,
                "allow",
                f"there is no rule {name!r}.",
                why="allow names rules by their ids.",
                instead=f"did you mean {near!r}?" if near else "leave it out.",
            )
        elif rule.proof is None:
            yield Finding(
                Severity.ERROR,
                "allow",
                f"the rule {name!r} cannot be allowed.",
                why="no test shows that such a plan works.",
                instead=f"{rule.instead} And take the rule out of allow.",
                rule=name,
            )
        elif name not in firing:
            yield Finding(
                Severity.NOTE,
                "allow",
                f"the rule {name!r} has nothing against this plan.",
                why="it is allowed, and does not speak.",
                instead="take it out of allow.",
                rule=name,
            )
