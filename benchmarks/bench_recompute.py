"""Recompute against `torch.utils.checkpoint`, on the parts of transformers.

Activations: the rivals checkpoint the activation alone (which saves nothing of its output), the
activation with the second linear layer (the non-reentrant form stops early, before that layer, and
so holds as little as ours; but the model must be rewritten for it), and the whole MLP. Ours is
`recompute_activation(model)` on the untouched model.

Norms: the rivals checkpoint the norm with the linear layer that reads it. Layers: they checkpoint
each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.device import current_backend
from ascend_core.testing import held_bytes
from ascend_recompute import recompute_activation, recompute_layers, recompute_norm
from benchmarks.case import Case, Variant
from benchmarks.steps import Forward, forward_and_backward, random_input


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


class NormAndLinear(nn.Module):
    """A norm with the projection that reads it, as before attention."""

    def __init__(self, hidden: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and project."""
        out: Tensor = self.linear(self.norm(x))
        return out


class Layer(nn.Module):
    """Half of a transformer's layer: norm and MLP, with the residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(hidden), GeluMLP(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Activation(nn.Module):
    """An activation whose consumer lives in another module."""

    def forward(self, h: Tensor) -> Tensor:
        """Apply it."""
        return F.gelu(h)


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`.

    The work of a matrix product grows with the width for each byte of activation, so what the
    rebuilding costs falls with it: the wide cases are as wide as a small language model of today,
    the narrow ones show what is left where the matrices are small.
    """
    hidden, inner, tokens = (64, 256, 32) if quick else (512, 2048, 1024)
    shape = f"{hidden}/{inner}, {tokens} tokens"
    width = f"{2 * hidden}, {tokens} tokens"
    wide = f"{2 * hidden}/{2 * inner}, {tokens} tokens"
    return [
        Case(
            f"gelu MLP {wide}",
            lambda: _against_checkpoint(GeluMLP(2 * hidden, 2 * inner), tokens),
        ),
        Case(
            f"SwiGLU MLP {wide}",
            lambda: _against_checkpoint(GatedMLP(2 * hidden, 2 * inner), tokens),
        ),
        Case(f"gelu MLP {shape}", lambda: _against_checkpoint(GeluMLP(hidden, inner), tokens)),
        Case(f"SwiGLU MLP {shape}", lambda: _against_checkpoint(GatedMLP(hidden, inner), tokens)),
        Case(f"relu MLP {shape} (cannot pay)", lambda: _on_and_off(ReluMLP(hidden, inner), tokens)),
        Case(
            f"consumer in another module {shape}",
            lambda: _on_and_off(_apart(hidden, inner), tokens, modules=(Activation,)),
        ),
        Case(f"LayerNorm and linear {width}", lambda: _norm(nn.LayerNorm, 2 * hidden, tokens)),
        Case(f"RMSNorm and linear {width}", lambda: _norm(nn.RMSNorm, 2 * hidden, tokens)),
        Case(f"4 layers {shape}", lambda: _layers(hidden, tokens)),
        Case("recording 32 sums of 4096 elements", _recording, rounds=25 if quick else 100),
    ]


def _against_checkpoint(mlp: GeluMLP | GatedMLP, tokens: int) -> dict[str, Variant]:
    device = current_backend().device()
    mlp = mlp.to(device)
    ours = copy.deepcopy(mlp)
    recompute_activation(ours)
    x = random_input(tokens, mlp.down.out_features)

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

    variants = {
        "plain": forward_and_backward(mlp, x),
        "recompute_activation": forward_and_backward(ours, x),
    }
    wraps = {
        "activation": around_activation,
        "activation + linear": around_both,
        "MLP": around_all,
    }
    for what, wrap in wraps.items():
        for form, reentrant in (("non-reentrant", False), ("reentrant", True)):
            variants[f"checkpoint({what}), {form}"] = forward_and_backward(wrap(reentrant), x)
    return variants


def _norm(norm: Callable[[int], nn.Module], hidden: int, tokens: int) -> dict[str, Variant]:
    # Its input is made by an operator, as the hidden state is.
    model = NormAndLinear(hidden, norm).to(current_backend().device())
    ours = copy.deepcopy(model)
    recompute_norm(ours)
    x = random_input(tokens, hidden)

    def around(reentrant: bool) -> Forward:
        return lambda x: checkpoint(model, x * 1.0, use_reentrant=reentrant)

    return {
        "plain": forward_and_backward(lambda x: model(x * 1.0), x),
        "recompute_norm": forward_and_backward(lambda x: ours(x * 1.0), x),
        "checkpoint(norm + linear), non-reentrant": forward_and_backward(
            around(reentrant=False), x
        ),
        "checkpoint(norm + linear), reentrant": forward_and_backward(around(reentrant=True), x),
    }


def _layers(hidden: int, tokens: int) -> dict[str, Variant]:
    device = current_backend().device()
    model = nn.Sequential(*(Layer(hidden) for _ in range(4))).to(device)
    block, uniform = copy.deepcopy(model), copy.deepcopy(model)
    recompute_layers(block)
    recompute_layers(uniform, method="uniform", num_layers=2)
    x = random_input(tokens, hidden)

    def around(reentrant: bool) -> Forward:
        def forward(x: Tensor) -> Tensor:
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

        return forward

    return {
        "plain": forward_and_backward(model, x),
        "recompute_layers, block": forward_and_backward(block, x),
        "recompute_layers, uniform of 2": forward_and_backward(uniform, x),
        "checkpoint(layer), non-reentrant": forward_and_backward(around(reentrant=False), x),
        "checkpoint(layer), reentrant": forward_and_backward(around(reentrant=True), x),
    }


def _on_and_off(
    model: nn.Module,
    tokens: int,
    modules: tuple[type[nn.Module], ...] | None = None,
    backward: bool = True,
) -> dict[str, Variant]:
    device = current_backend().device()
    model = model.to(device)
    ours = copy.deepcopy(model)
    recompute_activation(ours, modules=modules)
    x = random_input(tokens, next(model.parameters()).shape[-1])
    if backward:
        return {
            "plain": forward_and_backward(model, x),
            "recompute_activation": forward_and_backward(ours, x),
        }
    return {"plain": _forward_only(model, x), "recompute_activation": _forward_only(ours, x)}


def _recording() -> dict[str, Variant]:
    """What recording alone costs: 32 operators, of which autograd saves nothing."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(32):
                x = x + 1.0
            return x

    return _on_and_off(Sums(), 64, modules=(Sums,), backward=False)


def _apart(hidden: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, inner), Activation(), nn.Linear(inner, hidden))


def _forward_only(forward: Forward, x: Tensor) -> Variant:
    return Variant(lambda: forward(x), lambda: held_bytes(lambda: forward(x)))
