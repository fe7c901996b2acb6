"""Directives for `ascend-suite`: the tables of its options, and what it really prints.

    ```{command-options} check
    ```

    ```{command-output} check plan.toml
    [swap-optimizer]
    ```

The second one writes its content to `plan.toml`, or to what `:file:` names, in an empty folder,
runs the command there, and shows both, with the file's name in a comment. So what the page shows
is what the command prints, in every build. The exit code is to be 0, or what `:exit:` says.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer.main
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from terminal import printed_on_terminal

from ascend_suite._app import build_app

HELP = ("-h", "--help")
COLUMNS = 86  # as many as a block on a page shows
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def options_of(command: str, *, own: bool = False) -> str:
    """Write the arguments and options of a command as a Markdown table.

    Args:
        command: Its name.
        own: Leave out the options of panels, which describe a model or a machine.
    """
    group: Any = typer.main.get_command(build_app())
    found = group.commands[command]
    context = found.make_context(command, [], resilient_parsing=True)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for parameter in found.params:
        panel = getattr(parameter, "rich_help_panel", None)
        if set(HELP) & set(parameter.opts) or (own and panel is not None):
            continue
        rows.append(
            f"| {_name(parameter, context)} | {_default(parameter)} | {_cell(parameter.help)} |"
        )
    return "\n".join(rows)


def _name(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = "`, `".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return f"`{names}`"
    kind = parameter.metavar or parameter.display_type(ctx=context).strip("<>").replace("|", "\\|")
    return f"`{names} {kind.removesuffix(' range')}`"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    shown = parameter.show_default
    if isinstance(shown, str):
        return shown if " " in shown else f"`{shown}`"
    if parameter.default is None or parameter.default is False or parameter.default == ():
        return ""
    return f"`{parameter.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def printed_by(arguments: str, content: str = "", name: str = "plan.toml") -> tuple[str, int]:
    """Run the command on a terminal, in a folder that holds a file.

    Args:
        arguments: As one writes them in a shell.
        content: What is in the file; there is none where this is empty.
        name: The file's name.

    Returns:
        What it prints, without colours, and its exit code.
    """
    command = [sys.executable, "-m", "ascend_suite", *shlex.split(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        if content:
            (Path(folder) / name).write_text(f"{content}\n", encoding="utf-8")
        printed, code = printed_on_terminal(command, COLUMNS, Path(folder))
    lines = [line.rstrip() for line in COLOUR.sub("", printed).strip("\n").splitlines()]
    return "\n".join(lines), code


class CommandOptions(SphinxDirective):
    """Puts the options of a command in its place: `{command-options} check`."""

    required_arguments = 1
    option_spec = {"own": directives.flag}  # noqa: RUF012 - docutils' own attribute

    def run(self) -> list[nodes.Node]:
        """Parse the table as Markdown."""
        own = "own" in self.options
        return self.parse_text_to_nodes(options_of(self.arguments[0], own=own))


class CommandOutput(SphinxDirective):
    """Puts a command and what it prints in its place. The content is the plan that it reads."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {  # noqa: RUF012 - docutils' own attribute
        "exit": directives.nonnegative_int,
        "file": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Run the command; another exit code than the page says is an error."""
        plan = "\n".join(self.content)
        name = self.options.get("file", "plan.toml")
        text, code = printed_by(self.arguments[0], plan, name)
        expected = self.options.get("exit", 0)
        if code != expected:
            raise self.error(f"{self.arguments[0]} ended with {code}, not {expected}:\n{text}")
        blocks = [_block(f"# {name}\n{plan}", "toml")] if plan else []
        return [*blocks, _block(f"$ ascend-suite {self.arguments[0]}\n{text}", "console")]


def _block(text: str, language: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("command-options", CommandOptions)
    app.add_directive("command-output", CommandOutput)
    return {"parallel_read_safe": True}
