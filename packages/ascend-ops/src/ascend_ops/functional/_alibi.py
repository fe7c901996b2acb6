"""ALiBi: its slopes, and the check of what its attention is given."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_ops._checks import check_derivative, check_dtype, check_same
from ascend_ops._operators import alibi_attention as operator

__all__ = ["alibi_attention", "alibi_slopes", "call_of_alibi_attention"]

_NAME = "alibi_attention"


def alibi_slopes(
    heads: int,
    *,
    start: int = 0,
    stop: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The slopes of ALiBi, one for each head (https://arxiv.org/abs/2108.12409, section 3).

    For n heads, n a power of two, they are the series that begins with `2**(-8 / n)` and has it as
    its ratio: 1/2, 1/4, ... 1/256 for 8. For other head counts they are those of the power of two
    below, and then every other one of twice that, from its first.

    Args:
        heads: Of the whole model, on all ranks.
        start: The first head that is wanted: under tensor parallelism that of this rank.
        stop: The head after the last that is wanted; `heads` when left out.
        device: Of the result.

    Returns:
        [stop - start], FP32: a slice of the slopes of all heads, positive.

    Raises:
        ConfigError: When `heads` is below 1, or the slice is not within them.

    Example:
        >>> alibi_slopes(12, start=3 * rank, stop=3 * rank + 3)  # tensor parallel, 4 ranks
    """
    stop = heads if stop is None else stop
    if heads < 1 or not 0 <= start <= stop <= heads:
        raise ConfigError(
            f"alibi_slopes: there are no heads [{start}, {stop}) of {heads}.",
            why="heads counts those of the whole model, and a rank takes a slice of their slopes.",
            instead="use 0 <= start <= stop <= heads, and at least one head.",
        )
    below = 1 << (heads.bit_length() - 1)
    exponents = [8 * (head + 1) / below for head in range(below)]
    exponents += [4 * (head + 1) / below for head in range(0, 2 * (heads - below), 2)]
    slopes = [2**-exponent for exponent in exponents[start:stop]]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


@overload
def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    mask: Tensor | None = ...,
    q_start: int | None = ...,
    kv_start: int = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    mask: Tensor | None = ...,
    q_start: int | None = ...,
    kv_start: int = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    q_start: int | None = None,
    kv_start: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with ALiBi: `softmax(q k^T scale - slope |i - j|) v`, i and j global positions.

    The bias is negative and counted from the query, in FP32 (FP64 for FP64 q) whatever the dtype
    of q: BF16 has 641 different values for 2048 positions. A family of models that adds
    `slope * j` instead differs by a number for each row, which softmax does not see; under a causal
    mask alone, as without one the distance is `|i - j|`. Nothing of Sq x Skv is kept for backward,
    nor allocated at once, and nothing is cached between calls.

    On a CPU, keys so far from a query that their weights are below `2**-64` are not read, which is
    known from the norms of q and k before a score is computed; their gradient from that query is 0.

    Args:
        q: [B, H, Sq, D], of any strides, as k and v; FP32, BF16, FP16 or FP64.
        k: [B, Hkv, Skv, D], H a multiple of Hkv; head h of q reads head `h // (H / Hkv)`.
        v: [B, Hkv, Skv, Dv], in the dtype of q and k.
        slopes: [H] or [B, H], FP32 (or FP64 where q is). Those of this rank's heads; see
            `alibi_slopes`. They get a gradient where they require one, and it costs nothing where
            they do not.
        causal: See no key after the query.
        window: See keys less than `window` positions from the query alone, on either side.
        scale: `D ** -0.5` when left out.
        mask: [B, Skv], bool, True for a key that counts. Padding on the left shifts positions of
            queries and keys alike, which leaves their distance.
        q_start: The global position of the first query. When left out, the last query and the last
            key share one: `kv_start + Skv - Sq`.
        kv_start: The global position of the first key.
        return_lse: Return `lse` too, which merges the results of chunks of the keys.
        backend: `"eager"`, `"cpu"`, `"triton"` or `"npu"`; the best for this call when left out.

    Returns:
        [B, H, Sq, Dv], contiguous, in q's dtype; 0 in rows that see no key, whose gradients are 0
        too. With `return_lse` also the logarithm of each row's sum of exponentials: [B, H, Sq],
        FP32 (FP64 for FP64), minus infinity in such rows, and not differentiable.

    Raises:
        ConfigError: When shapes, dtypes or devices do not fit, or `backend` refuses the call.
        UnavailableError: When `backend` cannot be used on this machine.

    Example:
        >>> out = ascend_ops.alibi_attention(q, k, v, ascend_ops.alibi_slopes(q.shape[1]))
    """
    _, call = call_of_alibi_attention(
        q,
        k,
        v,
        slopes,
        causal=causal,
        window=window,
        scale=scale,
        mask=mask,
        q_start=q_start,
        kv_start=kv_start,
    )
    out, lse = operator.alibi_attention(
        q, k, v, slopes, mask, causal, window, call.scale, call.q_start, kv_start, backend
    )
    return (out, lse) if return_lse else out


def call_of_alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    q_start: int | None = None,
    kv_start: int = 0,
    return_lse: bool = False,
) -> tuple[Tensor, operator.AlibiCall]:
    """Check a call of `alibi_attention`; return a tensor of it, and what its kernels are given."""
    check_dtype(_NAME, q=q, k=k, v=v)
    check_same(_NAME, "dtype", q=q, k=k, v=v)
    check_same(_NAME, "device", q=q, k=k, v=v, slopes=slopes, mask=mask)
    check_derivative(_NAME, "slopes", slopes)
    _check_heads(q, k, v)
    _check_slopes(slopes, q)
    _check_mask(mask, k)
    if window is not None and window < 1:
        raise ConfigError(
            f"{_NAME}: window is {window}.",
            why="it counts the keys that a query sees, its own position among them.",
            instead="use 1 or more, or leave it out.",
        )
    scale = q.shape[-1] ** -0.5 if scale is None and q.shape[-1] else scale or 0.0
    if not math.isfinite(scale):
        raise ConfigError(f"{_NAME}: scale is {scale}.", instead="use a finite number.")
    if q_start is None:
        q_start = k.shape[2] - q.shape[2] + kv_start
    options = (causal, window, scale, q_start, kv_start)
    return q, operator.AlibiCall(q, k, v, slopes, mask, *options)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}."
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ConfigError(
            f"{_NAME}: {shapes}",
            why="each has four dimensions.",
            instead="give q as [B, H, Sq, D], k as [B, Hkv, Skv, D], v as [B, Hkv, Skv, Dv].",
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ConfigError(
            f"{_NAME}: {shapes}",
            why="all share the batch, q and k the head size, k and v length and heads.",
            instead="give q as [B, H, Sq, D], k as [B, Hkv, Skv, D], v as [B, Hkv, Skv, Dv].",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"{_NAME}: {q.shape[1]} heads of q share {k.shape[1]} heads of k and v.",
            why="each head of k and v is read by one number of heads of q.",
            instead="use a number of heads in q that is a multiple of that in k.",
        )


def _check_slopes(slopes: Tensor, q: Tensor) -> None:
    if slopes.dtype != torch.float32 and not slopes.dtype == q.dtype == torch.float64:
        raise ConfigError(
            f"{_NAME}: slopes is {slopes.dtype}.",
            why="the bias is computed in FP32 (FP64 for FP64 q), whatever the dtype of q.",
            instead="make the slopes in FP32, as alibi_slopes does; rounded ones stay rounded.",
        )
    if slopes.shape not in (q.shape[1:2], q.shape[:2]):
        raise ConfigError(
            f"{_NAME}: slopes is {list(slopes.shape)}.",
            why=f"there is one for each of the {q.shape[1]} heads of q, or for each of each item.",
            instead=f"give it the shape {list(q.shape[1:2])} or {list(q.shape[:2])}.",
        )


def _check_mask(mask: Tensor | None, k: Tensor) -> None:
    expected = [k.shape[0], k.shape[2]]
    if mask is not None and (mask.dtype != torch.bool or list(mask.shape) != expected):
        raise ConfigError(
            f"{_NAME}: mask is {mask.dtype} {list(mask.shape)}.",
            why="it says of each key whether it counts.",
            instead=f"give torch.bool {expected}, True for the keys that count.",
        )
