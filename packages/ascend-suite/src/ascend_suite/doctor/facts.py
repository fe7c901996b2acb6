"""The facts about a machine as lines of text. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ascend_suite.doctor.machine import Accelerator, Library, Machine
from ascend_suite.size import size_text

__all__ = ["as_lines"]


def as_lines(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Return a label and a text for each fact."""
    return (
        ("system", f"{machine.system}, Python {machine.python}"),
        ("packages", _packages(machine.packages)),
        ("features", ", ".join(machine.features) or "none"),
        ("PyTorch", _library(machine.torch)),
        *_accelerators(machine),
        ("torch_npu", _library(machine.torch_npu)),
        ("CANN", _cann(machine)),
        ("megatron-core", _library(machine.megatron)),
        ("Triton", _library(machine.triton)),
        ("C compiler", _compiler(machine)),
        ("host memory", _memory(machine)),
        ("pinned memory", _pinned(machine)),
        ("processors", _processors(machine)),
        ("NUMA", _numa(machine)),
        ("multiprocessing", f"processes start by {machine.start_method}"),
    )


def _packages(packages: Mapping[str, str | None]) -> str:
    by_version: dict[str, list[str]] = {}
    for name, version in packages.items():
        by_version.setdefault(version or "missing", []).append(name)
    return "; ".join(f"{', '.join(names)} {version}" for version, names in by_version.items())


def _library(library: Library) -> str:
    if library.version is None:
        return "not installed"
    return library.version + (", cannot be imported" if library.failure is not None else "")


def _accelerators(machine: Machine) -> Iterator[tuple[str, str]]:
    for accelerator in machine.accelerators:
        yield accelerator.kind, _accelerator(accelerator)


def _accelerator(accelerator: Accelerator) -> str:
    if not accelerator.devices:
        reason = (accelerator.unavailable or "torch sees no device").splitlines()[0].rstrip(".")
        return f"none: {reason}"
    counted = Counter((one.name, one.total_bytes) for one in accelerator.devices)
    return ", ".join(
        f"{count} x {name}, {size_text(size)}" for (name, size), count in counted.items()
    )


def _cann(machine: Machine) -> str:
    cann = machine.cann
    where = cann.home or cann.installed
    if where is None:
        return "not found"
    driver = f", driver {cann.driver}" if cann.driver else ""
    state = "" if cann.home else ", not set up in this process"
    return f"{cann.version or 'of unknown version'} in {where}{driver}{state}"


def _compiler(machine: Machine) -> str:
    compiler = machine.compiler
    works = "works" if compiler.failure is None else "does not work"
    kept = "cannot be written to" if compiler.cache_failure else "can be written to"
    return f"{compiler.command or 'none'}, {works}; its cache {compiler.cache or ''} {kept}"


def _memory(machine: Machine) -> str:
    memory = machine.memory
    parts = [
        "of unknown size" if memory.total_bytes is None else size_text(memory.total_bytes),
        "" if memory.available_bytes is None else f"{size_text(memory.available_bytes)} available",
        "no control group limits it"
        if memory.cgroup_bytes is None
        else f"limited to {size_text(memory.cgroup_bytes)} by a control group",
    ]
    return ", ".join(part for part in parts if part)


def _pinned(machine: Machine) -> str:
    """What may be locked: the host's memory, unless `ulimit -l` says less to those who ask it."""
    memory = machine.memory
    locked = memory.memlock_bytes
    tried = "" if memory.pinned_bytes is None else f"; tried with {size_text(memory.pinned_bytes)}"
    if locked is None:
        return f"ulimit -l unlimited; {_most(memory.limit_bytes)}{tried}"
    hard = memory.memlock_hard_bytes
    raised = "unlimited" if hard is None else size_text(hard)
    own = f"ulimit -l {size_text(locked)}, may be raised to {raised}"
    return f"{own}; {_most(memory.limit_bytes)}{tried}"


def _most(limit: int | None) -> str:
    return "" if limit is None else f"never more than {size_text(limit)}, the host's memory"


def _processors(machine: Machine) -> str:
    processors = machine.processors
    quota = "" if processors.quota is None else f", a quota of {processors.quota:g}"
    threads = "" if processors.threads is None else f"; torch uses {processors.threads} threads"
    return f"{processors.count}, {len(processors.allowed)} for this process{quota}{threads}"


def _numa(machine: Machine) -> str:
    count = len(machine.nodes)
    if count < 2:
        return "one node"
    allowed = machine.processors.allowed
    here = ", ".join(str(node.index) for node in machine.nodes if node.processors & allowed)
    near = ", ".join(str(n) for n in sorted({d.node for d in machine.pci if d.node is not None}))
    at = f", accelerators at {near}" if near else ""
    return f"{count} nodes, this process on {here or 'none'}{at}"
