"""Activation recompute against `torch.utils.checkpoint`, on the MLPs of transformers.

The rivals checkpoint the activation alone (which saves nothing of its output), the activation with
the second linear layer (the non-reentrant form stops early, before that layer, and so holds as
little as ours; but the model must be rewritten for it), and the whole MLP. Ours is
`recompute_activation(model)` on the untouched model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.device import current_backend
from ascend_core.testing import held_bytes
from ascend_recompute import recompute_activation
from benchmarks.case import Case, Variant

Forward = Callable[[Tensor], Tensor]


class GeluMLP(nn.Module):
    """`down(gelu(up(x)))`, in pieces that a rival may wrap."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What comes before the activation."""
        return (self.up(x),)

    def activation(self, h: Tensor) -> Tensor:
        """The activation function."""
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        """The whole MLP."""
        out: Tensor = self.down(self.activation(*self.before(x)))
        return out


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, in pieces that a rival may wrap."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What comes before the activation."""
        return self.gate(x), self.up(x)

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated activation function."""
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        """The whole MLP."""
        out: Tensor = self.down(self.activation(*self.before(x)))
        return out


class ReluMLP(GeluMLP):
    """Its activation saves its own output and nothing else: rebuilding cannot pay."""

    def activation(self, h: Tensor) -> Tensor:
        """The activation function."""
        return F.relu(h)


class Activation(nn.Module):
    """An activation whose consumer lives in another module."""

    def forward(self, h: Tensor) -> Tensor:
        """Apply it."""
        return F.gelu(h)


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    hidden, inner, tokens = (64, 256, 32) if quick else (512, 2048, 1024)
    shape = f"{hidden}/{inner}, {tokens} tokens"
    return [
        Case(f"gelu MLP {shape}", lambda: _against_checkpoint(GeluMLP(hidden, inner), tokens)),
        Case(f"SwiGLU MLP {shape}", lambda: _against_checkpoint(GatedMLP(hidden, inner), tokens)),
        Case(f"relu MLP {shape} (cannot pay)", lambda: _on_and_off(ReluMLP(hidden, inner), tokens)),
        Case(
            f"consumer in another module {shape}",
            lambda: _on_and_off(_apart(hidden, inner), tokens, modules=(Activation,)),
        ),
        Case("32 cheap operators on 64 elements", _tiny, rounds=25 if quick else 200),
    ]


def _against_checkpoint(mlp: GeluMLP | GatedMLP, tokens: int) -> dict[str, Variant]:
    device = current_backend().device()
    mlp = mlp.to(device)
    ours = type(mlp)(mlp.down.out_features, mlp.down.in_features).to(device)
    recompute_activation(ours, modules=None)
    x = _input(tokens, mlp.down.out_features)

    def around_activation(reentrant: bool) -> Forward:
        return lambda x: mlp.down(
            checkpoint(mlp.activation, *mlp.before(x), use_reentrant=reentrant)
        )

    def around_both(reentrant: bool) -> Forward:
        return lambda x: checkpoint(
            lambda *parts: mlp.down(mlp.activation(*parts)),
            *mlp.before(x),
            use_reentrant=reentrant,
        )

    def around_all(reentrant: bool) -> Forward:
        return lambda x: checkpoint(mlp, x, use_reentrant=reentrant)

    variants = {"plain": _variant(mlp, x), "recompute_activation": _variant(ours, x)}
    wraps = {
        "activation": around_activation,
        "activation + linear": around_both,
        "MLP": around_all,
    }
    for what, wrap in wraps.items():
        for form, reentrant in (("non-reentrant", False), ("reentrant", True)):
            variants[f"checkpoint({what}), {form}"] = _variant(wrap(reentrant), x)
    return variants


def _on_and_off(
    model: nn.Module, tokens: int, modules: tuple[type[nn.Module], ...] | None = None
) -> dict[str, Variant]:
    device = current_backend().device()
    model = model.to(device)
    x = _input(tokens, next(model.parameters()).shape[-1])
    handle = recompute_activation(model, modules=modules)
    handle.remove()

    def step_with_ours() -> None:
        handle = recompute_activation(model, modules=modules)
        _step(model, x)
        handle.remove()

    def held_by_ours() -> int:
        handle = recompute_activation(model, modules=modules)
        held = held_bytes(lambda: model(x))
        handle.remove()
        return held

    return {
        "plain": _variant(model, x),
        "recompute_activation": Variant(step_with_ours, held_by_ours),
    }


def _tiny() -> dict[str, Variant]:
    """What recording costs: small tensors, of which nothing is dropped."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 8), *[nn.SiLU() for _ in range(32)])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mlp(x)
            return out

    return _on_and_off(Chain(), 8)


def _apart(hidden: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, inner), Activation(), nn.Linear(inner, hidden))


def _input(tokens: int, hidden: int) -> Tensor:
    return torch.randn(tokens, hidden, device=current_backend().device(), requires_grad=True)


def _variant(forward: Forward, x: Tensor) -> Variant:
    return Variant(lambda: _step(forward, x), lambda: held_bytes(lambda: forward(x)))


def _step(forward: Forward, x: Tensor) -> None:
    inputs = x.detach().requires_grad_()
    forward(inputs).sum().backward()
