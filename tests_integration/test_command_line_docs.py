"""What the page about the command line takes from the command itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs/_ext"))

from command_line import COLUMNS, options_of, printed_by
from terminal import as_svg


def test_options_are_those_of_the_app() -> None:
    table = options_of("estimate").splitlines()
    assert table[0] == "| option | default | meaning |"
    assert "| `--layers int` |  | Decoder blocks, over all pipeline stages. |" in table
    dtype = r"| `--dtype float32\|bfloat16\|float16` | `float32` |"
    assert [row for row in table if row.startswith(dtype)]
    assert not [row for row in table if "--help" in row]
    required = "| `--hbm SIZE` | required |"
    own = options_of("suggest", own=True).splitlines()
    assert [row for row in own if row.startswith(required)]
    assert not [row for row in own if "--layers" in row or "--device" in row]


def test_what_a_command_prints_is_shown_without_colours_in_the_width_of_a_page() -> None:
    text, code = printed_by("check plan.toml", "[swap-optimizer]\n[reuse-fp32-param]")
    assert code == 1 and "\x1b" not in text
    assert text.startswith("1 error\n  error    swap-optimizer and reuse-fp32-param cannot")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert printed_by("check model.toml", "[recompute-norm]", "model.toml")[1] == 0


def test_a_picture_needs_no_font_of_a_server_and_places_indented_text() -> None:
    svg = as_svg("\x1b[1;31m1 error\x1b[0m\n   indented\n", "a title", 40)
    assert "@font-face" not in svg and "url(http" not in svg
    assert "a&#160;title" in svg
    [line] = [part for part in svg.split("<text") if "indented" in part]
    assert 'x="36.6"' in line and ">indented<" in line
