"""Models written as Hugging Face's are: functional code inside forwards.

The modules follow those of transformers 5.24; the library itself would be a larger dependency than
all others but torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, SEQUENCE, HIDDEN, HEADS, INNER, LAYERS, VOCABULARY = 2, 16, 32, 4, 96, 3, 64


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.gate_proj, self.up_proj = linear(HIDDEN, INNER), linear(HIDDEN, INNER)
        self.down_proj = linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Conv1D(nn.Module):
    """A linear layer by addmm, whose weight lies the other way round."""

    def __init__(self, width_out: int, width_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class GPT2MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * HIDDEN, HIDDEN), Conv1D(HIDDEN, 4 * HIDDEN)
        self.act, self.dropout = NewGELU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.o_proj = Conv1D(3 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        shape = (BATCH, SEQUENCE, 3, HEADS, HIDDEN // HEADS)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        out: Tensor = self.o_proj(heads.transpose(1, 2).reshape(BATCH, SEQUENCE, HIDDEN))
        return out


class Layer(nn.Module):
    """Checkpoints its own call when told to, as transformers' GradientCheckpointingLayer does."""

    gradient_checkpointing: dict[str, Any] | None = None

    def __init__(self, norm: Callable[[], nn.Module], mlp: nn.Module, dropout: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = Attention(dropout), mlp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(super().__call__, **kwargs)
        if self.gradient_checkpointing and self.training:
            return checkpoint(call, *args, **self.gradient_checkpointing)
        return call(*args)

    def forward(self, x: Tensor, *, position: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.1) -> None:
        super().__init__()
        llama = kind == "llama"
        norm = LlamaRMSNorm if llama else functools.partial(nn.LayerNorm, HIDDEN)
        mlp = LlamaMLP if llama else functools.partial(GPT2MLP, dropout)
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm, mlp(), dropout) for _ in range(LAYERS))
        self.norm, self.lm_head = norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        for layer in self.layers:
            layer.gradient_checkpointing = options

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for position, layer in enumerate(self.layers):
            x = layer(x, position=position)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens(_: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss
