"""What is said of machines that were made up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ascend_suite.doctor import Machine, diagnose
from ascend_suite.doctor.facts import as_lines
from ascend_suite.doctor.machine import (
    Accelerator,
    Cann,
    Compiler,
    Device,
    HostMemory,
    Library,
    NumaNode,
    PciDevice,
    Processors,
)
from ascend_suite.finding import Finding, Severity

GIB = 2**30
OPERATORS = dict.fromkeys(
    ("fused_attention", "fused_rms_norm", "fused_rotary", "fused_swiglu"), True
)
NODES = (
    NumaNode(index=0, processors=frozenset(range(4))),
    NumaNode(index=1, processors=frozenset(range(4, 8))),
)
NPU = Device(name="Ascend910B2", total_bytes=64 * GIB)
GPU = Device(name="NVIDIA H100", total_bytes=80 * GIB)

GOOD = Machine(
    system="Linux",
    python="3.11.7",
    packages={"ascend-core": "0.1.0", "ascend-swap": "0.1.0"},
    wanted={"ascend-core": "==0.1.0", "ascend-swap": "==0.1.0", "torch": ">=2.13"},
    features=("swap-optimizer",),
    torch=Library(version="2.13.0"),
    torch_npu=Library(version="2.13.0"),
    megatron=Library(version="0.16.1"),
    accelerators=(
        Accelerator(kind="npu", devices=(NPU,) * 8, capabilities=OPERATORS),
        Accelerator(kind="cuda", unavailable="the accelerator of this build of torch is 'npu'."),
    ),
    pci=(PciDevice(address="0000:c1:00.0", kind="npu", node=1),),
    cann=Cann(home="/cann", installed="/cann", version="8.5.0", driver="25.2"),
    memory=HostMemory(total_bytes=1536 * GIB, available_bytes=1500 * GIB),
    processors=Processors(count=8, allowed=frozenset(range(4, 8)), threads=4),
    nodes=NODES,
    compiler=Compiler(command="/usr/bin/cc", cache="/home/me/.cache/ascend-suite/native"),
    start_method="spawn",
)
"""Eight NPUs on one of two nodes, to which this process is bound. Nothing is wrong with it."""


def changed(**values: Any) -> Machine:
    return dataclasses.replace(GOOD, **values)


def rules(machine: Machine) -> dict[str, Finding]:
    return {finding.rule or "": finding for finding in diagnose(machine)}


def test_a_machine_without_a_fault_has_no_finding() -> None:
    assert diagnose(GOOD) == ()


def on_cuda(**values: Any) -> Machine:
    cuda = Accelerator(kind="cuda", devices=(GPU,))
    return changed(
        **{
            "accelerators": (
                Accelerator(kind="npu", unavailable="torch_npu is not installed."),
                cuda,
            ),
            "pci": (PciDevice(address="0000:c1:00.0", kind="cuda", node=1),),
            "torch_npu": Library(),
            "cann": Cann(),
            "triton": Library(version="3.7.1"),
            **values,
        }
    )


def without_device(**values: Any) -> Machine:
    return changed(**{"accelerators": (), "pci": (), "torch_npu": Library(), **values})


LOCKED = HostMemory(total_bytes=64 * GIB, memlock_bytes=8 << 20, memlock_hard_bytes=8 << 20)
SMALL = HostMemory(total_bytes=1536 * GIB, cgroup_bytes=200 * GIB)
UNBOUND = Processors(count=8, allowed=frozenset(range(8)), threads=8)
FAR = Processors(count=8, allowed=frozenset(range(4)), threads=4)

CASES = [
    (changed(packages={"ascend-core": "0.1.0", "ascend-swap": None}), "packages", "error",
     "ascend-swap is not installed"),
    (changed(packages={"ascend-core": "0.2.0"}), "packages", "error", "ascend-core is 0.2.0"),
    (changed(features_failure="swap-optimizer: ImportError"), "features", "error",
     "cannot be loaded"),
    (changed(torch=Library()), "torch", "error", "not installed"),
    (changed(torch=Library(version="2.13.0", failure="OSError: libgomp")), "torch", "error",
     "cannot be imported"),
    (changed(torch=Library(version="2.12.1"), torch_npu=Library(version="2.12.0")), "torch",
     "warning", "PyTorch is 2.12.1"),
    (changed(torch_npu=Library(version="2.13.0", failure="ImportError: libhccl.so")), "torch-npu",
     "error", "cannot be imported"),
    (changed(torch_npu=Library(version="2.12.0")), "torch-npu-release", "error", "2.12.0"),
    (changed(cann=Cann(installed="/usr/local/Ascend/ascend-toolkit/latest")), "cann", "error",
     "this process does not know of it"),
    (changed(cann=Cann(home="/cann", version="8.3.RC1")), "cann-release", "warning", "8.3.RC1"),
    (changed(megatron=Library(version="0.16.1", failure="ImportError: no")), "megatron-core",
     "warning", "cannot be imported"),
    (changed(torch=Library(version="2.13.0rc2")), "torch", "warning", "PyTorch is 2.13.0rc2"),
    (changed(megatron=Library(version="0.17.0")), "megatron-core-release", "note", "0.17.0"),
    (changed(compiler=Compiler(failure="there is no C compiler")), "compiler", "warning",
     "cannot be compiled"),
    (changed(compiler=Compiler(command="cc", cache_failure="/ is read-only")), "compiler-cache",
     "warning", "cannot be kept"),
    (changed(accelerators=(Accelerator(kind="npu", unavailable="torch_npu is not installed."),),
             torch_npu=Library()), "unused-device", "warning", "1 Ascend NPU"),
    (changed(pci=(), accelerators=(
        Accelerator(kind="npu", unavailable="it did not end within 60 seconds"),)),
     "device-failure", "error", "looking for Ascend NPUs failed"),
    (without_device(), "no-device", "note", "there is no accelerator"),
    (changed(accelerators=(Accelerator(kind="npu", devices=(NPU,),
             capabilities={**OPERATORS, "fused_swiglu": False}),)), "operators", "warning",
     "has no npu_swiglu"),
    (on_cuda(triton=Library()), "triton", "warning", "Triton is not installed"),
    (changed(memory=SMALL), "host-memory", "warning", "200 GiB"),
    (without_device(memory=SMALL), "host-memory", "note", "200 GiB"),
    (changed(memory=LOCKED), "memlock", "warning", "8.00 MiB"),
    (changed(memory=dataclasses.replace(LOCKED, pinned_bytes=40 << 20)), "memlock", "note",
     "8.00 MiB"),
    (changed(memory=dataclasses.replace(LOCKED, pin_failure="RuntimeError: refused")), "pinning",
     "warning", "cannot be page-locked"),
    (changed(start_method="fork"), "fork", "note", "started by fork"),
    (changed(processors=UNBOUND), "numa-unbound", "warning", "2 NUMA nodes (0, 1)"),
    (without_device(processors=UNBOUND), "numa-unbound", "note", "2 NUMA nodes (0, 1)"),
    (changed(processors=FAR), "numa-far", "warning", "bound to NUMA node 0"),
    (changed(processors=dataclasses.replace(GOOD.processors, threads=9)), "threads", "warning",
     "9 threads, and has 4 processors"),
    (changed(processors=dataclasses.replace(GOOD.processors, quota=1.5)), "threads", "warning",
     "4 threads, and has 1.5 processors"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "rule", "severity", "words"), CASES, ids=[f"{c[1]}-{c[2]}-{c[3]}" for c in CASES]
)
def test_each_fault_is_found_with_its_reason_and_a_way_out(
    machine: Machine, rule: str, severity: str, words: str
) -> None:
    finding = rules(machine)[f"machine/{rule}"]
    assert finding.severity is Severity(severity)
    assert words in finding.what
    assert finding.why and finding.instead


def test_every_rule_has_a_case() -> None:
    tested = {f"machine/{case[1]}" for case in CASES}
    found = {finding.rule for case in CASES for finding in diagnose(case[0])}
    assert found <= tested


def test_what_torch_npu_says_of_a_missing_cann_comes_with_the_way_to_set_it_up() -> None:
    machine = changed(
        torch_npu=Library(version="2.13.0", failure="ImportError: libascendcl.so."),
        cann=Cann(installed="/usr/local/Ascend/ascend-toolkit/latest"),
    )
    finding = rules(machine)["machine/torch-npu"]
    assert "libascendcl.so" in (finding.why or "")
    assert "source /usr/local/Ascend/ascend-toolkit/latest/set_env.sh" in (finding.instead or "")


def test_without_torch_nothing_is_said_of_what_is_above_it() -> None:
    broken = Library(version="2.13.0", failure="it ended the process with signal SIGSEGV")
    machine = changed(torch=broken, torch_npu=dataclasses.replace(broken), pci=(), accelerators=())
    assert set(rules(machine)) == {"machine/torch", "machine/no-device"}


def test_who_can_raise_the_lock_limit_himself_is_told_how() -> None:
    raised = dataclasses.replace(LOCKED, memlock_hard_bytes=None)
    told = rules(changed(memory=raised))["machine/memlock"].instead or ""
    assert "ulimit -l unlimited" in told
    told = rules(changed(memory=LOCKED))["machine/memlock"].instead or ""
    assert "limits.conf" in told


def test_binding_is_advised_in_the_form_that_the_device_knows() -> None:
    assert "CPU_AFFINITY_CONF" in str(rules(changed(processors=UNBOUND)))
    advice = rules(on_cuda(processors=UNBOUND))["machine/numa-unbound"].instead or ""
    assert "numactl --cpunodebind=1 --membind=1" in advice


def test_a_limit_above_what_is_built_in_is_none() -> None:
    memory = HostMemory(total_bytes=64 * GIB, cgroup_bytes=64 * GIB, memlock_bytes=64 * GIB)
    assert diagnose(changed(memory=memory)) == ()
    assert memory.limit_bytes == 64 * GIB


def test_the_facts_are_json_and_lines_of_text() -> None:
    facts = json.loads(json.dumps(GOOD.as_json()))
    assert facts["processors"]["allowed"] == [4, 5, 6, 7]
    assert facts["accelerators"][0]["devices"][0] == {
        "name": "Ascend910B2",
        "total_bytes": 64 * GIB,
    }
    lines = dict(as_lines(GOOD))
    assert lines["npu"] == "8 x Ascend910B2, 64.0 GiB"
    assert lines["CANN"] == "8.5.0 in /cann, driver 25.2"
    assert lines["NUMA"] == "2 nodes, this process on 1, accelerators at 1"
    assert "ulimit -l unlimited" in lines["pinned memory"]
    assert as_lines(on_cuda()) != as_lines(GOOD)
