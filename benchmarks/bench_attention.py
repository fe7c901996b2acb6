"""swap-attention against torch's `save_on_cpu`, torchtune's `OffloadActivations`, and recompute.

All move what the same modules save. On the CPU nothing overlaps, and what is timed is what the host
does: `save_on_cpu` copies nothing there, as the tensors are on the CPU already, so a pair of hooks
that copies both ways stands beside it. On a device the same cases run with pinned memory; on a
simulated one,

    ascend-sim run --schedule eager -m benchmarks attention

the device's work is done as it is submitted, by the CPU. The overlap of copies with compute is a
benchmark of its own, `attention_timeline`.

The cases of many small tensors compute next to nothing: what a variant takes beyond plain is the
bookkeeping, of 72 saved tensors in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ascend_core.device import current_backend
from ascend_core.scope import around_forward
from ascend_recompute import recompute_layers
from ascend_swap import SwapAttentionConfig, swap_attention
from benchmarks.attention_model import Model
from benchmarks.case import Case, Variant
from benchmarks.steps import forward_and_backward
from benchmarks.torchtune_offload import offload_activations

TurnOn = Callable[[nn.Module], object]


class Sines(nn.Module):
    """A module that saves many tensors, and computes little."""

    def __init__(self, saves: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.saves = saves

    def forward(self, x: Tensor) -> Tensor:
        """Save `x` and what follows of it, `saves` tensors in all."""
        x = x * self.weight
        for _ in range(self.saves - 1):
            x = x.sin()
        return x


class Stack(nn.Module):
    """Layers of nothing but `Sines`."""

    def __init__(self, layers: int, saves: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"self_attention": Sines(saves)}) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for layer in self.layers:
            x = layer["self_attention"](x)
        return x


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    layers, width, tokens = (2, 32, 32) if quick else (4, 256, 256)
    shape = (2, tokens, width)
    label = f"{layers} layers of width {width}, {2 * tokens} tokens"
    small, large = ("72 tensors of 1 KiB", (16, 16)), ("72 tensors of 1 MiB", (512, 512))
    found = [_case(label, lambda: Model(layers, width, 4), shape, 1024)]
    for name, sizes in (small,) if quick else (small, large):
        rounds = 100 if name == small[0] else 15
        found.append(_case(name, lambda: Stack(8, 9), sizes, 1, rounds, replays=False))
    return found


def _case(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    smallest: int,
    rounds: int = 25,
    *,
    replays: bool = True,
) -> Case:
    def variants() -> Mapping[str, Variant]:
        device = current_backend().device()
        x = torch.randn(*shape, device=device, requires_grad=True)
        ways = {"plain": lambda model: None, **_ways(smallest)}
        if replays:
            ways["all layers recomputed"] = recompute_layers
        made = {}
        for way, turn_on in ways.items():
            torch.manual_seed(0)
            model = build().to(device)
            turn_on(model)
            made[way] = forward_and_backward(model, x)
        return made

    return Case(name, variants, rounds=rounds)


def _ways(smallest: int) -> dict[str, TurnOn]:
    on_device = current_backend().name != "cpu"
    config = SwapAttentionConfig(swap_modules="self_attention", min_bytes=smallest, keep_last=0)
    ways: dict[str, TurnOn] = {
        "swap_attention, keep_last=0": lambda model: swap_attention(model, config),
        "save_on_cpu": _around(lambda: save_on_cpu(pin_memory=on_device)),
        "hooks that do nothing": _around(lambda: saved_tensors_hooks(Tensor.detach, _same)),
    }
    if not on_device:
        ways["hooks that copy"] = _around(lambda: saved_tensors_hooks(_copied, Tensor.clone))
    if (kind := offload_activations()) is not None:
        offload = kind(min_offload_size=smallest)
        ways["torchtune's OffloadActivations"] = _around(lambda: offload)
    return ways


def _around(make: Callable[[], AbstractContextManager[object]]) -> TurnOn:
    def turn_on(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith("self_attention"):
                around_forward(module, make)

    return turn_on


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _same(tensor: Tensor) -> Tensor:
    return tensor
