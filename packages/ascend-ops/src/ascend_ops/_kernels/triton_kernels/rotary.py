"""Rotary embedding: pairs are read, then both written. In FP32, rounded once.

A program has ROWS rows of x, and of each PAIRS pairs and LEFT elements that are not turned.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["forward"]

# What the annotations of a kernel say is for people, but for constexpr. They are in quotes, since
# Triton would look for their values.
Pointer = Any
Block = Any  # a tensor in registers
Number = Any  # a scalar


@triton.jit
def start_of(
    row: "Block",
    middle: "Number",
    inner: "Number",
    outer_stride: "Number",
    middle_stride: "Number",
    inner_stride: "Number",
) -> "Block":
    """Where rows of [outer, middle, inner] begin."""
    above = row // inner
    outermost = above // middle * outer_stride
    return outermost + above % middle * middle_stride + row % inner * inner_stride


@triton.jit
def forward(
    x: "Pointer",
    cos: "Pointer",
    sin: "Pointer",
    result: "Pointer",
    rows: "Number",
    middle: "Number",
    inner: "Number",
    width: "Number",
    pairs: "Number",
    x_outer: "Number",
    x_middle: "Number",
    x_inner: "Number",
    x_column: "Number",
    cos_outer: "Number",
    cos_middle: "Number",
    cos_inner: "Number",
    cos_column: "Number",
    sin_outer: "Number",
    sin_middle: "Number",
    sin_inner: "Number",
    sin_column: "Number",
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEFT: tl.constexpr,
) -> None:
    """Write the rows, turned.

    Args:
        x: [outer, middle, inner, width] of any strides.
        cos: [outer, middle, inner, pairs] of any strides, 0 among them.
        sin: The same, of strides of its own.
        result: As x, contiguous.
        rows: outer * middle * inner.
        middle: A size of x.
        inner: A size of x.
        width: How long a row is.
        pairs: How many pairs of a row are turned.
        x_outer: Stride of x, and so on.
        x_middle: See there.
        x_inner: See there.
        x_column: See there.
        cos_outer: Stride of cos, and so on.
        cos_middle: See there.
        cos_inner: See there.
        cos_column: See there.
        sin_outer: Stride of sin, and so on.
        sin_middle: See there.
        sin_inner: See there.
        sin_column: See there.
        INTERLEAVED: Whether the two of a pair are neighbours.
        INVERSE: Whether -sin is meant.
        ROWS: That a program has.
        PAIRS: That a program has of each row.
        LEFT: How many elements a program has of each row that are not turned; 0 for none.
    """
    numbers = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    row = program % numbers * ROWS + tl.arange(0, ROWS)[:, None]
    block = program // numbers
    pair = block * PAIRS + tl.arange(0, PAIRS)[None, :]
    inside = (row < rows) & (pair < pairs)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + pairs
    read = x + start_of(row, middle, inner, x_outer, x_middle, x_inner)
    written = result + row * width
    a = tl.load(read + first * x_column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(read + second * x_column, mask=inside, other=0.0).to(tl.float32)
    at = start_of(row, middle, inner, cos_outer, cos_middle, cos_inner) + pair * cos_column
    c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    at = start_of(row, middle, inner, sin_outer, sin_middle, sin_inner) + pair * sin_column
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    tl.store(written + first, (a * c - b * s).to(result.dtype.element_ty), mask=inside)
    tl.store(written + second, (b * c + a * s).to(result.dtype.element_ty), mask=inside)
    if LEFT:
        column = 2 * pairs + block * LEFT + tl.arange(0, LEFT)[None, :]
        inside = (row < rows) & (column < width)
        tl.store(written + column, tl.load(read + column * x_column, mask=inside), mask=inside)
