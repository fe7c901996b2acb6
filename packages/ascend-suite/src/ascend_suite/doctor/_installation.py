"""Findings about what is installed."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_suite.doctor.machine import Machine
from ascend_suite.finding import Finding, Severity
from ascend_suite.versions import Version

__all__ = ["compiler", "features", "megatron", "packages", "torch", "torch_npu"]

_MEGATRON = "0.16.1"  # what the tests run with


def packages(machine: Machine) -> Iterator[Finding]:
    """Packages of the suite that are missing, or of another version than it declares."""
    for name, version in machine.packages.items():
        wanted = machine.wanted.get(name, "")
        if version is None or not _satisfies(version, wanted):
            yield Finding(
                Severity.ERROR,
                name,
                f"{name} is {'not installed' if version is None else version}.",
                why=f"ascend-suite needs {name}{wanted}: these versions are tested together.",
                instead="install ascend-suite anew, with what it depends on.",
                rule="machine/packages",
            )


def features(machine: Machine) -> Iterator[Finding]:
    """Features that cannot be loaded."""
    if machine.features_failure is not None:
        yield Finding(
            Severity.ERROR,
            "features",
            "the installed features cannot be loaded.",
            why=machine.features_failure,
            instead="reinstall or uninstall the package that offers them.",
            rule="machine/features",
        )


def torch(machine: Machine) -> Iterator[Finding]:
    """PyTorch: missing, broken, or older than declared."""
    library = machine.torch
    wanted = machine.wanted.get("torch", "")
    if library.version is None or library.failure is not None:
        missing = library.version is None
        yield Finding(
            Severity.ERROR,
            "torch",
            "PyTorch is not installed." if missing else "PyTorch cannot be imported.",
            why="every feature works on it." if missing else library.failure,
            instead=f"install torch{wanted}, in the build for this machine's devices.",
            rule="machine/torch",
        )
    elif not _satisfies(library.version, wanted):
        yield Finding(
            Severity.WARNING,
            "torch",
            f"PyTorch is {library.version}.",
            why=f"the suite is tested with torch{wanted}.",
            instead="raise it, or expect what nobody has tried.",
            rule="machine/torch",
        )


def torch_npu(machine: Machine) -> Iterator[Finding]:
    """torch_npu: broken, or built for another PyTorch."""
    npu, torch = machine.torch_npu, machine.torch
    if npu.failure is not None and torch.works:
        yield Finding(
            Severity.ERROR,
            "torch_npu",
            "torch_npu is installed and cannot be imported.",
            why=f"{npu.failure} PyTorch loads it by itself, so `import torch` may fail, too.",
            instead=_way_to_torch_npu(machine),
            rule="machine/torch-npu",
        )
    built_for, there = Version.of(npu.version), Version.of(torch.version)
    if built_for and there and built_for.series != there.series:
        yield Finding(
            Severity.ERROR,
            "torch_npu",
            f"torch_npu is {npu.version}, and PyTorch is {torch.version}.",
            why="torch_npu is built for one release of PyTorch, whose first two numbers it has.",
            instead="install the torch_npu of that release.",
            rule="machine/torch-npu-release",
        )


def _way_to_torch_npu(machine: Machine) -> str:
    if machine.cann.home is None:
        found = machine.cann.installed or "the CANN toolkit"
        return (
            f"run `source {found}/set_env.sh` first, or uninstall torch_npu where there is no NPU."
        )
    return "see that CANN and its driver are of the versions that this torch_npu was built for."


def megatron(machine: Machine) -> Iterator[Finding]:
    """megatron-core: broken, or not the one that is tested."""
    library = machine.megatron
    if library.failure is not None:
        yield Finding(
            Severity.WARNING,
            "megatron-core",
            "megatron-core is installed and cannot be imported.",
            why=library.failure,
            instead="repair it where you train with it; plain PyTorch needs none.",
            rule="machine/megatron-core",
        )
    elif library.version is not None and Version.of(library.version) != Version.of(_MEGATRON):
        yield Finding(
            Severity.NOTE,
            "megatron-core",
            f"megatron-core is {library.version}.",
            why=f"the integrations are tested with {_MEGATRON}, and it changes between releases.",
            instead="run a few steps with and without a feature before a long training.",
            rule="machine/megatron-core-release",
        )


def compiler(machine: Machine) -> Iterator[Finding]:
    """What native kernels need to be compiled."""
    compiler = machine.compiler
    if compiler.failure is not None:
        yield Finding(
            Severity.WARNING,
            "native kernels",
            "the native kernels cannot be compiled.",
            why=compiler.failure,
            instead="install a C compiler, or name one in CC; without, the slower kernels of "
            "PyTorch compute the same on the CPU.",
            rule="machine/compiler",
        )
    if compiler.cache_failure is not None:
        yield Finding(
            Severity.WARNING,
            "native kernels",
            "compiled kernels cannot be kept.",
            why=f"{compiler.cache_failure}.",
            instead="set XDG_CACHE_HOME to a folder that can be written.",
            rule="machine/compiler-cache",
        )


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version is `==` or `>=` another; the suite declares nothing else."""
    relation, number = wanted[:2], wanted[2:].split(",")[0].strip()
    if relation == "==":
        return version.partition("+")[0] == number
    here, oldest = Version.of(version), Version.of(number)
    return relation != ">=" or here is None or oldest is None or here >= oldest
