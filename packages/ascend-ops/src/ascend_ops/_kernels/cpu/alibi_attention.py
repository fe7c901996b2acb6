"""ALiBi attention by torch's own flash attention for CPUs, given a bias that takes no memory.

[Note: a bias of S x S in 2 S numbers]
The bias of a head depends on j - i alone. With the query rows in reverse, that is key minus row
plus a constant: a view of Sq + Skv - 1 numbers in which both strides are 1. torch's operator takes
it as its mask and adds it in FP32 (FP64 for FP64), also where q is BF16 or FP16. What is hidden by
`causal` and `window` is minus infinity in those numbers. Rows go by blocks of `_ROWS`, each with
the keys that it sees. Beside the results there are: a block of rows of q, out and their gradients;
in backward, the gradients of k and v from one block; and both for as many heads as there are
threads, as backward gives a thread a head.

[Note: keys that are too far to count]
A weight is exp(score - slope d - lse) at a distance d, and a score at most |q| |k| scale. Keys that
are so far that their weights are below 2**-64 (2**-128 for FP64) are not read: of any number of
keys that memory holds, they cannot change a rounded sum. This bound is of the numbers that are
given, not of what is usual; where it holds for no key, all are read. It matters for more than the
work that it saves: such weights are denormal numbers, of which a matrix product is 7 times slower.
Where scores are so large that the bound leaves some, backward computes with weights that are a
power of two larger, by a smaller lse, and takes it from their sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_ops._kernels.eager.alibi_attention import EagerAlibi
from ascend_ops._operators.alibi_attention import AlibiCall

__all__ = ["FlashAlibi", "load"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_ROWS = 512


class FlashAlibi:
    """See `ascend_ops._operators.alibi_attention.AlibiKernel`."""

    def refusal(self, call: AlibiCall) -> str | None:
        """Takes one head size, and masks whose keys that count are neighbours."""
        if call.q.shape[3] != call.v.shape[3] or not call.q.shape[3]:
            return "torch's flash attention takes v of the head size of q, above 0."
        if call.mask is not None and not _are_neighbours(call.mask):
            return "the mask hides keys between keys that count, not before or after them alone."
        return None

    def forward(self, call: AlibiCall) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        q = call.q
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=_wide(q.dtype))
        for part in _parts(call):
            part_out, part_lse = part.of_queries(out), part.of_queries(lse)
            for rows, keys in part.blocks(None):
                found, sums = _FORWARD(
                    part.q[:, :, rows].flip(2),
                    part.k[:, :, keys],
                    part.v[:, :, keys],
                    attn_mask=part.bias_of(rows, keys),
                    scale=call.scale,
                )
                part_out[:, :, rows] = found.flip(2)
                part_lse[:, :, rows] = sums.flip(2)
        return out, lse

    def backward(
        self, call: AlibiCall, grad: Tensor, out: Tensor, lse: Tensor, slopes_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the protocol."""
        if slopes_grad:  # it needs the gradient of each score, which torch's operator does not give
            return EagerAlibi().backward(call, grad, out, lse, True)
        of_q, of_k, of_v = (x.new_zeros(x.shape) for x in (call.q, call.k, call.v))
        for part in _parts(call):
            self._part_backward(part, (grad, out, lse), (of_q, of_k, of_v))
        return of_q, of_k, of_v, call.slopes.new_empty(0)

    def _part_backward(
        self, part: _Part, known: tuple[Tensor, ...], grads: tuple[Tensor, ...]
    ) -> None:
        grad, out, lse = (part.of_queries(x) for x in known)
        q_grad, (k_grad, v_grad) = part.of_queries(grads[0]), map(part.of_keys, grads[1:])
        # Sums over blocks of rows are kept in FP32, and rounded once.
        k_sum, v_sum = (x.to(_wide(x.dtype)) for x in (k_grad, v_grad))
        lift = part.lift(grad)
        down = 0.5**lift
        lifted = lse - lift * math.log(2) if lift else lse
        for rows, keys in part.blocks(lse):
            of_q, of_k, of_v = _BACKWARD(
                grad[:, :, rows].flip(2),
                part.q[:, :, rows].flip(2),
                part.k[:, :, keys],
                part.v[:, :, keys],
                out[:, :, rows].flip(2),
                lifted[:, :, rows].flip(2),
                0.0,
                False,
                attn_mask=part.bias_of(rows, keys),
                scale=part.call.scale,
            )
            q_grad[:, :, rows] = of_q.flip(2).mul_(down)
            for total, found in ((k_sum, of_k), (v_sum, of_v)):
                total[:, keys] += found[:, 0] if found.shape[1] == 1 else found.sum(1)
            del of_q, of_k, of_v, found  # or they would be there beside those of the next block
        k_grad.copy_(k_sum.mul_(down))
        v_grad.copy_(v_sum.mul_(down))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some heads of one item of the batch. Heads of k are the batch of torch's operator.

    Attributes:
        heads: Which heads of k.
        q: [h, G, Sq, D], where G heads read one of k.
        k: [h, G, Skv, D], of stride 0 in G.
        v: The same.
        slopes: [h, G], FP32 or FP64.
        bias: [h, G, Sq + Skv - 1], by distance, from that of the last query and the first key.
        bound: [h, G, Sq], FP64, above each row's scores as numbers without sign and bias.
        counting: The keys that the mask lets count.
        rows: The rows that see any of them.
    """

    call: AlibiCall
    item: int
    heads: slice
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    bias: Tensor
    bound: Tensor
    counting: slice
    rows: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """This part of [B, H, Sq, ...], as [h, G, Sq, ...]."""
        heads = self.call.k.shape[1]
        return x[self.item].view(heads, -1, *x.shape[2:])[self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        """This part of [B, Hkv, Skv, D]."""
        return x[self.item, self.heads]

    def bias_of(self, rows: slice, keys: slice) -> Tensor:
        """The bias of a block, its rows in reverse: [h, G, rows, keys], a view."""
        shape = (*self.bias.shape[:2], rows.stop - rows.start, keys.stop - keys.start)
        first = keys.start + self.q.shape[2] - rows.stop
        return self.bias.as_strided(shape, (*self.bias.stride()[:2], 1, 1), first)

    def blocks(self, lse: Tensor | None) -> Iterator[tuple[slice, slice]]:
        """Blocks of rows, each with the keys that count for any of its rows and heads.

        Writes minus infinity over the bias, for each head, at distances that count for no row.

        Args:
            lse: [h, G, Sq]; None where it is not known yet.
        """
        reach = self._reach(lse)
        first = self.call.kv_start - self.call.q_start - self.q.shape[2] + 1
        distance = torch.arange(first, first + self.bias.shape[-1], device="cpu").abs_()
        farthest = reach[..., self.rows].amax(-1, keepdim=True)
        self.bias.masked_fill_(distance > farthest, -math.inf)
        reach = reach.flatten(0, 1).amax(0)
        for start in range(self.rows.start, self.rows.stop, _ROWS):
            rows = slice(start, min(self.rows.stop, start + _ROWS))
            yield rows, self._keys(rows, reach[rows])

    def _keys(self, rows: slice, reach: Tensor) -> slice:
        ahead = self.call.q_start - self.call.kv_start
        i = torch.arange(rows.start + ahead, rows.stop + ahead, device="cpu")
        low, high = self.call.keys_of(rows.start, rows.stop)
        low, high = max(low, self.counting.start), min(high, self.counting.stop)
        nearest, farthest = (i - reach).min(), (i + reach).max()
        keys = slice(int(nearest.clamp(low, high)), int(farthest.clamp(low, high - 1)) + 1)
        assert keys.start < keys.stop  # torch's operator ends the process where there is no key
        return keys

    def _reach(self, lse: Tensor | None) -> Tensor:
        """How far from each row a key may be and count: [h, G, Sq], FP64.

        See the note above. A row's sum is at least the exponential of its nearest key's score;
        backward knows the sum.
        """
        spare = _bits(self.q.dtype) * math.log(2) + self.bound
        slopes = self.slopes.to(_EXACT)[..., None]
        if lse is None:
            first = self.call.q_start - self.call.kv_start
            i = torch.arange(first, first + self.q.shape[2], device="cpu")
            nearest = (i - i.clamp(self.counting.start, self.counting.stop - 1)).abs()
            found = nearest + (spare + self.bound) / slopes
        else:
            found = (spare - lse) / slopes
        return torch.where(slopes > 0, found, math.inf).nan_to_num(math.inf, math.inf, math.inf)

    def lift(self, grad: Tensor) -> int:
        """Bits by which backward's weights are lifted, so that few are denormal numbers.

        0 where none can be, and never so many that a sum could overflow. `grad` is [h, G, Sq, D].
        """
        if self.q.dtype not in (torch.float32, torch.bfloat16):
            return 0
        wanted = _bits(self.q.dtype) + float(self.bound.max()) * 2 / math.log(2) - 110
        given = (grad, self.v[:, :1], self.q, self.k[:, :1])
        sizes = (float(_length(x).max()) for x in given)
        factors = (self.k.shape[2], abs(self.call.scale), *sizes)
        room = 124 - sum(math.log2(max(1.0, factor)) for factor in factors)
        return int(min(wanted, room, 60)) if wanted > 0 and room > 0 else 0


_EXACT = torch.float64  # of bounds, which are added to positions
_ROUNDED = 1 + 1e-4  # at least what rounding takes from a length of a head's size


def _length(x: Tensor) -> Tensor:
    """Of the vectors in the last dimension, in FP64; infinite where FP32 cannot hold its square."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=_wide(x.dtype))
    return length.to(_EXACT)


def _bits(dtype: torch.dtype) -> int:
    """A weight of two to minus so many is as none; see the note above."""
    return 128 if dtype == torch.float64 else 64


def _parts(call: AlibiCall) -> Iterator[_Part]:
    """As many heads at once as there are threads; nothing where no row sees a key."""
    batch, heads, count, _ = call.q.shape
    shared = call.k.shape[1]
    each = heads // shared
    step = -(-torch.get_num_threads() // each) if each else 1
    for item in range(batch if count * heads else 0):
        counting = _counting(call, item)
        rows = _rows(call, counting)
        if rows.start >= rows.stop:
            continue
        slopes = (call.slopes if call.slopes.dim() == 1 else call.slopes[item]).view(shared, each)
        for first in range(0, shared, step):
            chosen = slice(first, min(shared, first + step))
            k, v = (
                _dense(x[item, chosen])[:, None].expand(-1, each, -1, -1) for x in (call.k, call.v)
            )
            q = call.q[item].view(shared, each, *call.q.shape[2:])[chosen]
            longest = _length(k[:, :1, counting]).amax(-1, keepdim=True)
            bound = _length(q) * longest * (abs(call.scale) * _ROUNDED)
            bias = _bias(call, slopes[chosen])
            yield _Part(call, item, chosen, q, k, v, slopes[chosen], bias, bound, counting, rows)


def _bias(call: AlibiCall, slopes: Tensor) -> Tensor:
    first = call.kv_start - call.q_start - call.q.shape[2] + 1
    ahead = torch.arange(first, first + call.q.shape[2] + call.k.shape[2] - 1, device="cpu")
    dtype = _wide(call.q.dtype)
    bias = slopes.to(dtype)[..., None] * ahead.abs().neg_().to(dtype)
    if call.causal:
        bias.masked_fill_(ahead > 0, -math.inf)
    if call.window is not None:
        bias.masked_fill_(ahead.abs() >= call.window, -math.inf)
    return bias


def _counting(call: AlibiCall, item: int) -> slice:
    if call.mask is None:
        return slice(0, call.k.shape[2])
    counting = call.mask[item].nonzero()
    if not len(counting):
        return slice(0, 0)
    return slice(int(counting[0]), int(counting[-1]) + 1)


def _rows(call: AlibiCall, counting: slice) -> slice:
    """The rows that see any of some keys, which are neighbours."""
    first, stop = 0, call.q.shape[2] if counting.start < counting.stop else 0
    ahead = call.q_start - call.kv_start
    if call.window is not None:
        first = max(first, counting.start - ahead - call.window + 1)
        stop = min(stop, counting.stop - ahead + call.window - 1)
    if call.causal:
        first = max(first, counting.start - ahead)
    return slice(first, stop)


def _are_neighbours(mask: Tensor) -> bool:
    """Whether the keys that count are one run in each item."""
    begins = mask[:, 1:] & ~mask[:, :-1]
    return bool((begins.sum(1) + mask[:, :1].sum(1) <= 1).all())


def _dense(x: Tensor) -> Tensor:
    """The same numbers, where torch's operator finds them: in the last dimension without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def load() -> FlashAlibi:
    """Return the kernel."""
    return FlashAlibi()
