"""Reads the facts about this machine. Imports no torch; a process of its own does."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from ascend_suite.doctor import _software, _system
from ascend_suite.doctor._aside import Answer, ask_aside
from ascend_suite.doctor._questions import QUESTIONS
from ascend_suite.doctor.machine import (
    Accelerator,
    Device,
    HostMemory,
    Kind,
    Library,
    Machine,
    Processors,
)
from ascend_suite.versions import installed_version

__all__ = ["SECONDS", "read_machine"]

SECONDS = 120.0
"""How long a library may take to load: a cold disk and a slow one, together."""


def read_machine(
    *,
    seconds: float = SECONDS,
    questions: Mapping[str, Callable[[], dict[str, Any]]] = QUESTIONS,
) -> Machine:
    """Find out what `diagnose` looks at.

    Loads torch, torch_npu and megatron-core, each where it is installed, in child processes, and
    initialises the devices' runtime there; makes no tensor.

    Args:
        seconds: How long one of the libraries may take.
        questions: What is asked of them; a test may ask otherwise.
    """
    wanted = _software.suite_requirements()
    answers = _ask(questions, seconds)
    torch = answers["torch"]
    features, features_failure = _software.loadable_features()
    return Machine(
        system=" ".join((platform.system(), platform.machine(), *platform.libc_ver())).strip(),
        python=platform.python_version(),
        packages={name: installed_version(name) for name in wanted if name.startswith("ascend-")},
        wanted=wanted,
        features=features,
        features_failure=features_failure,
        torch=_library("torch", torch),
        torch_npu=_torch_npu(answers["npu"]),
        megatron=_library("megatron-core", answers.get("megatron", Answer())),
        triton=Library(version=installed_version("triton")),
        accelerators=tuple(_accelerator(kind, torch, answers[kind]) for kind in _KINDS),
        pci=_system.pci_devices(),
        cann=_software.cann(),
        memory=_memory(answers.get("pinning", Answer())),
        processors=Processors(
            count=os.cpu_count() or 1,
            allowed=_allowed_processors(),
            quota=_system.cpu_quota(),
            threads=(torch.value or {}).get("threads"),
        ),
        nodes=_system.numa_nodes(),
        compiler=_software.compiler(),
        start_method=multiprocessing.get_context().get_start_method(),
    )


_KINDS: tuple[Kind, ...] = ("npu", "cuda")


def _ask(
    questions: Mapping[str, Callable[[], dict[str, Any]]], seconds: float
) -> dict[str, Answer]:
    """Ask what there is something to ask about; nothing is page-locked without a device."""
    left_out = {"pinning"}
    if installed_version("megatron-core") is None:
        left_out.add("megatron")
    asked = {name: q for name, q in questions.items() if name not in left_out}
    answers = ask_aside(asked, seconds=seconds, first="torch")
    if any((answers[kind].value or {}).get("devices") for kind in _KINDS):
        answers |= ask_aside({"pinning": questions["pinning"]}, seconds=seconds)
    return answers


def _library(distribution: str, answer: Answer) -> Library:
    """What is installed as a distribution, and whether it answered; its own word comes first."""
    version = (answer.value or {}).get("version") or installed_version(distribution)
    return Library(version=version, failure=None if version is None else answer.failure)


def _torch_npu(answer: Answer) -> Library:
    """The question about NPUs loads torch_npu: what it says of an import is torch_npu's failure."""
    version = installed_version("torch-npu")
    if version is None:
        return Library()
    reason = answer.failure or (answer.value or {}).get("unavailable") or ""
    broken = answer.failure is not None or "cannot be imported" in reason
    return Library(version=version, failure=reason if broken else None)


def _accelerator(kind: Kind, torch: Answer, answer: Answer) -> Accelerator:
    if torch.failure is not None:
        return Accelerator(kind=kind, unavailable="torch does not work.")
    if answer.failure is not None:
        return Accelerator(kind=kind, unavailable=answer.failure)
    return Accelerator(
        kind=kind,
        unavailable=answer.value.get("unavailable"),
        devices=tuple(Device(**device) for device in answer.value.get("devices", ())),
        capabilities=answer.value.get("capabilities", {}),
    )


def _memory(pinning: Answer) -> HostMemory:
    return dataclasses.replace(
        _system.host_memory(),
        pinned_bytes=(pinning.value or {}).get("pinned_bytes"),
        pin_failure=pinning.failure,
    )


def _allowed_processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
