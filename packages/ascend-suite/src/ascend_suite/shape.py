"""The shape of a decoder-only transformer and of its training. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["ModelShape"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What `estimate` has to know of a model and of how it is trained.

    Attributes:
        layers: Decoder blocks, over all pipeline stages.
        hidden: Model width.
        heads: Attention heads.
        kv_heads: Heads of keys and values; as many as `heads` when left out.
        head_size: Width of a head; `hidden // heads` when left out.
        ffn: Width of the feed-forward layer; that of the demo's model when left out.
        seq: Tokens in a sequence.
        vocab: Entries of the vocabulary, padding included.
        micro_batch: Sequences in a micro-batch.
        micro_batches: Micro-batches in a step on one data-parallel rank.
        activation: "swiglu" or "gelu".
        norm: "rms" or "layer".
        tied: Whether the embedding is the output layer's weight.
        dropout: Whether dropout is on.
        flash: Whether attention keeps no matrix of scores.
        dtype: Of weights and activations: "float32", "bfloat16" or "float16".
        optimizer: "adamw" (two moments), "sgd" (none) or "momentum" (one).
        masters: Whether the optimizer keeps FP32 masters of the weights.
        tp: Tensor-parallel ranks.
        sequence_parallel: Whether what tensor parallelism leaves whole is cut along the sequence.
        pp: Pipeline stages.
        vpp: Model chunks on each pipeline stage.
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    kv_heads: int | None = None
    head_size: int | None = None
    ffn: int | None = None
    micro_batch: int = 1
    micro_batches: int = 1
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    tied: bool = True
    dropout: bool = False
    flash: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    optimizer: Literal["adamw", "sgd", "momentum"] = "adamw"
    masters: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
