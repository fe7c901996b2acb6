"""Directives for the page of plans: tables of the options of training and of flags."""

from __future__ import annotations

from collections.abc import Iterable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ascend_suite._kinds import in_words
from ascend_suite.flags import FEATURE_FLAGS
from ascend_suite.vocabulary import VOCABULARY


def training_table(origin: str) -> str:
    """Write the options of one origin as a Markdown table.

    Raises:
        ValueError: When there is none.
    """
    rows = ["| option | values | flag | meaning |", "|---|---|---|---|"]
    for option in VOCABULARY.values():
        if option.origin == origin:
            flag = option.flag or option.off
            cells = (f"`{option.name}`", in_words(option.type), f"`{flag}`" if flag else "")
            rows.append(f"| {' | '.join(cells)} | {option.meaning} |")
    if len(rows) == 2:
        raise ValueError(f"no option of training is of origin {origin!r}.")
    return "\n".join(rows)


def flags_table() -> str:
    """Write the flags that ask for features as a Markdown table."""
    rows = ["| flag | feature | option | meaning |", "|---|---|---|---|"]
    for row in FEATURE_FLAGS:
        spellings = " or ".join(f"`{flag}`" for flag in (row.flag, *row.aliases))
        value = "" if row.type is None else {int: " N", str: " NAMES"}[row.type]
        option = "" if row.option is None else f"`{row.option}`"
        loops = " (plain PyTorch's loops)" if row.framework else ""
        cells = (f"{spellings}{value}", f"{row.feature}{loops}", option, row.meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def break_at_underscores(found: Iterable[nodes.Node]) -> None:
    """Let long names break behind an underscore, so that the table is no wider than the page."""
    for node in found:
        for name in node.findall(nodes.literal):
            first, *others = name.astext().split("_")
            name.clear()
            name.append(nodes.Text(first))
            for part in others:
                mark = nodes.raw("", "<wbr>", format="html")
                name.extend([nodes.Text("_"), mark, nodes.Text(part)])


class TrainingOptions(SphinxDirective):
    """Puts the options of an origin in its place: `{training-options} megatron-core`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the table as Markdown."""
        try:
            table = training_table(self.arguments[0])
        except ValueError as error:
            raise self.error(str(error)) from error
        parsed = self.parse_text_to_nodes(table)
        break_at_underscores(parsed)
        return parsed


class FeatureFlags(SphinxDirective):
    """Puts the table of flags in its place: `{feature-flags}`."""

    def run(self) -> list[nodes.Node]:
        """Parse the table as Markdown."""
        return self.parse_text_to_nodes(flags_table())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("training-options", TrainingOptions)
    app.add_directive("feature-flags", FeatureFlags)
    return {"parallel_read_safe": True}
