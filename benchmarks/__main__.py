"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ascend_core.errors import AscendError, ConfigError
from benchmarks.allocator import keep_freed_memory
from benchmarks.case import Case
from benchmarks.report import document, result_path, table, write
from benchmarks.timing import Row, run_case

HERE = Path(__file__).resolve().parent
QUICK_ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks, print the table, write the JSON.

    Returns:
        0, or 2 when an argument cannot be right.
    """
    options = _parser().parse_args(arguments)
    try:
        names = chosen_names(options.names)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.list:
        sys.stdout.write("".join(f"{name}\n" for name in names))
        return 0
    keep_freed_memory()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else None)
    try:
        rows = [row for name in names for row in _run(name, rounds, quick=options.quick)]
    except AscendError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(table(rows))
    measured = document(rows, _command(options))
    if options.json is not None:
        write(measured, options.json)
    if options.keep:
        path = result_path(HERE / "results", measured)
        write(measured, path)
        sys.stderr.write(f"kept in {path.relative_to(HERE.parent)}\n")
    return 0


def chosen_names(wanted: Sequence[str], folder: Path = HERE) -> list[str]:
    """The benchmarks to run: those that are named, or all that are there.

    Raises:
        ConfigError: When there is none of a name.
    """
    there = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    unknown = [name for name in wanted if name not in there]
    if unknown:
        raise ConfigError(
            f"there is no benchmark called {', '.join(map(repr, unknown))}.",
            why=f"those that are there: {', '.join(there) or 'none'}.",
            instead="name one of them, or none to run all.",
        )
    return list(dict.fromkeys(wanted)) or there


def load_cases(name: str, *, quick: bool) -> list[Case]:
    """Import `bench_<name>.py` and ask it for its cases."""
    module = importlib.import_module(f"benchmarks.bench_{name}")
    cases: list[Case] = module.cases(quick=quick)
    return cases


def _run(name: str, rounds: int | None, *, quick: bool) -> list[Row]:
    rows: list[Row] = []
    cases = load_cases(name, quick=quick)
    for number, case in enumerate(cases, start=1):
        sys.stderr.write(f"{name} {number}/{len(cases)}: {case.name} ... ")
        sys.stderr.flush()
        started = time.perf_counter()
        rows += run_case(name, case, rounds=rounds)
        sys.stderr.write(f"{time.perf_counter() - started:.0f} s\n")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", action="store_true", help="keep the run in benchmarks/results/")
    parser.add_argument("--quick", action="store_true", help="small cases, 3 rounds: does it run?")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="rounds of every case")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _command(options: argparse.Namespace) -> str:
    """The command that repeats the run; where its result was written does not matter."""
    parts = ["python3 -m nox -s bench --", *options.names]
    parts += ["--quick"] if options.quick else []
    parts += [f"--rounds {options.rounds}"] if options.rounds else []
    return " ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
