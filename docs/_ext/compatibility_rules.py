"""Directives that print the suite's table of rules, the pairs of features, and what is no rule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ascend_suite.explain import Verdict, pairs
from ascend_suite.rule import Rule
from ascend_suite.rules import RULES
from ascend_suite.rules.out_of_scope import OUT_OF_SCOPE, OutOfScope

_PAGE = "../compatibility-rules.html"  # from that of a feature
_SCOPES = {"both": "", "pytorch": "plain PyTorch alone", "megatron-core": "megatron-core alone"}


def by_subject(rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    """The rules about each feature and each option, in the order of the table."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.subject, []).append(rule)
    return found


def rules_text(rules: Sequence[Rule]) -> str:
    """Write rules as a Markdown list."""
    return "\n\n".join(map(_rule_text, rules))


def pairs_text(verdicts: Mapping[frozenset[str], Verdict]) -> str:
    """Write which rules are about which two features."""
    names = sorted({name for pair in verdicts for name in pair})
    return "\n".join(
        f"* `{one}` and `{other}`: {_listed(verdict.rules)}"
        for one, other in itertools.combinations(names, 2)
        if (verdict := verdicts[frozenset({one, other})]).rules
    )


def anchor_of(rule: Rule) -> str:
    """Where on the page of rules a rule stands."""
    return "rule-" + rule.id.replace("/", "-")


def works_with_text(name: str, verdicts: Mapping[frozenset[str], Verdict]) -> str:
    """Write what one feature is to every other as a Markdown table.

    Raises:
        KeyError: When there is no such feature.
    """
    rows = ["| with | | rules |", "|---|---|---|"]
    others = sorted({other for pair in verdicts for other in pair} - {name})
    for other in others:
        verdict = verdicts[frozenset({name, other})]
        rows.append(f"| `{other}` | {verdict.kind} | {_listed(verdict.rules, _PAGE)} |")
    return "\n".join(rows)


def out_of_scope_text(entries: Sequence[OutOfScope]) -> str:
    """Write the constraints that are no rule as a Markdown table, those of one reason in a row."""
    rows = ["| rows | about | why it is no rule |", "|---|---|---|"]
    for (subject, reason), group in itertools.groupby(entries, lambda e: (e.subject, e.reason)):
        numbers = ", ".join(str(entry.row) for entry in group)
        rows.append(f"| {numbers} | {subject} | {_sentence(reason)} |")
    return "\n".join(rows)


def _rule_text(rule: Rule) -> str:
    kinds = (f"**{rule.severity}**", rule.relation, _SCOPES[rule.scope], rule.source)
    allowed = (
        "" if rule.proof is None else f" *Can be allowed:* `{rule.proof}` shows that it works."
    )
    told = ", ".join(filter(None, kinds))
    lines = [
        f'* <span id="{anchor_of(rule)}"></span>`{rule.id}` ({told})',
        f"  {_plain(_sentence(rule.what))} *When:* {_plain(str(rule.fires_when))}.",
        f"  *Why:* {_plain(rule.because)} *Instead:* {_plain(rule.instead)}{allowed}",
    ]
    return "\n\n".join(lines)


def _listed(rules: Sequence[Rule], page: str = "") -> str:
    """The rules in a line, each a link to its place on the page of rules."""
    return ", ".join(
        f'<a href="{page}#{anchor_of(rule)}"><code>{rule.id}</code></a> ({rule.severity})'
        for rule in rules
    )


def _sentence(text: str) -> str:
    """The text with a capital letter, unless it begins with the name of something."""
    is_name = re.match(r"\w+[-_]", text)
    return text if is_name else text[0].upper() + text[1:]


def _plain(text: str) -> str:
    """The text with what Markdown, and its typography, would read as marks escaped."""
    return re.sub(r"([_*'\"<>\[\]-])", r"\\\1", text)


class _Printed(SphinxDirective):
    """Puts a text of the suite's own tables in its place."""

    text: ClassVar[Callable[[], str]]

    def run(self) -> list[nodes.Node]:
        """Parse the text as Markdown."""
        return self.parse_text_to_nodes(type(self).text())


class CompatibilityRules(SphinxDirective):
    """`{compatibility-rules}`: every rule of the table, a section for each subject."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        return list(itertools.starmap(self._section, by_subject(RULES).items()))

    def _section(self, subject: str, rules: Sequence[Rule]) -> nodes.section:
        title = nodes.title("", "", nodes.literal("", subject))
        text = self.parse_text_to_nodes(rules_text(rules))
        return nodes.section("", title, *text, ids=[nodes.make_id(f"rules-{subject}")])


class FeaturePairs(_Printed):
    """`{feature-pairs}`: what every two features are to one another."""

    text = staticmethod(lambda: pairs_text(pairs()))


class WorksWith(SphinxDirective):
    """`{works-with} feature`: what a feature is to every other."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the table as Markdown."""
        try:
            text = works_with_text(self.arguments[0], pairs())
        except KeyError as error:
            raise self.error(f"there is no feature {self.arguments[0]!r}.") from error
        return self.parse_text_to_nodes(text)


class OutOfScopeConstraints(_Printed):
    """`{out-of-scope-constraints}`: the constraints that are no rule."""

    text = staticmethod(lambda: out_of_scope_text(OUT_OF_SCOPE))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("compatibility-rules", CompatibilityRules)
    app.add_directive("feature-pairs", FeaturePairs)
    app.add_directive("works-with", WorksWith)
    app.add_directive("out-of-scope-constraints", OutOfScopeConstraints)
    return {"parallel_read_safe": True}
