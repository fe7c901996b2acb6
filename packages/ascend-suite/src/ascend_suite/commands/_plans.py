"""The plans that a command line names: files, standard input, flags of a training script."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ascend_core.errors import ConfigError
from ascend_suite.finding import Finding, IncompatiblePlanError, Severity, errors_of
from ascend_suite.plan import Plan, read_plan

__all__ = ["Framework", "Source", "named", "read_sources", "sound_plan"]

Framework = Literal["megatron-core", "pytorch"]

_STANDARD_INPUT = "standard input"


@dataclasses.dataclass(frozen=True)
class Source:
    """A plan as it was read.

    Attributes:
        name: Where it comes from.
        plan: What of it is right.
        findings: What is wrong with it by itself.
    """

    name: str
    plan: Plan
    findings: tuple[Finding, ...]


def read_sources(words: Sequence[str], framework: Framework) -> Iterator[Source]:
    """Read plans: a path, or `-`, is one each; all words from the first flag on are one together.

    Args:
        words: What stands on the command line.
        framework: Whose training loop the flags are of.

    Raises:
        ConfigError: When there is none, or a file cannot be read.
    """
    first = next((i for i, word in enumerate(words) if word[:1] == "-" and word != "-"), None)
    paths, flags = words[:first], words[first:] if first is not None else []
    if not words:
        raise ConfigError(
            "there is no plan to look at.",
            instead="name a file of TOML, YAML or JSON; `-` for TOML on standard input; or write "
            "two dashes, and the flags of a training script behind them.",
        )
    if "" in paths or paths.count("-") > 1:
        raise ConfigError(
            "a path is empty." if "" in paths else "`-` is given twice.",
            why="it names no plan." if "" in paths else "standard input holds one plan.",
            instead="name each plan once; is a variable of your shell unset?",
        )
    for path in paths:
        yield _from_standard_input() if path == "-" else _from_file(Path(path))
    if flags:
        yield _from_flags(flags, framework)


def sound_plan(word: str | None) -> Plan:
    """Read the one plan of a command that goes on with it; an empty one when left out.

    Raises:
        ConfigError: When it cannot be read, or anything in it is wrong; it tells of all of it.
    """
    if word is None:
        return Plan()
    [source] = read_sources([word], "megatron-core")
    if errors_of(source.findings):
        raise IncompatiblePlanError(source.findings)
    return source.plan


def named(plan: Plan) -> str:
    """Name a plan's features, with those options that are not their defaults."""
    return " + ".join(_with_options(*item) for item in plan.features.items()) or "plain"


def _with_options(feature: str, config: Any) -> str:
    options = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
        and field.default_factory is dataclasses.MISSING
    ]
    return f"{feature}({', '.join(options)})" if options else feature


def _from_file(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(
            f"{path} cannot be read.",
            why=_no_file(path),
            instead="check the path. Flags of a training script come behind two dashes, without "
            "the script's own name.",
        )
    return Source(str(path), *read_plan(path))


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "it is a folder."
    return "it is no regular file." if path.exists() else "there is no such file."


def _from_standard_input() -> Source:
    try:
        tables: Mapping[str, object] = tomllib.loads(sys.stdin.buffer.read().decode())
    except (ValueError, RecursionError) as error:  # also of decoding
        finding = Finding(
            Severity.ERROR,
            _STANDARD_INPUT,
            "standard input cannot be read.",
            why=str(error),
            instead="correct it there: it is to be TOML.",
        )
        return Source(_STANDARD_INPUT, Plan(), (finding,))
    return Source(_STANDARD_INPUT, *read_plan(tables))


def _from_flags(flags: Sequence[str], framework: Framework) -> Source:
    from ascend_suite._reading_flags import read_flags

    return Source("flags", *read_flags(flags, framework=framework))
