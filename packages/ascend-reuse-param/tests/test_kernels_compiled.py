"""What `torch.compile` makes of the codec equals the eager one, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._kernels.compiled import CompiledCodec
from ascend_reuse_param._kernels.eager import EagerCodec

CPU = torch.device("cpu")


# Of torch itself, where it compiles.
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounding", ["nearest-even", "half-away"])
def test_the_compiled_codec_equals_the_eager_one(rounding: Rounding) -> None:
    eager, compiled = EagerCodec(CPU, rounding), CompiledCodec(CPU, rounding, chunk=16 * BLOCK)
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    every = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16).unsqueeze(1) | lows
    for numel in (every.numel(), 0, 7, BLOCK + 1, 2 * BLOCK, 33 * BLOCK + 7):
        master = every.view(-1)[-numel:].view(torch.float32) if numel else torch.empty(0)
        scratch = Arena(max(codec.scratch_bytes(numel) for codec in (eager, compiled)), CPU)
        weights = [torch.empty(numel, dtype=torch.bfloat16) for _ in range(2)]
        parts = [Parts.empty(numel, CPU, rounding) for _ in range(2)]
        joined = [torch.empty(numel) for _ in range(2)]
        for number, codec in enumerate((eager, compiled)):
            codec.split(master, weights[number], parts[number], scratch)
            if numel:
                weights[number][numel // 2] = 3.0
            codec.join(weights[number], parts[number], joined[number], scratch)
        assert torch.equal(*[weight.view(torch.int16) for weight in weights])
        assert torch.equal(*[values.view(torch.int32) for values in joined])
        assert torch.equal(parts[0].residual, parts[1].residual)
        assert torch.equal(parts[0].fingerprints, parts[1].fingerprints)
        left, right = parts[0].bitmap, parts[1].bitmap
        assert left is right is None or torch.equal(left, right)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.timeout(600)
def test_the_compiled_codec_works_at_any_address() -> None:
    codec, numel = CompiledCodec(CPU, chunk=16 * BLOCK), 18 * BLOCK + 5
    scratch = Arena(codec.scratch_bytes(numel), CPU)
    drawn = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=torch.Generator().manual_seed(0))
    master = torch.empty(numel + 1, dtype=torch.int32)[1:].copy_(drawn)
    master[:BLOCK] = 0x3F818000  # ties, all of them
    weight = torch.empty(numel + 1, dtype=torch.bfloat16)[1:]
    whole = Parts.empty(numel + 8, CPU)
    assert whole.bitmap is not None
    parts = Parts(whole.residual[1 : numel + 1], whole.bitmap[1:], whole.fingerprints)
    codec.split(master.view(torch.float32), weight, parts, scratch)
    joined = torch.empty(numel + 1)[1:]
    codec.join(weight, parts, joined, scratch)
    assert torch.equal(joined.view(torch.int32), master)
    expected = Parts.empty(numel, CPU)
    EagerCodec(CPU).split(
        master.view(torch.float32).clone(), weight.clone(), expected, Arena(1 << 24, CPU)
    )
    assert parts.bitmap is not None
    assert expected.bitmap is not None
    assert torch.equal(parts.bitmap, expected.bitmap)
    assert torch.equal(parts.residual, expected.residual)
    assert torch.equal(parts.fingerprints, expected.fingerprints)
