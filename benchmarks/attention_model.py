"""The transformer that the benchmarks of swap-attention train."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Model"]


class Attention(nn.Module):
    """Self-attention, as most write it.

    Args:
        width: Of the hidden states.
        heads: How many.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions. `x` and the result are [batch, sequence, width]."""
        heads = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*heads)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A layer of a transformer; see `Attention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Both halves. `x` and the result are [batch, sequence, width]."""
        x = x + self.self_attention(self.input_norm(x))
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Model(nn.Module):
    """Layers alone."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """All of them. `x` and the result are [batch, sequence, width]."""
        for layer in self.layers:
            x = layer(x)
        return x
