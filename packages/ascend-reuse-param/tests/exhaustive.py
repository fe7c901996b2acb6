"""All 2 ** 32 patterns of FP32 through a codec: `python3 -m nox -s exhaustive`.

Usage: python packages/ascend-reuse-param/tests/exhaustive.py [eager|native|compiled] ...
"""

from __future__ import annotations

import sys
import time

import torch

from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import Codec, Parts
from ascend_reuse_param._kernels.compiled import CompiledCodec
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.native import NativeCodec

CPU = torch.device("cpu")
CHUNK = 1 << 24
TIES_UP = 2 * 255 * 64  # in each binade, subnormals among them, every second of 128
SIGNALLING = 2 * ((1 << 22) - 1)


def check(codec: Codec) -> None:
    """Split and join every pattern, and compare with torch's cast and with the pattern."""
    weight = torch.empty(CHUNK, dtype=torch.bfloat16)
    parts, joined = Parts.empty(CHUNK, CPU), torch.empty(CHUNK)
    scratch = Arena(codec.scratch_bytes(CHUNK), CPU)
    exceptions = 0
    began, chunks = time.monotonic(), (1 << 32) // CHUNK
    for number in range(chunks):
        start = number * CHUNK - (1 << 31)
        bits = torch.arange(start, start + CHUNK, dtype=torch.int32)
        master = bits.view(torch.float32)
        codec.split(master, weight, parts, scratch)
        codec.join(weight, parts, joined, scratch)
        exceptions += exceptions_in(parts)
        check_chunk(master, weight, joined)
        done = f"{number + 1} of {chunks}, {time.monotonic() - began:.0f} s"
        sys.stderr.write(f"\r{type(codec).__name__}: {done}")
    sys.stderr.write("\n")
    if exceptions != TIES_UP + SIGNALLING:
        raise SystemExit(f"{exceptions} exceptions, not {TIES_UP + SIGNALLING}")


def exceptions_in(parts: Parts) -> int:
    """How many bits of the bitmap are set."""
    assert parts.bitmap is not None
    words = parts.bitmap[parts.bitmap.ne(0)].tolist()
    return sum(word.bit_count() for word in words)


def check_chunk(master: torch.Tensor, weight: torch.Tensor, joined: torch.Tensor) -> None:
    """Compare a chunk; NaN is compared by its definition."""
    bits, high = master.view(torch.int32), weight.view(torch.int16)
    if not torch.equal(joined.view(torch.int32), bits):
        raise SystemExit(f"not joined as it was, near {int(bits[0]):#x}")
    nan = master.isnan()
    expected = master.to(torch.bfloat16).view(torch.int16)
    forced = (bits >> 16 | 0x40).to(torch.int16)
    if not torch.equal(high, torch.where(nan, forced, expected)):
        raise SystemExit(f"not torch's cast, near {int(bits[0]):#x}")
    if not torch.equal(weight.isnan(), nan):
        raise SystemExit(f"a NaN that is none, or none that is, near {int(bits[0]):#x}")


if __name__ == "__main__":
    makers = {
        "eager": lambda: EagerCodec(CPU),
        "native": NativeCodec,
        "compiled": lambda: CompiledCodec(CPU),
    }
    for name in sys.argv[1:] or makers:
        check(makers[name]())
