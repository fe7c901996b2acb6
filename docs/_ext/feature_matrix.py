"""The directive `feature-matrix`: features by features, from the table of rules.

A cell says how two features go together, and leads to the rule that has the most to say about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compatibility_rules import anchor_of
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ascend_suite._order import ORDER
from ascend_suite.explain import Kind, Verdict, pairs
from ascend_suite.finding import Severity

Verdicts = Mapping[frozenset[str], Verdict]

WORDS = {
    Kind.TOGETHER: "yes",
    Kind.NEEDS: "options",
    Kind.ALLOWED: "allow",
    Kind.REFUSED: "no",
}
MEANINGS = {
    Kind.TOGETHER: "they go together, whatever their options are.",
    Kind.NEEDS: "they go together with some options, and not with others: the rule says which.",
    Kind.ALLOWED: "refused by documents that users know, and it works here: a plan has to allow "
    "the rule by its id.",
    Kind.REFUSED: "they cannot be used together.",
}
RULES_PAGE = "compatibility-rules.html"


def names_of(verdicts: Verdicts) -> list[str]:
    """The features, in the order in which they are turned on; unknown ones behind, by name."""
    places = [place.feature for place in ORDER]
    names = {name for pair in verdicts for name in pair}
    return sorted(names, key=lambda n: (places.index(n) if n in places else len(places), n))


def cell_of(verdict: Verdict) -> nodes.paragraph:
    """The word for a verdict; a link where a rule stands behind it."""
    word = WORDS[verdict.kind]
    errors = [rule for rule in verdict.rules if rule.severity is Severity.ERROR]
    told = (*errors, *verdict.rules)
    if not told:
        return nodes.paragraph("", word, classes=[f"pair-{verdict.kind}"])
    uri = f"{RULES_PAGE}#{anchor_of(told[0])}"
    mark = "" if verdict.kind is not Kind.TOGETHER else "*"
    link = nodes.reference("", word + mark, refuri=uri, reftitle="; ".join(r.what for r in told))
    return nodes.paragraph("", "", link, classes=[f"pair-{verdict.kind}"])


def table_of(verdicts: Verdicts) -> nodes.table:
    """The matrix."""
    names = names_of(verdicts)
    group = nodes.tgroup("", cols=len(names) + 1)
    group += [nodes.colspec("", colwidth=1) for _ in range(len(names) + 1)]
    group += nodes.thead("", _row([nodes.paragraph(), *map(_name, names)]))
    body = nodes.tbody("")
    for name in names:
        cells: list[nodes.Node] = [_name(name)]
        for other in names:
            same = nodes.paragraph("", "–", classes=["pair-same"])
            cells.append(same if other == name else cell_of(verdicts[frozenset({name, other})]))
        body += _row(cells)
    group += body
    return nodes.table("", group, classes=["feature-matrix"])


def legend_of(verdicts: Verdicts) -> nodes.bullet_list:
    """What the words mean that the cells of a matrix have."""
    lines = nodes.bullet_list()
    there = {verdict.kind for verdict in verdicts.values()}
    texts = [(f"pair-{kind}", WORDS[kind], MEANINGS[kind]) for kind in WORDS if kind in there]
    if any(verdict.kind is Kind.TOGETHER and verdict.rules for verdict in verdicts.values()):
        texts.append(("pair-together", "yes*", "together, and a rule has something to say."))
    for style, word, meaning in texts:
        mark = nodes.inline("", word, classes=[style])
        lines += nodes.list_item("", nodes.paragraph("", "", mark, nodes.Text(f": {meaning}")))
    return lines


def _name(name: str) -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.literal("", name))


def _row(cells: Sequence[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


class FeatureMatrix(SphinxDirective):
    """Puts the matrix and its legend in its place: `{feature-matrix}`."""

    def run(self) -> list[nodes.Node]:
        """Build both from the table of rules."""
        return [table_of(pairs()), legend_of(pairs())]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("feature-matrix", FeatureMatrix)
    return {"parallel_read_safe": True}
