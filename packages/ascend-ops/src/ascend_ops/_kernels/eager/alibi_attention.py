"""ALiBi attention by torch's operators, a block of query rows at a time.

[Note: the bytes of a block]
Scores of a block are [b, Hkv, G, rows, keys] in FP32 (FP64 for FP64), where G query heads read one
head of the keys. `b` and `rows` are chosen so that one such tensor is at most `_BLOCK_BYTES`, or
one row of one batch item where that is more. At most four of them are alive at once, in backward.
Beside them there are k and v of b batch items in that dtype, and in backward their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_ops._operators.alibi_attention import AlibiCall

__all__ = ["EagerAlibi", "load"]

_BLOCK_BYTES = 16 << 20
_ROWS = 64  # a matrix product of fewer reads k for too little


class EagerAlibi:
    """See `ascend_ops._operators.alibi_attention.AlibiKernel`."""

    def refusal(self, call: AlibiCall) -> str | None:
        """Takes everything."""
        return None

    def forward(self, call: AlibiCall) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        q, v = call.q, call.v
        dtype = _wide(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        for items in _batches(call):
            keys, values = call.k[items].to(dtype), v[items].to(dtype)
            for block in _blocks(call, items, keys):
                weights = block.scores()
                highest = weights.amax(-1, keepdim=True)
                highest.masked_fill_(highest == float("-inf"), 0)
                total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
                found = weights.flatten(2, 3) @ values[:, :, block.keys]
                found = found.view(*weights.shape[:4], -1) / total.masked_fill(total == 0, 1)
                out[items, :, block.rows] = found.flatten(1, 2).to(out.dtype)
                lse[items, :, block.rows] = (total.log() + highest).flatten(1, 2)[..., 0]
        return out, lse

    def backward(
        self, call: AlibiCall, grad: Tensor, out: Tensor, lse: Tensor, slopes_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the protocol."""
        dtype = _wide(call.q.dtype)
        q_grad, k_grad, v_grad = (x.new_zeros(x.shape) for x in (call.q, call.k, call.v))
        slopes = call.slopes.new_zeros(call.slopes.shape if slopes_grad else (0,), dtype=dtype)
        # exp(-inf - 0) is 0 where a row sees no key; -inf - -inf would be no number
        known = lse.masked_fill(lse == float("-inf"), 0)
        for items in _batches(call):
            keys, values = call.k[items].to(dtype), call.v[items].to(dtype)
            keys_grad, values_grad = torch.zeros_like(keys), torch.zeros_like(values)
            for block in _blocks(call, items, keys):
                arrived = block.grouped(grad).to(dtype)
                own = (arrived * block.grouped(out)).sum(-1, keepdim=True)
                weights = block.scores().sub_(block.grouped(known)[..., None]).exp_()
                arrived = arrived.flatten(2, 3)
                seen = block.keys
                values_grad[:, :, seen] += weights.flatten(2, 3).transpose(-1, -2) @ arrived
                slope = (arrived @ values[:, :, seen].transpose(-1, -2)).view(weights.shape)
                if slopes_grad:  # distances would magnify what rounding `out` and `lse` took
                    total = weights.sum(-1, keepdim=True)
                    own = (slope * weights).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
                slope = slope.sub_(own).mul_(weights)
                flat = slope.flatten(2, 3)
                found = (flat @ keys[:, :, seen]).mul_(call.scale)
                q_grad[items, :, block.rows] = (
                    found.view_as(block.queries).flatten(1, 2).to(q_grad.dtype)
                )
                queries = block.queries.flatten(2, 3)
                keys_grad[:, :, seen] += (flat.transpose(-1, -2) @ queries).mul_(call.scale)
                if slopes_grad:
                    _add_slopes(slopes, items, slope.mul_(block.distance()))
            k_grad[items], v_grad[items] = keys_grad.to(k_grad.dtype), values_grad.to(v_grad.dtype)
        return q_grad, k_grad, v_grad, slopes.to(call.slopes.dtype)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some query rows of some batch items, and the keys that any of them sees.

    Attributes:
        queries: [b, Hkv, G, rows, D], in FP32 or FP64.
        all_keys: [b, Hkv, Skv, D], in the same.
    """

    call: AlibiCall
    items: slice
    rows: slice
    keys: slice
    queries: Tensor
    all_keys: Tensor

    def grouped(self, x: Tensor) -> Tensor:
        """The block of [B, H, Sq, ...] as [b, Hkv, G, rows, ...]."""
        return _grouped(x[self.items, :, self.rows], self.queries.shape[1], self.queries.shape[2])

    def ahead(self) -> Tensor:
        """How far each key is ahead of each query: [rows, keys], int64."""
        start, device = self.call.q_start - self.call.kv_start, self.queries.device
        i = torch.arange(self.rows.start + start, self.rows.stop + start, device=device)
        return torch.arange(self.keys.start, self.keys.stop, device=device) - i[:, None]

    def distance(self) -> Tensor:
        """`-|i - j|`, in the dtype of the scores."""
        return self.ahead().abs_().neg_().to(self.queries.dtype)

    def scores(self) -> Tensor:
        """Scores with their bias, minus infinity where a key is not visible."""
        call = self.call
        keys = self.all_keys[:, :, self.keys].transpose(-1, -2)
        shape = (*self.queries.shape[:4], keys.shape[-1])
        scores = (self.queries.flatten(2, 3) * call.scale @ keys).view(shape)
        slopes = call.slopes if call.slopes.dim() == 1 else call.slopes[self.items]
        slopes = slopes.to(scores.dtype).view(-1, *shape[1:3], 1, 1)
        scores.addcmul_(slopes, self.distance())
        hidden = self._hidden()
        return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))

    def _hidden(self) -> Tensor | None:
        call, hidden = self.call, []
        if call.causal:
            hidden.append(self.ahead() > 0)
        if call.window is not None:
            hidden.append(self.ahead().abs_() >= call.window)
        if call.mask is not None:
            hidden.append(~call.mask[self.items, None, None, None, self.keys])
        return functools.reduce(torch.logical_or, hidden) if hidden else None


def _batches(call: AlibiCall) -> Iterator[slice]:
    """Batch items that are computed at once; none where there is nothing to compute."""
    batch, heads, rows, _ = call.q.shape
    row = heads * call.k.shape[2] * _wide(call.q.dtype).itemsize
    if not rows * row:
        return
    step = max(1, _BLOCK_BYTES // (row * min(rows, _ROWS)))
    for first in range(0, batch, step):
        yield slice(first, min(batch, first + step))


def _blocks(call: AlibiCall, items: slice, keys: Tensor) -> Iterator[_Block]:
    _, heads, count, _ = call.q.shape
    row = (items.stop - items.start) * heads * keys.shape[2] * keys.dtype.itemsize
    step = max(1, _BLOCK_BYTES // row)
    groups = keys.shape[1], heads // keys.shape[1]
    for first in range(0, count, step):
        rows = slice(first, min(count, first + step))
        low, high = call.keys_of(rows.start, rows.stop)
        if low < high:
            queries = _grouped(call.q[items, :, rows].to(keys.dtype), *groups)
            yield _Block(call, items, rows, slice(low, high), queries, keys)


def _grouped(x: Tensor, heads: int, each: int) -> Tensor:
    """[b, H, ...] as [b, Hkv, G, ...], of the same memory."""
    return x.view(x.shape[0], heads, each, *x.shape[2:])


def _add_slopes(slopes: Tensor, items: slice, products: Tensor) -> None:
    """Add to the gradient of the slopes what a block, [b, Hkv, G, rows, keys], has for it."""
    found = products.sum((3, 4)).flatten(1)
    if slopes.dim() == 1:
        slopes += found.sum(0)
    else:
        slopes[items] += found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def load() -> EagerAlibi:
    """Return the kernel."""
    return EagerAlibi()
