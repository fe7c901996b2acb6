"""Features that the tests give to the demo: honest ones, wrong ones and impossible ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import ConfigError, NothingToDoError, UnavailableError
from ascend_core.feature import Feature
from ascend_suite.demo.gpt import GPT, GatedMLP


@dataclasses.dataclass(frozen=True)
class Options:
    """No option at all."""


class Undo:
    def __init__(self, *actions: Callable[[], None]) -> None:
        self._actions = list(actions)

    def report(self) -> Mapping[str, Any]:
        return {"undone": not self._actions, "share": 0.5}

    def remove(self) -> None:
        while self._actions:
            self._actions.pop()()


class CheckpointedMLP(GatedMLP):
    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x_BSD, use_reentrant=False)


def checkpoint_mlps(model: GPT, options: Options) -> Undo:
    for block in model.blocks:
        block.mlp.__class__ = CheckpointedMLP

    def undo() -> None:
        for block in model.blocks:
            block.mlp.__class__ = GatedMLP

    return Undo(undo)


def negate_one_gradient(model: GPT, options: Options) -> Undo:
    weight = model.blocks[0].self_attention.output.weight
    return Undo(weight.register_hook(torch.neg).remove)


def climb(model: GPT, options: Options) -> Undo:
    return Undo(*(p.register_hook(torch.neg).remove for p in model.parameters()))


def want_a_petabyte(model: GPT, options: Options) -> Undo:
    def allocate(model: torch.nn.Module, _: object) -> None:
        torch.empty(2**50, device=next(model.parameters()).device)

    return Undo(model.register_forward_pre_hook(allocate).remove)


def want_other_hardware(model: GPT, options: Options) -> Undo:
    raise UnavailableError("this needs a [quantum] device.")


def dislike_the_model(model: GPT, options: Options) -> Undo:
    raise ConfigError("this model has no such layer.", instead="choose another layer.")


def find_nothing(model: GPT, options: Options) -> Undo:
    raise NothingToDoError("this model has nothing of the kind.")


class LazyAdamW(torch.optim.AdamW):
    """An optimizer that is its own handle, as a facade is."""

    removed = False

    def report(self) -> Mapping[str, Any]:
        return {}

    def remove(self) -> None:
        self.removed = True


def facade(optimizer: torch.optim.Optimizer, options: Options) -> LazyAdamW:
    return LazyAdamW(optimizer.param_groups)


def _feature(
    name: str,
    verb: Callable[..., object],
    *,
    bitwise: bool = True,
    target: Literal["model", "optimizer"] = "model",
) -> Feature:
    where = f"{verb.__module__}:{verb.__name__}"
    return Feature(name, "For tests.", Options, where, target, bitwise)


HONEST = _feature("honest", checkpoint_mlps)
WRONG = _feature("wrong", negate_one_gradient)
OPENLY_WRONG = _feature("openly-wrong", negate_one_gradient, bitwise=False)
CLIMBING = _feature("climbing", climb, bitwise=False)
GREEDY = _feature("greedy", want_a_petabyte)
ABSENT = _feature("absent", want_other_hardware)
IDLE = _feature("idle", find_nothing)
PICKY = _feature("picky", dislike_the_model)
FACADE = _feature("facade", facade, target="optimizer")
