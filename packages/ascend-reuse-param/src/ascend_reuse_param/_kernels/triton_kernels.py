"""What runs on a CUDA device, in Triton's language. Importing this imports Triton.

One program works on one block, since what a block needs beside its elements is its fingerprint: so
each array is read once and written once, and what is in between stays in registers. A block is a
matrix of 64 x 64, as in `_fingerprint`; what is computed is defined in `_bits`.

Values are integers but for the step's own arithmetic, and become floats and back by their bits: no
pattern of a NaN is changed by being looked at. 16 bits are read as int16, sign and all.

[Note: whose rounding] `enable_fp_fusion=False` goes with each launch (`COMPILING`), so that the
compiler fuses no product with a sum; where torch does, FUSED says so here and `tl.fma` does it.
Divisions and roots are the correctly rounded ones.

[Note: alignment] Triton compiles a kernel once more for addresses and sizes that are multiples of
16, and loads and stores up to 16 bytes at a time there. A weight that begins at another address
in its flat buffer, or a slice of another size, is right all the same, and slower.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["adamw", "join", "split"]

# What the annotations of a kernel say is for people, but for constexpr. They are in quotes, since
# Triton would look for their values.
Pointer = Any
Block = Any  # a tensor of 64 x 64, in registers
Number = Any  # a scalar

SIDE = tl.constexpr(64)
BLOCK = tl.constexpr(64 * 64)
NIBBLES = tl.constexpr(8)  # bytes of the bitmap in a row, and bits in a byte


# Where things are.


@triton.jit
def places() -> "Block":
    """Where each element is within its block."""
    return tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]


@triton.jit
def left_from(start: "Number", numel: "Number") -> "Number":
    """How many elements the block has that begins at `start`."""
    return tl.minimum(numel - start, BLOCK).to(tl.int32)


@triton.jit
def bytes_of_bitmap() -> "Block":
    """Where each byte of a block's bitmap is."""
    return tl.arange(0, SIDE)[:, None] * NIBBLES + tl.arange(0, NIBBLES)[None, :]


# Fingerprints.


@triton.jit
def fingerprint(high: "Block", weighted: "Pointer", plain: "Pointer") -> "Number":
    """The fingerprint of a block of 16 bits each, sign and all; 0 beyond the end."""
    columns = tl.arange(0, SIDE)
    rows = SIDE - tl.arange(0, SIDE)
    sums = tl.sum(high, axis=0).to(tl.int64)
    of_rows = tl.sum(high * rows[:, None], axis=0).to(tl.int64)
    products = of_rows * tl.load(weighted + columns) + sums * tl.load(plain + columns)
    return tl.sum(products, axis=0)


# The codec, in registers.


@triton.jit
def halves(bits: "Block", TO_EVEN: tl.constexpr) -> "Any":
    """The weight's 16 bits of an FP32 pattern, and 1 where there is an exception."""
    magnitude = bits & 0x7FFFFFFF
    low = bits & 0xFFFF
    top = bits >> 16
    nan = magnitude > 0x7F800000
    if TO_EVEN:
        tie = (bits & 0x1FFFF) == 0x18000
        up = (low > 0x8000) | tie
        exception = tl.where(nan, magnitude < 0x7FC00000, tie).to(tl.int32)
    else:
        up = low >= 0x8000
        exception = tl.zeros_like(bits)
    return tl.where(nan, top | 0x40, top + up.to(tl.int32)), exception


@triton.jit
def pattern(high: "Block", low: "Block", exception: "Block", TO_EVEN: tl.constexpr) -> "Block":
    """The FP32 pattern of a weight's 16 bits, a residual (0 to 0xFFFF), an exception (0 or 1)."""
    nan = (high & 0x7FFF) > 0x7F80
    borrow = low + exception > 0x8000 if TO_EVEN else low >= 0x8000
    top = tl.where(nan, high & ~(exception << 6), high - borrow.to(tl.int32))
    return (top << 16) | low


@triton.jit
def joined(
    weight: "Pointer",
    residual: "Pointer",
    bitmap: "Pointer",
    fingerprints: "Pointer",
    weighted: "Pointer",
    plain: "Pointer",
    start: "Number",
    left: "Number",
    TO_EVEN: tl.constexpr,
) -> "Block":
    """Read a block's master, as its FP32 pattern. 0 beyond the end."""
    at = places()
    high = tl.load(weight + start + at, mask=at < left, other=0).to(tl.int32)
    low = tl.load(residual + start + at, mask=at < left, other=0).to(tl.int32) & 0xFFFF
    found = fingerprint(high, weighted, plain)
    same = (found == tl.load(fingerprints + start // BLOCK)).to(tl.int32)
    exception = tl.zeros_like(high)
    if TO_EVEN:
        byte = bytes_of_bitmap()
        read = tl.load(bitmap + start // 8 + byte, mask=byte < (left + 7) // 8, other=0)
        bits = (read.to(tl.int32)[:, :, None] >> tl.arange(0, NIBBLES)[None, None, :]) & 1
        exception = tl.reshape(bits, (SIDE, SIDE)) * same
    return pattern(high, low * same, exception, TO_EVEN)


@triton.jit
def write_split(
    bits: "Block",
    weight: "Pointer",
    residual: "Pointer",
    bitmap: "Pointer",
    fingerprints: "Pointer",
    weighted: "Pointer",
    plain: "Pointer",
    start: "Number",
    left: "Number",
    TO_EVEN: tl.constexpr,
) -> None:
    """Write a block's weight and parts. `bits` are 0 beyond the end."""
    at = places()
    high, exception = halves(bits, TO_EVEN)
    tl.store(weight + start + at, high.to(tl.int16), mask=at < left)
    tl.store(residual + start + at, bits.to(tl.int16), mask=at < left)
    if TO_EVEN:
        byte = bytes_of_bitmap()
        shifted = tl.reshape(exception, (SIDE, NIBBLES, NIBBLES))
        shifted = shifted << tl.arange(0, NIBBLES)[None, None, :]
        packed = tl.sum(shifted, axis=2).to(tl.uint8)
        tl.store(bitmap + start // 8 + byte, packed, mask=byte < (left + 7) // 8)
    tl.store(fingerprints + start // BLOCK, fingerprint(high, weighted, plain))


# What is launched, one program for each block.


@triton.jit
def split(
    master: "Pointer",
    weight: "Pointer",
    residual: "Pointer",
    bitmap: "Pointer",
    fingerprints: "Pointer",
    weighted: "Pointer",
    plain: "Pointer",
    numel: "Number",
    TO_EVEN: tl.constexpr,
) -> None:
    """Write weight and parts of a master.

    Args:
        master: int32, the bits of FP32 [numel].
        weight: int16, the bits of BF16 [numel].
        residual: int16 [numel].
        bitmap: uint8 [ceil(numel / 8)]; None with half-away.
        fingerprints: int64 [blocks].
        weighted: int64 [64], of `_fingerprint`.
        plain: int64 [64], of `_fingerprint`.
        numel: How many elements.
        TO_EVEN: Whether the rounding is nearest-even.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = left_from(start, numel)
    at = places()
    bits = tl.load(master + start + at, mask=at < left, other=0)
    write_split(
        bits,
        weight,
        residual,
        bitmap,
        fingerprints,
        weighted,
        plain,
        start,
        left,
        TO_EVEN,
    )


@triton.jit
def join(
    master: "Pointer",
    weight: "Pointer",
    residual: "Pointer",
    bitmap: "Pointer",
    fingerprints: "Pointer",
    weighted: "Pointer",
    plain: "Pointer",
    numel: "Number",
    TO_EVEN: tl.constexpr,
) -> None:
    """Write the master of a weight and its parts; arguments as of `split`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = left_from(start, numel)
    bits = joined(weight, residual, bitmap, fingerprints, weighted, plain, start, left, TO_EVEN)
    at = places()
    tl.store(master + start + at, bits, mask=at < left)


@triton.jit
def multiply_add(a: "Block", b: "Block", c: "Block", FUSED: tl.constexpr) -> "Block":
    """The sum of a product and c, rounded once or twice."""
    if FUSED:
        return tl.fma(a, b, c)
    return a * b + c


@triton.jit
def added_square(
    v: "Block", g: "Block", factor: "Number", FUSED: tl.constexpr, SQUARES_FIRST: tl.constexpr
) -> "Block":
    """What addcmul_ makes of v."""
    if SQUARES_FIRST:
        return multiply_add(g * g, factor, v, FUSED)
    return multiply_add(g * factor, g, v, FUSED)


@triton.jit
def added_quotient(
    w: "Block",
    m: "Block",
    divisor: "Block",
    factor: "Number",
    FUSED: tl.constexpr,
    QUOTIENT_FIRST: tl.constexpr,
) -> "Block":
    """What addcdiv_ makes of w."""
    if QUOTIENT_FIRST:
        return multiply_add(tl.math.div_rn(m, divisor), factor, w, FUSED)
    return w + tl.math.div_rn(m * factor, divisor)


@triton.jit
def loaded_gradient(
    gradient: "Pointer",
    start: "Number",
    left: "Number",
    IS_BF16: tl.constexpr,
    NEGATED: tl.constexpr,
) -> "Block":
    """A block's gradient in FP32, from its bits."""
    at = places()
    bits = tl.load(gradient + start + at, mask=at < left, other=0).to(tl.int32)
    if IS_BF16:
        bits = bits << 16
    if NEGATED:
        bits = bits ^ -0x80000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def adamw(
    weight: "Pointer",
    residual: "Pointer",
    bitmap: "Pointer",
    fingerprints: "Pointer",
    weighted: "Pointer",
    plain: "Pointer",
    gradient: "Pointer",
    exp_avg: "Pointer",
    exp_avg_sq: "Pointer",
    max_exp_avg_sq: "Pointer",
    numel: "Number",
    decay: "Number",
    coupled_decay: "Number",
    average: "Number",
    beta2: "Number",
    square: "Number",
    correction: "Number",
    eps: "Number",
    negative_step_size: "Number",
    TO_EVEN: tl.constexpr,
    IS_BF16: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr,
    COUPLED: tl.constexpr,
    NEAR: tl.constexpr,
    FUSED: tl.constexpr,
    SQUARES_FIRST: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    QUOTIENT_FIRST: tl.constexpr,
) -> None:
    """Step a weight, its parts and the moments in place, as torch's operators do it.

    Args:
        weight: As of `split`, and so on to `plain`.
        residual: See there.
        bitmap: See there.
        fingerprints: See there.
        weighted: See there.
        plain: See there.
        gradient: int16 or int32, the bits of BF16 or FP32 [numel].
        exp_avg: float32 [numel].
        exp_avg_sq: float32 [numel].
        max_exp_avg_sq: float32 [numel]; None without amsgrad.
        numel: How many elements.
        decay: What a weight is multiplied with, if DECOUPLED.
        coupled_decay: How much of the weight is added to the gradient, if COUPLED.
        average: What lerp multiplies with: 1 - beta1 if NEAR, else -beta1, as FP32 has it.
        beta2: As in torch.
        square: 1 - beta2.
        correction: The root of 1 - beta2 ^ step; one over it if RECIPROCAL.
        eps: As in torch.
        negative_step_size: What the quotient is multiplied with.
        TO_EVEN: Whether the rounding is nearest-even.
        IS_BF16: Whether the gradient is.
        MAXIMIZE: As in torch.
        AMSGRAD: As in torch.
        DECOUPLED: Whether weights decay.
        COUPLED: Whether gradients do.
        NEAR: Whether lerp starts from the average: 1 - beta1 < 0.5.
        FUSED: Whether a product and a sum are rounded once.
        SQUARES_FIRST: Whether it is square * (g * g), not (square * g) * g.
        RECIPROCAL: Whether roots are multiplied with 1 / correction, not divided by it.
        QUOTIENT_FIRST: Whether it is step * (m / divisor), not (step * m) / divisor.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = left_from(start, numel)
    at = places()
    inside = at < left
    g = loaded_gradient(gradient, start, left, IS_BF16, MAXIMIZE)
    m = tl.load(exp_avg + start + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + start + at, mask=inside, other=0.0)
    bits = joined(weight, residual, bitmap, fingerprints, weighted, plain, start, left, TO_EVEN)
    w = bits.to(tl.float32, bitcast=True)
    if DECOUPLED:
        w = w * decay
    if COUPLED:
        g = multiply_add(w, coupled_decay, g, FUSED)
    m = multiply_add(g - m, average, m if NEAR else g, FUSED)
    v = added_square(v * beta2, g, square, FUSED, SQUARES_FIRST)
    tl.store(exp_avg + start + at, m, mask=inside)
    tl.store(exp_avg_sq + start + at, v, mask=inside)
    if AMSGRAD:
        largest = tl.load(max_exp_avg_sq + start + at, mask=inside, other=0.0)
        v = tl.where((largest > v) | (largest != largest), largest, v)  # a NaN in either stays
        tl.store(max_exp_avg_sq + start + at, v, mask=inside)
    root = tl.math.sqrt_rn(v)
    divisor = (root * correction if RECIPROCAL else tl.math.div_rn(root, correction)) + eps
    w = added_quotient(w, m, divisor, negative_step_size, FUSED, QUOTIENT_FIRST)
    bits = tl.where(inside, w.to(tl.int32, bitcast=True), 0)
    write_split(
        bits,
        weight,
        residual,
        bitmap,
        fingerprints,
        weighted,
        plain,
        start,
        left,
        TO_EVEN,
    )
