"""Core attention with linear biases, in the form in which megatron-core builds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_ops.functional import alibi_attention, alibi_slopes

__all__ = ["AlibiCoreAttention", "check_alibi"]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)
_KNOWN = {*_CAUSAL, *_PADDED, AttnMaskType.no_mask}


class AlibiCoreAttention(MegatronModule):  # type: ignore[misc] # megatron is not typed
    """`ascend_ops.alibi_attention` in the place of megatron-core's `DotProductAttention`.

    This rank computes its heads, with their slice of the slopes of all heads. Nothing is added to
    the state dict. What hides keys is the kind of mask: a `causal` one hides those behind the
    query, whatever `attention_mask` says (where it says more, as it does where attention is reset
    at the end of a document, the first call is refused); a `padding` one hides the keys that
    `attention_mask`, [batch, 1, 1, keys], marks; `padding_causal` does both.

    Args:
        config: The `TransformerConfig`.
        layer_number: Of the layer, from 1, which says whether its window is limited.
        attn_mask_type: What hides keys, where a call does not say.
        attention_type: "self" or "cross"; not used.
        attention_dropout: That of the config when left out.
        softmax_scale: The inverse root of the head size when left out.
        cp_comm_type: Not used.
        pg_collection: Has the group of tensor parallelism, `tp`; megatron-core's own when left out.
        backend: See `ascend_ops.alibi_attention`.

    Raises:
        ConfigError: When the config asks for what the operator does not do.
    """

    slopes: Tensor

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(config=config)
        check_alibi(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.window = _window(config, layer_number)
        self.backend = backend
        here = config.num_attention_heads // pg_collection.tp.size()
        self._first = here * pg_collection.tp.rank()
        self._heads = config.num_attention_heads
        self._mask_seen = False
        slopes = alibi_slopes(self._heads, start=self._first, stop=self._first + here)
        self.register_buffer("slopes", slopes, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlibiCoreAttention:
        """Move as modules do; the slopes stay those of FP32 in a model of BF16."""
        super()._apply(fn, recurse)
        stop = self._first + len(self.slopes)
        device = self.slopes.device
        self.slopes = alibi_slopes(self._heads, start=self._first, stop=stop, device=device)
        return self

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [Sq, batch, heads of this rank, head size].
            key: [Skv, batch, groups of this rank, head size].
            value: [Skv, batch, groups of this rank, head size].
            attention_mask: True for what is hidden; see the class.
            attn_mask_type: What hides keys; that of the constructor when left out.
            attention_bias: Refused.
            packed_seq_params: Refused.

        Returns:
            [Sq, batch, heads * head size].

        Raises:
            ConfigError: When the call asks for what the operator does not do, dropout in training
                among it.
        """
        kind = attn_mask_type or self.attn_mask_type
        self._check_call(kind, attention_bias, packed_seq_params)
        mask = None
        if kind in _PADDED and attention_mask is not None:
            mask = ~_of_keys(attention_mask, query.shape[1], key.shape[0])
        elif kind == AttnMaskType.causal and attention_mask is not None:
            self._check_causal(attention_mask)
        out: Tensor = alibi_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            self.slopes,
            causal=kind in _CAUSAL,
            window=self.window,
            scale=self.softmax_scale,
            mask=mask,
            backend=self.backend,
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _check_call(self, kind: AttnMaskType, bias: Any, packed: Any) -> None:
        if self.dropout and self.training:
            raise _cannot(
                f"attention_dropout is {self.dropout}",
                "it drops no weights of attention.",
                "use attention_dropout=0.0; hidden_dropout may stay.",
            )
        if kind not in _KNOWN:
            raise _cannot(
                f"the mask is {kind.name}",
                "it hides keys by position and by padding alone.",
                "use AttnMaskType.causal, padding, padding_causal or no_mask.",
            )
        if bias is not None or packed is not None:
            raise _cannot(
                "attention_bias or packed_seq_params is given",
                "its bias is that of ALiBi, and its sequences are one for each item of the batch.",
                "leave them out, and use the layout sbhd.",
            )

    def _check_causal(self, attention_mask: Tensor) -> None:
        """Look once whether the mask is the causal one, which waits for the device."""
        if self._mask_seen or self.window is not None:
            return
        rows, keys = attention_mask.shape[-2:]
        ahead = torch.ones_like(attention_mask, dtype=torch.bool).triu(1 + keys - rows)
        if not torch.equal(attention_mask.bool(), ahead):
            raise _cannot(
                "attention_mask is not the causal one",
                "with AttnMaskType.causal it hides the keys behind a query, and no others.",
                "pass no mask, do not reset attention at the end of documents, and use "
                "AttnMaskType.padding_causal for padding.",
            )
        self._mask_seen = True


def check_alibi(config: Any) -> None:
    """Refuse a `TransformerConfig` that asks for what `alibi_attention` does not do.

    Raises:
        ConfigError: Names the option.
    """
    if config.context_parallel_size > 1:
        raise _cannot(
            f"context_parallel_size is {config.context_parallel_size}",
            "a rank has chunks of the sequence from several places, and is not told from which.",
            "use context_parallel_size=1, or call ascend_ops.alibi_attention with q_start and "
            "kv_start.",
        )
    if config.softmax_type != "vanilla":
        raise _cannot(
            f"softmax_type is {config.softmax_type!r}",
            "its softmax has no offset.",
            'use softmax_type="vanilla".',
        )


def _window(config: Any, layer_number: int) -> int | None:
    """How many keys a query sees on each side, itself counted."""
    window, skip = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(window, skip, layer_number):
        return None
    before, after = window
    if after not in (0, before):
        raise _cannot(
            f"window_size is {window}",
            "a window reaches as far behind a query as before it, or ends at the query.",
            "use (n, 0) with a causal mask, or (n, n).",
        )
    return None if before < 0 else before + 1


def _of_keys(attention_mask: Tensor, batch: int, keys: int) -> Tensor:
    """The mask of padding, [batch, keys], True for keys that are hidden."""
    if attention_mask.dim() != 4 or attention_mask.shape[1:3] != (1, 1):
        raise _cannot(
            f"attention_mask is {list(attention_mask.shape)}",
            "a mask of padding says of each key of each item whether it is hidden.",
            f"give it the shape [{batch}, 1, 1, {keys}].",
        )
    return attention_mask[:, 0, 0].bool().expand(batch, keys)


def _cannot(what: str, why: str, instead: str) -> ConfigError:
    return ConfigError(f"alibi_attention cannot be used: {what}.", why=why, instead=instead)
