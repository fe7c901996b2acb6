"""What kind of device is simulated."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ascend_sim.errors import ConfigError
from ascend_sim.profile import PUBLISHED, Profile

SCHEDULES = ("eager", "thread", "lazy", "early", "random", "timed")
MAX_DEVICES = 64

PREFIX = "ASCENDSIM_"
# Read elsewhere: where compiled libraries are kept, and the compiler.
NOT_OPTIONS = {"CACHE", "CXX"}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SimConfig:
    """Options of the simulated device. Two are equal that describe the same device.

    Attributes:
        hbm: Memory of each device: bytes, or a size such as "64M" or "1.5G" (powers of 1024).
        devices: How many devices there are.
        schedule: When a submitted task runs. "eager": at once. "thread": on one thread per stream.
            "lazy": only when a synchronisation asks, with exactly what that depends on, so that a
            missing synchronisation shows on every run. "early": the main stream's as in "lazy", a
            side stream's as soon as what it waits for is reached. "random": any that can run, by a
            seeded choice. "timed": in the order of a modelled clock.
        h2d_gbps: Bandwidth from host to device in 1e9 bytes per second; None: the profile's in
            "timed", otherwise as fast as it goes.
        d2h_gbps: The same from device to host.
        d2d_gbps: The same within and between devices.
        copy_latency_us: Microseconds added to each copy between host and device; None: the
            profile's in "timed", otherwise 0.
        poison: Fill fresh and freed memory with bytes that read as NaN. Pinned memory that torch's
            cache keeps is filled as it is handed out again.
        query_stall: Where tasks wait for a synchronisation ("lazy", "early", "random", "timed"), an
            event answers "not yet" this often before a query lets a task run. The caching
            allocators query on every allocation, so a small number hides races; any number lets a
            polling loop end.
        collective_timeout_s: Seconds that a rank waits for others, in a collective, in a send or a
            receive, and in making a group. One that has ended is noticed at once.
        blocking_sends: A send ends when it is received, rather than when it is sent, so that two
            ranks that both send first wait for ever; on a device they may.
        strict: Raise where a program calls an operator that torch_npu itself would have to run and
            that no simulated kernel stands for, instead of leaving it to torch_npu.
        seed: What the choices of "random" begin with.
        profile: Path of the rates and latencies of "timed"; None: the package's.
        trace: Note which bytes each task touches, so that `Simulator.races` can name the tasks of
            a race and the wait that is missing.
    """

    hbm: str | int = "4G"
    devices: int = 1
    schedule: str = "eager"
    h2d_gbps: float | None = None
    d2h_gbps: float | None = None
    d2d_gbps: float | None = None
    copy_latency_us: float | None = None
    poison: bool = False
    query_stall: int = 100_000
    collective_timeout_s: float = 120.0
    blocking_sends: bool = False
    strict: bool = False
    seed: int = 0
    profile: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: When one cannot be.
        """
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        if self.hbm_bytes <= 0:
            raise ConfigError(
                f"hbm={self.hbm!r} leaves the device no memory.", instead='a size such as "64M"'
            )
        if not 1 <= self.devices <= MAX_DEVICES:
            raise ConfigError(
                f"devices={self.devices} cannot be simulated.",
                instead=f"a whole number from 1 to {MAX_DEVICES}",
            )
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ConfigError(f"There is no schedule {self.schedule!r}.", instead=f"one of {known}")
        self._check_speeds()
        if self.query_stall < 0:
            raise ConfigError(
                f"query_stall={self.query_stall} is negative.",
                why="it is how often an event answers that it is not reached yet",
                instead="a whole number, 0 or more",
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} is no seed.", instead="0 or more, below 2**64")
        if self.profile is not None:
            self.rates()

    def _check_speeds(self) -> None:
        for name in ("h2d_gbps", "d2h_gbps", "d2d_gbps"):
            speed = getattr(self, name)
            if speed is not None and not (speed > 0 and math.isfinite(speed)):
                raise ConfigError(
                    f"{name}={speed} is no bandwidth.", instead="a positive number, or None"
                )
        latency = self.copy_latency_us
        if latency is not None and not (latency >= 0 and math.isfinite(latency)):
            raise ConfigError(
                f"copy_latency_us={latency} is no duration.",
                instead="microseconds, 0 or more; or None",
            )
        if not (self.collective_timeout_s > 0 and math.isfinite(self.collective_timeout_s)):
            raise ConfigError(
                f"collective_timeout_s={self.collective_timeout_s} is no time-out.",
                instead="seconds, more than 0",
            )

    def rates(self) -> Profile:
        """Return what "timed" goes by: the profile, and the options that take its place.

        Raises:
            ConfigError: When `profile` names no profile.
        """
        profile = Profile.read(PUBLISHED if self.profile is None else Path(self.profile))
        names = ("h2d_gbps", "d2h_gbps", "d2d_gbps", "copy_latency_us")
        given = {name: getattr(self, name) for name in names}
        return dataclasses.replace(profile, **{k: v for k, v in given.items() if v is not None})

    def __eq__(self, other: object) -> bool:
        """Compare all options, sizes in bytes."""
        if not isinstance(other, SimConfig):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        """Hash what is compared."""
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "hbm"]
        return (self.hbm_bytes, *(getattr(self, name) for name in names))

    @property
    def hbm_bytes(self) -> int:
        """Memory of each device in bytes."""
        return parse_size(self.hbm)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **options: Any) -> SimConfig:
        """Make a config of `ASCENDSIM_*` variables; `options` have the last word.

        Args:
            environment: Such as `os.environ`. `ASCENDSIM_HBM=64M` is `hbm="64M"`, and so on.
            options: Fields of this class.

        Raises:
            ConfigError: When a variable is no option, or its text is no value of it.
        """
        known = readers()
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            name = variable.removeprefix(PREFIX)
            if name == variable or name in NOT_OPTIONS:
                continue
            field = name.lower()
            if field not in known:
                raise ConfigError(
                    f"{variable} is no option of the simulated NPU.",
                    instead="one of " + ", ".join(PREFIX + name.upper() for name in known),
                )
            try:
                values[field] = known[field](text)
            except ValueError as error:
                raise ConfigError(f"{variable}={text!r} cannot be read.", why=str(error)) from error
        for name in options.keys() - known.keys():
            raise ConfigError(
                f"{name} is no option of the simulated NPU.", instead="one of " + ", ".join(known)
            )
        return cls(**{**values, **options})


def parse_size(size: str | int) -> int:
    """Turn a size such as "64M", "1.5 GiB" or 4096 into bytes.

    Raises:
        ConfigError: When it is none.
    """
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f"{size!r} is no size.", instead='a number of bytes, or such as "64M"')
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper()])


def _check_type(name: str, annotation: str, value: object) -> None:
    """Refuse what is of another type. A truth value is no number, and an int is a float, too."""
    types, wanted, _ = _KINDS[annotation]
    is_truth_for_a_number = isinstance(value, bool) and bool not in types
    if is_truth_for_a_number or not isinstance(value, types):
        raise ConfigError(f"{name}={value!r} cannot be.", instead=wanted)


def readers() -> dict[str, Callable[[str], Any]]:
    """Say for each option how its text is read: by a function that may raise ValueError."""
    return {field.name: _KINDS[str(field.type)].read for field in dataclasses.fields(SimConfig)}


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number is needed") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number is needed") from None


def _truth(text: str) -> bool:
    try:
        return _TRUTH[text.strip().lower()]
    except KeyError:
        raise ValueError(f"one of {', '.join(_TRUTH)} is needed") from None


class _Kind(NamedTuple):
    """What an option may be, in types and in words, and how its text is read."""

    types: tuple[type, ...]
    wanted: str
    read: Callable[[str], Any]


# By the annotation of the option.
_KINDS = {
    "str | int": _Kind((str, int), 'a whole number of bytes, or a text such as "64M"', str),
    "str": _Kind((str,), "a text", str),
    "str | None": _Kind((str, type(None)), "a text, or None", str),
    "int": _Kind((int,), "a whole number", _whole),
    "float": _Kind((float, int), "a number", _number),
    "float | None": _Kind((float, int, type(None)), "a number, or None", _number),
    "bool": _Kind((bool,), "True or False", _truth),
}
