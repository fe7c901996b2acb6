"""fused-ops: a model's gated MLPs and RMSNorms are computed by the operators."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError, NothingToDoError
from ascend_core.feature import chosen_config
from ascend_core.rng import RngState
from ascend_core.scope import instead_of_forward, owners
from ascend_ops._fusing._fusion import Fusion
from ascend_ops._fusing._mlp import fuse_mlp, looks_gated
from ascend_ops._fusing._norm import fuse_norm, looks_like_rms_norm
from ascend_ops.config import FusedOpsConfig

__all__ = ["FusedOps", "apply_fused_ops"]

_ALREADY = "an operator computes it already"

Looks = Callable[[nn.Module], bool]
Fuse = Callable[[nn.Module, str | None], Fusion | str]


class FusedOps:
    """The handle of `apply_fused_ops`: operators compute these modules while it is on.

    Args:
        model: The whole model.
        fusions: How each module is computed, by its name.
        left: Why each of the others is not, by its name.
    """

    def __init__(
        self, model: nn.Module, fusions: Mapping[str, Fusion], left: Mapping[str, str]
    ) -> None:
        self._fusions = dict(fusions)
        self._left = dict(left)
        modules = {name: model.get_submodule(name) for name in fusions}
        self._modules = {name: weakref.ref(module) for name, module in modules.items()}
        self._arounds = [
            instead_of_forward(modules[name], fusion.run, self) for name, fusion in fusions.items()
        ]

    def report(self) -> dict[str, Any]:
        """What is computed by what.

        Returns:
            `fused`: by the name of each module, the operator, the backend that would have computed
            a small call when the feature was turned on, and the formula; `left`: by the name of
            each module that looked alike, or has changed since, why it computes itself;
            `operators`: how many modules each operator computes.
        """
        changed = {name: change for name in self._fusions if (change := self._change(name))}
        fused = {name: one for name, one in self._fusions.items() if name not in changed}
        return {
            "fused": {
                name: f"{fusion.operator} by {fusion.backend}: {fusion.form}"
                for name, fusion in fused.items()
            },
            "left": self._left | changed,
            "operators": dict(Counter(fusion.operator for fusion in fused.values())),
        }

    def _change(self, name: str) -> str | None:
        module = self._modules[name]()
        return None if module is None else self._fusions[name].settings.change(module)

    def remove(self) -> None:
        """Let the modules compute themselves again. A second call does nothing."""
        while self._arounds:
            self._arounds.pop().remove()


def apply_fused_ops(model: nn.Module, config: FusedOpsConfig | None = None) -> FusedOps:
    """Compute a model's gated MLPs and RMSNorms by operators of `ascend_ops`.

    A norm or MLP of any library is taken when its forward, run on a few numbers, proves to compute
    what the operator does; see the handle's `report()` for which were not, and why. The run touches
    neither weights, hooks nor random state. Nothing of the model is replaced: each module taken
    becomes an instance of a generated subclass of its own class, with the parameters, the state
    dict and the hooks that it has. Its linear layers are called as before.

    Losses are equal to rounding, not to the bit: a norm rounds once, where the models that this
    feature is for round before they multiply by the weight as well.

    Args:
        model: Any module. Weights may be on any device, also on meta.
        config: The options.

    Returns:
        A handle: `report()` says what is computed by what, `remove()` undoes.

    Raises:
        NothingToDoError: When there is nothing that an operator could compute.
        ConfigError: When an operator computes all of it already, or `backend` refuses what the
            model computes.
        UnavailableError: When `backend` cannot be used on this machine.

    Example:
        >>> handle = apply_fused_ops(model)
        >>> handle.report()["operators"]
        {'rms_norm': 65, 'swiglu_pair': 32}
    """
    config = chosen_config("apply_fused_ops", FusedOpsConfig, config)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"apply_fused_ops was given a {type(model).__name__}.",
            why="it works on modules.",
            instead="build the model first, and pass it.",
        )
    fusions: dict[str, Fusion] = {}
    left: dict[str, str] = {}
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    with torch.no_grad(), RngState.capture(devices).replaying():
        for name, module in model.named_modules():
            found = _fusion_of(module, config)
            if isinstance(found, Fusion):
                fusions[name] = found
            elif found is not None:
                left[name] = found
    if not fusions:
        raise _nothing(model, left)
    return FusedOps(model, fusions, left)


def _fusion_of(module: nn.Module, config: FusedOpsConfig) -> Fusion | str | None:
    """How an operator computes a module, or why none does; None where it looks like nothing."""
    kinds: dict[str, tuple[Looks, Fuse]] = {
        "swiglu": (looks_gated, fuse_mlp),
        "rms_norm": (looks_like_rms_norm, fuse_norm),
    }
    for operator, (looks, fuse) in kinds.items():
        if operator in config.operators and looks(module):
            if any(isinstance(owner, FusedOps) for owner in owners(module)):
                return _ALREADY
            if "forward" in vars(module):
                return "its forward was set on the module itself, before that of any class"
            with torch.autocast(_device_type(module), enabled=False):
                return fuse(module, config.backend)
    return None


def _device_type(module: nn.Module) -> str:
    weight = next(module.parameters(), None)
    return "cpu" if weight is None or weight.is_meta else weight.device.type


def _nothing(model: nn.Module, left: Mapping[str, str]) -> ConfigError:
    if _ALREADY in left.values():
        return ConfigError(
            f"fused-ops is on for this {type(model).__name__} already.",
            why=f"an operator computes {next(n for n in left if left[n] == _ALREADY)!r} already.",
            instead="remove() the handle that you have first, to apply it with other options.",
        )
    name, reason = next(iter(left.items()), ("", ""))
    return NothingToDoError(
        f"nothing of this {type(model).__name__} is computed by an operator of ascend_ops.",
        why=f"{name}: {reason}." if left else "no module looks like a gated MLP or like RMSNorm.",
        instead="leave the feature off, or call the operators in the model's code.",
    )
