"""measure_peak against hand arithmetic."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode

from ascend_core import MeasurementError, measure_peak
from ascend_core.testing import parametrize_devices

KIB = 1024


def kib(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8, device=device)


def occupied(count: int, device: torch.device) -> int:
    """What `kib(count)` takes of a device, whose allocator may round up: less than a KiB more."""
    with measure_peak(device) as memory:
        block = kib(count, device)
    assert 0 <= memory.held_bytes - block.nbytes < KIB
    return memory.held_bytes


@parametrize_devices()
def test_peak_and_held_are_those_of_the_block_to_the_byte(device: torch.device) -> None:
    before = kib(64, device)
    with measure_peak(device) as memory:
        first = kib(100, device)
        second = kib(50, device)
        del first, before
        third = kib(20, device)
    sizes = {count: occupied(count, device) for count in (64, 100, 50, 20)}
    assert memory.peak_bytes == sizes[100] + sizes[50]
    assert memory.held_bytes == sizes[50] + sizes[20] - sizes[64]
    assert memory.timeline.events[0] == (0.0, 0)
    assert memory.timeline.events[-1][1] == memory.held_bytes
    assert second.numel() + third.numel() == 70 * KIB


@parametrize_devices()
def test_measurements_one_after_the_other_are_independent(device: torch.device) -> None:
    with measure_peak(device):
        kib(512, device)
    with measure_peak(device) as memory:
        kib(16, device)
    assert memory.peak_bytes == occupied(16, device)
    assert memory.held_bytes == 0


def test_the_timeline_holds_every_allocation_and_free_in_order() -> None:
    with measure_peak("cpu") as memory:
        first = kib(100)
        second = kib(50)
        del first
        del second
    sizes = [size // KIB for _, size in memory.timeline.events]
    assert sizes == [0, 100, 150, 50, 0, 0]
    times = [moment for moment, _ in memory.timeline.events]
    assert times == sorted(times)
    assert memory.timeline.peak == memory.peak_bytes


def test_scratch_memory_that_never_becomes_a_tensor_counts() -> None:
    weight = torch.empty(1024, 1024, dtype=torch.float32)
    with measure_peak("cpu") as memory:
        weight.sort(dim=0, stable=True)  # copies each column into a buffer of its own
    outputs = weight.numel() * (4 + 8)
    assert memory.peak_bytes > outputs
    assert memory.held_bytes == 0


def test_a_tensor_from_before_that_dies_inside_is_given_back() -> None:
    before = kib(64)
    with measure_peak("cpu") as memory:
        during = kib(16)
        del before
        after = kib(40)
    assert memory.held_bytes == (16 + 40 - 64) * KIB
    assert memory.peak_bytes == 16 * KIB
    assert during.numel() + after.numel() == 56 * KIB


def test_a_backward_frees_what_a_forward_from_before_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    loss = x.exp().sin().sum()  # saves the results of exp, twice: one storage
    size = x.nbytes
    with measure_peak("cpu") as memory:
        loss.backward()
        del loss
    # The gradient of x stays; the saved result of exp and the loss itself go.
    assert memory.held_bytes == size - size - 4


def test_gradients_from_before_that_are_dropped_inside_are_given_back() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    x.sum().backward()
    with measure_peak("cpu") as memory:
        x.grad = None
    # The gradient of sum() is an expanded scalar that AccumulateGrad made dense.
    assert memory.held_bytes == -x.nbytes


def test_a_storage_from_before_that_is_emptied_inside_is_given_back() -> None:
    before = kib(64)
    with measure_peak("cpu") as memory:
        before.untyped_storage().resize_(0)
    assert memory.held_bytes == -64 * KIB


def test_a_storage_from_before_that_grows_inside_counts_once() -> None:
    before = kib(64)
    with measure_peak("cpu") as memory:
        before.untyped_storage().resize_(100 * KIB)
    assert memory.held_bytes == 36 * KIB


def test_memory_that_numpy_or_shared_memory_owns_does_not_count() -> None:
    array = torch.empty(64 * KIB, dtype=torch.uint8).numpy().copy()
    borrowed = torch.from_numpy(array)
    shared = kib(64).share_memory_()
    with measure_peak("cpu") as memory:
        del borrowed, shared
    assert memory.held_bytes == 0


def test_the_baseline_is_what_was_alive_at_the_start() -> None:
    with measure_peak("cpu") as without:
        pass
    kept = kib(64)
    with measure_peak("cpu") as memory:
        added = kib(16)
    assert memory.baseline_bytes - without.baseline_bytes == 64 * KIB
    assert memory.absolute_peak_bytes == memory.baseline_bytes + 16 * KIB
    assert kept.numel() == 64 * KIB
    assert added.numel() == 16 * KIB


def test_a_second_measurement_is_not_misled_by_the_blocks_of_the_first() -> None:
    with measure_peak("cpu") as first:
        kept = kib(64)
    del kept  # the profiler does not see this free, and keeps the address in its table
    reused = [kib(8) for _ in range(200)]
    with measure_peak("cpu") as second:
        reused.clear()
    assert first.held_bytes == 64 * KIB
    assert second.held_bytes == -200 * 8 * KIB


def test_a_block_that_another_thread_frees_counts_until_its_address_is_used_again() -> None:
    with measure_peak("cpu") as memory:
        box = [kib(4096)]
        cleaner = threading.Thread(target=box.clear)
        cleaner.start()
        cleaner.join()
        again = kib(4096)
        reused = again.data_ptr()
    assert memory.held_bytes in (4096 * KIB, 2 * 4096 * KIB)
    assert reused


def test_measurements_do_not_nest_and_say_so() -> None:
    with measure_peak("cpu") as outer:
        kept = kib(8)
        with pytest.raises(MeasurementError, match="a profiler already runs"), measure_peak("cpu"):
            pass
    assert outer.held_bytes == kept.numel()


def test_a_profiler_of_the_user_is_refused() -> None:
    with profile(), pytest.raises(MeasurementError, match="outside"), measure_peak("cpu"):
        pass


def test_an_exception_leaves_no_profiler_behind_and_the_measurement_is_filled() -> None:
    with pytest.raises(KeyError), measure_peak("cpu") as memory:
        kept = kib(8)
        raise KeyError
    assert memory.held_bytes == kept.numel()
    with measure_peak("cpu") as again:
        pass
    assert again.peak_bytes == 0


def test_a_result_that_is_read_too_early_is_refused() -> None:
    with measure_peak("cpu") as memory, pytest.raises(MeasurementError, match="when the"):
        _ = memory.peak_bytes


def test_the_default_device_is_named() -> None:
    with measure_peak() as memory:
        pass
    assert isinstance(memory.device, torch.device)
    assert memory.baseline_bytes >= 0


def test_tensors_without_ordinary_storage_do_not_get_in_the_way() -> None:
    odd = [
        nn.LazyLinear(4).weight,
        torch.eye(3).to_sparse(),
        torch.empty(5, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    with FakeTensorMode():
        odd.append(torch.empty(64, 1024))
    seen: list[object] = []
    torch.func.vmap(lambda row: seen.append(row) or row * 2)(torch.ones(2, 3))
    with measure_peak("cpu") as memory:
        kept = kib(8)
    assert memory.held_bytes == kept.numel()
    assert len(odd) + len(seen) == 6


def test_looking_for_tensors_is_not_seen_by_a_function_mode() -> None:
    class Watching(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    calls: list[object] = []
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    with Watching(), measure_peak("cpu"):
        pass
    assert set(calls) <= {torch.device}  # parsing "cpu"
    assert y.requires_grad
