"""Capacity, accounting, poison and pinned memory, through torch_npu's own allocators."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from ascend_sim import Simulator

MIB = 2**20
Run = Callable[..., str]

OUT_OF_MEMORY = """
import ascend_sim
simulator = ascend_sim.start(hbm="64M", devices=2)
import torch
MIB = 2**20
held = []
try:
    while True:
        held.append(torch.empty(10 * MIB, dtype=torch.uint8, device="npu"))
except torch.OutOfMemoryError as error:
    print(len(held), str(error))
print(torch.npu.mem_get_info(0)[1] // MIB, simulator.device_bytes(0) <= 64 * MIB)
other = torch.empty(40 * MIB, dtype=torch.uint8, device="npu:1")
held.clear()
most = torch.zeros(50 * MIB, dtype=torch.uint8, device="npu")
print(most.sum().item(), simulator.device_bytes(0) >= 50 * MIB)
"""


@pytest.fixture
def clean() -> Iterator[None]:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    yield


def active() -> int:
    return int(torch.npu.memory_stats()["active_bytes.all.current"])


def peak() -> int:
    return int(torch.npu.memory_stats()["active_bytes.all.peak"])


@pytest.mark.schedules("eager")
@pytest.mark.parametrize("expandable", ["False", "True"])
def test_a_full_device_raises_torch_npus_own_error_and_recovers(
    python: Run, expandable: str
) -> None:
    shown = python(OUT_OF_MEMORY, PYTORCH_NPU_ALLOC_CONF=f"expandable_segments:{expandable}")
    first, second, third = shown.splitlines()[-3:]
    assert first.startswith("5 NPU out of memory. Tried to allocate")
    assert "64.00 MiB total capacity" in first
    assert second == "64 True"
    assert third == "0 True"


@pytest.mark.schedules("eager")
@pytest.mark.usefixtures("clean")
def test_active_bytes_are_those_of_hand_arithmetic() -> None:
    # torch_npu rounds up to 512 bytes after it has added 32.
    def block(floats: int) -> int:
        return -(-(4 * floats + 32) // 512) * 512

    base = active()
    x = torch.randn(256, 1024, device="npu")
    w = torch.randn(1024, 512, device="npu")
    assert active() - base == block(256 * 1024) + block(1024 * 512)
    y = torch.relu(x @ w)  # the product is alive while relu makes its own output
    assert active() - base == block(256 * 1024) + block(1024 * 512) + block(256 * 512)
    assert peak() - base == block(256 * 1024) + block(1024 * 512) + 2 * block(256 * 512)
    del x, w, y
    assert active() == base


@pytest.mark.schedules("eager")
@pytest.mark.usefixtures("clean")
def test_what_autograd_saves_grows_by_one_activation_per_layer() -> None:
    width = 256
    layers = [torch.randn(width, width, device="npu") for _ in range(8)]

    def held(count: int) -> int:
        x = torch.randn(width, width, device="npu", requires_grad=True)
        before = active()
        for w in layers[:count]:
            x = (x @ w).sigmoid()
        return active() - before

    # sigmoid saves its result, and the product before it is gone; the weights need no gradient.
    assert held(8) - held(4) == 4 * (4 * width * width + 512)


@pytest.mark.usefixtures("clean")
def test_a_storage_gives_its_memory_back_and_takes_it_again() -> None:
    tensor = torch.full((4 * MIB,), 3, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    before, size = active(), tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    assert before - active() == 4 * MIB + 512
    tensor.untyped_storage().resize_(size)
    assert active() == before
    assert tensor.fill_(5).sum(dtype=torch.int64).item() == 5 * 4 * MIB


def test_pinned_memory_is_told_from_pageable() -> None:
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.empty(3).pin_memory().is_pinned()
    assert not torch.empty(3).is_pinned()
    assert torch.empty(100, pin_memory=True)[10:20].is_pinned()


@pytest.mark.usefixtures("clean")
def test_the_runtime_and_the_allocator_agree(npu_sim: Simulator) -> None:
    tensor = torch.ones(30 * MIB, dtype=torch.uint8, device="npu")
    assert npu_sim.device_bytes(0) == torch.npu.memory_reserved(0)
    free, total = torch.npu.mem_get_info(0)
    assert (total - free, total) == (npu_sim.device_bytes(0), npu_sim.config.hbm_bytes)
    del tensor


@pytest.mark.schedules("lazy")
def test_poison_reads_as_nan_where_nothing_was_written(python: Run) -> None:
    shown = python(
        """
import ascend_sim
ascend_sim.start(schedule="lazy", poison=True)
import torch
print(torch.empty(1000, device="npu").isnan().all().item())
x = torch.full((1000,), 3.0, device="npu")
address = x.data_ptr()
del x
again = torch.empty(1000, device="npu")
print(again.data_ptr() == address, again.isnan().all().item())
print(torch.empty(1000, pin_memory=True).isnan().all().item())
print(torch.empty(1000, dtype=torch.bfloat16, device="npu").isnan().all().item())
"""
    )
    assert shown.split() == ["True"] * 5


@pytest.mark.schedules("lazy")
def test_poison_shows_a_block_that_was_freed_too_early_though_nobody_took_it(python: Run) -> None:
    program = """
import ascend_sim
ascend_sim.start(schedule="lazy", poison={poison})
import torch
side = torch.npu.Stream()
host = torch.empty(1000, pin_memory=True)
x = torch.full((1000,), 7.0, device="npu")
torch.npu.synchronize()
with torch.npu.stream(side):
    host.copy_(x, non_blocking=True)
del x  # no record_stream
torch.npu.current_stream().synchronize()
side.synchronize()
print(host.eq(7).all().item())
"""
    assert python(program.format(poison=False)).split() == ["True"]
    assert python(program.format(poison=True)).split() == ["False"]


@pytest.mark.schedules("lazy")
def test_poison_fills_pinned_memory_that_the_cache_hands_out_again(python: Run) -> None:
    shown = python(
        """
import ascend_sim
ascend_sim.start(schedule="lazy", poison=True)
import torch
torch.npu.init()
x = torch.full((1000,), 3.0, pin_memory=True)
address = x.data_ptr()
del x
again = torch.empty(1000, pin_memory=True)
print(again.data_ptr() == address, again.isnan().all().item())
"""
    )
    assert shown.split() == ["True"] * 2


def test_devices_are_apart(python: Run) -> None:
    shown = python(
        """
import ascend_sim
simulator = ascend_sim.start(devices=3)
import torch
print(torch.npu.device_count())
x = torch.ones(5 * 2**20, device="npu:1")
print(simulator.device_bytes(0), simulator.device_bytes(1) >= 20 * 2**20)
print((x[:3].to("npu:2") + 1).sum().item(), (x.to("npu:2") + 1).device)
y = torch.zeros(2, 3, dtype=torch.bfloat16, device="npu:2")
y.add_(5)
y.t().copy_((x[:6] * 3).view(3, 2), non_blocking=True)  # after what both devices did before
x.add_(1)
print(y.sum().item())
with torch.npu.device(2):
    print(torch.empty(1, device="npu").device)
"""
    )
    assert shown.split() == ["3", "0", "True", "6.0", "npu:2", "18.0", "npu:2"]


def test_a_device_has_a_context_once_it_was_selected(python: Run) -> None:
    shown = python(
        """
import ctypes, ascend_sim
simulator = ascend_sim.start(devices=2)
import torch
acl, active = ctypes.CDLL("libascendcl.so"), ctypes.c_int()

def state(device):
    return acl.aclrtGetPrimaryCtxState(device, None, ctypes.byref(active)), active.value

torch.npu.set_device(0)
print(state(0), state(1))
x = torch.ones(3, device="npu:1")
print(state(1), state(2)[0] != 0)
"""
    )
    assert shown.split("\n")[:2] == ["(0, 1) (0, 0)", "(0, 1) True"]


@pytest.mark.schedules("lazy")  # once: torch_npu's own, whatever the schedule
def test_a_device_that_was_selected_and_never_used_ends_a_backward(python: Run) -> None:
    # Documented: torch_npu counts a device as used once it was selected, and makes its streams when
    # one is asked for. The engine's threads then set a stream that is not there.
    program = """
import ascend_sim
ascend_sim.start(devices=2)
import torch
w = torch.ones(3, device="npu", requires_grad=True)
with torch.npu.device(1):
    {}
(w * 2).sum().backward()
print(w.grad.tolist())
"""
    assert "default NPU stream" in python(program.format("pass"), fails=True)
    assert python(program.format("torch.npu.current_stream()")).strip() == "[2.0, 2.0, 2.0]"
