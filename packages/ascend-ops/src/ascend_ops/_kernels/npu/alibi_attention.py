"""ALiBi attention by `npu_fusion_attention_v2`, which makes the bias itself from the slopes.

[Note: what the operator is told]
The bias. `pse_type=2`: slopes in FP32, and of queries and keys the position of the first. The
operator subtracts slope times |i - j| after the scale, in FP32. Its documentation allows that where
there are as many queries as keys. Elsewhere the bias has to be a tensor in the dtype of q
(`pse_type=0`): it is made for FP32 alone, as BF16 would round it, and up to `_BIAS_BYTES`, which is
what torch's operators take for a block of scores. (The documented compression of such a tensor to
its last 1024 rows is for calls that the slopes cover.)

What is hidden. A causal mask and a window are a band along a diagonal that is counted from the
lower right corner (`sparse_mode` 3 and 4); they share one mask of 2048 x 2048 bits, one byte each,
whatever the length. Keys that do not count need the whole mask, [B, 1, Sq, Skv], a byte each
(`sparse_mode` 1). It is made in forward and again in backward, and not kept.

[Note: what backward is given]
The operator's gradient wants the maximum and the sum of each row, eight times over, 64 bytes a row.
It uses them as exp(score - maximum) / sum alone, which is exp(score - lse): it is given lse for the
maximum and 1 for the sum, and 4 bytes a row are kept. In a row that sees no key, what arrives is
set to 0, and so is the result in forward, whatever the operator makes of such rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_ops import reference
from ascend_ops._kernels.eager.alibi_attention import EagerAlibi
from ascend_ops._kernels.npu._device import operators, refusal_of
from ascend_ops._operators.alibi_attention import AlibiCall

__all__ = ["NpuAlibi", "load"]

_HEADS, _HEAD_SIZE = 256, 768
_BATCH, _LENGTH = 2 << 20, 1 << 20
_BIAS_BYTES = 16 << 20
_BAND = 2048  # side of the mask that stands for a band
_ALL = 2147483647  # of pre_tokens and next_tokens
_SLOPES, _TENSOR = 2, 0  # of pse_type
_WHOLE, _CAUSAL, _OF_BAND = 1, 3, 4  # of sparse_mode


class NpuAlibi:
    """See `ascend_ops._operators.alibi_attention.AlibiKernel`.

    Args:
        npu: The operators of torch_npu.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu

    def refusal(self, call: AlibiCall) -> str | None:
        """See the protocol."""
        return refusal_of(q=call.q) or _refused_shape(call) or _refused_bias(call)

    def forward(self, call: AlibiCall) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        q = call.q
        first, stop = call.keys_of(0, q.shape[2])
        if first == stop:
            out = q.new_zeros((*q.shape[:3], call.v.shape[3]))
            return out, q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        options, blind = _options(call)
        tensors = (x.contiguous() for x in (q, call.k, call.v))
        out, highest, total, *_ = self._npu.npu_fusion_attention_v2(
            *tensors, q.shape[1], "BNSD", scale=call.scale, **options
        )
        lse = highest[..., 0] + total[..., 0].log()
        if blind is not None:
            out.masked_fill_(blind[..., None], 0)
            lse.masked_fill_(blind, float("-inf"))
        return out, lse

    def backward(
        self, call: AlibiCall, grad: Tensor, out: Tensor, lse: Tensor, slopes_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the protocol."""
        if slopes_grad:  # which the operator makes into no gradient
            return EagerAlibi().backward(call, grad, out, lse, slopes_grad)
        q, k, v = call.q.contiguous(), call.k.contiguous(), call.v.contiguous()
        none = call.slopes.new_empty(0)
        first, stop = call.keys_of(0, q.shape[2])
        if first == stop:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), none
        options, blind = _options(call)
        if blind is not None:
            grad, lse = grad.masked_fill(blind[..., None], 0), lse.masked_fill(blind, 0)
        highest = lse[..., None].expand(*lse.shape, 8).contiguous()
        q_grad, k_grad, v_grad, *_ = self._npu.npu_fusion_attention_grad_v2(
            q,
            k,
            v,
            grad.contiguous(),
            q.shape[1],
            "BNSD",
            softmax_max=highest,
            softmax_sum=torch.ones_like(highest),
            attention_in=out,
            scale_value=call.scale,
            **options,
        )
        return q_grad, k_grad, v_grad, none


def _refused_shape(call: AlibiCall) -> str | None:
    (batch, heads, rows, size), keys, value_size = call.q.shape, call.k.shape[2], call.v.shape[3]
    if not (call.q.numel() and call.k.numel() and call.v.numel()):
        return "q, k or v is empty, which npu_fusion_attention does not take."
    if value_size > size or size > _HEAD_SIZE:
        return (
            f"q and k have a head size of {size} and v of {value_size}: npu_fusion_attention takes "
            f"up to {_HEAD_SIZE}, and v not above q."
        )
    if heads > _HEADS:
        return f"q has {heads} heads, and npu_fusion_attention takes {_HEADS}."
    if batch > _BATCH or max(rows, keys) > _LENGTH:
        return (
            f"{batch} items of {rows} queries and {keys} keys: npu_fusion_attention takes {_BATCH} "
            f"items and {_LENGTH} queries or keys."
        )
    return None


def _refused_bias(call: AlibiCall) -> str | None:
    if _type_of_bias(call) == _SLOPES:
        return None
    rows, keys = call.q.shape[2], call.k.shape[2]
    differ = f"npu_fusion_attention takes slopes for as many queries as keys, not {rows} and {keys}"
    if call.q.dtype != torch.float32:
        return f"{differ}, and a bias in {call.q.dtype} would be rounded."
    nbytes = call.slopes.numel() * rows * keys * 4
    if nbytes > _BIAS_BYTES:
        return f"{differ}, and a bias would take {nbytes >> 20} MiB."
    return None


def _type_of_bias(call: AlibiCall) -> int:
    return _SLOPES if call.q.shape[2] == call.k.shape[2] else _TENSOR


def _options(call: AlibiCall) -> tuple[dict[str, Any], Tensor | None]:
    """What forward and backward are told alike, and which rows see no key.

    Returns:
        The operator's options, and [1 or B, 1, Sq], bool; None where each row sees one.
    """
    options: dict[str, Any] = {"pse_type": _type_of_bias(call)}
    if options["pse_type"] == _SLOPES:
        starts = {"q_start_idx": [call.q_start], "kv_start_idx": [call.kv_start]}
        options |= {"pse": call.slopes.float().contiguous(), **starts}
    else:
        options["pse"] = reference.alibi_bias(call.slopes, *_positions(call))
    if call.mask is not None:
        hidden = _hidden(call)
        options |= {"atten_mask": hidden, "sparse_mode": _WHOLE}
        blind: Tensor | None = hidden.all(-1)
    else:
        options |= _band(call)
        blind = _beside_all_keys(call)
    if blind is not None:
        options["inner_precise"] = 2  # for rows that are hidden whole
    return options, blind


def _positions(call: AlibiCall) -> tuple[Tensor, Tensor]:
    device = call.q.device
    i = torch.arange(call.q.shape[2], device=device) + call.q_start
    return i, torch.arange(call.k.shape[2], device=device) + call.kv_start


def _band(call: AlibiCall) -> dict[str, Any]:
    """The options that hide what `causal` and `window` hide; none where that is nothing."""
    rows, keys = call.q.shape[2], call.k.shape[2]
    ahead = call.q_start - call.kv_start
    lowest, highest = (call.keys_of(row, row + 1) for row in (rows - 1, 0))
    if lowest[0] == 0 and highest[1] == keys:
        return {}
    device = call.q.device
    options: dict[str, Any] = {
        "atten_mask": torch.ones(_BAND, _BAND, dtype=torch.bool, device=device).triu_(1)
    }
    corner = ahead - (keys - rows)  # how far a query's own key is ahead of the diagonal there
    if call.causal and call.window is None and not corner and rows <= keys:
        return {**options, "sparse_mode": _CAUSAL}
    side = _ALL if call.window is None else call.window - 1
    before = _ALL if side == _ALL else side - corner
    after = corner if call.causal else side + corner
    return {**options, "sparse_mode": _OF_BAND, "pre_tokens": before, "next_tokens": after}


def _hidden(call: AlibiCall) -> Tensor:
    """Which keys a row does not see, with the mask of the keys: [B, 1, Sq, Skv], bool.

    Positions are compared and not subtracted, so that nothing of Sq x Skv is wider than a byte.
    """
    assert call.mask is not None
    i, j = _positions(call)
    i, hidden = i[:, None], ~call.mask[:, None, None, :]
    if call.causal:
        hidden = hidden | (j > i)
    if call.window is not None:
        hidden = hidden | (j <= i - call.window)
        if not call.causal:
            hidden = hidden | (j >= i + call.window)
    return hidden.expand(-1, -1, i.shape[0], -1).contiguous()


def _beside_all_keys(call: AlibiCall) -> Tensor | None:
    """Which rows see no key because of their position: [1, 1, Sq], bool; None where none does."""
    rows = call.q.shape[2]
    # The keys that a row sees move with it: where both ends see some, all do.
    ends = (call.keys_of(row, row + 1) for row in (0, rows - 1))
    if all(low < high for low, high in ends):
        return None
    i, j = _positions(call)
    before = i < j[0]
    if call.window is not None:
        before = i <= j[0] - (1 if call.causal else call.window)
        before |= i >= j[-1] + call.window
    return before[None, None]


def load() -> NpuAlibi:
    """Return the kernel.

    Raises:
        UnavailableError: When torch_npu cannot be imported.
    """
    return NpuAlibi(operators())
