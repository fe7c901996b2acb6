"""A byte-level GPT, plain PyTorch from top to bottom: it knows of no memory feature.

Shape suffixes, here and in the demo's other files:

    B  sequences in a batch        D  hidden size (model width)     N  attention heads
    S  tokens in a sequence        F  feed-forward size (4 D)       K  head size (D / N)
    V  vocabulary (256 bytes)

The activation functions are functional code inside `forward`, as in most models that people
train: the product `silu(gate) * up` is the output of no module.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ConfigError

__all__ = ["GPT", "Attention", "Block", "GPTConfig", "GatedMLP", "GeluMLP"]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        layers: Number of decoder blocks.
        hidden: Model width D.
        heads: Attention heads N; they divide `hidden`.
        seq: Longest sequence S that the position embedding covers.
        vocabulary: Number of token values V.
        expansion: Feed-forward size F as a multiple of D.
        activation: `"swiglu"` gates the feed-forward layer, `"gelu"` does not.
        norm: The kind of normalisation before each half of a block.
        dropout: Probability with which an element of the embedding, and of what either half of a
            block adds to the residual, is dropped.

    Raises:
        ConfigError: When `heads` does not divide `hidden`.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 256
    vocabulary: int = 256
    expansion: int = 4
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden={self.hidden} cannot be split into heads={self.heads}.",
                why="every attention head has the same whole number of channels.",
                instead=f"choose a multiple of {self.heads} for hidden.",
            )


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.seq, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = _norm(config)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self._initialise()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Predict the next byte at every position.

        Args:
            tokens_BS: Byte values, int64, with S no longer than `config.seq`.

        Returns:
            logits_BSV, in the dtype of the weights.
        """
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.token_embedding(tokens_BS) + self.position_embedding(positions_S)
        x_BSD = self.dropout(x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV: Tensor = self.head(self.final_norm(x_BSD))
        return logits_BSV

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of `targets_BS` (int64) given `tokens_BS`."""
        logits_BSV = self(tokens_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise as GPT-2 does: 0.02 everywhere, less where a block adds to the residual."""
        residual = {f"blocks.{i}.{end}" for i in range(self.config.layers) for end in _RESIDUAL}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * self.config.layers) ** -0.5 if name in residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)


_RESIDUAL = ("self_attention.output.weight", "mlp.down.weight")


class Block(nn.Module):
    """One decoder block: attention and a feed-forward layer, each behind a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_norm = _norm(config)
        self.self_attention = Attention(config)
        self.post_attention_norm = _norm(config)
        self.mlp = GatedMLP(config) if config.activation == "swiglu" else GeluMLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return x_BSD with what attention and the feed-forward layer add to it."""
        x_BSD = x_BSD + self.dropout(self.self_attention(self.input_norm(x_BSD)))
        x_BSD = x_BSD + self.dropout(self.mlp(self.post_attention_norm(x_BSD)))
        return x_BSD


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Let every position see itself and those before it; returns a tensor shaped as x_BSD."""
        heads_BSNK = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x_BSD).chunk(3, -1))
        q_BNSK, k_BNSK, v_BNSK = (part_BSNK.transpose(1, 2) for part_BSNK in heads_BSNK)
        mixed_BNSK = F.scaled_dot_product_attention(q_BNSK, k_BNSK, v_BNSK, is_causal=True)
        out_BSD: Tensor = self.output(mixed_BNSK.transpose(1, 2).flatten(-2))
        return out_BSD


class GatedMLP(nn.Module):
    """The SwiGLU feed-forward layer, `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.expansion * config.hidden
        self.gate = nn.Linear(config.hidden, inner, bias=False)
        self.up = nn.Linear(config.hidden, inner, bias=False)
        self.down = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor shaped as x_BSD.

        Plain autograd saves four tensors of shape BSF here: `gate(x)`, `silu(gate(x))`, `up(x)`
        and their product.
        """
        h_BSF = F.silu(self.gate(x_BSD)) * self.up(x_BSD)
        out_BSD: Tensor = self.down(h_BSF)
        return out_BSD


class GeluMLP(nn.Module):
    """The classic feed-forward layer, `down(gelu(up(x)))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.expansion * config.hidden
        self.up = nn.Linear(config.hidden, inner)
        self.down = nn.Linear(inner, config.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor shaped as x_BSD; plain autograd saves `up(x)` and its gelu, both BSF."""
        out_BSD: Tensor = self.down(F.gelu(self.up(x_BSD)))
        return out_BSD


def _norm(config: GPTConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden)
