"""The documentation's own Sphinx extensions."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest

from ascend_suite.explain import Kind, pairs
from ascend_suite.rules import RULES
from ascend_suite.rules.out_of_scope import OutOfScope

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs/_ext"))

from compatibility_rules import (
    by_subject,
    out_of_scope_text,
    rules_text,
    works_with_text,
)
from config_options import options_table
from docutils import nodes
from feature_matrix import WORDS, legend_of, table_of
from markdown_blocks import with_marked_blocks
from plan_tables import break_at_underscores, flags_table, training_table


@dataclasses.dataclass(frozen=True)
class Described:
    """Options of something.

    Attributes:
        times: How many windows. Fewer windows
            are larger.
        names: Which modules.
    """

    times: int
    names: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Undescribed:
    """Options that nobody described."""

    times: int = 1


def test_table_has_type_default_and_meaning_of_every_option() -> None:
    assert options_table(Described).splitlines()[2:] == [
        "| `times` | `int` | required | How many windows. Fewer windows are larger. |",
        r"| `names` | `tuple[str, ...] \| None` | `None` | Which modules. |",
    ]


def test_option_without_a_description_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not describe its field 'times'"):
        options_table(Undescribed)


def test_indented_blocks_are_marked_and_sections_are_not() -> None:
    docstring = """Does something:

        with it:

            go()

    Args:
        x: A number.

            It has a block, too.
    """
    assert with_marked_blocks(inspect.cleandoc(docstring).splitlines()) == [
        "Does something:",
        "",
        "::",
        "",
        "    with it:",
        "",
        "        go()",
        "",
        "Args:",
        "    x: A number.",
        "",
        "    ::",
        "",
        "        It has a block, too.",
    ]


def test_lists_and_headed_notes_are_text() -> None:
    lines = ["[Note: who owns it]", "* an item", "", "      goes on"]
    assert with_marked_blocks(lines) == ["**Who owns it.**", "", *lines[1:]]


def test_tables_of_plans_have_a_row_for_each_option_and_each_flag() -> None:
    assert "| `bf16` | true or false | `--bf16` | Weights and activations are BF16. |" in (
        training_table("megatron-core").splitlines()
    )
    row = "| `--use-fused-swiglu` or `--used-fused-swiglu` | fused-ops | `operators` |"
    assert any(line.startswith(row) for line in flags_table().splitlines())
    with pytest.raises(ValueError, match="no option"):
        training_table("nobody")


def test_long_names_break_behind_an_underscore_and_read_the_same() -> None:
    name = nodes.literal("", "num_layers_in")
    break_at_underscores([nodes.paragraph("", "", name)])
    parts = [part.astext() for part in name.findall(nodes.Text) if part.astext() != "<wbr>"]
    assert parts == ["num", "_", "layers", "_", "in"]
    assert len(list(name.findall(nodes.raw))) == 2


def test_every_rule_is_printed_with_all_that_it_says() -> None:
    text = rules_text(RULES)
    for rule in RULES:
        assert f"`{rule.id}`" in text
        assert (rule.proof or rule.id) in text
    assert text.count("*Instead:*") == text.count("*When:*") == len(RULES)
    assert sum(map(len, by_subject(RULES).values())) == len(RULES)
    assert text.count("*Can be allowed:*") == sum(rule.proof is not None for rule in RULES)


def test_marks_within_a_rule_are_escaped() -> None:
    rule = dataclasses.replace(RULES[0], what="a_b is *c*.", instead="pip install --no-deps 'x'.")
    assert r"a\_b is \*c\*." in rules_text([rule])
    assert r"pip install \-\-no\-deps \'x\'." in rules_text([rule])


def test_every_pair_is_in_the_matrix_on_both_sides() -> None:
    verdicts = pairs()
    table = table_of(verdicts)
    rows = [
        [cell.astext() for cell in row.findall(nodes.entry)] for row in table.findall(nodes.row)
    ]
    names = [row[0] for row in rows[1:]]
    assert rows[0][1:] == names and len(names) == 9
    words = {
        frozenset({name, other}): row[column].rstrip("*")
        for name, row in zip(names, rows[1:], strict=True)
        for column, other in enumerate(names, 1)
        if other != name
    }
    assert words == {pair: WORDS[verdict.kind] for pair, verdict in verdicts.items()}
    assert list(words.values()).count("no") == 1  # swap-optimizer and reuse-fp32-param
    both_ways = [
        (i, j) for i in range(9) for j in range(9) if rows[i + 1][j + 1] != rows[j + 1][i + 1]
    ]
    assert both_ways == []


def test_legend_explains_the_words_of_the_cells_and_no_other() -> None:
    verdicts = pairs()
    cells = {cell.astext() for cell in table_of(verdicts).findall(nodes.entry)}
    told = [
        line.astext().partition(":")[0] for line in legend_of(verdicts).findall(nodes.list_item)
    ]
    assert set(told) == cells & {*WORDS.values(), "yes*"}
    first = next(iter(verdicts))
    allowed = dataclasses.replace(verdicts[first], kind=Kind.ALLOWED)
    [line] = legend_of({first: allowed}).findall(nodes.list_item)
    assert line.astext().startswith("allow: refused by documents")


def test_a_cell_leads_to_a_rule_that_is_on_the_page_of_rules() -> None:
    page = rules_text(RULES)
    links = [link["refuri"] for link in table_of(pairs()).findall(nodes.reference)]
    assert len(links) > 10
    for link in links:
        file, _, anchor = link.partition("#")
        assert file == "compatibility-rules.html"
        assert f'<span id="{anchor}"></span>' in page


def test_constraints_of_one_reason_are_one_row() -> None:
    entries = [OutOfScope(1, "a", "no."), OutOfScope(2, "a", "no."), OutOfScope(3, "b", "no.")]
    assert out_of_scope_text(entries).splitlines()[2:] == ["| 1, 2 | a | No. |", "| 3 | b | No. |"]


def test_a_feature_page_has_a_row_for_every_other_feature() -> None:
    verdicts = pairs()
    rows = works_with_text("swap-optimizer", verdicts).splitlines()[2:]
    assert len(rows) == len({name for pair in verdicts for name in pair}) - 1
    link = "../compatibility-rules.html#rule-swap-optimizer-reuse-fp32-param"
    rule = f'<a href="{link}"><code>swap-optimizer/reuse-fp32-param</code></a> (error)'
    assert f"| `reuse-fp32-param` | refused | {rule} |" in rows
    assert '<span id="rule-swap-optimizer-reuse-fp32-param">' in rules_text(RULES)
    assert "| `recompute-norm` | together |  |" in rows
    with pytest.raises(KeyError):
        works_with_text("nothing", verdicts)
