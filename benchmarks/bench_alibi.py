"""ALiBi attention in training, forward and backward, at 8192 tokens.

The first case is compared with what plain PyTorch does: a bias of H x S x S, built and given to
`F.scaled_dot_product_attention`; the second with the same attention without any bias, causal, which
is the least that it could cost. In the third no key is so far that its weight vanishes (a slope of
2**-12 for each head), so that all are read. flex_attention is missing, as it has no backward on a
CPU. Bytes are the most during forward and backward, less the result and the three gradients.
Everything runs on one thread: threads that wait for one another would count as work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

import ascend_ops
from ascend_core.device import current_backend
from ascend_core.memory import measure_peak
from benchmarks.case import Case, Variant
from benchmarks.threads import one_thread

_HEADS, _SIZE = 4, 64
_BIASED, _PLAIN = "SDPA, bias of S x S", "SDPA, causal, no bias"


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    tokens = 1024 if quick else 8192
    slopes = ascend_ops.alibi_slopes(_HEADS)
    shape = f"FP32, {_HEADS} heads of {_SIZE}, {tokens} tokens"
    extra = "most in use, less the result and the gradients"
    return [
        Case(
            f"{shape}, against a bias in memory",
            lambda: _variants(tokens, slopes, _BIASED),
            baseline=_BIASED,
            rounds=5,
            warmup=1,
            bytes_are=extra,
            around=one_thread,
        ),
        Case(
            f"{shape}, against no bias",
            lambda: _variants(tokens, slopes, _PLAIN),
            baseline=_PLAIN,
            rounds=13,
            bytes_are=extra,
            around=one_thread,
        ),
        Case(
            f"{shape}, slopes of 2**-12, against no bias",
            lambda: _variants(tokens, torch.full((_HEADS,), 2**-12), _PLAIN),
            baseline=_PLAIN,
            rounds=11,
            bytes_are=extra,
            around=one_thread,
        ),
    ]


def _variants(tokens: int, slopes: Tensor, rival: str) -> Mapping[str, Variant]:
    device = current_backend().device()
    shape = (1, _HEADS, tokens, _SIZE)
    given = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, device=device)
    slopes = slopes.to(device)
    q, k, v = given

    def biased() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_bias(tokens, slopes))

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(backend: str | None) -> Callable[[], Tensor]:
        return lambda: ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)

    forwards = {rival: plain, "ascend_ops.alibi_attention": ours(None)}
    if rival == _BIASED:
        forwards |= {rival: biased, "ascend_ops.alibi_attention, eager": ours("eager")}
    return {name: _trained(forward, given, grad) for name, forward in forwards.items()}


def _bias(tokens: int, slopes: Tensor) -> Tensor:
    positions = torch.arange(tokens, device=slopes.device)
    ahead = positions - positions[:, None]
    bias = slopes[:, None, None] * ahead
    return bias.masked_fill_(ahead > 0, float("-inf"))[None]


def _trained(forward: Callable[[], Tensor], given: list[Tensor], grad: Tensor) -> Variant:
    def step() -> None:
        torch.autograd.grad(forward(), given, grad)

    def extra_bytes() -> int:
        with measure_peak(grad.device) as memory:
            step()
        return memory.peak_bytes - 4 * grad.nbytes

    return Variant(step, extra_bytes)
