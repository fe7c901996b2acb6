"""What only torch and libraries above it can answer. Runs in a process of its own.

Nothing here is imported before it is asked for, and each answer is JSON values.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ascend_suite.doctor._system import host_memory

__all__ = ["QUESTIONS"]

_TRIAL = 32 << 20  # bytes
_LARGEST = 1 << 30  # bytes: above, a limit is not worth a trial that takes so much


def _import_torch() -> Any:
    """Import torch without the backends that it would load by itself: those are asked apart."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return importlib.import_module("torch")


def about_torch() -> dict[str, Any]:
    """The version that answers, and how many threads it computes with."""
    torch = _import_torch()
    return {"version": str(torch.__version__), "threads": torch.get_num_threads()}


def about_accelerator(kind: str) -> dict[str, Any]:
    """The devices of one kind. Initialises their runtime, and makes no tensor."""
    torch = _import_torch()
    from ascend_core.device import get_backend
    from ascend_core.errors import DeviceUnavailableError

    try:
        backend = get_backend(kind)
    except DeviceUnavailableError as error:
        return {"unavailable": error.why}
    module = torch.get_device_module(kind)
    properties = [module.get_device_properties(i) for i in range(backend.device_count())]
    return {
        "devices": [
            {"name": str(one.name), "total_bytes": int(one.total_memory)} for one in properties
        ],
        "capabilities": dict(backend.capabilities()),
    }


def about_pinning() -> dict[str, Any]:
    """Page-lock a little more than `ulimit -l` allows, where there is an accelerator.

    Some drivers lock under that limit and others beside it, which only a trial tells.
    """
    torch = _import_torch()
    from ascend_core.device import current_backend

    if not current_backend().can_pin:
        return {"pinned_bytes": None}
    limit = host_memory().memlock_bytes
    nbytes = _TRIAL + (limit if limit is not None and limit <= _LARGEST else 0)
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return {"pinned_bytes": nbytes if tensor.is_pinned() else None}


def about_megatron() -> dict[str, Any]:
    """The version of megatron-core. Imports all of it: a part that is broken shows."""
    _import_torch()
    # By name: only integrations know megatron-core, and this asks no more than whether it loads.
    return {"version": str(importlib.import_module("megatron.core").__version__)}


QUESTIONS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {
        "torch": about_torch,
        "cuda": functools.partial(about_accelerator, "cuda"),
        "npu": functools.partial(about_accelerator, "npu"),
        "pinning": about_pinning,
        "megatron": about_megatron,
    }
)
"""By the name of what is asked about."""
