"""Attention with linear biases (Press et al. 2021, https://arxiv.org/abs/2108.12409, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_ops.reference._precision import wide

__all__ = ["alibi_attention", "alibi_bias", "alibi_lse"]


def alibi_bias(slopes: Tensor, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
    """What is added to the scores: `-slope * |i - j|`.

    Args:
        slopes: [H] or [B, H].
        q_positions: [Sq], the global position i of each query, int64.
        kv_positions: [Skv], the global position j of each key, int64.

    Returns:
        [1 or B, H, Sq, Skv], in the dtype of the slopes.
    """
    distance = (q_positions[:, None] - kv_positions).abs().to(slopes.dtype)
    return slopes.view(-1, slopes.shape[-1], 1, 1) * -distance


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
) -> Tensor:
    """`softmax(q k^T scale + bias) v`; see `ascend_ops.alibi_attention`."""
    options = (causal, window, scale, mask, q_start, kv_start)
    scores, visible = _scores(q, k, slopes, *options)
    # Softmax is that of the visible keys; where there is none, the sum below is one of zeros.
    weights = scores.softmax(-1).masked_fill(~visible, 0)
    return (weights @ _repeated(wide(v), q)).to(q.dtype)


def alibi_lse(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    q_start: int | None = None,
    kv_start: int = 0,
) -> Tensor:
    """The logarithm of the sum of each row's exponentials, minus infinity where no key is seen."""
    options = (causal, window, scale, mask, q_start, kv_start)
    scores, visible = _scores(q, k, slopes, *options)
    return scores.masked_fill(~visible, float("-inf")).logsumexp(-1)


def _scores(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    mask: Tensor | None,
    q_start: int | None,
    kv_start: int,
) -> tuple[Tensor, Tensor]:
    """Scores, the lowest finite number where a key is not visible, and where one is."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first = k.shape[2] - q.shape[2] + kv_start if q_start is None else q_start
    i = torch.arange(q.shape[2], device=q.device) + first
    j = torch.arange(k.shape[2], device=q.device) + kv_start
    ahead = j - i[:, None]
    visible = (ahead <= 0) if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        visible = visible & (ahead.abs() < window)
    visible = visible[None, None]
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    wider = wide(q)
    scores = wider @ _repeated(wide(k), q).transpose(-1, -2) * scale
    scores = scores + alibi_bias(slopes.to(wider.dtype), i, j)
    # Finite, as the gradient of softmax is no number where all of a row is minus infinity.
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min), visible


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """The head that each head of the queries reads, beside it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)
