"""What the tests of several backends share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import profiler


@pytest.fixture(scope="session")
def triton_device() -> Iterator[torch.device]:
    """The CPU in Triton's interpreter, rounding to BF16 as every device does, or cuda."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield torch.device("cuda", 0)
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, multiply = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def as_torch(self: Any, source: Any, dtype: Any) -> Any:
        # The interpreter's own cuts lower bits off, and has other subnormal numbers.
        shape = source.data.shape
        if (source.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.ravel()).bfloat16()
            bits = rounded.view(torch.int16).numpy().view(np.uint16)
            return TensorHandle(bits.reshape(shape), dtype.scalar)
        if (source.dtype.scalar, dtype.scalar) == (tl.bfloat16, tl.float32):
            bits = source.data.astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), dtype.scalar)
        return cast(self, source, dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        # (it multiplies the bits of BF16)
        wide = [as_torch(self, x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)]
        return multiply(self, *wide, d, *rest)

    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        for name in ("cast_impl", "create_fp_trunc", "create_fp_ext"):
            patched.setattr(InterpreterBuilder, name, as_torch)
        patched.setattr(InterpreterBuilder, "create_dot", dot)
        yield torch.device("cpu")


@pytest.fixture
def called() -> Callable[[Callable[[], Any]], list[str]]:
    """A function that runs another and lists the operators of torch_npu that it called, in order.

    They are called below autograd and modes, where only the dispatcher's own profiler sees them.
    """

    def run(function: Callable[[], Any]) -> list[str]:
        with profiler.profile() as profile:
            function()
            torch.npu.synchronize()
        events = sorted(profile.function_events, key=lambda event: event.time_range.start)
        calls = [event for event in events if event.name.startswith("npu::npu_")]
        # One call is an event for each of the dispatcher's keys that it passes.
        outer = [c for c in calls if c.cpu_parent is None or c.cpu_parent.name != c.name]
        return [call.name.removeprefix("npu::npu_") for call in outer]

    return run


@pytest.fixture
def saved_bytes() -> Callable[[Callable[[], Any]], int]:
    """A function that runs another and adds up what autograd saves in it, each storage once."""

    def run(function: Callable[[], Any]) -> int:
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
        return sum(found.values())

    return run
