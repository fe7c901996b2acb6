"""Facts from files that were made up, from children that fail, and from this machine."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ascend_suite.doctor import _software, _system, diagnose, read_machine
from ascend_suite.doctor._aside import ask_aside
from ascend_suite.doctor._questions import QUESTIONS

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_least_limit_of_all_groups_above_counts_in_version_2(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "proc/meminfo": "MemTotal:  1048576 kB\nMemAvailable:  524288 kB\nHugePages_Total: 0\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/memory.max": f"{GIB // 2}\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/jobs/cpu.max": "max 100000\n",
        },
    )
    memory = _system.host_memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (GIB, GIB // 2)
    assert memory.cgroup_bytes == memory.limit_bytes == GIB // 2
    assert _system.cpu_quota(root) == 1.5


def test_limits_of_version_1_are_those_of_each_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/b\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert _system.host_memory(root).cgroup_bytes == GIB
    assert _system.cpu_quota(root) == 3.0


def test_in_a_container_the_mounted_root_holds_the_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/0123\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
    }
    assert _system.host_memory(write(tmp_path, files)).cgroup_bytes == GIB


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert _system.host_memory(tmp_path).cgroup_bytes is None
    assert _system.cpu_quota(tmp_path) is None
    assert _system.numa_nodes(tmp_path) == _system.pci_devices(tmp_path) == ()


def test_nodes_with_processors_and_accelerators_are_found(tmp_path: Path) -> None:
    pci = "sys/bus/pci/devices"
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node1/cpulist": "4-5,7\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node2/cpulist": "\n",
            f"{pci}/0000:c1:00.0/vendor": "0x19e5\n",
            f"{pci}/0000:c1:00.0/class": "0x120000\n",
            f"{pci}/0000:c1:00.0/numa_node": "1\n",
            f"{pci}/0000:02:00.0/vendor": "0x10de\n",
            f"{pci}/0000:02:00.0/class": "0x030200\n",
            f"{pci}/0000:02:00.0/numa_node": "-1\n",
            f"{pci}/0000:03:00.0/vendor": "0x19e5\n",
            f"{pci}/0000:03:00.0/class": "0x020000\n",
        },
    )
    nodes = {node.index: sorted(node.processors) for node in _system.numa_nodes(root)}
    assert nodes == {0: [0, 1, 2, 3], 1: [4, 5, 7]}
    found = [(device.address, device.kind, device.node) for device in _system.pci_devices(root)]
    assert found == [("0000:02:00.0", "cuda", None), ("0000:c1:00.0", "npu", 1)]


def test_cann_is_found_where_its_variable_points_and_in_its_usual_place(tmp_path: Path) -> None:
    latest = "usr/local/Ascend/ascend-toolkit/latest"
    root = write(
        tmp_path,
        {
            f"{latest}/version.cfg": "[x]\ntoolkit_installed_version=[8.3.0:8.3.RC1]\n",
            "usr/local/Ascend/driver/version.info": "Version=25.2.0\n",
            "opt/cann/x86_64-linux/ascend_toolkit_install.info": "path=/opt\nversion=8.5.0\n",
            "opt/older/compiler/version.info": "Version=7.7.0.5.238\nversion_dir=8.2.RC1\n",
            "opt/unknown/compiler/version.info": "Version=7.7.0.5.238\n",
        },
    )
    found = _software.cann({}, root)
    assert found.home is None and found.installed == str(root / latest)
    assert (found.version, found.driver) == ("8.3.RC1", "25.2.0")
    for home, version in (("opt/cann", "8.5.0"), ("opt/older", "8.2.RC1"), ("opt/unknown", None)):
        found = _software.cann({"ASCEND_HOME_PATH": str(root / home)}, root)
        assert (found.home, found.version) == (str(root / home), version)
    assert _software.cann({}, tmp_path / "empty").installed is None


def test_the_compiler_is_tried_and_its_cache_is_only_looked_at(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "new")}
    found = _software.compiler(environment)
    assert found.failure is found.cache_failure is None and found.command
    assert found.cache == str(tmp_path / "new" / "ascend-suite" / "native")
    assert not (tmp_path / "new").exists()


def test_a_compiler_that_fails_and_a_cache_that_is_a_file_are_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no headers here; exit 1\n")
    broken.chmod(0o755)
    occupied = tmp_path / "file"
    occupied.touch()
    found = _software.compiler({"CC": str(broken), "XDG_CACHE_HOME": str(occupied)})
    assert "no headers here" in (found.failure or "")
    assert found.cache_failure == f"{occupied} is no folder"
    assert "no C compiler" in (_software.compiler({"PATH": ""}).failure or "")


def test_what_the_suite_declares_is_read_without_its_extras() -> None:
    wanted = _software.suite_requirements()
    assert wanted["ascend-core"].startswith("==")
    assert wanted["torch"].startswith(">=")
    assert "typer" not in wanted


def crash() -> object:
    faulthandler.disable()  # pytest's, which would write where the test is read
    os.write(2, b"fatal: the driver is gone\n")
    os.kill(os.getpid(), signal.SIGSEGV)
    return None


def hang() -> object:
    time.sleep(600)
    return None


def refuse() -> object:
    raise ImportError("libascendcl.so: no such file")


def leave() -> object:
    os._exit(7)


def test_crashes_and_hangs_are_answers_and_the_next_question_is_asked() -> None:
    begin = time.monotonic()
    questions: dict[str, Any] = {
        "crash": crash,
        "first": lambda: {"n": 1},
        "hang": hang,
        "refuse": refuse,
        "leave": leave,
        "exit": lambda: sys.exit(3),
        "last": lambda: {"process": os.getpid()},
    }
    answers = ask_aside(questions, seconds=10)
    assert time.monotonic() - begin < 300
    assert list(answers) == list(questions)
    failures = {name: answer.failure for name, answer in answers.items()}
    last = "it ended the process with signal SIGSEGV: fatal: the driver is gone"
    assert failures["crash"] == last
    assert failures["hang"] == "it did not end within 10 seconds"
    assert failures["refuse"] == "ImportError: libascendcl.so: no such file"
    assert failures["leave"] == "it ended the process with exit code 7"
    assert failures["exit"] == "SystemExit: 3"
    assert answers["first"].value == {"n": 1}
    assert answers["last"].value["process"] != os.getpid()


def test_without_the_first_answer_the_others_are_not_asked() -> None:
    begin = time.monotonic()
    questions: dict[str, Any] = {"torch": hang, "npu": hang, "cuda": lambda: {"devices": []}}
    answers = ask_aside(questions, seconds=1, first="torch")
    assert time.monotonic() - begin < 300
    assert {answer.failure for answer in answers.values()} == {"it did not end within 1 seconds"}


def test_memory_is_page_locked_where_there_is_a_device_and_only_there() -> None:
    device = {"name": "Ascend910B2", "total_bytes": GIB}

    def asked(devices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "torch": lambda: {"version": "2.13.0", "threads": 2},
            "npu": lambda: {"devices": devices, "capabilities": {}},
            "cuda": lambda: {"unavailable": "none"},
            "pinning": lambda: {"pinned_bytes": 40},
        }

    machine = read_machine(questions=asked([device]))
    assert machine.has_accelerator and machine.memory.pinned_bytes == 40
    machine = read_machine(questions=asked([]))
    assert not machine.has_accelerator and machine.memory.pinned_bytes is None


def test_this_machine_is_read() -> None:
    asked = {name: question for name, question in QUESTIONS.items() if name != "megatron"}
    machine = read_machine(questions=asked)
    assert machine.torch.works and machine.processors.threads
    assert machine.features and machine.features_failure is None
    assert set(machine.packages) == {name for name in machine.wanted if name != "torch"}
    assert machine.memory.total_bytes and machine.memory.total_bytes > 2**28
    assert machine.processors.allowed == os.sched_getaffinity(0)
    assert [accelerator.kind for accelerator in machine.accelerators] == ["npu", "cuda"]
    assert not {"machine/torch", "machine/packages"} & {f.rule for f in diagnose(machine)}


def test_a_broken_torch_is_a_fact_and_the_rest_is_known() -> None:
    def broken() -> dict[str, Any]:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    machine = read_machine(questions=dict.fromkeys(QUESTIONS, broken))
    assert "libtorch_cpu.so" in (machine.torch.failure or "")
    assert machine.torch.version and machine.processors.threads is None
    [error] = [finding for finding in diagnose(machine) if finding.severity == "error"]
    assert error.rule == "machine/torch"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1, 3", {0, 1, 3})],
)
def test_ranges_are_read_as_the_kernel_writes_them(text: str, numbers: set[int]) -> None:
    assert _system.parse_ranges(text) == numbers
