"""The command `ascend-sim`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ascend_sim import _build, _machine
from ascend_sim._start import start
from ascend_sim._version import __version__
from ascend_sim.config import SCHEDULES, SimConfig, readers
from ascend_sim.errors import RefusedError, SimError

_SMOKE_TEST = """
import ascend_sim; ascend_sim.start()
import torch; x = torch.ones(3, device="npu") + 1
assert x.tolist() == [2, 2, 2]
"""

_MEANINGS = {
    "hbm": "memory of each device",
    "devices": "how many there are",
    "schedule": "when a submitted task runs",
    "h2d_gbps": "bandwidth from host to device in 1e9 bytes per second",
    "d2h_gbps": "the same from device to host",
    "d2d_gbps": "the same within and between devices",
    "copy_latency_us": "microseconds added to each copy between host and device",
    "poison": "fresh and freed memory reads as NaN",
    "query_stall": "how often an event answers 'not yet' before a query lets a task run",
    "collective_timeout_s": "how long a rank waits for others",
    "blocking_sends": "a send ends when it is received",
    "strict": "an operator without a simulated kernel is an error",
    "seed": "what the choices of random begin with",
    "profile": "the rates and latencies of timed, a TOML file",
    "trace": "name the tasks of races and the wait that is missing",
}

_UNSET = {"profile": "the package's"}
_METAVARS = {"hbm": "SIZE", "profile": "FILE"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        The exit status: 0 when all is well, 2 when the simulation was refused.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.action(options)
    except SimError as error:
        sys.stderr.write(f"ascend-sim: {error}\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ascend-sim", description="Run torch_npu programs on a simulated NPU."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a Python script on a simulated NPU",
        usage="ascend-sim run [OPTIONS] script.py ...  |  ascend-sim run [OPTIONS] -m MODULE ...",
        epilog="Each option is also a variable, such as ASCENDSIM_HBM=64M; the option comes first.",
        allow_abbrev=False,
    )
    run.set_defaults(action=_run)
    defaults = SimConfig()
    for field in dataclasses.fields(SimConfig):
        _add_option(run, field.name, getattr(defaults, field.name))
    run.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does; what follows it is passed to it",
    )
    run.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="the script, and what is passed to it",
    )
    doctor = commands.add_parser("doctor", help="say whether a simulated NPU can run here")
    doctor.set_defaults(action=_doctor)
    build = commands.add_parser(
        "build", help="compile the native code now rather than at first use"
    )
    build.set_defaults(action=_compile)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    # A text of an option is read as that of its environment variable, so that both mean the same.
    flag = "--" + name.replace("_", "-")
    unset = (
        _UNSET.get(name, "the profile's in timed, elsewhere none") if default is None else default
    )
    meaning = f"{_MEANINGS[name]} (default: {unset})"
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_const", const="1", help=_MEANINGS[name])
    elif name == "schedule":
        parser.add_argument(flag, choices=SCHEDULES, help=meaning)
    else:
        metavar = _METAVARS.get(name, "N")
        parser.add_argument(flag, metavar=metavar, help=meaning, type=_readable(name))


def _readable(name: str) -> Callable[[str], str]:
    def text_of(text: str) -> str:
        try:
            readers()[name](text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error
        return text

    return text_of


def _run(options: argparse.Namespace) -> int:
    is_module = options.module is not None
    words = options.module if is_module else options.words
    if words[:1] == ["--"]:
        words = words[1:]
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
    _check_program(words[0] if words else "", is_module=is_module)
    names = [field.name for field in dataclasses.fields(SimConfig)]
    texts = {f"ASCENDSIM_{name.upper()}": getattr(options, name) for name in names}
    given = {name: text for name, text in texts.items() if text is not None}
    # For child processes too, which inherit the environment.
    os.environ.update(given)
    start()
    sys.argv[:] = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _check_program(name: str, *, is_module: bool) -> None:
    """Refuse what cannot be run before a device is started for it."""
    if not name:
        raise RefusedError(
            "run needs a script, or -m and a module.", instead="ascend-sim run --hbm 64M train.py"
        )
    # The spec of a submodule would import the packages above it.
    if is_module and find_spec(name.partition(".")[0]) is None:
        raise RefusedError(
            f"There is no module {name}.",
            instead="one that can be imported from here, or the path of a script without -m",
        )
    if not is_module and not (Path(name).is_file() or Path(name, "__main__.py").is_file()):
        raise RefusedError(
            f"There is no script {name}.",
            instead="the path of a Python file, or -m and a module; a command has one, too",
        )


def _compile(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{_build.build()}\n")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    """Go through what a simulation needs, and stop at the first thing that is missing."""
    for name, version in _machine.TESTED.items():
        _say(name, f"{_machine.installed(name) or 'not installed'} (tested: {version})")
    _say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    _say("CANN", _machine.real_cann(os.environ) or "none, as it must be")
    _say("options", str(SimConfig.from_environment(os.environ)))
    _machine.check()
    _say("cache", str(_build.cache_folder()))
    _say("compiled", str(_build.built() or "not yet"))
    _build.build()
    done = subprocess.run(
        [sys.executable, "-c", _SMOKE_TEST], capture_output=True, text=True, check=False
    )
    _say("first sum", "right" if done.returncode == 0 else f"failed:\n{done.stderr}")
    return 1 if done.returncode else 0


def _say(what: str, answer: str) -> None:
    sys.stdout.write(f"{what:<10} {answer}\n")
    sys.stdout.flush()
