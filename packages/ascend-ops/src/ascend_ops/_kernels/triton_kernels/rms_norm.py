"""RMSNorm, and its gradient. All in FP32, rounded once.

A program has some rows at a time. Where a row fits into registers (SINGLE) it is read once; a
longer one is read in blocks, twice. What a row is divided by is computed again in backward: nothing
is kept for it.

[Note: the gradient of the weight] is a sum over rows. Each program sums those that it has, in
order, into a row of its own of `partials`, and torch sums these: the result is the same in every
run. Where a row does not fit into registers neither does such a sum: there `backward_of_rows`
leaves 1 / rms of each row, for the time of one more kernel, `backward_of_weight`.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["backward", "backward_of_rows", "backward_of_weight", "forward"]

# What the annotations of a kernel say is for people, but for constexpr. They are in quotes, since
# Triton would look for their values.
Pointer = Any
Block = Any  # a tensor in registers
Number = Any  # a scalar


@triton.jit
def read(pointer: "Pointer", at: "Block", inside: "Block") -> "Block":
    """Read a tile, in FP32. 0 beyond the end."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def factor(
    weight: "Pointer",
    column: "Block",
    width: "Number",
    HAS_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
) -> "Block":
    """What a normalised row is multiplied with."""
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        return 1.0 + w if UNIT else w
    return tl.full(column.shape, 1.0, tl.float32)


@triton.jit
def forward(
    x: "Pointer",
    weight: "Pointer",
    result: "Pointer",
    rows: "Number",
    width: "Number",
    x_row: "Number",
    x_column: "Number",
    eps: "Number",
    HAS_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the normalised rows.

    Args:
        x: [rows, width] of any strides.
        weight: [width]; anything unless HAS_WEIGHT.
        result: [rows, width], contiguous.
        rows: How many.
        width: How long each is.
        x_row: Stride of x.
        x_column: Stride of x.
        eps: Added to the mean of squares.
        HAS_WEIGHT: Whether there is one.
        UNIT: Whether 1 is added to the weight.
        SINGLE: Whether a row has at most COLUMNS elements.
        ROWS: That a program has.
        COLUMNS: That a program reads at once.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    if SINGLE:
        inside = (row < rows) & (columns < width)
        a = read(x, row * x_row + columns * x_column, inside)
        rstd = tl.rsqrt(tl.sum(a * a, axis=1)[:, None] / width + eps)
        y = a * rstd * factor(weight, columns, width, HAS_WEIGHT, UNIT)
        tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + columns
            a = read(x, row * x_row + column * x_column, (row < rows) & (column < width))
            squares += a * a
        rstd = tl.rsqrt(tl.sum(squares, axis=1)[:, None] / width + eps)
        for start in range(0, width, COLUMNS):
            column = start + columns
            inside = (row < rows) & (column < width)
            a = read(x, row * x_row + column * x_column, inside)
            y = a * rstd * factor(weight, column, width, HAS_WEIGHT, UNIT)
            tl.store(result + row * width + column, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    x: "Pointer",
    weight: "Pointer",
    grad: "Pointer",
    x_grad: "Pointer",
    partials: "Pointer",
    rows: "Number",
    width: "Number",
    x_row: "Number",
    x_column: "Number",
    grad_row: "Number",
    grad_column: "Number",
    eps: "Number",
    tiles: "Number",
    HAS_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradient of x and this program's part of the weight's: rows that fit.

    Args:
        x: As of `forward`, and so on.
        weight: See there.
        grad: [rows, width] of any strides: what arrives at the result.
        x_grad: [rows, width], contiguous.
        partials: FP32 [programs, width]; anything unless WEIGHT_GRAD.
        rows: See there.
        width: At most COLUMNS.
        x_row: See there.
        x_column: See there.
        grad_row: Stride of grad.
        grad_column: Stride of grad.
        eps: See there.
        tiles: How many times ROWS rows a program has.
        HAS_WEIGHT: See there.
        UNIT: See there.
        WEIGHT_GRAD: Whether the gradient of the weight is wanted.
        ROWS: See there.
        COLUMNS: See there.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    w = factor(weight, column, width, HAS_WEIGHT, UNIT)
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(0, tiles):
        row = (program * tiles + number) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        a = read(x, row * x_row + column * x_column, inside)
        g = read(grad, row * grad_row + column * grad_column, inside)
        rstd = tl.rsqrt(tl.sum(a * a, axis=1)[:, None] / width + eps)
        normed = a * rstd
        if WEIGHT_GRAD:  # (0 * NaN where eps is 0 is no part of it)
            of_weight += tl.where(inside, g * normed, 0.0)
        g = g * w
        along = tl.sum(g * normed, axis=1)[:, None] / width
        of_x = (g - normed * along) * rstd
        tl.store(x_grad + row * width + column, of_x.to(x_grad.dtype.element_ty), mask=inside)
    if WEIGHT_GRAD:
        at = tl.arange(0, COLUMNS)
        summed = tl.sum(of_weight, axis=0)
        tl.store(partials + program * width + at, summed, mask=at < width)


@triton.jit
def backward_of_rows(
    x: "Pointer",
    weight: "Pointer",
    grad: "Pointer",
    x_grad: "Pointer",
    rstds: "Pointer",
    rows: "Number",
    width: "Number",
    x_row: "Number",
    x_column: "Number",
    grad_row: "Number",
    grad_column: "Number",
    eps: "Number",
    HAS_WEIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the gradient of x, and 1 / rms of each row to FP32 `rstds` [rows]: one long row each.

    The other arguments are those of `backward`.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    squares = tl.zeros((COLUMNS,), tl.float32)
    products = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + columns
        inside = column < width
        a = read(x, row * x_row + column * x_column, inside)
        g = read(grad, row * grad_row + column * grad_column, inside)
        squares += a * a
        products += a * (g * factor(weight, column, width, HAS_WEIGHT, UNIT))
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    along = tl.sum(products, axis=0) * rstd / width
    tl.store(rstds + row, rstd)
    for start in range(0, width, COLUMNS):
        column = start + columns
        inside = column < width
        normed = read(x, row * x_row + column * x_column, inside) * rstd
        g = read(grad, row * grad_row + column * grad_column, inside)
        g = g * factor(weight, column, width, HAS_WEIGHT, UNIT)
        of_x = (g - normed * along) * rstd
        tl.store(x_grad + row * width + column, of_x.to(x_grad.dtype.element_ty), mask=inside)


@triton.jit
def backward_of_weight(
    x: "Pointer",
    grad: "Pointer",
    rstds: "Pointer",
    partials: "Pointer",
    rows: "Number",
    width: "Number",
    x_row: "Number",
    x_column: "Number",
    grad_row: "Number",
    grad_column: "Number",
    share: "Number",
    COLUMNS: tl.constexpr,
) -> None:
    """Write a program's part of the gradient of the weight: some columns of `share` long rows.

    The other arguments are those of `backward_of_rows`.
    """
    blocks = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    number = program // blocks
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    summed = tl.zeros((COLUMNS,), tl.float32)
    first = number * share
    for row in range(first, tl.minimum(first + share, rows)):
        a = read(x, row * x_row + column * x_column, inside)
        g = read(grad, row * grad_row + column * grad_column, inside)
        summed += g * (a * tl.load(rstds + row))
    tl.store(partials + number * width + column, summed, mask=inside)
