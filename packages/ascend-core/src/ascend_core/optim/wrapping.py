"""The verb: wraps a facade around an optimizer, which it steps in windows from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import ConfigError, FeatureError
from ascend_core.optim.checkpoint import Loading
from ascend_core.optim.checks import check_groups
from ascend_core.optim.engine import Engine
from ascend_core.optim.facade import WindowedOptimizer
from ascend_core.optim.gradients import AttributeGradients, Gradients
from ascend_core.optim.home import Home
from ascend_core.optim.identity import ParameterWatch
from ascend_core.optim.resident import Resident
from ascend_core.optim.roster import Roster, WindowSize
from ascend_core.optim.rules import rule_for
from ascend_core.options import check_count

__all__ = ["windowed"]


def windowed(
    optimizer: optim.Optimizer,
    *,
    home: Home | None = None,
    times: int | None = None,
    window_bytes: int | None = None,
    master_weights: bool = False,
    gradients: Gradients | None = None,
) -> WindowedOptimizer:
    """Put a facade around an elementwise optimizer that steps it in windows.

    The optimizer's own state, if it has any, moves to the home. From then on the facade is the
    optimizer: learning-rate schedulers, scalers and checkpoints go to it.

    Args:
        optimizer: One of torch's elementwise optimizers, over parameters of one device.
        home: Where state lives between steps; on the device when left out.
        times: Into how many windows the parameters are cut, at most; 1 when neither this nor
            `window_bytes` is given.
        window_bytes: The most bytes of state in a window, instead of `times`.
        master_weights: Keep an FP32 master for each BF16 and FP16 parameter, and step that.
        gradients: Where gradients come from; `.grad` when left out.

    Returns:
        The facade. It is also an instance of the optimizer's class.

    Raises:
        ConfigError: When the optimizer or a parameter cannot be stepped in windows, or an option
            cannot be right. The optimizer is as it was.
        HostMemoryError: When the home has no room. The optimizer is as it was.
    """
    size = _checked_size(times, window_bytes)
    _check_options(optimizer)
    rule = rule_for(optimizer)
    kind = type(optimizer)
    facade: WindowedOptimizer = object.__new__(
        type(f"Windowed{kind.__name__}", (WindowedOptimizer, kind), {})
    )
    home = Resident() if home is None else home
    gradients = AttributeGradients() if gradients is None else gradients
    facade._home, facade._gradients, facade._inner = home, gradients, optimizer
    facade._roster = Roster(rule, home, size, master_weights=master_weights)
    facade._watch = ParameterWatch()
    attributes = _own_attributes(optimizer)
    facade._engine = Engine(kind, optimizer.defaults, home, gradients, attributes)
    facade._journal, facade._is_saving = None, False
    hooks = {name: kept for name, kept in vars(optimizer).items() if name.endswith("_hooks")}
    shared = {"defaults": optimizer.defaults, "param_groups": optimizer.param_groups}
    optim.Optimizer.__setstate__(facade, {**attributes, **shared, **hooks})
    facade._left_behind = {}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter in optimizer.state for parameter in listed):
        facade._load(_moving_in(optimizer))
    else:
        facade._follow()
    for parameter in listed:
        optimizer.state.pop(parameter, None)
    facade._left_behind = optimizer.state
    facade._guards = _guarded(optimizer, facade)
    return facade


def _own_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """What a subclass gave its instance, and its step may read."""
    torchs = {
        *vars(optim.SGD([torch.empty(0, device="cpu")])),
        "step",
        "_opt_called",
        "grad_scale",
        "found_inf",
    }
    return {name: value for name, value in vars(optimizer).items() if name not in torchs}


def _moving_in(optimizer: optim.Optimizer) -> Loading:
    """The state that an optimizer has already."""
    groups = optimizer.param_groups
    keys = [{**group, "params": list(map(id, group["params"]))} for group in groups]
    state: dict[int, Any] = {id(p): kept for p, kept in optimizer.state.items()}
    if isinstance(optimizer, optim.Adagrad):
        for group in groups:
            _make_sums_anew(group, state)
    return Loading(keys, state, groups)


def _make_sums_anew(group: Mapping[str, Any], state: dict[int, Any]) -> None:
    """Give sums that Adagrad made before the first step the digits that a BF16 one rounds away."""
    first = torch.tensor(float(group["initial_accumulator_value"]), device="cpu")
    for parameter in group["params"]:
        kept = state.get(id(parameter))
        if kept and kept["step"] == 0:
            state[id(parameter)] = {**kept, "sum": first.expand(parameter.shape)}


class _Refusal:
    """A hook, shared by both, that refuses to use the wrapped optimizer by itself."""

    def __init__(self, optimizer: optim.Optimizer, facade: WindowedOptimizer, call: str) -> None:
        self._wrapped = weakref.ref(optimizer)
        self._facade = weakref.ref(facade)
        self._call = call

    def __call__(self, called: optim.Optimizer, *_: Any) -> None:
        if called is not self._wrapped():
            return
        why = "its state lives with the windowed optimizer that was made from it."
        instead = f"call {self._call}() of that one, or remove() it first."
        if self._facade() is None:
            why = (
                "its state lived with the windowed optimizer that was made from it, which is gone."
            )
            instead = "build both anew, keep the windowed one, and load a checkpoint."
        raise FeatureError(
            f"this {type(called).__name__} was wrapped, and its own {self._call}() was called.",
            why=why,
            instead=instead,
        )


def _guarded(optimizer: optim.Optimizer, facade: WindowedOptimizer) -> list[RemovableHandle]:
    """Refuse what would need the state that has moved."""
    registers: dict[str, Callable[[Any], RemovableHandle]] = {
        "step": optimizer.register_step_pre_hook,
        "state_dict": optimizer.register_state_dict_pre_hook,
        "load_state_dict": optimizer.register_load_state_dict_pre_hook,
    }
    return [register(_Refusal(optimizer, facade, call)) for call, register in registers.items()]


def _checked_size(times: int | None, window_bytes: int | None) -> WindowSize:
    if times is not None and window_bytes is not None:
        raise ConfigError(
            "times and window_bytes were both given.",
            why="each of them says how large a window is.",
            instead="leave one of them out.",
        )
    if times is None and window_bytes is None:
        times = 1
    for name, value in (("times", times), ("window_bytes", window_bytes)):
        if value is not None:
            check_count(name, value)
    return WindowSize(times, window_bytes)


def _check_options(optimizer: optim.Optimizer) -> None:
    if isinstance(optimizer, WindowedOptimizer):
        raise ConfigError(
            "the optimizer is a windowed one already.",
            instead="give every option at once to the optimizer that it was made from.",
        )
    if any(isinstance(hook, _Refusal) for hook in optimizer._optimizer_step_pre_hooks.values()):
        raise ConfigError(
            "the optimizer was wrapped already.",
            why="its state lives with the windowed optimizer that was made from it.",
            instead="use that one, or remove() it first.",
        )
    check_groups(optimizer.param_groups)
