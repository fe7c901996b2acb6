"""Every wait that swap-attention relies on, taken away: then some schedule computes otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_sim
from ascend_core._backends.npu import NpuBackend
from ascend_core.layout import Layout
from ascend_core.transfer import DeviceCopy, HostCopy, Transfer
from ascend_swap import SwapAttentionConfig, swap_attention

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

Program = Callable[..., list[Tensor]]


def made(decoder: Any, *, swaps: bool = True) -> tuple[Any, Any]:
    """A model and its handle, of which nothing stays on the device."""
    torch.manual_seed(0)
    model = decoder().to("npu")
    config = SwapAttentionConfig(min_bytes=1, keep_last=0)
    return model, swap_attention(model, config) if swaps else None


def batches(count: int) -> list[Tensor]:
    seeded = torch.Generator().manual_seed(0)
    return [torch.randn(2, 16, 32, generator=seeded).npu() for _ in range(count)]


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: Any) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


def in_a_pipeline(decoder: Any, *, swaps: bool = True) -> list[Tensor]:
    """Micro-batches forward and back by turns, as in a pipeline, without any wait."""
    model, _ = made(decoder, swaps=swaps)
    losses, waiting = [], []
    for x in batches(8):
        waiting.append(loss_of(model, x))
        losses.append(waiting[-1].detach())
        if len(waiting) == 3:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return read([*losses, *gradients(model)])


def with_a_side_stream(decoder: Any, *, swaps: bool = True) -> list[Tensor]:
    """The middle layer is on a stream of its own, and its tensors are fetched from the usual one.

    They have come before anybody reads them, and the usual stream goes on before they are read.
    """
    model, handle = made(decoder, swaps=swaps)
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    losses = []
    for given in batches(2):
        x = model.layers[0](model.entry(given))
        x.register_hook(lambda _: end_fetches(handle))
        side.wait_stream(main)
        x.record_stream(side)
        with torch.npu.stream(side):
            y = model.layers[1](x)
        main.wait_stream(side)
        y.record_stream(main)
        losses.append(model.head(model.layers[2](y)).square().mean())
        losses[-1].backward()
    return read([*losses, *gradients(model)])


def end_fetches(handle: Any) -> None:
    """Wait for the copies back. Of what reads them nothing is known."""
    if handle is None:
        return
    for engine in handle._keeper._engines.values():
        engine._both_streams()[1].synchronize()


def overtaken(decoder: Any, *, swaps: bool = True) -> list[Tensor]:
    """A forward on another stream gets host memory from which the device has not read yet."""
    model, _ = made(decoder, swaps=swaps)
    first, second = batches(2)
    loss = loss_of(model, first)
    torch.npu.synchronize()  # all that follows is about the way back
    loss.backward()
    del loss
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        later = loss_of(model, second)
    outcome = read(gradients(model))
    torch.npu.current_stream().wait_stream(side)
    return [*outcome, *read([later])]


def interrupted(decoder: Any) -> list[Tensor]:
    """A backward that ends between a fetch and its use, and others' work in the memory it had."""
    model, handle = made(decoder)
    x = model.layers[1](model.layers[0](model.entry(batches(1)[0])))
    x.register_hook(interrupt)
    loss = model.layers[2](x).square().mean()
    torch.npu.synchronize()
    with contextlib.suppress(KeyboardInterrupt):
        loss.backward()
    del x, loss
    torch.ones(1, device="npu", requires_grad=True).backward()  # autograd's thread drops the last
    others = [torch.full((numel,), 7.0, device="npu") for numel in SIZES for _ in range(8)]
    torch.npu.current_stream().synchronize()
    end_fetches(handle)
    return read(others)


SIZES = (32, 512, 1024, 3072)  # elements of what a layer saves


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def queue_all(*, outward: bool = True, inward: bool = True) -> Callable[..., None]:
    """`Transfer._queue_all`, of which a stream may not wait for the current one."""

    def queue(self: Any, pairs: Any, stream: Any, after: Any, done: Any) -> None:
        if outward if stream == self._both_streams()[0] else inward:
            stream.wait_stream(self._backend.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with self._backend.stream_context(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done.record(stream)

    return queue


real_queue = Transfer._queue


def queue(*, outward: bool = True, inward: bool = True) -> Callable[..., Any]:
    """`Transfer._queue`, of which a copy may not wait for the last one of the same host memory."""

    def one(self: Any, target: Any, source: Any, buffer: Any, stream: Any, after: Any = ()) -> Any:
        if not (outward if stream == self._both_streams()[0] else inward):
            buffer.used_by()
        return real_queue(self, target, source, buffer, stream, after)

    return one


def wait(*, waits: bool = True, records: bool = True) -> Callable[..., Tensor]:
    """`DeviceCopy.wait`, which may not wait, or may not tie the block to another stream."""

    def one(self: Any, layout: Any = None) -> Tensor:
        stream = self._backend.current_stream(self._device)
        if waits:
            stream.wait_event(self._done)
        if records and stream != self._owner:
            self._backend.record_stream(self._stored, stream)
        self._dropped.detach()
        rebuilt: Tensor = (layout or self.layout).rebuild(self._stored, self._first)
        return rebuilt

    return one


def to_host(*, records: bool = True) -> Callable[..., HostCopy]:
    """`Transfer.to_host`, which may not tie the block that is read to its stream."""

    def one(self: Any, tensor: Tensor, *, whole_storage: bool = False) -> HostCopy:
        layout = Layout.of(tensor)
        source = layout.flatten(tensor, whole_storage=whole_storage)
        buffer = self.pool.allocate(source.numel() * source.itemsize)
        outward, _ = self._both_streams()
        self._queue(buffer.tensor.view(layout.dtype), source, buffer, outward)
        if records:
            self._backend.record_stream(source, outward)
        return HostCopy(self, layout, 0, buffer)

    return one


real_init = DeviceCopy.__init__


def untied(self: Any, *args: Any) -> None:
    """`DeviceCopy.__init__`, without what is done when nobody waits for the copy."""
    real_init(self, *args)
    self._dropped.detach()


def first_stream(self: Any, device: Any = None) -> Any:
    """`Backend.current_stream`, which does not see that another one was entered."""
    return torch.npu.default_stream()


# What is taken away: whose method does without, where it shows, and in which schedule.
AWAY: dict[str, tuple[tuple[type, str, Any], Program, str]] = {
    "out waits for compute": (
        (Transfer, "_queue_all", queue_all(outward=False)),
        in_a_pipeline,
        "early",
    ),
    "in waits for compute": (
        (Transfer, "_queue_all", queue_all(inward=False)),
        in_a_pipeline,
        "early",
    ),
    "in waits for its own way out": (
        (Transfer, "_queue", queue(inward=False)),
        in_a_pipeline,
        "lazy",
    ),
    "out waits for the last way in": (
        (Transfer, "_queue", queue(outward=False)),
        overtaken,
        "early",
    ),
    "compute waits for in": ((DeviceCopy, "wait", wait(waits=False)), in_a_pipeline, "lazy"),
    "what leaves is tied to out": (
        (Transfer, "to_host", to_host(records=False)),
        in_a_pipeline,
        "lazy",
    ),
    "what came is tied to who reads it": (
        (DeviceCopy, "wait", wait(records=False)),
        with_a_side_stream,
        "lazy",
    ),
    "what nobody waited for is tied to in": ((DeviceCopy, "__init__", untied), interrupted, "lazy"),
    "the current stream is read each time": (
        (NpuBackend, "current_stream", first_stream),
        with_a_side_stream,
        "early",
    ),
}


@pytest.mark.parametrize("name", AWAY)
def test_without_a_wait_a_schedule_goes_wrong(
    name: str, decoder: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant, program, schedule = AWAY[name]
    assert running is not None
    if running.config.schedule != schedule:
        pytest.skip(f"shows under --npu-sim={schedule}")
    expected = program(decoder)
    monkeypatch.setattr(*mutant)
    assert not same(program(decoder), expected)


def test_the_mutant_that_leaves_nothing_out_is_right(
    decoder: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = (in_a_pipeline, with_a_side_stream, overtaken)
    expected = [program(decoder) for program in programs]
    monkeypatch.setattr(Transfer, "_queue_all", queue_all())
    monkeypatch.setattr(Transfer, "_queue", queue())
    monkeypatch.setattr(Transfer, "to_host", to_host())
    monkeypatch.setattr(DeviceCopy, "wait", wait())
    for program, outcome in zip(programs, expected, strict=True):
        assert same(program(decoder), outcome)


@pytest.mark.parametrize("program", [in_a_pipeline, with_a_side_stream, overtaken])
def test_the_programs_compute_what_they_do_without_the_feature(
    program: Program, decoder: Any, same: Any
) -> None:
    assert same(program(decoder), program(decoder, swaps=False))


def test_others_memory_is_left_alone(decoder: Any) -> None:
    for tensor in interrupted(decoder):
        assert (tensor == 7).all()
