"""Whether this process may have a simulated NPU, and where torch and torch_npu are."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ascend_sim.errors import RefusedError

TESTED = {"torch": "2.13.0", "torch-npu": "2.13.0"}

# With torch_npu installed and no CANN, a plain `import torch` fails: torch loads it as a back end.
# And with a task queue between torch_npu and the runtime, submissions come from another thread than
# those of the simulated kernels, and in another order.
ENVIRONMENT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "0"}

_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_LIBRARY = "libascendcl.so"


def real_cann(environment: Mapping[str, str]) -> str | None:
    """Say where a real CANN was found, or None."""
    for variable in _CANN_VARIABLES:
        if environment.get(variable):
            return f"{variable} is {environment[variable]}"
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, _CANN_LIBRARY).exists():
            return f"LD_LIBRARY_PATH leads to {Path(folder, _CANN_LIBRARY)}"
    if found := ctypes.util.find_library("ascendcl"):
        return f"the system's loader finds {found}"
    return None


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse where a simulated NPU would lie, or crash.

    Raises:
        RefusedError: When a real CANN is present, when torch and torch_npu are not the tested pair,
            when torch_npu was imported already, or when an import of torch has failed.
    """
    if "torch_npu" in sys.modules:
        raise RefusedError(
            "The simulated NPU cannot start: torch_npu was imported already.",
            why="torch_npu binds to its runtime as it is imported",
            instead="call ascend_sim.start() first, or run the script with `ascend-sim run`",
        )
    if "torch" not in sys.modules and any(name.startswith("torch.") for name in sys.modules):
        raise RefusedError(
            "The simulated NPU cannot start: an import of torch has failed in this process.",
            why="torch is half there, and what it has registered cannot be registered twice",
            instead="a new process that calls ascend_sim.start() before it imports torch",
        )
    if where := real_cann(environment):
        raise RefusedError(
            "The simulated NPU cannot start beside a real CANN.",
            why=f"{where}; two runtimes of one name in a process are mixed up",
            instead="use the real device, or an environment without CANN",
        )
    for name, version in TESTED.items():
        found = installed(name)
        if found != version:
            raise RefusedError(
                f"The simulated NPU needs {name} {version}, and found {found or 'none'}.",
                why="its kernels stand for this pair's operators; no other pair was tested",
                instead="pip install torch==2.13.0, then pip install --no-deps torch-npu==2.13.0",
            )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RefusedError(
            "The simulated NPU runs on Linux on x86-64 alone.",
            why=f"this is {sys.platform} on {platform.machine()}",
        )


def installed(name: str) -> str | None:
    """Return the version of an installed distribution without its local part, or None."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def folder_of(module: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not installed"
    return Path(spec.origin).parent
