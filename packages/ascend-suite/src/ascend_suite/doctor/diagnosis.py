"""What the facts about a machine mean for training. A pure function; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ascend_suite.doctor import _devices, _host, _installation
from ascend_suite.doctor.machine import Machine
from ascend_suite.finding import Finding

__all__ = ["diagnose"]

_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _installation.packages,
    _installation.features,
    _installation.torch,
    _installation.torch_npu,
    _installation.megatron,
    _installation.compiler,
    _devices.cann,
    _devices.devices,
    _devices.operators,
    _devices.triton,
    _host.memory,
    _host.memlock,
    _host.fork,
    _host.numa,
    _host.threads,
)


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Say what will fail, what will be slow, and what is worth knowing.

    Each finding's `rule` begins with `machine/` and stays the same from release to release.
    """
    return tuple(finding for check in _CHECKS for finding in check(machine))
