"""Turning recompute on by the options of megatron-core, and MindSpeed's beside them.

[Note: who recomputes whole layers]
megatron-core does it itself where the model's own config says so. Then only what is left for the
other two is done here, on the layers behind those. Where the config says nothing, and the options
ask for it, `recompute_layers` does it. Layers are counted in each model chunk, that is, in each
pipeline stage, or in each virtual one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.stack import find_stack
from ascend_recompute.activation import recompute_activation
from ascend_recompute.integrations.megatron._mlp import VisibleActivationMLP
from ascend_recompute.layers import recompute_layers
from ascend_recompute.norm import recompute_norm

__all__ = ["MegatronRecompute", "recompute_by_options"]

_VERBS: dict[str, Callable[..., Any]] = {
    "recompute_activation_function": recompute_activation,
    "recompute_norm": recompute_norm,
}
# What of megatron-core's own selective recompute covers the same values.
_SELECTIVE = {"recompute_activation_function": "mlp", "recompute_norm": "layernorm"}


@dataclasses.dataclass(frozen=True)
class MegatronRecompute:
    """The handle of `recompute_by_options`.

    Attributes:
        handles: What each verb returned, by the name of its option; `recompute_granularity` for
            whole layers.
    """

    handles: dict[str, Any]

    def report(self) -> dict[str, Any]:
        """What was not held in the latest forward.

        Returns:
            `saved_bytes`: in all; and under each option's name its handle's own report.
        """
        reports = {name: handle.report() for name, handle in self.handles.items()}
        saved = sum(report["saved_bytes"] for report in reports.values())
        return {"saved_bytes": saved, **reports}

    def remove(self) -> None:
        """Undo all, the last first."""
        for handle in reversed(self.handles.values()):
            handle.remove()


@dataclasses.dataclass(frozen=True)
class _Full:
    """Full recompute as megatron-core's options describe it; `own` when it does that itself."""

    method: str | None = None
    num_layers: int | None = None
    own: bool = False
    modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Any, *, own: bool) -> _Full:
        granularity = getattr(options, "recompute_granularity", None)
        number = getattr(options, "recompute_num_layers", None)
        if granularity not in (None, "full", "selective"):
            raise ConfigError(
                f"recompute_granularity is {granularity!r}.",
                why="megatron-core recomputes whole layers, or selected modules.",
                instead='write "full" or "selective", or leave it out.',
            )
        if granularity == "full":
            method = getattr(options, "recompute_method", None)
            if method is None:
                raise ConfigError(
                    'recompute_granularity is "full", and recompute_method is not given.',
                    why="it says which layers are recomputed.",
                    instead='write recompute_method="block" or "uniform".',
                )
            return cls(method, number, own)
        modules = getattr(options, "recompute_modules", None) if granularity else None
        return cls(modules=tuple(modules or ()))


def recompute_by_options(model: nn.Module, options: Any) -> MegatronRecompute:
    """Turn on what the options of megatron-core and MindSpeed ask for.

    Apply it to each model chunk, before the optimizer or after. The options that count:

    * `recompute_granularity`, `recompute_method`, `recompute_num_layers` as megatron-core has them.
      Whole layers are counted first.
    * `recompute_activation_function`: the MLPs' activation functions, in
      `recompute_activation_function_num_layers` layers behind those, or in all that are left.
    * `recompute_norm` and `recompute_norm_num_layers`: the norms, likewise.

    Args:
        model: A model chunk, also one that is wrapped.
        options: Has the options as attributes, as `get_args()` and `TransformerConfig` do; those
            that it lacks are off.

    Returns:
        A handle: `report()` says how many bytes are no longer held, `remove()` undoes.

    Raises:
        ConfigError: When options do not go together, or with the model; which is then as before.
    """
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    wanted = [name for name in _VERBS if _is_on(options, name)]
    full = _Full.of(config, own=True)
    if full.method is None:
        full = _Full.of(options, own=False) if not full.modules else full
    _check(full, wanted)
    if "recompute_activation_function" in wanted and getattr(
        config, "bias_activation_fusion", None
    ):
        _check_visible(model)
    handles: dict[str, Any] = {}
    with contextlib.ExitStack() as undo:
        if full.method is not None and not full.own:
            method: Any = full.method
            whole = recompute_layers(model, method=method, num_layers=full.num_layers)
            handles["recompute_granularity"] = whole
            undo.callback(whole.remove)
        done = full.num_layers or 0 if full.own else 0
        for name in wanted:
            handles[name] = _VERBS[name](model, **_layers(model, options, name, done))
            undo.callback(handles[name].remove)
        undo.pop_all()
    return MegatronRecompute(handles)


def _is_on(options: Any, name: str) -> bool:
    number = getattr(options, f"{name}_num_layers", None)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
        raise ConfigError(
            f"{name}_num_layers is {number!r}.",
            why="it is a number of layers.",
            instead="use a whole number, or leave it out to take all layers that are left.",
        )
    if not getattr(options, name, False):
        if number:
            raise ConfigError(
                f"{name}_num_layers is {number}, and {name} is off.",
                why="the number says how many layers, and the other option turns it on.",
                instead=f"set {name} too, or leave the number out.",
            )
        return False
    return number != 0


def _layers(model: nn.Module, options: Any, name: str, done: int) -> dict[str, Any]:
    """Which layers a verb is to take, behind `done` that megatron-core itself recomputes whole."""
    number = getattr(options, f"{name}_num_layers", None)
    if not done:
        return {} if number is None else {"num_layers": number}
    stack = find_stack(model)
    count = 0 if stack is None else len(stack.layers)
    left = range(min(done, count), count)
    if not left or (number or 0) > len(left):
        raise ConfigError(
            f"{name} asks for {number or 'all'} of the layers that are left, which are {len(left)}"
            f" of {count}.",
            why=f"megatron-core recomputes the first {min(done, count)} whole, which are counted "
            "first (in each pipeline stage).",
            instead=f"lower recompute_num_layers or {name}_num_layers.",
        )
    if number is not None and number < len(left):
        warnings.warn(
            f"{min(done, count)} fully recomputed layers and {number} more are not the {count} "
            "layers of this model (or pipeline stage): the rest keep all that they save.",
            stacklevel=3,
        )
    return {"layers": left[:number]}


def _check(full: _Full, wanted: list[str]) -> None:
    for name in wanted:
        if full.method not in (None, "block"):
            raise ConfigError(
                f"{name} and recompute_method={full.method!r} cannot be used together.",
                why="this method recomputes every layer whole, and a layer is never both.",
                instead='use recompute_method="block" with a recompute_num_layers below the number '
                f"of layers, or leave {name} off.",
            )
        if _SELECTIVE[name] in full.modules:
            raise ConfigError(
                f"{name} and {_SELECTIVE[name]!r} in recompute_modules cannot be used together.",
                why="megatron-core's selective recompute covers the same values already.",
                instead=f"take {_SELECTIVE[name]!r} out of recompute_modules, or leave {name} off.",
            )


def _check_visible(model: nn.Module) -> None:
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    if mlps and not any(isinstance(mlp, VisibleActivationMLP) for mlp in mlps):
        raise ConfigError(
            "recompute_activation_function cannot see this model's activation functions.",
            why="bias_activation_fusion makes each of them an opaque autograd Function.",
            instead="build the model from with_visible_activation(spec), or with "
            "bias_activation_fusion=False.",
        )
