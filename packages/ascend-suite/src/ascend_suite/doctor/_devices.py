"""Findings about accelerators and the software below them."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_suite.doctor.machine import Kind, Machine
from ascend_suite.finding import Finding, Severity
from ascend_suite.versions import OLDEST_CANN, Version

__all__ = ["cann", "devices", "operators", "triton"]

_CALLED: dict[Kind, str] = {"npu": "Ascend NPU", "cuda": "NVIDIA GPU"}
_OPERATORS = {
    "fused_attention": "npu_fusion_attention",
    "fused_rms_norm": "npu_rms_norm",
    "fused_rotary": "npu_rotary_mul",
    "fused_swiglu": "npu_swiglu",
}


def cann(machine: Machine) -> Iterator[Finding]:
    """CANN that is not set up, or is old, where torch_npu wants it."""
    cann = machine.cann
    if not machine.torch_npu.version:
        return
    version, oldest = Version.of(cann.version), Version.of(OLDEST_CANN)
    if version and oldest and version < oldest:
        yield Finding(
            Severity.WARNING,
            "CANN",
            f"CANN is {cann.version}.",
            why=f"torch_npu names CANN {OLDEST_CANN}.0 for torch 2.9 and newer: operators that it "
            "calls may be missing.",
            instead=f"install CANN {OLDEST_CANN}.0 or newer.",
            rule="machine/cann-release",
        )
    if cann.home is None and cann.installed is not None:
        yield Finding(
            Severity.ERROR,
            "CANN",
            f"CANN is in {cann.installed}, and this process does not know of it.",
            why="neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set.",
            instead=f"run `source {cann.installed}/set_env.sh` before training.",
            rule="machine/cann",
        )


def devices(machine: Machine) -> Iterator[Finding]:
    """Accelerators that are there and that torch does not use; or none at all."""
    for kind, called in _CALLED.items():
        count = sum(device.kind == kind for device in machine.pci)
        accelerator = machine.accelerator(kind)
        if count and not accelerator.devices:
            yield Finding(
                Severity.WARNING,
                kind,
                f"the machine has {_counted(count, called)}, and torch uses none.",
                why=accelerator.unavailable,
                instead=_way_to(kind),
                rule="machine/unused-device",
            )
        elif accelerator.unavailable and _is_a_failure(machine, kind):
            yield Finding(
                Severity.ERROR,
                kind,
                f"looking for {called}s failed.",
                why=f"{accelerator.unavailable}.",
                instead="repair its driver; training on it would fail in the same way.",
                rule="machine/device-failure",
            )
    if not machine.has_accelerator:
        yield Finding(
            Severity.NOTE,
            "devices",
            "there is no accelerator: training runs on the CPU.",
            why="its memory is the host's, so what features move to the host stays where it was.",
            instead="use features that rebuild or share; those that move save on an accelerator.",
            rule="machine/no-device",
        )


def operators(machine: Machine) -> Iterator[Finding]:
    """Fused operators that this torch_npu lacks."""
    npu = machine.accelerator("npu")
    missing = [name for key, name in _OPERATORS.items() if npu.capabilities.get(key) is False]
    if npu.devices and missing:
        yield Finding(
            Severity.WARNING,
            "fused-ops",
            f"this torch_npu has no {', '.join(missing)}.",
            why="then several operators compute what one would.",
            instead="raise torch_npu, or leave fused-ops out.",
            rule="machine/operators",
        )


def triton(machine: Machine) -> Iterator[Finding]:
    """Triton, which kernels for CUDA are written in."""
    if machine.accelerator("cuda").devices and machine.triton.version is None:
        yield Finding(
            Severity.WARNING,
            "triton",
            "Triton is not installed.",
            why="the fused kernels for GPUs are written in it; without, PyTorch's own operators "
            "compute the same, in more passes over memory.",
            instead="install triton in the version that your PyTorch names.",
            rule="machine/triton",
        )


def _is_a_failure(machine: Machine, kind: Kind) -> bool:
    """Whether a question ended badly, other than by what is said of torch and torch_npu."""
    reason = machine.accelerator(kind).unavailable or ""
    known = not machine.torch.works or (kind == "npu" and machine.torch_npu.failure is not None)
    return not known and reason.startswith(("it did not end", "it ended the process"))


def _way_to(kind: Kind) -> str:
    if kind == "npu":
        return "install torch_npu for this PyTorch, and CANN and the driver below it."
    return "install a build of PyTorch for CUDA, and see that `nvidia-smi` lists the GPU."


def _counted(count: int, called: str) -> str:
    return f"{count} {called}{'s' if count > 1 else ''}"
