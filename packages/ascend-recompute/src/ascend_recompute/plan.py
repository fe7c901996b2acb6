"""A chosen recompute: which layers do what, what was measured for it, and how to turn it on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.stack import find_stack
from ascend_recompute._options import check_model
from ascend_recompute.activation import recompute_activation
from ascend_recompute.layers import recompute_layers
from ascend_recompute.norm import recompute_norm

__all__ = ["PlannedRecompute", "RecomputePlan"]

_FORMAT = "ascend-recompute-plan"
_VERSION = 1
_POSITIONS = ("whole", "activation", "norm")
# In this order a verb leaves alone what an earlier one has taken.
_VERBS: dict[str, Callable[..., Any]] = {
    "whole": recompute_layers,
    "activation": recompute_activation,
    "norm": recompute_norm,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """What `recompute_to_fit` chose, for a model with so many layers.

    Attributes:
        num_layers: How many layers the model has (in this pipeline stage).
        whole: The layers, by position from 0, that run again as a whole (`recompute_layers`).
        activation: The layers in which MLP activations are rebuilt (`recompute_activation`).
        norm: The layers in which outputs of norms are rebuilt (`recompute_norm`).
        budget_bytes: What may be held between forward and backward.
        plain_bytes: What was held without recompute, measured.
        held_bytes: What was held with this plan, measured.
        seconds: What backward computes again in one step takes, as measured for each part.
        seconds_at_least: No other choice that fits costs less than this, by those measurements.
        exact: Whether `seconds` is known to be the least, and so equal to it.
    """

    num_layers: int
    whole: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    norm: tuple[int, ...] = ()
    budget_bytes: int
    plain_bytes: int
    held_bytes: int
    seconds: float = 0.0
    seconds_at_least: float = 0.0
    exact: bool = True

    def __post_init__(self) -> None:
        """Check that the parts fit together.

        Raises:
            ConfigError: When a layer is recomputed in two ways or does not exist, or a field is
                of another type.
        """
        for name in ("num_layers", "budget_bytes", "plain_bytes", "held_bytes"):
            if not _is_count(getattr(self, name)):
                raise _bad_field(name, getattr(self, name), "it is a whole number, not below 0.")
        for name in ("seconds", "seconds_at_least"):
            if not _is_duration(getattr(self, name)):
                raise _bad_field(name, getattr(self, name), "it is a number of seconds.")
        if not isinstance(self.exact, bool):
            raise _bad_field("exact", self.exact, "it is True or False.")
        for name in _POSITIONS:
            layers = getattr(self, name)
            if not isinstance(layers, tuple) or not all(map(self._has, layers)):
                raise _bad_field(name, layers, f"it holds positions below {self.num_layers}.")
            if len(set(layers)) < len(layers):
                raise _bad_field(name, layers, "it holds each position once.")
        both = sorted(set(self.whole).intersection(self.activation + self.norm))
        if both:
            raise ConfigError(
                f"layer {both[0]} of a recompute plan is recomputed in two ways.",
                why="a layer that runs again as a whole has nothing else to rebuild.",
                instead="leave it out of whole, or out of activation and norm.",
            )

    def _has(self, layer: object) -> bool:
        return _is_count(layer) and layer < self.num_layers  # type: ignore[operator]

    def apply(self, model: nn.Module) -> PlannedRecompute:
        """Turn the plan on.

        Args:
            model: The model that was measured, or one with as many layers.

        Returns:
            A handle: `report()` says how many bytes each part no longer holds, `remove()` undoes.

        Raises:
            ConfigError: When the model has another number of layers, has nothing to rebuild where
                the plan wants it, or is recomputed already. The model is then as before.
        """
        check_model(self.apply, model)
        stack = find_stack(model)
        count = 0 if stack is None else len(stack.layers)
        if count != self.num_layers:
            raise ConfigError(
                f"this plan is for {self.num_layers} layers, and this {type(model).__name__} has "
                f"{count}.",
                why="it says by position what each layer does.",
                instead="measure this model with recompute_to_fit.",
            )
        handles = {}
        with contextlib.ExitStack() as undo:
            for name, verb in _VERBS.items():
                if getattr(self, name):
                    handles[name] = verb(model, layers=getattr(self, name))
                    undo.callback(handles[name].remove)
            return PlannedRecompute(handles, undo.pop_all())

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        document = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecomputePlan:
        """Read a plan that `save` wrote.

        Raises:
            ConfigError: When the file holds something else, or a plan of a later version.
            OSError: When the file cannot be read.
        """
        try:
            document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if document.pop("format") != _FORMAT:
                raise ValueError("its format is another one")
            version = document.pop("version")
            if type(version) is not int or version != _VERSION:
                raise ValueError(f"its version is {version!r}, and this release reads {_VERSION}")
            for name in _POSITIONS:
                document[name] = tuple(document[name])
            return cls(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no recompute plan that can be read here.",
                why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                instead="read a file that RecomputePlan.save wrote, or measure again with "
                "recompute_to_fit.",
            ) from error


class PlannedRecompute:
    """The handle of a plan that is on."""

    def __init__(self, handles: dict[str, Any], undo: contextlib.ExitStack) -> None:
        self._handles = handles
        self._undo = undo

    def report(self) -> dict[str, Any]:
        """What was not held in the latest forward that ran with gradients on.

        Returns:
            `whole`, `activation` and `norm`: the reports of those that are on; `saved_bytes`:
            their sum.
        """
        reports = {name: handle.report() for name, handle in self._handles.items()}
        return {**reports, "saved_bytes": sum(part["saved_bytes"] for part in reports.values())}

    def remove(self) -> None:
        """Turn everything off. Graphs that were made before can still run backward."""
        self._undo.close()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _bad_field(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(
        f"{name} of a recompute plan is {value!r}.",
        why=why,
        instead="let recompute_to_fit make the plan, and RecomputePlan.load read it.",
    )
