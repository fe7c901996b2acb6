"""What the kernel says about memory, processors and what is on the bus.

Each function takes the root of the file system, so that a test can give it another one. What cannot
be read is not known, and no error: containers hide much of it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ascend_suite.doctor.machine import HostMemory, Kind, NumaNode, PciDevice

__all__ = ["cpu_quota", "host_memory", "numa_nodes", "parse_ranges", "pci_devices"]

_UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as a number about this high
_MAKERS: dict[str, Kind] = {"0x19e5": "npu", "0x10de": "cuda"}
# Of PCI: a display controller, or a processing accelerator.
_CLASSES = ("0x03", "0x12")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read how much memory there is, and what limits this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    sizes = _meminfo(root)
    limits = [
        limit
        for folder in _control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / name)) is not None and limit < _UNLIMITED
    ]
    return HostMemory(
        total_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
        cgroup_bytes=min(limits, default=None),
        memlock_bytes=_limit(soft),
        memlock_hard_bytes=_limit(hard),
    )


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Read how many processors' time the control groups of this process grant it."""
    quotas = []
    for folder in _control_groups(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if len(words) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_text(folder / name) for name in names]
        if all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Read which processors belong to which node; nodes of memory alone are left out."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        processors = parse_ranges(_text(folder / "cpulist"))
        if processors:
            nodes.append(NumaNode(index=int(folder.name[4:]), processors=processors))
    return tuple(sorted(nodes, key=lambda node: node.index))


def pci_devices(root: Path = Path("/")) -> tuple[PciDevice, ...]:
    """Read which accelerators are on the bus, by their makers."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = _MAKERS.get(_text(folder / "vendor"))
        if kind is not None and _text(folder / "class").startswith(_CLASSES):
            node = _text(folder / "numa_node")
            found.append(
                PciDevice(
                    address=folder.name,
                    kind=kind,
                    node=int(node) if node.isdecimal() else None,  # "-1" says that it is unknown
                )
            )
    return tuple(found)


def parse_ranges(text: str) -> frozenset[int]:
    """Read a list of processors as the kernel writes it: `"0-3,8"`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders that may limit this process: its group, and all above it.

    In a container the path that the kernel names may not be there, since the container's own group
    is mounted as the root: then the folders above, which are looked at anyway, hold the limit.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controllers, mount / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in tops:
            yield from (top / part for part in (inner, *inner.parents))


def _meminfo(root: Path) -> dict[str, int]:
    sizes = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal():
            sizes[name] = int(words[0]) * 1024
    if not sizes:  # no Linux
        try:
            sizes["MemTotal"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return {}
    return sizes


def _limit(value: int) -> int | None:
    return None if value in (resource.RLIM_INFINITY, -1) else value


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
