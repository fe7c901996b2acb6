"""The facts about a machine that decide what trains on it, and how fast. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

__all__ = [
    "Accelerator",
    "Cann",
    "Compiler",
    "Device",
    "HostMemory",
    "Library",
    "Machine",
    "NumaNode",
    "PciDevice",
    "Processors",
]

Kind = Literal["npu", "cuda"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A Python library that the suite uses where it is there.

    Attributes:
        version: What is installed; None where it is not.
        failure: Why it cannot be imported; None where it can, or where nobody tried.
    """

    version: str | None = None
    failure: str | None = None

    @property
    def works(self) -> bool:
        """Whether it is installed, and nothing is known against it."""
        return self.version is not None and self.failure is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator as torch sees it.

    Attributes:
        name: Its model.
        total_bytes: Its memory.
    """

    name: str
    total_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
        kind: As torch writes it.
        unavailable: Why torch has none; None where it has.
        devices: Those that torch sees.
        capabilities: What the first of them can do; see `ascend_core.device.Backend`.
    """

    kind: Kind
    unavailable: str | None = None
    devices: tuple[Device, ...] = ()
    capabilities: Mapping[str, bool | str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PciDevice:
    """An accelerator as the system sees it, whether a driver is there or not.

    Attributes:
        address: Where it is on the bus.
        kind: What it would be to torch.
        node: The NUMA node that it is at; None where the system does not say.
    """

    address: str
    kind: Kind
    node: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cann:
    """The software below torch_npu.

    Attributes:
        home: What `ASCEND_HOME_PATH` or `ASCEND_TOOLKIT_HOME` names; None where neither is set.
        installed: A toolkit in the usual place; None where there is none.
        version: Of the toolkit.
        driver: Version of the driver.
    """

    home: str | None = None
    installed: str | None = None
    version: str | None = None
    driver: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of the host. None where there is no limit, or none is known.

    Attributes:
        total_bytes: What is built in.
        available_bytes: What a program can have now.
        cgroup_bytes: The least limit of the control groups that this process is in.
        memlock_bytes: What a process may lock, `ulimit -l`.
        memlock_hard_bytes: How far it can raise that itself.
        pinned_bytes: What an accelerator's driver page-locked when it was tried; None where there
            is no accelerator, or it refused.
        pin_failure: Why it refused.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    cgroup_bytes: int | None = None
    memlock_bytes: int | None = None
    memlock_hard_bytes: int | None = None
    pinned_bytes: int | None = None
    pin_failure: str | None = None

    @property
    def limit_bytes(self) -> int | None:
        """The most that this process can have: what is built in, or its control groups' limit."""
        known = [n for n in (self.total_bytes, self.cgroup_bytes) if n is not None]
        return min(known, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumaNode:
    """Processors and memory that are beside one another.

    Attributes:
        index: Its number.
        processors: Those of the node.
    """

    index: int
    processors: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processors:
    """What computes on the host.

    Attributes:
        count: How many logical processors the machine has.
        allowed: Those on which this process may run.
        quota: How many the control groups grant, in processors; None for no limit.
        threads: How many threads torch computes with; None where torch does not answer.
    """

    count: int
    allowed: frozenset[int]
    quota: float | None = None
    threads: int | None = None

    @property
    def usable(self) -> float:
        """How many processors' time this process can have."""
        return min(float(len(self.allowed)), self.quota or float("inf"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """What compiles the native kernels, and where to.

    Attributes:
        command: The C compiler; None where there is none.
        failure: Why a small C file does not compile; None where it does.
        cache: Where compiled code is kept.
        cache_failure: Why nothing can be written there; None where it can.
    """

    command: str | None = None
    failure: str | None = None
    cache: str | None = None
    cache_failure: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """All facts that `diagnose` looks at.

    Attributes:
        system: The operating system, the kind of processor, and the C library.
        python: Version of Python.
        packages: The suite's packages: version, or None where one is missing.
        wanted: For these packages and for torch what the suite declares to need, such as
            `"==0.1.0"`.
        features: Names of the features that can be loaded.
        features_failure: Why features cannot be loaded; None where they can.
        torch: PyTorch.
        torch_npu: PyTorch's backend for NPUs.
        megatron: megatron-core.
        triton: Triton.
        accelerators: What torch says about each kind.
        pci: What the system says.
        cann: The software below torch_npu.
        memory: Memory of the host.
        processors: The host's.
        nodes: NUMA nodes; one where the system knows of none.
        compiler: For native kernels.
        start_method: How `multiprocessing` starts processes.
    """

    system: str
    python: str
    packages: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    wanted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    features_failure: str | None = None
    torch: Library = Library()
    torch_npu: Library = Library()
    megatron: Library = Library()
    triton: Library = Library()
    accelerators: tuple[Accelerator, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    cann: Cann = Cann()
    memory: HostMemory = HostMemory()
    processors: Processors
    nodes: tuple[NumaNode, ...] = ()
    compiler: Compiler = Compiler()
    start_method: str = "spawn"

    def accelerator(self, kind: Kind) -> Accelerator:
        """What torch says about one kind of accelerator."""
        for accelerator in self.accelerators:
            if accelerator.kind == kind:
                return accelerator
        return Accelerator(kind=kind, unavailable="torch was not asked.")

    @property
    def has_accelerator(self) -> bool:
        """Whether torch can use any."""
        return any(accelerator.devices for accelerator in self.accelerators)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON values; sets become sorted lists."""
        return {
            field.name: _json_value(getattr(self, field.name)) for field in dataclasses.fields(self)
        }


def _json_value(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {f.name: _json_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_json_value(inner) for inner in value]
    return value
