"""Our ways to leave out an output against megatron-core's `CheckpointWithoutOutput`.

On a dense MLP the activation's output is left out, before attention the norm's. By hand, with
megatron-core's class and with ours, the model's forward is rewritten; `recompute_activation` and
`recompute_norm` leave it as it is; and torch's non-reentrant checkpoint, around the function and
the linear layer that reads its output, is the strongest rival that needs neither of them.

The last case computes next to nothing, so that its times are those of the bookkeeping: what a
variant takes beyond plain is the overhead of one call with its hook.

Needs megatron-core. Without CUDA it runs with the stand-ins of the integration tests: there the
state of the device's generator is the CPU's, read and set a second time (5056 bytes, 1 to 2 us).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.device import current_backend
from ascend_recompute import CheckpointWithoutOutput, recompute_activation, recompute_norm
from benchmarks.case import Case, Variant
from benchmarks.steps import forward_and_backward, random_input

TurnOn = Callable[[nn.Module], object]


class Pair(nn.Module):
    """`linear(function(before(x)))`: the function's output is what may be left out."""

    def __init__(self, before: nn.Module, function: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.before, self.function, self.linear = before, function, linear

    def forward(self, x: Tensor) -> Tensor:
        """All of it."""
        out: Tensor = self.linear(self.function(self.before(x)))
        return out

    def by_hand(self, make: Callable[[], Any], x: Tensor) -> Tensor:
        """The same, as somebody writes it who has a `CheckpointWithoutOutput` to call."""
        ours = make()
        flags = (False,) if isinstance(ours, CheckpointWithoutOutput) else ()
        out: Tensor = self.linear(ours.checkpoint(self.function, *flags, self.before(x)))
        ours.discard_output_and_register_recompute(out)
        return out

    def with_checkpoint(self, x: Tensor) -> Tensor:
        """The same with torch's checkpoint around the function and its reader."""
        out: Tensor = checkpoint(
            lambda h: self.linear(self.function(h)), self.before(x), use_reentrant=False
        )
        return out


class Gelu(nn.Module):
    """The activation function as a module."""

    def forward(self, h: Tensor) -> Tensor:
        """Apply it."""
        return F.gelu(h)


class Scale(nn.Module):
    """Stands for the operator that makes the hidden state a norm reads."""

    def forward(self, x: Tensor) -> Tensor:
        """Make it."""
        return x * 1.0


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    hidden, tokens = (32, 32) if quick else (512, 1024)
    found = [_mlp(2 * hidden, tokens), _mlp(hidden, tokens)]
    for name, norm in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
        found.append(_norm(f"{name} and linear", norm, 2 * hidden, tokens))
    return [*found, _mlp(16, 8, name="one call of gelu 16/64, 8 tokens", rounds=200)]


def _mlp(hidden: int, tokens: int, name: str | None = None, rounds: int = 25) -> Case:
    def build() -> Pair:
        return Pair(nn.Linear(hidden, 4 * hidden), Gelu(), nn.Linear(4 * hidden, hidden))

    def turn_on(model: nn.Module) -> object:
        return recompute_activation(model, modules=(Pair,))

    label = name or f"gelu MLP {hidden}/{4 * hidden}, {tokens} tokens"
    return _case(label, build, turn_on, random_input(tokens, hidden), rounds)


def _norm(name: str, norm: Callable[[int], nn.Module], hidden: int, tokens: int) -> Case:
    def build() -> Pair:
        return Pair(Scale(), norm(hidden), nn.Linear(hidden, 3 * hidden))

    label = f"{name} {hidden}, {tokens} tokens"
    return _case(label, build, recompute_norm, random_input(tokens, hidden), 25)


def _case(name: str, build: Callable[[], Pair], turn_on: TurnOn, x: Tensor, rounds: int) -> Case:
    def variants() -> dict[str, Variant]:
        from megatron.core.tensor_parallel import random

        model = build().to(x.device)
        untouched = copy.deepcopy(model)
        turn_on(untouched)

        def megatrons() -> Any:
            return random.CheckpointWithoutOutput(fp8=None)  # its default needs an engine for FP8

        forwards = {
            "plain": model,
            "recompute_* on the untouched model": untouched,
            "our CheckpointWithoutOutput": lambda x: model.by_hand(CheckpointWithoutOutput, x),
            "megatron's CheckpointWithoutOutput": lambda x: model.by_hand(megatrons, x),
            "checkpoint(function + linear), non-reentrant": model.with_checkpoint,
        }
        return {name: forward_and_backward(forward, x) for name, forward in forwards.items()}

    return Case(name, variants, rounds=rounds, around=_megatron)


def _megatron() -> AbstractContextManager[object]:
    if current_backend().name == "cuda":
        return contextlib.nullcontext()
    from tests_integration.megatron_cpu import megatron_on_cpu

    return megatron_on_cpu()
