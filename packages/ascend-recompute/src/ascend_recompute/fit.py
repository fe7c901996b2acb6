"""Selective recompute by budget: what recomputing costs is measured, and the least is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.modules import find_mlps, find_norms
from ascend_core.scope import owners
from ascend_core.stack import Named, Stack, find_stack
from ascend_recompute._knapsack import Choice, Option, choose
from ascend_recompute._options import check_model
from ascend_recompute._rehearsal import Forward, Rehearsal, rehearsal
from ascend_recompute._values import ValueRecompute
from ascend_recompute.activation import recompute_activation
from ascend_recompute.layers import LayersRecompute, recompute_layers
from ascend_recompute.norm import recompute_norm
from ascend_recompute.plan import RecomputePlan

__all__ = ["recompute_to_fit"]

Verb = Callable[..., Any]

# How often a choice that holds more than was expected is replaced by one that saves more.
_ATTEMPTS = 8


class _Way(NamedTuple):
    """One thing that can be done with a layer.

    Attributes:
        parts: The fields of `RecomputePlan` that name the layer.
        option: What it saves and costs.
    """

    parts: tuple[str, ...]
    option: Option


def recompute_to_fit(
    model: nn.Module,
    sample: Any,
    budget_bytes: int,
    *,
    forward: Forward | None = None,
    repeats: int = 5,
) -> RecomputePlan:
    """Find the cheapest recompute with which a step's activations fit into a budget.

    For each layer of the model's stack it is measured what is saved by rebuilding its norms, by
    rebuilding its MLP activations, and by running it again as a whole, and how long the device
    takes to compute that again. Of these the set is chosen that fits and costs least, tried on the
    model, and returned as a plan; nothing is turned on.

    What the budget is for: the bytes that a forward leaves in use on the model's device while what
    it returns is alive. That is what autograd saved and the result; parameters, gradients and
    optimizer state are not in it, nor is what backward itself allocates (the recomputed values
    of one layer, and one gradient of each activation in flight).

    [Note: what is measured, and how]
    Only forwards run, about five and one for each choice that is tried, in the model's present
    mode (call `model.train()` before) and in the autocast mode of the caller. Each starts from
    the random state of the caller. Gradients, hooks on gradients, random state and buffers are
    afterwards as they were; other things that a forward changes (a counter in Python) are not
    put back. The plain forward must fit into the memory of the device.
    A part's time is that of asking the graph for each value that is not held, one by one and in
    the order of backward, with a synchronisation around each; the shortest of some times counts,
    since whatever else the machine does can only add to it. Layers of one class that save equally
    much share the least, so that the choice between them is not made by noise. What recording
    costs in forward is not in it.
    Bytes of parts are added up for the choice. It is exact for up to 30 parts, and for many more
    where layers are alike; beyond that it costs less than one layer's recompute more than the
    best, and the plan tells the bound. The choice is then measured itself, and replaced by one
    that saves more when it holds more than the budget. So a plan always fits.

    Args:
        model: Any module with a stack of layers, on one device, without recompute.
        sample: A batch of the size that is trained with, on the model's device: a tensor, a tuple
            of positional arguments or a dict of keyword arguments of the model.
        budget_bytes: What may be held between forward and backward, in bytes.
        forward: A function of `model` and `sample` that returns what backward starts from, when
            that is not what the model returns. `sample` may then be anything.
        repeats: How often each part's time is measured.

    Returns:
        The plan, with what was measured; empty when the model fits without.

    Raises:
        ConfigError: When an argument cannot be right, the model has no stack of layers or is
            recomputed already, nothing that the forward returns requires grad, or even with
            everything recomputed more than the budget is held; that says how much.
        MeasurementError: On CPU, when a profiler is running.

    Example:
        >>> plan = recompute_to_fit(model, batch, 8 * 2**30)
        >>> plan.save("plan.json")
        >>> handle = plan.apply(model)
    """
    stack = _checked(model, budget_bytes, repeats)
    with rehearsal(model, sample, forward) as runs:
        runs.run()  # what is made once, by the first run, is not held by each
        plain = runs.run().nbytes
        empty = RecomputePlan(
            num_layers=len(stack.layers),
            budget_bytes=budget_bytes,
            plain_bytes=plain,
            held_bytes=plain,
        )
        if plain <= budget_bytes:
            return empty
        return _Search(model, stack, runs, empty).cheapest(repeats)


def _checked(model: nn.Module, budget_bytes: object, repeats: object) -> Stack:
    check_model(recompute_to_fit, model)
    for name, value in (("budget_bytes", budget_bytes), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name} is {value!r}.",
                why="it is a number of bytes." if name == "budget_bytes" else "it is a count.",
                instead="use a whole number above 0.",
            )
    for name, module in model.named_modules():
        if any(isinstance(owner, (LayersRecompute, ValueRecompute)) for owner in owners(module)):
            raise ConfigError(
                f"{name or 'the model'} is recomputed already.",
                why="what the model holds without recompute has to be measured.",
                instead="call remove() of that recompute's handle first.",
            )
    stack = find_stack(model)
    if stack is None:
        raise ConfigError(
            f"this {type(model).__name__} has no stack of layers.",
            why="none of its modules is a ModuleList, or a Sequential of equal modules, and what "
            "is recomputed is chosen layer by layer.",
            instead="use recompute_activation or recompute_norm with modules=.",
        )
    return stack


class _Search:
    """The search for the cheapest plan of one model."""

    def __init__(
        self, model: nn.Module, stack: Stack, runs: Rehearsal, empty: RecomputePlan
    ) -> None:
        self._model = model
        self._stack = stack
        self._runs = runs
        self._empty = empty

    def cheapest(self, repeats: int) -> RecomputePlan:
        """Measure what there is to choose from, and choose.

        Raises:
            ConfigError: When nothing fits.
        """
        ways = self._ways(repeats)
        groups = [[way.option for way in layer] for layer in ways]
        wanted = missing = self._empty.plain_bytes - self._empty.budget_bytes
        at_least = 0.0
        for attempt in range(_ATTEMPTS):
            choice = choose(groups, missing)
            if choice is None:
                break
            if attempt == 0:
                at_least = choice.at_least
            else:  # another one might have fitted that saves less by addition
                choice = choice._replace(at_least=at_least, exact=False)
            plan = self._tried(ways, choice)
            if plan.held_bytes <= plan.budget_bytes:
                return plan
            # The next one may fall short of what it promises by as much as this one did.
            missing = wanted + choice.nbytes - (plan.plain_bytes - plan.held_bytes)
        plan = self._tried(ways, _everything(groups, at_least))
        if plan.held_bytes <= plan.budget_bytes:
            return plan
        raise ConfigError(
            f"this {type(self._model).__name__} cannot be made to hold {plan.budget_bytes} bytes.",
            why=f"without recompute it holds {plan.plain_bytes}, and with everything recomputed "
            f"that saves bytes it still holds {plan.held_bytes}.",
            instead=f"give a budget of {plan.held_bytes} bytes or more, or a smaller sample.",
        )

    def _ways(self, repeats: int) -> list[list[_Way]]:
        """What can be done with each layer."""
        found = {name: self._measured(*what, repeats) for name, what in self._verbs().items()}
        ways: list[list[_Way]] = []
        for layer in range(len(self._stack.layers)):
            here = {name: options[layer] for name, options in found.items() if layer in options}
            ways.append([_Way((name,), option) for name, option in here.items()])
            if "activation" in here and "norm" in here:
                both = here["activation"].and_also(here["norm"])
                ways[-1].append(_Way(("activation", "norm"), both))
        return ways

    def _verbs(self) -> dict[str, tuple[Verb, Sequence[int]]]:
        """By field of the plan: the verb, and the layers in which it finds something."""
        found: dict[str, tuple[Verb, Sequence[int]]] = {
            "whole": (recompute_layers, range(len(self._stack.layers))),
            "activation": (recompute_activation, self._layers_with(find_mlps)),
            "norm": (recompute_norm, self._layers_with(find_norms)),
        }
        return {name: (verb, layers) for name, (verb, layers) in found.items() if layers}

    def _layers_with(self, find: Callable[[nn.Module], Named]) -> Sequence[int]:
        try:
            positions = {self._stack.position(name) for name in find(self._model)}
        except ConfigError:  # there is none
            return ()
        return sorted(position for position in positions if position is not None)

    def _measured(self, verb: Verb, layers: Sequence[int], repeats: int) -> dict[int, Option]:
        """What a verb saves and costs in each layer, measured with all of them on.

        A report counts the bytes of the values that are not held. The device gains less by what
        stands for them (a random state, say), and more or less by how it rounds blocks; that
        difference is divided evenly.
        """
        handle = verb(self._model, layers=layers)
        with contextlib.ExitStack() as undo:
            undo.callback(handle.remove)
            held = self._runs.run()
            seconds = self._by_layer(self._runs.seconds(held.outputs, repeats))
            report = handle.report()
        by_name = report.get("saved_bytes_by_layer", report.get("saved_bytes_by_module"))
        dropped = {layer: size for layer, size in self._by_layer(by_name).items() if size > 0}
        gained = self._empty.plain_bytes - held.nbytes
        extra = (gained - sum(dropped.values())) // max(1, len(dropped))
        costs = self._costs(dropped, seconds)
        return {
            layer: Option(nbytes + extra, costs[layer])
            for layer, nbytes in dropped.items()
            if nbytes + extra > 0
        }

    def _by_layer(self, by_name: Mapping[str, Any]) -> dict[int, Any]:
        """Add up what belongs to modules of one layer."""
        sums: dict[int, Any] = {}
        for name, value in by_name.items():
            position = self._stack.position(name)
            if position is not None:
                sums[position] = sums.get(position, 0) + value
        return sums

    def _costs(self, dropped: dict[int, int], seconds: dict[int, float]) -> dict[int, float]:
        """The seconds of each layer: the least of all that are alike."""
        layers = list(self._stack.layers.values())
        kinds = {layer: (type(layers[layer]).__qualname__, dropped[layer]) for layer in dropped}
        least: dict[tuple[str, int], float] = {}
        for layer, kind in kinds.items():
            least[kind] = min(least.get(kind, math.inf), seconds.get(layer, 0.0))
        return {layer: least[kind] for layer, kind in kinds.items()}

    def _tried(self, ways: list[list[_Way]], choice: Choice) -> RecomputePlan:
        """The plan of a choice, with what is really held under it."""
        named: dict[str, list[int]] = {"whole": [], "activation": [], "norm": []}
        for layer, (there, taken) in enumerate(zip(ways, choice.taken, strict=True)):
            for name in () if taken is None else there[taken].parts:
                named[name].append(layer)
        plan = dataclasses.replace(
            self._empty,
            whole=tuple(named["whole"]),
            activation=tuple(named["activation"]),
            norm=tuple(named["norm"]),
            seconds=choice.seconds,
            seconds_at_least=choice.at_least,
            exact=choice.exact,
        )
        handle = plan.apply(self._model)
        with contextlib.ExitStack() as undo:
            undo.callback(handle.remove)
            return dataclasses.replace(plan, held_bytes=self._runs.run().nbytes)


def _everything(groups: Sequence[Sequence[Option]], at_least: float) -> Choice:
    """The option of each group that saves the most."""
    taken = tuple(
        max(range(len(group)), key=lambda place: group[place].nbytes, default=None)
        for group in groups
    )
    chosen = [group[place] for group, place in zip(groups, taken, strict=True) if place is not None]
    nbytes, seconds = sum(one.nbytes for one in chosen), sum(one.seconds for one in chosen)
    return Choice(taken, nbytes, seconds, at_least, exact=False)
