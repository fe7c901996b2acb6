"""The shape of a decoder-only transformer and of its training. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_core.errors import ConfigError
from ascend_core.options import check_count, check_one_of

__all__ = ["ITEM_BYTES", "ModelShape"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_COUNTS = (
    "layers", "hidden", "heads", "seq", "vocab", "micro_batch", "micro_batches",
    "tp", "pp", "vpp", "dp", "cp",
)  # fmt: skip
_SWITCHES = (
    "tied", "dropout", "flash", "fp32_loss", "fused_step", "masters", "sequence_parallel",
)  # fmt: skip
_WORDS = {
    "activation": ("swiglu", "gelu"),
    "norm": ("rms", "layer"),
    "positions": ("learned", "rotary", "none"),
    "dtype": tuple(ITEM_BYTES),
    "optimizer": ("adamw", "sgd", "momentum"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What `estimate` has to know of a model and of how it is trained.

    Attributes:
        layers: Decoder blocks, over all pipeline stages.
        hidden: Model width.
        heads: Attention heads.
        kv_heads: Heads of keys and values; as many as `heads` when left out.
        head_size: Width of a head; `hidden // heads` when left out.
        ffn: Width of the feed-forward layer; that of the demo's model, `4 * hidden`, when left out.
        seq: Tokens in a sequence.
        vocab: Entries of the vocabulary, padding included.
        micro_batch: Sequences in a micro-batch.
        micro_batches: Micro-batches in a step on one data-parallel rank.
        activation: "swiglu" or "gelu".
        norm: "rms" or "layer".
        positions: "learned" embeddings, as many as `seq`; "rotary"; or "none".
        biases: Which linear layers have one: "none", "mlp" or "all". When left out as the demo's
            model has them: those of a "gelu" MLP.
        tied: Whether the embedding is the output layer's weight.
        dropout: Whether dropout is on.
        flash: Whether attention keeps no matrix of scores.
        dtype: Of weights and activations: "float32", "bfloat16" or "float16".
        fp32_loss: Whether logits are cast to FP32 for the loss, as megatron-core does.
        optimizer: "adamw" (two moments), "sgd" (none) or "momentum" (one).
        fused_step: Whether the optimizer is torch's fused form, whose step has no temporaries.
        masters: Whether the optimizer keeps FP32 masters of the weights.
        tp: Tensor-parallel ranks.
        sequence_parallel: Whether what tensor parallelism leaves whole is cut along the sequence.
        pp: Pipeline stages.
        vpp: Model chunks on each pipeline stage.
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.

    Raises:
        ConfigError: When a value cannot be right, or one does not divide another that it must.
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
    positions: Literal["learned", "rotary", "none"] = "learned"
    biases: Literal["none", "mlp", "all"] | None = None
    tied: bool = True
    dropout: bool = False
    flash: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    fp32_loss: bool = False
    optimizer: Literal["adamw", "sgd", "momentum"] = "adamw"
    fused_step: bool = False
    masters: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        for name in ("kv_heads", "head_size", "ffn"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in _SWITCHES:
            self._check_switch(name, getattr(self, name))
        for name, known in _WORDS.items():
            check_one_of(name, getattr(self, name), known)
        if self.biases is not None:
            check_one_of("biases", self.biases, ("none", "mlp", "all"))
        if self.head_size is None:
            self._check_division("hidden", self.hidden, "heads", self.heads)
        self._check_division("heads", self.heads, "kv_heads", self.kv_heads or self.heads)
        for name, number in (("heads", self.heads), ("ffn", self.ffn_size)):
            self._check_division(name, number, "tp", self.tp)
        self._check_division("layers", self.layers, "pp * vpp", self.pp * self.vpp)
        self._check_division("seq", self.seq, "cp", self.cp)
        if self.sequence_parallel:
            self._check_division("seq", self.seq, "cp * tp", self.cp * self.tp)

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query_size(self) -> int:
        """The width of all queries of a token."""
        return self.heads * self.head_width

    @property
    def key_size(self) -> int:
        """The width of all keys of a token; values are as wide."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def ffn_size(self) -> int:
        """The width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden

    @property
    def mlp_biases(self) -> bool:
        """Whether the linear layers of MLPs have biases."""
        return (self.biases or ("mlp" if self.activation == "gelu" else "none")) != "none"

    @property
    def attention_biases(self) -> bool:
        """Whether the linear layers of attention have biases."""
        return self.biases == "all"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of weights and activations."""
        return ITEM_BYTES[self.dtype]

    def _check_switch(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}.", instead="use True or False.")

    def _check_division(self, name: str, number: int, parts: str, count: int) -> None:
        if number % count:
            raise ConfigError(
                f"{name}={number} cannot be split into {parts}={count}.",
                why="every part is as large as the others.",
                instead=f"choose a multiple of {count} for {name}.",
            )
