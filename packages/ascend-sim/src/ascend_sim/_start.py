"""Start the simulation in this process."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from typing import Any

from ascend_sim import _machine
from ascend_sim._build import build
from ascend_sim._runtime import ALLOCATORS, KERNELS, Runtime
from ascend_sim._simulator import Simulator
from ascend_sim.config import SimConfig
from ascend_sim.errors import ConfigError, RefusedError
from ascend_sim.kernels import Kernels

_NO_CANN = "ASCEND_HOME_PATH environment variable is not set"

# A process has one runtime, as it has one torch_npu: this holds its handle.
_running: list[Simulator] = []


def start(config: SimConfig | None = None, **options: Any) -> Simulator:
    """Give this process a simulated NPU. Imports torch and torch_npu.

    Compiles the native code where this version of it was not compiled before (about a minute). Sets
    TORCH_DEVICE_BACKEND_AUTOLOAD and TASK_QUEUE_ENABLE to 0, for child processes too. No device is
    initialised; that happens at its first use, as ever.

    Args:
        config: The options. None: those of the environment (`ASCENDSIM_*`).
        options: Fields of `SimConfig`, which have the last word over the environment.

    Returns:
        The handle. A second call with equal options returns the same one.

    Raises:
        ConfigError: When an option cannot be.
        RefusedError: When a real CANN is present, torch and torch_npu are not the tested pair,
            torch_npu was imported already, or a simulation with other options runs.
        BuildError: When the native code does not compile.
    """
    if config is not None and not isinstance(config, SimConfig):
        raise ConfigError(
            f"start({config!r}): what is given by its place is a SimConfig.",
            instead='options by their names: start(hbm="64M")',
        )
    if config is not None and options:
        raise RefusedError(
            "start() takes a config or options, not both.",
            instead="dataclasses.replace(config, ...)",
        )
    wanted = config or SimConfig.from_environment(os.environ, **options)
    if running := current():
        if running.config == wanted:
            return running
        raise RefusedError(
            "A simulated NPU with other options runs in this process.",
            why=f"it has {running.config}; a runtime cannot be exchanged",
            instead="one process per configuration",
        )
    _machine.check()
    os.environ.update(_machine.ENVIRONMENT)
    simulator = _load(wanted)
    _running.append(simulator)
    return simulator


def current() -> Simulator | None:
    """Return the simulation that runs in this process, or None."""
    return _running[0] if _running else None


def _import_torch_npu() -> Any:
    """Import torch_npu, and torch with it, without what it prints about a missing CANN."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        import torch_npu
    for line in said.getvalue().splitlines(keepends=True):
        if _NO_CANN not in line:
            sys.stdout.write(line)
    return torch_npu


def _load(config: SimConfig) -> Simulator:
    runtime = Runtime(build())
    runtime.configure(config)
    torch_npu = _import_torch_npu()
    kernels = Kernels(runtime.install(KERNELS, config.strict))
    # Some of torch_npu's allocators exist only once a device was initialised.
    torch_npu.npu._lazy_call(lambda: runtime.install(ALLOCATORS, config.poison))
    # Tasks still pending would otherwise meet a torch that is half gone.
    atexit.register(runtime.drain)
    return Simulator(config, runtime, kernels)
