"""The rates and latencies of the modelled clock."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path

from ascend_sim.errors import ConfigError

# The one that serves every published figure.
PUBLISHED = Path(__file__).with_name("profile.toml")

_LATENCIES = {"launch_us", "kernel_us", "copy_latency_us", "link_latency_us"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """How fast the device of the schedule "timed" is: a model, and no NPU's timing.

    Attributes:
        launch_us: Microseconds that a submission costs the host.
        kernel_us: Microseconds that a kernel takes beside its work.
        memory_gbps: What kernels read and write, in 1e9 bytes per second.
        matmul_tflops_16: 1e12 floating-point operations per second, on numbers of at most 16 bits.
        matmul_tflops_32: The same on wider ones.
        copy_latency_us: Microseconds that a copy between host and device takes beside its bytes.
        h2d_gbps: Bandwidth from host to device in 1e9 bytes per second.
        d2h_gbps: The same from device to host.
        d2d_gbps: The same within and between devices.
        link_latency_us: Microseconds that each step of a collective takes beside its bytes.
        link_gbps: Bandwidth from a rank to its neighbour in 1e9 bytes per second.
    """

    launch_us: float
    kernel_us: float
    memory_gbps: float
    matmul_tflops_16: float
    matmul_tflops_32: float
    copy_latency_us: float
    h2d_gbps: float
    d2h_gbps: float
    d2d_gbps: float
    link_latency_us: float
    link_gbps: float

    def __post_init__(self) -> None:
        """Check every figure.

        Raises:
            ConfigError: When one cannot be.
        """
        for name, value in dataclasses.asdict(self).items():
            least = "0 or more" if name in _LATENCIES else "more than 0"
            too_small = value < 0 or (value == 0 and name not in _LATENCIES)
            if too_small or not math.isfinite(value):
                raise ConfigError(
                    f"{name}={value} cannot be in a profile.", instead=f"a number, {least}"
                )

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile from a TOML file that has every figure, as `profile.toml` here.

        Raises:
            ConfigError: When there is no such file, or it is no profile.
        """
        try:
            with path.open("rb") as file:
                figures = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} is no profile.", why=str(error)) from error
        names = [field.name for field in dataclasses.fields(cls)]
        if set(figures) != set(names):
            wrong = sorted(set(figures) ^ set(names))
            raise ConfigError(
                f"{path} is no profile.",
                why=f"missing or unknown: {', '.join(wrong)}",
                instead=f"a line for each of {', '.join(names)}",
            )
        for name, value in figures.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{path}: {name}={value!r} is no number.")
        return cls(**figures)
