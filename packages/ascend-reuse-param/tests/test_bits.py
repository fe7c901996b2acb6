"""The codec: BF16 as torch casts, FP32 as it was, and foreign writes noticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_core.memory import measure_peak
from ascend_core.optim.arena import Arena
from ascend_core.testing import available_devices
from ascend_reuse_param._bits import BLOCK, Codec, Parts, Rounding, blocks_of, compact, expand
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.native import NativeCodec
from ascend_reuse_param._kernels.triton_codec import TritonCodec

SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 10_001)
TIE = 0x8000
LOWS = (0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, TIE, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF)
ROUNDINGS: tuple[Rounding, ...] = ("nearest-even", "half-away")


@pytest.fixture(params=available_devices(), ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


Make = Callable[[Rounding], Codec]
KINDS = ["eager", "eager, chunks of a block", "native"]
# On a CPU that is for test_kernels_triton.py, which starts a process with Triton's interpreter.
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if IN_INTERPRETER or torch.cuda.is_available():
    KINDS.append("triton")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, device: torch.device) -> Make:
    if request.param == "native":
        if device.type != "cpu":
            pytest.skip("native code is for the CPU")
        return NativeCodec
    if request.param == "triton":
        if device.type != ("cpu" if IN_INTERPRETER else "cuda"):
            pytest.skip("Triton is for cuda, and its interpreter for the CPU")
        return lambda rounding: TritonCodec(device, rounding)
    chunk = BLOCK if "block" in request.param else None
    return lambda rounding: EagerCodec(device, rounding, chunk=chunk)


@pytest.fixture
def codec(make: Make) -> Codec:
    return make("nearest-even")


def patterns(*bits: int) -> torch.Tensor:
    """FP32 values of these patterns."""
    signed = [pattern - (pattern >> 31 << 32) for pattern in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def all_classes() -> torch.Tensor:
    """Every high half with every kind of low half: all exponents, ties, infinities and NaNs."""
    bits = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16).unsqueeze(1)
    lows = torch.tensor(LOWS, dtype=torch.int32)
    return (bits | lows).view(-1).view(torch.float32)


def split(codec: Codec, master: torch.Tensor) -> tuple[torch.Tensor, Parts]:
    weight = torch.empty(master.numel(), dtype=torch.bfloat16, device=master.device)
    parts = Parts.empty(master.numel(), master.device, codec.rounding)
    scratch = Arena(codec.scratch_bytes(master.numel()), master.device)
    codec.split(master, weight, parts, scratch)
    assert scratch.mark == 0
    return weight, parts


def join(codec: Codec, weight: torch.Tensor, parts: Parts) -> torch.Tensor:
    master = torch.full((weight.numel(),), 3.0, device=weight.device)
    scratch = Arena(codec.scratch_bytes(master.numel()), master.device)
    codec.join(weight, parts, master, scratch)
    assert scratch.mark == 0
    return master


def exceptions_of(parts: Parts) -> int:
    """How many bits of the bitmap are set."""
    assert parts.bitmap is not None
    bits = parts.bitmap.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return int(bits.sum())


def integers(values: torch.Tensor) -> torch.Tensor:
    """Bits, on the host: a NaN equals itself there."""
    kinds = {2: torch.int16, 4: torch.int32}
    return values.cpu().view(kinds[values.element_size()])


def assert_exact(codec: Codec, master: torch.Tensor) -> None:
    weight, parts = split(codec, master)
    nan = master.cpu().isnan()
    cast = integers(master.cpu().to(torch.bfloat16))
    assert torch.equal(integers(weight)[~nan], cast[~nan])
    assert torch.equal(weight.cpu().isnan(), nan)
    forced = (integers(master) >> 16 | 0x40).to(torch.int16)
    assert torch.equal(integers(weight)[nan], forced[nan])
    assert torch.equal(integers(join(codec, weight, parts)), integers(master))


def test_every_class_of_bits_is_exact(codec: Codec, device: torch.device) -> None:
    assert_exact(codec, all_classes().to(device))


@pytest.mark.parametrize(
    "pattern", [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF, 0xFFC08000]
)
@pytest.mark.parametrize("place", [0, 6000, 10_000])
def test_one_nan_among_numbers_is_exact(
    codec: Codec, device: torch.device, pattern: int, place: int
) -> None:
    masters = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
    masters[5000:5050] = patterns(0x3F818000)  # ties that go up
    masters[5050:5100] = patterns(0x3F808000)  # ties that go down
    masters.view(torch.int32)[place] = patterns(pattern).view(torch.int32)[0]
    assert_exact(codec, masters.to(device))


def test_a_nan_that_somebody_else_wrote_is_taken(codec: Codec, device: torch.device) -> None:
    masters = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    weight, parts = split(codec, masters.to(device))
    weight.view(torch.int16)[7] = 0x7F81
    joined = join(codec, weight, parts)
    expected = torch.where(torch.arange(5000) < BLOCK, weight.cpu().float(), masters)
    expected.view(torch.int32)[7] = 0x7F810000
    assert torch.equal(integers(joined), integers(expected))


@pytest.mark.parametrize("numel", SIZES)
def test_any_number_of_elements_is_exact(codec: Codec, device: torch.device, numel: int) -> None:
    ordinary = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    assert_exact(codec, ordinary.to(device))
    assert_exact(codec, all_classes()[-numel - 1 : -1].to(device))


def test_a_binade_is_exact(codec: Codec, device: torch.device) -> None:
    binade = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32).to(device)
    weight, parts = split(codec, binade)
    assert torch.equal(integers(weight), integers(binade.to(torch.bfloat16)))
    assert torch.equal(integers(join(codec, weight, parts)), integers(binade))
    assert exceptions_of(parts) == 64  # a tie in two rounds up, of 128 in a binade
    counts = torch.bincount(integers(weight).to(torch.int64) - 0x3F80)
    # The binade's ends get half of theirs from here.
    assert counts[1:-1].tolist() == [65535, 65537] * 63 + [65535]


def test_masters_born_in_half_precision_have_many_ties(codec: Codec, device: torch.device) -> None:
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    born = halves.view(torch.float16).float()
    assert_exact(codec, born.to(device))
    _, parts = split(codec, born.to(device))
    assert exceptions_of(parts) > born.numel() / 20


@pytest.mark.parametrize(
    ("pattern", "weight", "exceptions"),
    [
        pytest.param(0x3F808000, 0x3F80, 0, id="a tie above an even value goes down"),
        pytest.param(0x3F818000, 0x3F82, 1, id="a tie above an odd value goes up"),
        pytest.param(0x3E89CCD5, 0x3E8A, 0, id="to the nearest, not towards zero"),
        pytest.param(0x7F800000, 0x7F80, 0, id="infinity"),
        pytest.param(0x7F7FFFFF, 0x7F80, 0, id="the largest number becomes infinity"),
        pytest.param(0x7F800001, 0x7FC0, 1, id="a NaN with a payload below only"),
        pytest.param(0xFF800001, 0xFFC0, 1, id="the same, negative"),
        pytest.param(0x7F808000, 0x7FC0, 1, id="a NaN that looks like a tie"),
        pytest.param(0x7FFF8C22, 0x7FFF, 0, id="a NaN that would carry into the sign"),
        pytest.param(0x7FFFFFFF, 0x7FFF, 0, id="the last positive NaN"),
        pytest.param(0xFFFFFFFF, 0xFFFF, 0, id="the last NaN"),
        pytest.param(0x80008000, 0x8000, 0, id="a tie above negative zero"),
        pytest.param(0x00018000, 0x0002, 1, id="a tie among the subnormals"),
    ],
)
def test_a_pattern_splits_as_the_specification_says(
    codec: Codec, device: torch.device, pattern: int, weight: int, exceptions: int
) -> None:
    master = patterns(pattern).to(device)
    split_weight, parts = split(codec, master)
    assert int(integers(split_weight)) & 0xFFFF == weight
    assert int(parts.residual) & 0xFFFF == pattern & 0xFFFF
    assert exceptions_of(parts) == exceptions
    assert parts.bitmap is not None
    assert int(parts.bitmap) == exceptions
    assert int(integers(join(codec, split_weight, parts))) & 0xFFFFFFFF == pattern


def test_exceptions_are_bits_in_order(codec: Codec, device: torch.device) -> None:
    numel = 2 * BLOCK + 13
    chosen = torch.tensor([0, 7, 8, 100, BLOCK - 1, BLOCK, numel - 1])
    master = torch.ones(numel)
    master[chosen] = patterns(0x3F818000)
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
    parts = Parts.empty(numel, device)
    scratch = Arena(codec.scratch_bytes(numel), device)
    codec.split(master.to(device), weight, parts, scratch)
    assert exceptions_of(parts) == len(chosen)
    assert parts.bitmap is not None
    bits = parts.bitmap.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    assert torch.equal(bits.view(-1).nonzero().view(-1), chosen)


def test_half_away_restores_all_but_signalling_nans(make: Make, device: torch.device) -> None:
    codec = make("half-away")
    master = all_classes()
    weight, parts = split(codec, master.to(device))
    assert parts.bitmap is None
    joined = join(codec, weight, parts)
    bits = integers(master)
    signalling = master.isnan() & (bits & 0x400000).eq(0)
    assert torch.equal(integers(joined), torch.where(signalling, bits | 0x400000, bits))
    away = (((bits.to(torch.int64) & 0xFFFFFFFF) + TIE) >> 16).to(torch.int16)
    assert torch.equal(integers(weight)[~master.isnan()], away[~master.isnan()])
    assert torch.equal(weight.cpu().isnan(), master.isnan())
    assert parts.bitmap is None


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_weight_and_residual_may_lie_at_any_even_address(
    make: Make, device: torch.device, rounding: Rounding
) -> None:
    codec = make(rounding)
    numel = BLOCK + 5
    master = torch.randn(numel).to(device)
    expected, parts = split(codec, master)
    for offset in (1, 3):
        flat = torch.zeros(numel + 8, dtype=torch.bfloat16, device=device)
        moved = Parts.empty(numel, device, rounding)
        memory = torch.empty(numel + 8, dtype=torch.int16, device=device)
        moved = Parts(memory[offset:][:numel], moved.bitmap, moved.fingerprints)
        scratch = Arena(codec.scratch_bytes(numel), device)
        codec.split(master, flat[offset:][:numel], moved, scratch)
        assert torch.equal(integers(flat[offset:][:numel]), integers(expected))
        assert torch.equal(moved.residual, parts.residual)
        assert int(flat[:offset].count_nonzero() + flat[offset + numel :].count_nonzero()) == 0
        joined = torch.empty_like(master)
        codec.join(flat[offset:][:numel], moved, joined, scratch)
        assert torch.equal(joined, master)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "doubled": lambda w: w.mul_(2),
    "negated": lambda w: w.neg_(),
    "reversed": lambda w: w.copy_(w.flip(0)),
    "rolled by 1": lambda w: w.copy_(w.roll(1)),
    "rolled by a row": lambda w: w.copy_(w.roll(SIDE)),
    "sorted": lambda w: w.copy_(w.sort()[0]),
    "zeroed": lambda w: w.zero_(),
    "one element zeroed": lambda w: w[5].zero_(),
    "two elements swapped": lambda w: w[3:5].copy_(w[3:5].flip(0)),
    "two rows swapped": lambda w: w[: 2 * SIDE].copy_(w[: 2 * SIDE].roll(SIDE)),
    "transposed": lambda w: w[:BLOCK].copy_(w[:BLOCK].view(SIDE, SIDE).t().reshape(-1)),
    "averaged": lambda w: w.lerp_(torch.ones_like(w), 0.5),
}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_foreign_write_is_taken_as_it_is(
    make: Make,
    device: torch.device,
    rounding: Rounding,
    write: Callable[[torch.Tensor], object],
) -> None:
    codec = make(rounding)
    master = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    master[::50] = patterns(0x3F818000)  # exceptions, which must not be used either
    weight, parts = split(codec, master.to(device))
    write(weight)
    assert torch.equal(join(codec, weight, parts), weight.float())


def test_a_block_that_nobody_wrote_is_exact_beside_one_that_was(
    codec: Codec, device: torch.device
) -> None:
    master = torch.randn(3 * BLOCK + 9, generator=torch.Generator().manual_seed(0)).to(device)
    weight, parts = split(codec, master)
    weight[BLOCK + 17] = 4.0
    expected = master.clone()
    expected[BLOCK : 2 * BLOCK] = weight[BLOCK : 2 * BLOCK].float()
    assert torch.equal(join(codec, weight, parts), expected)
    weight[-1] = 4.0
    expected[3 * BLOCK :] = weight[3 * BLOCK :].float()
    assert torch.equal(join(codec, weight, parts), expected)


def test_a_chequered_block_that_is_negated_is_noticed(codec: Codec, device: torch.device) -> None:
    # Its rows' and columns' sums stay as they are.
    lattice = torch.arange(SIDE)
    signs = 1.0 - 2.0 * ((lattice + lattice.unsqueeze(1)) % 2)
    master = (signs * 1.001).view(-1).to(device)
    weight, parts = split(codec, master)
    weight.neg_()
    assert torch.equal(join(codec, weight, parts), weight.float())


def test_no_change_of_one_element_can_go_unnoticed() -> None:
    for weighted, plain in zip(WEIGHTED, PLAIN, strict=True):
        assert all((weighted * (SIDE - row) + plain) % 2 == 1 for row in range(SIDE))
    assert sum(range(SIDE + 1)) * 0x8000 < 1 << 31  # what is summed in 32 bits does not wrap
    assert len({*WEIGHTED, *PLAIN}) == 2 * SIDE


@settings(max_examples=200, deadline=None)
@given(
    places=st.lists(st.integers(0, 2 * BLOCK - 1), min_size=1, max_size=2, unique=True),
    masks=st.tuples(st.integers(1, 0xFFFF), st.integers(1, 0xFFFF)),
    seed=st.integers(0, 9),
)
def test_any_one_or_two_elements_that_change_are_noticed(
    places: list[int], masks: tuple[int, int], seed: int
) -> None:
    codec = EagerCodec(torch.device("cpu"))
    master = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(seed))
    weight, parts = split(codec, master)
    bits = weight.view(torch.int16)
    for place, mask in zip(places, masks, strict=False):
        bits[place] ^= mask - (mask >> 15 << 16)
    joined = join(codec, weight, parts)
    for block in {place // BLOCK for place in places}:
        changed = slice(block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(integers(joined)[changed] >> 16, integers(weight)[changed].int())
        assert not (integers(joined)[changed] & 0xFFFF).any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_memory_comes_from_the_arena(make: Make, device: torch.device, rounding: Rounding) -> None:
    codec = make(rounding)
    numel = 40 * BLOCK
    master = torch.randn(numel).to(device)
    weight, parts = split(codec, master)
    scratch = Arena(codec.scratch_bytes(numel), device)
    with measure_peak(device) as memory:
        codec.split(master, weight, parts, scratch)
        codec.join(weight, parts, master, scratch)
    assert memory.peak_bytes < numel / 4  # a temporary of a byte an element would show


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("numel", SIZES)
def test_all_codecs_leave_the_same(
    make: Make, device: torch.device, rounding: Rounding, numel: int
) -> None:
    master = all_classes()[-numel - 1 : -1].to(device)
    eager, other = EagerCodec(device, rounding), make(rounding)
    weight, parts = split(other, master)
    expected, theirs = split(eager, master)
    assert torch.equal(integers(weight), integers(expected))
    assert torch.equal(parts.residual, theirs.residual)
    assert torch.equal(parts.fingerprints, theirs.fingerprints)
    if parts.bitmap is not None and theirs.bitmap is not None:
        assert torch.equal(parts.bitmap, theirs.bitmap)
    if numel:
        weight[numel // 2] = 4.0
    joined, again = join(other, weight, parts), join(eager, weight, parts)
    assert torch.equal(integers(joined), integers(again))


def test_blocks_of_counts_a_short_one() -> None:
    assert [blocks_of(numel) for numel in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def bitmaps() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 1000):
        for density in (0.0, 0.02, 1.0):
            there = torch.rand(size, generator=generator) < density
            values = torch.randint(1, 1 << 32, (size,), generator=generator)
            yield (there * values).to(torch.int32)


@pytest.mark.parametrize("spare", [0, 3])
def test_a_bitmap_comes_back_from_the_list_of_its_words(device: torch.device, spare: int) -> None:
    for bitmap in bitmaps():
        count = int(bitmap.count_nonzero())
        index, value = compact(bitmap.to(device), count + spare)
        assert (index.dtype, value.dtype) == (torch.int32, torch.int32)
        assert index.tolist() == [*bitmap.nonzero().view(-1).tolist(), *[len(bitmap)] * spare]
        again = torch.full_like(bitmap, 9).to(device)
        expand(index, value, again)
        assert torch.equal(again.cpu(), bitmap)


def test_a_list_that_is_too_short_has_the_first_words() -> None:
    index, value = compact(torch.tensor([0, 3, 0, 9, 1], dtype=torch.int32), 2)
    assert index.tolist() == [1, 3]
    assert value.tolist() == [3, 9]
