"""The documentation's own Sphinx extensions."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs/_ext"))

from config_options import options_table
from markdown_blocks import with_marked_blocks
from plan_tables import flags_table, training_table


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
