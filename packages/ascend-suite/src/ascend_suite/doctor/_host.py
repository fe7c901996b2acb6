"""Findings about the host: its memory, its processors, and where this process runs."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_suite.doctor.machine import Machine
from ascend_suite.finding import Finding, Severity
from ascend_suite.size import size_text

__all__ = ["fork", "memlock", "memory", "numa", "threads"]


def memory(machine: Machine) -> Iterator[Finding]:
    """How much can be moved to the host, where a control group allows less than is built in."""
    memory = machine.memory
    limit, total = memory.cgroup_bytes, memory.total_bytes
    if limit is None or (total is not None and limit >= total):
        return
    on_devices = sum(d.total_bytes for a in machine.accelerators for d in a.devices)
    why = None if total is None else f"the machine has {size_text(total)}."
    if on_devices > limit:
        why = (
            f"the devices hold {size_text(on_devices)}: what is swapped out may be more than the "
            "limit, and the kernel then kills the process."
        )
    yield Finding(
        Severity.WARNING if on_devices > limit else Severity.NOTE,
        "host memory",
        f"a control group limits this process to {size_text(limit)} of host memory.",
        why=why,
        instead="give the container more memory, or set a budget for what is moved to the host: "
        "the features that move have an option for it.",
        rule="machine/host-memory",
    )


def memlock(machine: Machine) -> Iterator[Finding]:
    """How much memory can be locked, where an accelerator copies from locked memory."""
    memory, limit = machine.memory, machine.memory.limit_bytes
    locked, pinned = memory.memlock_bytes, memory.pinned_bytes
    if not machine.has_accelerator:
        return
    if memory.pin_failure is not None:
        yield Finding(
            Severity.WARNING,
            "pinned memory",
            "host memory cannot be page-locked.",
            why=f"{memory.pin_failure} Copies from other memory block the host, and overlap with "
            "nothing.",
            instead=_way_to_lock(machine),
            rule="machine/pinning",
        )
    elif locked is not None and (limit is None or locked < limit):
        beside = pinned is not None and pinned > locked
        yield Finding(
            Severity.NOTE if beside else Severity.WARNING,
            "pinned memory",
            f"a process may lock {size_text(locked)} of memory (`ulimit -l`).",
            why="the device's driver locks more beside that limit; collectives over RDMA do not."
            if beside
            else "a driver that locks memory under this limit refuses more, and so do collectives "
            "over RDMA; copies from other memory block the host, and overlap with nothing.",
            instead=_way_to_lock(machine),
            rule="machine/memlock",
        )


def _way_to_lock(machine: Machine) -> str:
    locked, raised = machine.memory.memlock_bytes, machine.memory.memlock_hard_bytes
    if locked is None:
        return "see what the system's log says of the driver."
    if raised is None or raised > locked:
        return "run `ulimit -l unlimited` before training."
    return (
        "let an administrator raise memlock in limits.conf; in a container, start it with "
        "`--ulimit memlock=-1`."
    )


def fork(machine: Machine) -> Iterator[Finding]:
    """Workers that are forked from a process that has pinned memory."""
    if machine.has_accelerator and machine.start_method == "fork":
        yield Finding(
            Severity.NOTE,
            "multiprocessing",
            "processes are started by fork.",
            why="a worker that is forked after memory was pinned copies the page tables of all of "
            "it, and cannot use the device.",
            instead="start workers of data loaders before features are turned on, and keep them "
            "(`persistent_workers=True`); or give them `multiprocessing_context='forkserver'`.",
            rule="machine/fork",
        )


def numa(machine: Machine) -> Iterator[Finding]:
    """Processes that may run, and take memory, far from their device."""
    if len(machine.nodes) < 2:
        return
    allowed = machine.processors.allowed
    here = [node.index for node in machine.nodes if node.processors & allowed]
    near = sorted({device.node for device in machine.pci if device.node is not None})
    if len(here) > 1:
        yield Finding(
            Severity.WARNING if machine.has_accelerator else Severity.NOTE,
            "NUMA",
            f"this process may run on {len(here)} NUMA nodes ({_listed(here)}).",
            why=f"the accelerators are at {_listed(near)}: " * bool(near)
            + "copies to and from memory of another node are slower.",
            instead=_way_to_bind(machine, near),
            rule="machine/numa-unbound",
        )
    elif near and not set(here) & set(near):
        yield Finding(
            Severity.WARNING,
            "NUMA",
            f"this process is bound to NUMA node {_listed(here)}, and the accelerators are at "
            f"{_listed(near)}.",
            why="everything that is copied to and from a device crosses nodes.",
            instead=_way_to_bind(machine, near),
            rule="machine/numa-far",
        )


def threads(machine: Machine) -> Iterator[Finding]:
    """Threads that wait for one another, since there are more of them than processors."""
    processors = machine.processors
    if processors.threads is not None and processors.threads > processors.usable + 0.5:
        limits = "the control group's quota" if processors.quota else "the processors it may use"
        yield Finding(
            Severity.WARNING,
            "threads",
            f"torch computes with {processors.threads} threads, and has {processors.usable:g} "
            "processors.",
            why=f"that is {limits}; threads beyond it wait for one another at every operator.",
            instead=f"set OMP_NUM_THREADS={max(1, int(processors.usable))} before training.",
            rule="machine/threads",
        )


def _way_to_bind(machine: Machine, near: list[int]) -> str:
    if machine.accelerator("npu").devices:
        return "export CPU_AFFINITY_CONF=1,lazy_bind:0 before training: torch_npu binds each rank."
    node = near[0] if near else machine.nodes[0].index
    return f"start each rank as `numactl --cpunodebind={node} --membind={node}`, with its own node."


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
