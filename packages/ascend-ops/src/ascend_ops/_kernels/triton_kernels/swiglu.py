"""SwiGLU, and its gradient.

A tile is a matrix of ROWS by COLUMNS of one half. All that torch's operators round on the way is
rounded here too: the sum with the bias, silu before the product, and the gradient of silu's output.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["backward", "forward"]

# What the annotations of a kernel say is for people, but for constexpr. They are in quotes, since
# Triton would look for their values.
Pointer = Any
Block = Any  # a tensor of ROWS x COLUMNS, in registers
Number = Any  # a scalar


@triton.jit
def tile(rows: "Number", width: "Number", ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> "Any":
    """Rows and columns of a program's tile, and which of its elements there are."""
    blocks = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def rounded(x: "Block", like: "Pointer") -> "Block":
    """`x` as the dtype of `like` has it, in FP32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def half(
    pointer: "Pointer",
    bias: "Pointer",
    at: "Block",
    column: "Block",
    inside: "Block",
    inner: "Number",
    HAS_BIAS: tl.constexpr,
) -> "Block":
    """Read a tile of gate or up, in FP32. 0 beyond the end."""
    x = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column // inner, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x + added, pointer)
    return x


@triton.jit
def clamped(x: "Block", lower: "Number", upper: "Number") -> "Block":
    """As torch clamps: a NaN stays."""
    return tl.where(x > upper, upper, tl.where(x < lower, lower, x))


@triton.jit
def sigmoid(x: "Block") -> "Block":
    """`1 / (1 + exp(-x))`, as torch computes it: 0 where the exponential is infinite."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def silu(x: "Block") -> "Block":
    """`x / (1 + exp(-x))`, as torch computes it: -0 where the exponential is infinite."""
    return tl.math.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def forward(
    gate: "Pointer",
    up: "Pointer",
    gate_bias: "Pointer",
    up_bias: "Pointer",
    result: "Pointer",
    rows: "Number",
    width: "Number",
    inner: "Number",
    gate_row: "Number",
    gate_column: "Number",
    up_row: "Number",
    up_column: "Number",
    limit: "Number",
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write `silu(gate) * up`.

    Args:
        gate: [rows, width] of any strides.
        up: The same, of strides of its own.
        gate_bias: [width / inner]; anything unless HAS_BIAS.
        up_bias: The same.
        result: [rows, width], contiguous.
        rows: How many.
        width: How long each is.
        inner: How many neighbours in a row share an element of the bias.
        gate_row: Stride of gate.
        gate_column: Stride of gate.
        up_row: Stride of up.
        up_column: Stride of up.
        limit: See `ascend_ops.swiglu`; anything unless HAS_LIMIT.
        HAS_BIAS: Whether there is one.
        HAS_LIMIT: Whether there is one.
        ROWS: Of a tile.
        COLUMNS: Of a tile.
    """
    row, column, inside = tile(rows, width, ROWS, COLUMNS)
    of_gate, of_up = row * gate_row + column * gate_column, row * up_row + column * up_column
    g = half(gate, gate_bias, of_gate, column, inside, inner, HAS_BIAS)
    u = half(up, up_bias, of_up, column, inside, inner, HAS_BIAS)
    if HAS_LIMIT:
        bound = rounded(tl.full((1, 1), limit, tl.float32), gate)
        g = clamped(g, float("-inf"), bound)
        u = clamped(u, -bound, bound)
    product = rounded(silu(g), gate) * u
    tl.store(result + row * width + column, product.to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    gate: "Pointer",
    up: "Pointer",
    gate_bias: "Pointer",
    up_bias: "Pointer",
    grad: "Pointer",
    gate_grad: "Pointer",
    up_grad: "Pointer",
    rows: "Number",
    width: "Number",
    inner: "Number",
    gate_row: "Number",
    gate_column: "Number",
    up_row: "Number",
    up_column: "Number",
    grad_row: "Number",
    grad_column: "Number",
    written_row: "Number",
    limit: "Number",
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradients of gate and up.

    Args:
        gate: As of `forward`, and so on.
        up: See there.
        gate_bias: See there.
        up_bias: See there.
        grad: [rows, width] of any strides: what arrives at the result.
        gate_grad: [rows, width], where a row is contiguous.
        up_grad: The same.
        rows: See there.
        width: See there.
        inner: See there.
        gate_row: See there.
        gate_column: See there.
        up_row: See there.
        up_column: See there.
        grad_row: Stride of grad.
        grad_column: Stride of grad.
        written_row: Stride of gate_grad and up_grad.
        limit: See there.
        HAS_BIAS: See there.
        HAS_LIMIT: See there.
        ROWS: See there.
        COLUMNS: See there.
    """
    row, column, inside = tile(rows, width, ROWS, COLUMNS)
    of_gate, of_up = row * gate_row + column * gate_column, row * up_row + column * up_column
    g = half(gate, gate_bias, of_gate, column, inside, inner, HAS_BIAS)
    u = half(up, up_bias, of_up, column, inside, inner, HAS_BIAS)
    at = row * grad_row + column * grad_column
    arriving = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    # As torch's clamp: the limits themselves let a gradient pass, and NaN does not.
    gate_passes, up_passes = inside, inside
    if HAS_LIMIT:
        bound = rounded(tl.full((1, 1), limit, tl.float32), gate)
        gate_passes, up_passes = g <= bound, tl.abs(u) <= bound
        g = clamped(g, float("-inf"), bound)
        u = clamped(u, -bound, bound)
    of_u = rounded(silu(g), gate) * arriving
    s = sigmoid(g)
    of_g = rounded(arriving * u, gate) * s * (1.0 + g * (1.0 - s))
    if HAS_LIMIT:
        of_g, of_u = tl.where(gate_passes, of_g, 0.0), tl.where(up_passes, of_u, 0.0)
    at = row * written_row + column
    tl.store(gate_grad + at, of_g.to(gate_grad.dtype.element_ty), mask=inside)
    tl.store(up_grad + at, of_u.to(up_grad.dtype.element_ty), mask=inside)
