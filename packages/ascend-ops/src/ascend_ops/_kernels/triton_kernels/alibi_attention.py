"""ALiBi attention, and its gradients, a block of scores at a time.

After FlashAttention-2 (https://arxiv.org/abs/2307.08691). The bias is made in registers, of
positions and of one slope.

[Note: what is where] A program of `forward` and `backward_of_queries` has ROWS rows of one head of
q, and visits the keys that any of them sees, KEYS at a time; one of `backward_of_keys` has KEYS
keys of one head of k, and visits the rows that see any of them, of each head of q that reads it, in
order. So every element of every result is written by one program, once, and nothing depends on
which program comes first. Scores, weights and sums are FP32; a weight is rounded to the dtype of v
for the product with it, and the gradient of a score to that of q.

[Note: positions] `ahead` is the position of the first query, counted from the first key. A row that
sees no key has the sum 0, the result 0 and the lse minus infinity.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["backward_of_keys", "backward_of_queries", "forward"]

# What the annotations of a kernel say is for people, but for constexpr. They are in quotes, since
# Triton would look for their values.
Pointer = Any
Block = Any  # a tensor in registers
Number = Any  # a scalar


@triton.jit
def read(
    matrix: "Pointer",
    row: "Block",
    stride: "Number",
    rows: "Number",
    width: "Number",
    WIDTH: tl.constexpr,
) -> "Block":
    """Read rows of a matrix, whose elements are neighbours. 0 beyond the end."""
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    return tl.load(matrix + row.to(tl.int64)[:, None] * stride + column, mask=inside, other=0.0)


@triton.jit
def write(
    matrix: "Pointer",
    block: "Block",
    row: "Block",
    rows: "Number",
    width: "Number",
    WIDTH: tl.constexpr,
) -> None:
    """Write rows of a contiguous matrix."""
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    at = row.to(tl.int64)[:, None] * width + column
    tl.store(matrix + at, block.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def counting(
    mask: "Pointer", key: "Block", stride: "Number", keys: "Number", HAS_MASK: tl.constexpr
) -> "Block":
    """Which keys there are, and count."""
    inside = key < keys
    if HAS_MASK:
        inside = inside & (tl.load(mask + key.to(tl.int64) * stride, mask=inside, other=0) != 0)
    return inside


@triton.jit
def seen(
    further: "Block",
    inside: "Block",
    window: "Number",
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> "Block":
    """Which keys are visible that are `further` ahead of a query."""
    if CAUSAL:
        inside = inside & (further <= 0)
    if HAS_WINDOW:
        inside = inside & (tl.abs(further) < window)
    return inside


@triton.jit
def first_key(
    first: "Number", ahead: "Number", window: "Number", HAS_WINDOW: tl.constexpr
) -> "Any":
    """Before it, no row from `first` on sees a key."""
    if HAS_WINDOW:
        return tl.maximum(first + ahead - window + 1, 0)
    return first * 0


@triton.jit
def last_key(
    stop: "Number",
    keys: "Number",
    ahead: "Number",
    window: "Number",
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> "Any":
    """From it on, no row before `stop` sees a key."""
    last = stop * 0 + keys
    if HAS_WINDOW:
        last = tl.minimum(last, stop + ahead + window - 1)
    if CAUSAL:
        last = tl.minimum(last, stop + ahead)
    return last


@triton.jit
def forward(
    q: "Pointer",
    k: "Pointer",
    v: "Pointer",
    slopes: "Pointer",
    mask: "Pointer",
    out: "Pointer",
    lse: "Pointer",
    heads: "Number",
    group: "Number",
    rows: "Number",
    keys: "Number",
    width: "Number",
    v_width: "Number",
    q_item: "Number",
    q_head: "Number",
    q_row: "Number",
    k_item: "Number",
    k_head: "Number",
    k_row: "Number",
    v_item: "Number",
    v_head: "Number",
    v_row: "Number",
    slopes_item: "Number",
    slopes_head: "Number",
    mask_item: "Number",
    mask_key: "Number",
    ahead: "Number",
    window: "Number",
    scale: "Number",
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the results, and the logarithms of the sums of exponentials.

    Args:
        q: [B, heads, rows, width], of any strides but the last, which is 1; so too k and v.
        k: [B, heads / group, keys, width].
        v: [B, heads / group, keys, v_width].
        slopes: FP32, [B, heads] of any strides.
        mask: uint8, [B, keys] of any strides; anything unless HAS_MASK.
        out: [B, heads, rows, v_width], contiguous.
        lse: FP32 [B, heads, rows], contiguous.
        heads: Of q.
        group: How many of them read one head of k.
        rows: Of q.
        keys: How many.
        width: Of q and k.
        v_width: Of v.
        q_item: Stride of q along the batch, and so on.
        q_head: See there.
        q_row: See there.
        k_item: See there.
        k_head: See there.
        k_row: See there.
        v_item: See there.
        v_head: See there.
        v_row: See there.
        slopes_item: See there.
        slopes_head: See there.
        mask_item: See there.
        mask_key: See there.
        ahead: Of the first query before the first key, in positions.
        window: Anything unless HAS_WINDOW.
        scale: What products of q and k are multiplied with.
        CAUSAL: Whether keys after a query are hidden.
        HAS_WINDOW: Whether keys are hidden that are `window` positions away, or more.
        HAS_MASK: Whether keys are hidden whose mask is 0.
        WIDTH: The power of two, at least 16, that holds `width`.
        V_WIDTH: The same for `v_width`.
        ROWS: That a program has.
        KEYS: That it visits at once.
    """
    blocks = tl.cdiv(rows, ROWS)
    above = tl.program_id(0) // blocks  # item and head
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS  # the most keys come first
    item, head = (above // heads).to(tl.int64), (above % heads).to(tl.int64)
    q += item * q_item + head * q_head
    k += item * k_item + head // group * k_head
    v += item * v_item + head // group * v_head
    mask += item * mask_item
    slope = tl.load(slopes + item * slopes_item + head * slopes_head)
    row = first + tl.arange(0, ROWS)
    queries = read(q, row, q_row, rows, width, WIDTH)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, V_WIDTH), tl.float32)
    low = first_key(first, ahead, window, HAS_WINDOW)
    stop = tl.minimum(first + ROWS, rows)
    last = last_key(stop, keys, ahead, window, CAUSAL, HAS_WINDOW)
    for start in range(low, last, KEYS):
        key = start + tl.arange(0, KEYS)
        further = key[None, :] - (row + ahead)[:, None]
        inside = counting(mask, key, mask_key, last, HAS_MASK)[None, :]
        some_keys = read(k, key, k_row, last, width, WIDTH)
        s = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
        s = s * scale - slope * tl.abs(further).to(tl.float32)
        s = tl.where(seen(further, inside, window, CAUSAL, HAS_WINDOW), s, float("-inf"))
        before, highest = highest, tl.maximum(highest, tl.max(s, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(s - base[:, None])
        fade = tl.exp(before - base)
        total = total * fade + tl.sum(weights, axis=1)
        values = read(v, key, v_row, last, v_width, V_WIDTH)
        found = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        result = result * fade[:, None] + found
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    of_head = above.to(tl.int64) * rows
    write(out + of_head * v_width, result, row, rows, v_width, V_WIDTH)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(lse + of_head + row, base + tl.log(total), mask=row < rows)


@triton.jit
def backward_of_queries(
    q: "Pointer",
    k: "Pointer",
    v: "Pointer",
    slopes: "Pointer",
    mask: "Pointer",
    grad: "Pointer",
    out: "Pointer",
    lse: "Pointer",
    delta: "Pointer",
    q_grad: "Pointer",
    partials: "Pointer",
    heads: "Number",
    group: "Number",
    rows: "Number",
    keys: "Number",
    width: "Number",
    v_width: "Number",
    q_item: "Number",
    q_head: "Number",
    q_row: "Number",
    k_item: "Number",
    k_head: "Number",
    k_row: "Number",
    v_item: "Number",
    v_head: "Number",
    v_row: "Number",
    slopes_item: "Number",
    slopes_head: "Number",
    mask_item: "Number",
    mask_key: "Number",
    grad_item: "Number",
    grad_head: "Number",
    grad_row: "Number",
    ahead: "Number",
    window: "Number",
    scale: "Number",
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SLOPES_GRAD: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the gradient of q, a part of the slopes', and what `backward_of_keys` needs.

    These are not among the arguments of `forward`:
        grad: What arrives at out: of its shape, and any strides but the last, which is 1.
        out, lse: What `forward` wrote.
        delta: FP32 [B, heads, rows], contiguous: the sums of grad * out are written here.
        q_grad: [B, heads, rows, width], contiguous.
        partials: FP32 [B, heads, programs of a head]; anything unless SLOPES_GRAD.
        grad_item, grad_head, grad_row: Strides of grad.
        SLOPES_GRAD: Whether the gradient of the slopes is wanted.
    """
    blocks = tl.cdiv(rows, ROWS)
    above = tl.program_id(0) // blocks  # item and head
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS  # the most keys come first
    item, head = (above // heads).to(tl.int64), (above % heads).to(tl.int64)
    of_head = above.to(tl.int64) * rows
    k += item * k_item + head // group * k_head
    v += item * v_item + head // group * v_head
    mask += item * mask_item
    slope = tl.load(slopes + item * slopes_item + head * slopes_head)
    row = first + tl.arange(0, ROWS)
    queries = read(q + item * q_item + head * q_head, row, q_row, rows, width, WIDTH)
    grad += item * grad_item + head * grad_head
    arrived = read(grad, row, grad_row, rows, v_width, V_WIDTH)
    result = read(out + of_head * v_width, row, v_width, rows, v_width, V_WIDTH)
    own = tl.sum(arrived.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(delta + of_head + row, own, mask=row < rows)
    known = tl.load(lse + of_head + row, mask=row < rows, other=0.0)
    known = tl.where(known == float("-inf"), 0.0, known)
    of_q = tl.zeros((ROWS, WIDTH), tl.float32)
    of_slope = tl.zeros((ROWS,), tl.float32)
    low = first_key(first, ahead, window, HAS_WINDOW)
    stop = tl.minimum(first + ROWS, rows)
    last = last_key(stop, keys, ahead, window, CAUSAL, HAS_WINDOW)
    for start in range(low, last, KEYS):
        key = start + tl.arange(0, KEYS)
        further = key[None, :] - (row + ahead)[:, None]
        distance = tl.abs(further).to(tl.float32)
        inside = counting(mask, key, mask_key, last, HAS_MASK)[None, :]
        inside = seen(further, inside & (row < rows)[:, None], window, CAUSAL, HAS_WINDOW)
        some_keys = read(k, key, k_row, last, width, WIDTH)
        s = tl.dot(queries, tl.trans(some_keys), input_precision="ieee") * scale - slope * distance
        weights = tl.exp(tl.where(inside, s - known[:, None], float("-inf")))
        values = read(v, key, v_row, last, v_width, V_WIDTH)
        of_weights = tl.dot(arrived, tl.trans(values), input_precision="ieee")
        of_s = weights * (of_weights - own[:, None])
        of_q += tl.dot(of_s.to(some_keys.dtype), some_keys, input_precision="ieee")
        if SLOPES_GRAD:
            of_slope -= tl.sum(of_s * distance, axis=1)
    write(q_grad + of_head * width, of_q * scale, row, rows, width, WIDTH)
    if SLOPES_GRAD:
        at = above.to(tl.int64) * blocks + first // ROWS
        tl.store(partials + at, tl.sum(of_slope, axis=0))


@triton.jit
def backward_of_keys(
    q: "Pointer",
    k: "Pointer",
    v: "Pointer",
    slopes: "Pointer",
    mask: "Pointer",
    grad: "Pointer",
    lse: "Pointer",
    delta: "Pointer",
    k_grad: "Pointer",
    v_grad: "Pointer",
    heads: "Number",
    group: "Number",
    rows: "Number",
    keys: "Number",
    width: "Number",
    v_width: "Number",
    q_item: "Number",
    q_head: "Number",
    q_row: "Number",
    k_item: "Number",
    k_head: "Number",
    k_row: "Number",
    v_item: "Number",
    v_head: "Number",
    v_row: "Number",
    slopes_item: "Number",
    slopes_head: "Number",
    mask_item: "Number",
    mask_key: "Number",
    grad_item: "Number",
    grad_head: "Number",
    grad_row: "Number",
    ahead: "Number",
    window: "Number",
    scale: "Number",
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the gradients of k and v: [B, heads / group, keys, ...], contiguous.

    The other arguments are those of `backward_of_queries`, which has written delta.
    """
    blocks = tl.cdiv(keys, KEYS)
    above = tl.program_id(0) // blocks  # item and head of k
    first = tl.program_id(0) % blocks * KEYS  # where causal, the most rows come first
    shared = (above % (heads // group)).to(tl.int64)
    item = (above // (heads // group)).to(tl.int64)
    key = first + tl.arange(0, KEYS)
    some_keys = read(k + item * k_item + shared * k_head, key, k_row, keys, width, WIDTH)
    values = read(v + item * v_item + shared * v_head, key, v_row, keys, v_width, V_WIDTH)
    counts = counting(mask + item * mask_item, key, mask_key, keys, HAS_MASK)
    of_k = tl.zeros((KEYS, WIDTH), tl.float32)
    of_v = tl.zeros((KEYS, V_WIDTH), tl.float32)
    stop = tl.minimum(first + KEYS, keys)
    low, high = first * 0, first * 0 + rows
    if HAS_WINDOW:
        low = tl.maximum(first - ahead - window + 1, 0)
        high = tl.minimum(high, stop - 1 - ahead + window)
    if CAUSAL:
        low = tl.maximum(low, first - ahead)
    for number in range(0, group):
        head = shared * group + number
        of_head = (item * heads + head) * rows
        slope = tl.load(slopes + item * slopes_item + head * slopes_head)
        for start in range(low, high, ROWS):
            row = start + tl.arange(0, ROWS)
            further = key[:, None] - (row + ahead)[None, :]
            inside = counts[:, None] & (row < high)[None, :]
            inside = seen(further, inside, window, CAUSAL, HAS_WINDOW)
            known = tl.load(lse + of_head + row, mask=row < high, other=0.0)
            known = tl.where(known == float("-inf"), 0.0, known)
            own = tl.load(delta + of_head + row, mask=row < high, other=0.0)
            at = q + item * q_item + head * q_head
            queries = read(at, row, q_row, high, width, WIDTH)
            s = tl.dot(some_keys, tl.trans(queries), input_precision="ieee") * scale
            s = s - slope * tl.abs(further).to(tl.float32) - known[None, :]
            weights = tl.exp(tl.where(inside, s, float("-inf")))
            at = grad + item * grad_item + head * grad_head
            arrived = read(at, row, grad_row, high, v_width, V_WIDTH)
            of_v += tl.dot(weights.to(arrived.dtype), arrived, input_precision="ieee")
            of_weights = tl.dot(values, tl.trans(arrived), input_precision="ieee")
            of_s = weights * (of_weights - own[None, :])
            of_k += tl.dot(of_s.to(queries.dtype), queries, input_precision="ieee")
    of_head = above.to(tl.int64) * keys
    write(k_grad + of_head * width, of_k * scale, key, keys, width, WIDTH)
    write(v_grad + of_head * v_width, of_v, key, keys, v_width, V_WIDTH)
