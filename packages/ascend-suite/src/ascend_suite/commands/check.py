"""`ascend-suite check`: everything that is to be said about a plan, before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_core.feature import discover
from ascend_suite._order import in_order
from ascend_suite.check import check as check_plan
from ascend_suite.commands._completion import complete_plan, complete_rule
from ascend_suite.commands._findings import is_refused, say, show_findings
from ascend_suite.commands._plans import Framework, read_sources
from ascend_suite.commands._screen import (
    EXIT_FAILED,
    JsonOption,
    StrictOption,
    console,
    write_json,
)
from ascend_suite.finding import Finding, Severity
from ascend_suite.plan import Plan
from ascend_suite.rules import RULES
from ascend_suite.versions import installed_versions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Checked", "check", "show_checked"]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A plan, and what is to be said about it.

    Attributes:
        source: Where it comes from.
        order: Its features in the order in which they are turned on.
        findings: Everything, the gravest first.
        ok: Whether the exit code is 0 as far as this plan goes.
    """

    source: str
    order: tuple[str, ...]
    findings: tuple[Finding, ...]
    ok: bool

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "source": self.source,
            "ok": self.ok,
            "features": list(self.order),
            "rules": len(RULES),
            "findings": [finding.as_json() for finding in self.findings],
        }


def check(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN]... [-- FLAG...]",
            help="Files of TOML, YAML or JSON; `-` for TOML on standard input; or, behind two "
            "dashes, flags of a training script.",
            autocompletion=complete_plan,
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        Framework, typer.Option(help="Whose training loop the flags are of.")
    ] = "megatron-core",
    here: Annotated[
        bool,
        typer.Option("--here", help="Check against the versions and limits of this machine, too."),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Let a rule pass that can be allowed; may be repeated.",
            autocompletion=complete_rule,
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Say all that is wrong with a plan, why, and what to do instead. Builds nothing.

    Exit code 0: every plan can be applied. 1: one of them cannot; with --strict, there is a
    warning. 2: a file cannot be read, or an option is wrong.
    """
    facts = _facts_of_this_machine() if here else {}
    checked = []
    for source in read_sources(plans or (), framework):
        plan = dataclasses.replace(
            source.plan,
            training={**facts, **source.plan.training},
            allow=(*source.plan.allow, *(allow or ())),
        )
        findings = _gravest_first((*source.findings, *check_plan(plan)))
        ok = not is_refused(findings, strict=strict)
        checked.append(Checked(source.name, _order_of(plan), findings, ok))
    all_ok = all(one.ok for one in checked)
    if json:
        write_json("check", ok=all_ok, plans=[one.as_json() for one in checked])
    else:
        screen = console()
        for one in checked:
            show_checked(screen, one)
    raise typer.Exit(0 if all_ok else EXIT_FAILED)


def show_checked(console: Console, checked: Checked) -> None:
    """Print what was found about a plan, and whether it can be applied."""
    show_findings(console, checked.findings)
    count = len(checked.order)
    features = f"{count} feature{'s' * (count != 1)}"
    looked = f"{features}, {len(RULES)} rules looked at"
    if not checked.ok:
        say(console, f"{checked.source} is refused: {looked}.", "bold red")
        return
    state = "can be applied" if checked.findings else "is fine"
    order = f", in this order: {', '.join(checked.order)}" if checked.order else ""
    say(console, f"{checked.source} {state}: {looked}{order}.", "bold green")


def _gravest_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    gravity = tuple(Severity)
    return tuple(sorted(findings, key=lambda finding: gravity.index(finding.severity)))


def _order_of(plan: Plan) -> tuple[str, ...]:
    installed = discover()
    chosen = [installed[name] for name in plan.features if name in installed]
    return tuple(feature.name for feature in in_order(chosen))


def _facts_of_this_machine() -> Mapping[str, object]:
    """What a plan may say of versions and limits, as far as it is known without loading torch."""
    from ascend_suite.doctor._software import cann
    from ascend_suite.doctor._system import host_memory

    found = cann()
    there = found.home is not None or found.installed is not None
    return {
        **installed_versions(),
        "pinned_limit_bytes": host_memory().memlock_bytes,
        **({} if there and found.version is None else {"cann_version": found.version}),
    }
