"""Where the tests of Triton's kernels run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> Iterator[torch.device]:
    """The CPU in Triton's interpreter, rounding to BF16 as every device does, or cuda."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield torch.device("cuda", 0)
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

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

    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        for name in ("cast_impl", "create_fp_trunc", "create_fp_ext"):
            patched.setattr(InterpreterBuilder, name, as_torch)
        yield torch.device("cpu")
