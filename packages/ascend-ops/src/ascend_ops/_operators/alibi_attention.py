"""ALiBi attention: `softmax(q k^T scale - slope |i - j|) v`, without a bias in memory.

[Note: what the gradient of ALiBi attention needs]
Saved are q, k, v and the slopes, the mask of the keys [B, Skv], the result, and the logarithm of
each row's sum of exponentials, `lse`. Backward makes the weights again, `exp(score - lse)`, a block
at a time. Nothing of Sq x Skv outlives a block, and nothing is kept between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ascend_ops import reference
from ascend_ops._backends import choose
from ascend_ops._operators._library import define, differentiated_again

__all__ = ["AlibiCall", "AlibiKernel", "alibi_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class AlibiCall:
    """What a kernel is given: checked arguments of `ascend_ops.alibi_attention`, of any strides.

    Attributes:
        q: [B, H, Sq, D].
        k: [B, Hkv, Skv, D]; H is a multiple of Hkv, and head h of q reads head h // (H / Hkv).
        v: [B, Hkv, Skv, Dv].
        slopes: [H] or [B, H]; FP32, or FP64 where q is.
        mask: Bool, [B, Skv], True for the keys that count; all do where it is left out.
        causal: Whether the keys after a query are not visible.
        window: How many keys a query sees on each side, itself counted; None for all.
        scale: What q k^T is multiplied by.
        q_start: The global position of the first query.
        kv_start: The global position of the first key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    mask: Tensor | None
    causal: bool
    window: int | None
    scale: float
    q_start: int
    kv_start: int

    def keys_of(self, first: int, stop: int) -> tuple[int, int]:
        """The keys, as indices (first, stop), outside of which the rows [first, stop) see none.

        The mask is not looked at. Where the rows see none at all, the two are equal.
        """
        ahead = self.q_start - self.kv_start
        low, high = 0, self.k.shape[2]
        if self.window is not None:
            low = max(low, first + ahead - self.window + 1)
            high = min(high, stop + ahead + self.window - 1)
        if self.causal:
            high = min(high, stop + ahead)
        return low, max(low, high)


class AlibiKernel(Protocol):
    """How a backend computes it."""

    def refusal(self, call: AlibiCall) -> str | None:
        """Why this call cannot be taken; None where it can be."""

    def forward(self, call: AlibiCall) -> tuple[Tensor, Tensor]:
        """Return the result and `lse`, both contiguous.

        The result is [B, H, Sq, Dv] in the dtype of q, and 0 in rows that see no key. `lse` is
        [B, H, Sq], FP32 (FP64 where q is): the logarithm of the sum of the exponentials of the
        scores with their bias, in units of e, and minus infinity in rows that see no key.
        """

    def backward(
        self, call: AlibiCall, grad: Tensor, out: Tensor, lse: Tensor, slopes_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and the slopes, contiguous, in the dtypes of those.

        `grad` has any strides, 0 among them; `out` and `lse` are what a forward returned, of this
        backend. Without `slopes_grad` the last is `slopes.new_empty(0)`. A kernel that cannot
        compute it hands the call with `slopes_grad` to the backward of `_kernels.eager`.
        """


def _kernel(backend: str | None, call: AlibiCall) -> AlibiKernel:
    kernel: AlibiKernel = choose("alibi_attention", backend, call.q, call)[1]
    return kernel


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _compute(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    *shape, backend = options
    call = AlibiCall(q, k, v, slopes, mask, *shape)
    with torch.autocast(q.device.type, enabled=False):  # the dtypes of a kernel are its own
        return _kernel(backend, call).forward(call)


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=_lse_dtype(q)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, mask, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, slopes, mask)


def _backward(ctx: Any, grad: Tensor, lse_grad: Tensor | None) -> tuple[Any, ...]:
    slopes_grad = ctx.needs_input_grad[3]
    grads = _alibi_attention_backward(grad, *ctx.saved_tensors, *ctx.options, slopes_grad)
    *grads, slopes = grads
    return *grads, slopes if slopes_grad else None, None, *[None] * len(ctx.options)


def _compute_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *shape, backend, slopes_grad = options
    call = AlibiCall(q, k, v, slopes, mask, *shape)
    with torch.autocast(q.device.type, enabled=False):
        return _kernel(backend, call).backward(call, grad, out, lse, slopes_grad)


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = slopes.shape if options[-1] else (0,)
    q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (q, k, v))
    return q_grad, k_grad, v_grad, slopes.new_empty(shape)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, q, k, v, _, _, slopes, mask, *ctx.options = inputs
    ctx.save_for_backward(grad, q, k, v, slopes, mask)


def _backward_backward(ctx: Any, *grads_of_grads: Tensor | None) -> tuple[Any, ...]:
    grad, q, k, v, slopes, mask = ctx.saved_tensors
    causal, window, scale, q_start, kv_start, _, slopes_grad = ctx.options

    def formula(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return reference.alibi_attention(
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

    of_slopes = grads_of_grads[3] if slopes_grad else None
    inputs, arrived = (q, k, v, slopes), (*grads_of_grads[:3], of_slopes)
    with torch.autocast(q.device.type, enabled=False):
        given = differentiated_again(formula, inputs, grad, arrived)
    grad_grad, *of_inputs, slopes_second = given
    return grad_grad, *of_inputs, None, None, slopes_second, None, *[None] * len(ctx.options)


_OPTIONS = "bool causal, SymInt? window, float scale, SymInt q_start, SymInt kv_start, str? backend"
alibi_attention = define(
    "alibi_attention(Tensor q, Tensor k, Tensor v, Tensor slopes, Tensor? mask, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    _compute,
    _fake,
    save=_save,
    backward=_backward,
)
_alibi_attention_backward = define(
    "alibi_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor slopes, Tensor? mask, {_OPTIONS}, bool slopes_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
    save=_save_backward,
    backward=_backward_backward,
)
