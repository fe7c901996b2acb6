"""Copies to the host and back: bitwise, in the right order, and without a byte lost or leaked."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ascend_core
from ascend_core._backends.cpu import CpuBackend
from ascend_core.device import backend_of
from ascend_core.errors import BudgetExceededError, ConfigError, HostMemoryError
from ascend_core.pinned import PinnedPool
from ascend_core.streams import Event, InlineEvent, InlineStream, Stream
from ascend_core.testing import parametrize_devices
from ascend_core.transfer import Transfer


def numbers(device: torch.device, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(size).numel())
    return (torch.arange(count, dtype=torch.float32) % 97 - 13).to(dtype).to(device).view(size)


def images(device: torch.device) -> torch.Tensor:
    return numbers(device, 2, 4, 5, 3).permute(0, 3, 1, 2)  # the strides of channels_last


def special_values(device: torch.device) -> torch.Tensor:
    """Every kind of bits: signed zeros, infinities, quiet and signalling NaNs with payloads."""
    patterns = [0, -(2**31), 0x7F800000, -0x800000, 0x7FC00001, 0x7F800001, -0x3FFFFF, 1]
    return torch.tensor(patterns, dtype=torch.int32).to(device).view(torch.float32)


def spare(device: torch.device) -> torch.Tensor:
    return numbers(device, 4, 2).as_strided((4, 1, 2), (2, 77, 1))


CASES: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "contiguous": lambda d: numbers(d, 3, 5),
    "transposed": lambda d: numbers(d, 3, 5).t(),
    "dense_permuted": lambda d: numbers(d, 2, 3, 4).permute(2, 0, 1),
    "step_2_slice": lambda d: numbers(d, 6, 8)[1:, ::2],  # SA-04, SA-08
    "column": lambda d: numbers(d, 6, 8)[:, 3],
    "offset": lambda d: numbers(d, 6, 8)[2:],
    "odd_offset": lambda d: numbers(d, 1000)[333:],
    "expanded": lambda d: numbers(d, 3).expand(4, 3),
    "expanded_scalar": lambda d: numbers(d, 1).expand(4, 3),
    "overlapping": lambda d: numbers(d, 10).unfold(0, 4, 2),
    "0_d": lambda d: numbers(d, 5)[3],
    "zero_size": lambda d: numbers(d, 0, 4),
    "zero_size_with_offset": lambda d: numbers(d, 6, 4)[6:],
    "channels_last": images,
    "channels_last_offset": lambda d: images(d)[1:],
    "sizes_of_1": spare,
    "bf16": lambda d: numbers(d, 3, 5, dtype=torch.bfloat16)[1:],
    "fp16": lambda d: numbers(d, 7, dtype=torch.float16),
    "bool": lambda d: (numbers(d, 9) > 20)[2:],
    "int8": lambda d: numbers(d, 9, dtype=torch.int8)[1:],
    "int64": lambda d: numbers(d, 9, dtype=torch.int64),
    "parameter": lambda d: nn.Parameter(numbers(d, 4, 3)).t(),
    "special_values": special_values,
}
# Not every accelerator has these dtypes and lazy views.
CPU_CASES: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "float8": lambda d: numbers(d, 9).to(torch.float8_e4m3fn)[1:],
    "complex64": lambda d: torch.complex(numbers(d, 6), numbers(d, 6).neg())[1:],
    "complex128": lambda d: torch.complex(numbers(d, 6).double(), numbers(d, 6).double()),
    "conjugated": lambda d: torch.complex(numbers(d, 6), numbers(d, 6))[1:].conj(),
    "negated": lambda d: torch.complex(numbers(d, 6), numbers(d, 6)).conj().imag[1:],
}


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device == expected.device  # SA-29
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert actual.is_conj() == expected.is_conj()
    assert actual.is_neg() == expected.is_neg()
    assert torch.equal(bits(actual), bits(expected))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.view(-1).view(torch.uint8)


def round_trip(engine: Transfer, tensor: torch.Tensor) -> torch.Tensor:
    return engine.to_host(tensor).fetch().wait()


@parametrize_devices()
@pytest.mark.parametrize("name", CASES)
def test_a_tensor_comes_back_with_layout_and_bits(
    name: str, device: torch.device
) -> None:  # SA-08, SA-09
    expected = CASES[name](device)
    assert_same(round_trip(Transfer(device), expected), expected)


@pytest.mark.parametrize("name", CPU_CASES)
def test_a_rare_tensor_comes_back_with_layout_and_bits(name: str) -> None:
    expected = CPU_CASES[name](torch.device("cpu"))
    assert_same(round_trip(Transfer("cpu"), expected), expected)


@parametrize_devices()
@pytest.mark.parametrize("name", [*CASES])
def test_pointers_stay_aligned_as_they_were(name: str, device: torch.device) -> None:
    expected = CASES[name](device)
    actual = round_trip(Transfer(device), expected)
    moved_by = (expected.storage_offset() - actual.storage_offset()) * expected.itemsize
    assert moved_by % 512 == 0
    spare_bytes = actual.untyped_storage().nbytes() - Transfer(device).to_host(expected).nbytes
    assert 0 <= spare_bytes < 512


@parametrize_devices()
def test_an_expanded_tensor_is_not_materialised(device: torch.device) -> None:  # SA-08
    expected = numbers(device, 16).expand(1024, 16)
    host = Transfer(device).to_host(expected)
    assert host.nbytes == 16 * 4
    assert host.fetch().wait().untyped_storage().nbytes() == 16 * 4


@parametrize_devices()
def test_one_copy_of_a_storage_gives_every_view_its_own_values(
    device: torch.device,
) -> None:  # SA-07
    x = numbers(device, 4, 4)
    views = [x, x.t(), x[1:], x[:, 2], x[1, 1], x.view(torch.int32)]
    copy = Transfer(device).to_host(x[2:], whole_storage=True).fetch()
    for view in views:
        actual = copy.wait(ascend_core.Layout.of(view))
        assert_same(actual, view)
        assert actual.storage_offset() == view.storage_offset()
    assert_same(copy.wait(), x[2:])


@parametrize_devices()
def test_two_views_moved_one_by_one_do_not_mix(device: torch.device) -> None:  # SA-07
    engine = Transfer(device)
    x = numbers(device, 4, 4)
    straight, transposed, slice_ = (engine.to_host(v) for v in (x, x.t(), x[1:]))
    assert_same(transposed.fetch().wait(), x.t())
    assert_same(slice_.fetch().wait(), x[1:])
    assert_same(straight.fetch().wait(), x)


@parametrize_devices()
def test_a_round_trip_leaves_no_graph_and_no_mode_behind(device: torch.device) -> None:
    weight = nn.Parameter(numbers(device, 4, 3))
    actual = round_trip(Transfer(device), weight * 2)
    assert not actual.requires_grad
    assert actual.grad_fn is None
    assert type(actual) is torch.Tensor


@parametrize_devices()
def test_default_device_and_dtype_do_not_matter(device: torch.device) -> None:
    expected = numbers(device, 4, 3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            actual = round_trip(Transfer(device), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(actual, expected)


@parametrize_devices()
def test_host_memory_made_in_inference_mode_serves_outside(device: torch.device) -> None:
    engine = Transfer(device)
    expected = numbers(device, 4, 3)
    with torch.inference_mode():
        engine.to_host(expected.clone())
    assert_same(round_trip(engine, expected), expected)


@parametrize_devices()
def test_the_source_may_be_dropped_at_once(device: torch.device) -> None:
    engine = Transfer(device)
    copies, expected = [], []
    for i in range(8):  # the allocator gives the freed block to the next one
        x = numbers(device, 64, 64) + i
        copies.append(engine.to_host(x))
        expected.append(torch.arange(4096, dtype=torch.float32).remainder(97) - 13 + i)
        storage = weakref.ref(x.untyped_storage())
        del x
        assert storage() is None  # SA-26: the engine holds no source, the allocator holds its block
    for copy, values in zip(copies, expected, strict=True):
        assert torch.equal(copy.fetch().wait().cpu().view(-1), values)


@parametrize_devices()
def test_a_storage_may_be_freed_during_its_copy(device: torch.device) -> None:  # SA-26
    engine = Transfer(device)
    x = numbers(device, 256, 64)
    expected = x.cpu().clone()
    host = engine.to_host(x)
    x.untyped_storage().resize_(0)
    noise = [torch.full((256, 64), float(i), device=device) for i in range(8)]
    assert torch.equal(host.fetch().wait().cpu(), expected)
    assert len(noise) == 8


@parametrize_devices()
def test_a_dropped_fetch_does_not_write_into_the_next_owner_of_its_block(
    device: torch.device,
) -> None:
    engine = Transfer(device)
    host = engine.to_host(numbers(device, 256, 64))
    host.fetch()  # nobody waits for it
    after = [torch.full((256, 64), float(i), device=device) for i in range(4)]
    engine.to_device(host).wait()
    for i, tensor in enumerate(after):
        assert torch.equal(tensor.cpu(), torch.full((256, 64), float(i)))


@parametrize_devices()
def test_a_fetched_block_is_free_for_others_only_after_its_use(device: torch.device) -> None:
    engine, backend = Transfer(device), backend_of(device)
    host = engine.to_host(numbers(device, 256, 64))
    copy = host.fetch()
    ended(host)
    consumer = backend.new_stream(device)
    with backend.stream_context(consumer):
        doubled = copy.wait() * 2  # SA-01: read on a stream that does not own the block
    del copy
    noise = [torch.full((256, 64), float(i), device=device) for i in range(4)]
    assert float(noise[-1][0, 0].cpu()) == 3  # all of it is written by now
    backend.current_stream(device).wait_stream(consumer)
    backend.record_stream(doubled, backend.current_stream(device))
    assert torch.equal(doubled.cpu(), numbers(torch.device("cpu"), 256, 64) * 2)


@parametrize_devices()
def test_a_fetch_waits_for_who_had_its_block_before(device: torch.device) -> None:
    host = Transfer(device).to_host(numbers(device, 256, 64))
    before = [torch.full((256, 64), float(i), device=device) for i in range(4)]
    doubled = [tensor * 2 for tensor in before]
    del before
    copy = host.fetch()
    ended(host)
    for i, tensor in enumerate(doubled):
        assert torch.equal(tensor.cpu(), torch.full((256, 64), 2.0 * i))
    assert_same(copy.wait(), numbers(device, 256, 64))


def ended(host: ascend_core.HostCopy) -> None:
    """Let the last copy of `host` run, and nothing that it does not wait for."""
    for event in host.last_use:
        event.synchronize()


@parametrize_devices()
def test_a_host_copy_can_be_fetched_again_and_again(device: torch.device) -> None:
    expected = numbers(device, 5, 3).t()
    host = Transfer(device).to_host(expected)
    fetched = [host.fetch() for _ in range(3)]
    for copy in fetched:
        assert_same(copy.wait(), expected)
        assert_same(copy.wait(), expected)
        assert copy.layout == host.layout


@parametrize_devices()
def test_on_host_waits_for_the_copy_and_shows_it(device: torch.device) -> None:
    expected = (numbers(device, 6, 8) * 3)[1:, ::2]  # the product may still be under way
    seen = Transfer(device).to_host(expected).on_host()
    assert seen.device.type == "cpu"
    assert seen.stride() == expected.stride()
    assert torch.equal(seen, (numbers(torch.device("cpu"), 6, 8) * 3)[1:, ::2])


@parametrize_devices()
def test_a_fetch_into_given_memory_waits_for_who_last_read_it(device: torch.device) -> None:
    engine = Transfer(device)
    window = numbers(device, 64, 64)
    coming = engine.to_host(torch.full((64, 64), 7.0, device=device))
    going = engine.to_host(window)
    copy = engine.to_device(coming, out=window, after=going.last_use)
    ended(coming)
    assert copy.wait().data_ptr() == window.data_ptr()
    assert torch.equal(window.cpu(), torch.full((64, 64), 7.0))
    assert torch.equal(going.on_host(), numbers(torch.device("cpu"), 64, 64))


@pytest.mark.parametrize(
    "out",
    [torch.empty(11), torch.empty(12, dtype=torch.int32), torch.empty(12, device="meta")],
    ids=["size", "dtype", "device"],
)
def test_a_fetch_into_memory_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    engine = Transfer("cpu")
    host = engine.to_host(numbers(engine.device, 12))
    with pytest.raises(ConfigError, match="does not fit"):
        engine.to_device(host, out=out)
    assert torch.equal(host.fetch().wait(), numbers(engine.device, 12))


def not_plain() -> dict[str, torch.Tensor]:
    class Tagged(torch.Tensor):
        pass

    return {
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "subclass": torch.ones(3).as_subclass(Tagged),
    }


@pytest.mark.parametrize("name", ["sparse", "nested", "subclass"])
def test_what_is_not_one_strided_range_is_refused_by_name(name: str) -> None:
    tensor = not_plain()[name]
    engine = Transfer("cpu")
    assert not engine.takes(tensor)
    with pytest.raises(ConfigError, match="cannot be moved"):
        engine.to_host(tensor)


def test_a_tensor_of_another_device_is_refused_and_untouched() -> None:  # SA-10
    engine = Transfer("cpu")
    elsewhere = torch.ones(3, device="meta")
    assert not engine.takes(elsewhere)
    assert engine.takes(torch.ones(3))
    with pytest.raises(ConfigError, match="on meta was given to the transfer engine of cpu"):
        engine.to_host(elsewhere)


def test_no_module_outside_the_backends_names_an_accelerator() -> None:  # SA-20
    folder = Path(ascend_core.__file__).parent
    for name in ("streams", "layout", "pinned", "transfer", "rng", "modes"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert not {"cuda", "npu"} & (words | attributes), name


@parametrize_devices()
def test_host_memory_stays_flat_over_20_steps(device: torch.device) -> None:  # SA-24
    engine = Transfer(device, pool=PinnedPool(slab_bytes=1 << 16))
    gc.disable()
    try:
        reserved = []
        for _ in range(20):
            hosts = [engine.to_host(numbers(device, 64, 64) + i) for i in range(8)]
            fetched = [host.fetch() for host in reversed(hosts)]
            for i, copy in enumerate(reversed(fetched)):
                assert float(copy.wait()[0, 0].cpu()) == i - 13
            del hosts, fetched
            assert engine.pool.stats().in_use_bytes == 0
            reserved.append(engine.pool.stats().reserved_bytes)
    finally:
        gc.enable()
    assert reserved == reserved[:1] * 20


@parametrize_devices()
def test_a_buffer_released_during_its_copy_is_not_overwritten_too_early(
    device: torch.device,
) -> None:  # SA-24
    # The buffer of each tensor is the one buffer that there is, given back while it is copied from.
    engine = Transfer(device, pool=PinnedPool(1 << 16, slab_bytes=1 << 16))
    fetched = []
    for i in range(6):
        host = engine.to_host(torch.full((128, 128), float(i), device=device))
        fetched.append(host.fetch())
        host.release()
    last = engine.to_host(numbers(device, 128, 128))
    assert engine.pool.stats().reserved_bytes == 1 << 16
    ended(last)
    for i, copy in enumerate(fetched):
        assert torch.equal(copy.wait().cpu(), torch.full((128, 128), float(i)))


def test_a_released_host_copy_says_so() -> None:
    host = Transfer("cpu").to_host(torch.ones(3))
    host.release()
    host.release()
    with pytest.raises(HostMemoryError, match="was released"):
        host.fetch()
    with pytest.raises(HostMemoryError, match="was released"):
        host.on_host()


@parametrize_devices()
def test_over_budget_nothing_moves_and_nothing_is_lost(device: torch.device) -> None:
    engine = Transfer(device, pool=PinnedPool(1 << 16))
    kept = engine.to_host(numbers(device, 100))
    big = numbers(device, 1 << 15)
    with pytest.raises(BudgetExceededError):
        engine.to_host(big)
    assert_same(big, numbers(device, 1 << 15))
    assert_same(kept.fetch().wait(), numbers(device, 100))
    assert_same(round_trip(engine, numbers(device, 200)), numbers(device, 200))


class FailingAt(TorchDispatchMode):
    """Makes one operator fail, as a full device or a broken copy would."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:  # noqa: ANN001
        if func.overloadpacket.__name__ == self.operator:
            raise RuntimeError(f"{self.operator} failed")
        return func(*args, **(kwargs or {}))


@parametrize_devices()
@pytest.mark.parametrize("operator", ["new_empty", "copy_"])
def test_after_a_failed_fetch_the_values_are_still_on_the_host(
    operator: str, device: torch.device
) -> None:
    engine = Transfer(device)
    host = engine.to_host(numbers(device, 64))
    with pytest.raises(RuntimeError, match=f"{operator} failed"), FailingAt(operator):
        host.fetch()
    assert_same(host.fetch().wait(), numbers(device, 64))


@parametrize_devices()
def test_after_a_failed_copy_to_the_host_its_memory_is_back(device: torch.device) -> None:
    engine = Transfer(device)
    x = numbers(device, 64)
    with pytest.raises(RuntimeError, match="copy_ failed"), FailingAt("copy_"):
        engine.to_host(x)
    assert engine.pool.stats().in_use_bytes == 0
    assert_same(x, numbers(device, 64))
    assert_same(round_trip(engine, x), x)


@parametrize_devices()
def test_several_threads_share_one_engine_and_one_pool(device: torch.device) -> None:
    engine = Transfer(device, pool=PinnedPool(slab_bytes=1 << 14))
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(30):
            expected = torch.full((50 + seed, 7), float(seed * 1000 + i), device=device)
            if not torch.equal(round_trip(engine, expected).cpu(), expected.cpu()):
                failures.append(f"thread {seed}, turn {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.pool.stats().in_use_bytes == 0


@parametrize_devices()
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_model_whose_saved_tensors_all_move_has_the_same_gradients(
    prefetch: bool, device: torch.device
) -> None:
    def gradients(engine: Transfer | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(3)]
        ).to(device)
        x = torch.randn(32, 16).to(device)
        hooks = moved(engine, prefetch) if engine else contextlib.nullcontext()
        with hooks:
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.cpu() for p in model.parameters()]

    engine = Transfer(device)
    plain, offloaded = gradients(None), gradients(engine)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert engine.pool.stats().allocations > 9
    assert engine.pool.stats().in_use_bytes == 0


def moved(engine: Transfer, prefetch: bool) -> contextlib.AbstractContextManager[Any]:
    hosts: list[Any] = []

    def pack(tensor: torch.Tensor) -> int:
        hosts.append(engine.to_host(tensor))
        return len(hosts) - 1

    def unpack(index: int) -> torch.Tensor:
        for i in range(index, max(index - 4, -1) if prefetch else index - 1, -1):
            if isinstance(hosts[i], ascend_core.HostCopy):
                hosts[i] = hosts[i].fetch()  # the host copy dies while it is copied from
        copy, hosts[index] = hosts[index], None
        return copy.wait()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# The order of waits cannot be seen on the CPU's own streams, which are all one queue and wait for
# nothing. These record what is asked of them, and are still real: the copies really run.


class RecordingStream(InlineStream):
    """An inline stream that is not equal to others and writes down what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "log", log)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class RecordingEvent(InlineEvent):
    """An inline event that has not happened until the host waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log, self.happened = name, log, False

    def record(self, stream: Stream | None = None) -> None:
        self.log.append(f"{self.name} recorded on {stream.name}")

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.happened = True


@dataclasses.dataclass(frozen=True)
class RecordingBackend(CpuBackend):
    """The CPU, with streams and events that write down what they are asked for."""

    log: list[str] = dataclasses.field(default_factory=list)
    current: list[Stream] = dataclasses.field(default_factory=list)
    names: Iterator[str] = dataclasses.field(default_factory=lambda: iter(["out", "in"]))
    events: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.current.append(RecordingStream("compute", self.log))

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current[-1]

    def new_stream(self, device: torch.device | None = None) -> Stream:
        return RecordingStream(next(self.names), self.log)

    def new_event(self, *, timing: bool = False) -> Event:
        self.events.append(f"e{len(self.events)}")
        return RecordingEvent(self.events[-1], self.log)

    @contextlib.contextmanager
    def stream_context(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(f"block recorded on {stream.name}")


class RecordingOperators(TorchDispatchMode):
    """Writes operators that compute or copy, not those that make views or memory, into the log."""

    def __init__(self, backend: RecordingBackend) -> None:
        super().__init__()
        self.backend = backend

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:  # noqa: ANN001
        name = func.overloadpacket.__name__
        if name not in ("as_strided", "slice", "view", "detach", "alias", "empty", "new_empty"):
            self.backend.log.append(f"{name} on {self.backend.current[-1].name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recording() -> RecordingBackend:
    return RecordingBackend()


def taken(log: list[str]) -> list[str]:
    lines = log[:]
    log.clear()
    return lines


def test_the_order_of_a_round_trip(
    recording: RecordingBackend,
) -> None:  # SA-04, SA-05, SA-17, SA-26
    engine = Transfer("cpu", backend=recording)
    x = numbers(engine.device, 6, 8)[1:, ::2]
    with RecordingOperators(recording):
        host = engine.to_host(x)
        assert taken(recording.log) == [
            "out waits for compute",  # as it stands now, and nothing is cloned after: SA-04
            "copy_ on out",
            "e0 recorded on out",
            "block recorded on out",  # whoever drops x from here on, the copy has its block: SA-26
        ]
        copy = host.fetch()
        assert taken(recording.log) == [
            "in waits for compute",
            "in waits for e0",  # its own way out: SA-05
            "copy_ on in",
            "e1 recorded on in",
        ]
        copy.wait()
        assert taken(recording.log) == ["compute waits for e1"]  # the host waits nowhere: SA-17


def test_a_second_fetch_is_ordered_behind_the_first(recording: RecordingBackend) -> None:
    host = Transfer("cpu", backend=recording).to_host(torch.ones(3))
    host.fetch().wait()
    taken(recording.log)
    host.fetch().wait()
    assert "in waits for e1" in recording.log


def test_the_current_stream_is_read_at_each_call(recording: RecordingBackend) -> None:  # SA-03
    engine = Transfer("cpu", backend=recording)
    pack, unpack, use = (RecordingStream(name, recording.log) for name in ("pack", "unpack", "use"))
    with recording.stream_context(pack):
        host = engine.to_host(torch.ones(3))
    assert taken(recording.log)[0] == "out waits for pack"
    with recording.stream_context(unpack):
        copy = host.fetch()
    assert taken(recording.log)[0] == "in waits for unpack"
    with recording.stream_context(use):
        copy.wait()
    assert taken(recording.log) == ["use waits for e1", "block recorded on use"]  # SA-01
    with recording.stream_context(unpack):
        copy.wait()
    assert taken(recording.log) == ["unpack waits for e1"]  # it owns the block


def test_a_dropped_fetch_leaves_its_block_to_the_copy(recording: RecordingBackend) -> None:  # SA-01
    host = Transfer("cpu", backend=recording).to_host(torch.ones(3))
    copy = host.fetch()
    taken(recording.log)
    del copy
    assert taken(recording.log) == ["block recorded on in"]
    copy = host.fetch()
    copy.wait()
    taken(recording.log)
    del copy
    assert recording.log == []


def test_a_fetch_that_failed_leaves_its_block_to_what_was_queued(
    recording: RecordingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Transfer("cpu", backend=recording).to_host(torch.ones(3))
    taken(recording.log)
    real = torch.Tensor.copy_

    def queued_and_failed(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "copy_", queued_and_failed)
        host.fetch()
    assert taken(recording.log)[-2:] == ["e1 recorded on in", "block recorded on in"]
    assert torch.equal(host.fetch().wait(), torch.ones(3))


def test_who_gets_a_released_buffer_waits_for_its_last_copy(
    recording: RecordingBackend,
) -> None:  # SA-24
    engine = Transfer("cpu", backend=recording)
    host = engine.to_host(torch.ones(16))
    host.fetch()
    host.release()
    taken(recording.log)
    engine.to_host(torch.ones(32))  # begins in the range of the first
    assert recording.log[:2] == ["out waits for compute", "out waits for e1"]
    assert engine.pool.stats().slabs == 1


def test_a_fetch_waits_for_the_events_it_is_given(recording: RecordingBackend) -> None:
    engine = Transfer("cpu", backend=recording)
    window = torch.ones(3)
    first, second = engine.to_host(window), engine.to_host(torch.zeros(3))
    taken(recording.log)
    engine.to_device(second, out=window, after=first.last_use)
    assert recording.log[:3] == ["in waits for compute", "in waits for e1", "in waits for e0"]


def test_whether_a_copy_is_there_is_asked_without_waiting(recording: RecordingBackend) -> None:
    copy = Transfer("cpu", backend=recording).to_host(torch.ones(3)).fetch()
    taken(recording.log)
    assert not copy.is_there()
    assert recording.log == []


def test_streams_are_made_at_the_first_copy_and_two_of_them(recording: RecordingBackend) -> None:
    engine = Transfer("cpu", backend=recording)
    assert len(list(recording.names)) == 2  # none was taken yet
    engine = Transfer("cpu", backend=RecordingBackend())
    for _ in range(3):
        engine.to_host(torch.ones(3)).fetch().wait()  # a third stream would raise StopIteration
