"""An MLP of megatron-core whose fused activation function shows where operators are recorded."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_recompute.fused import FusedActivation

__all__ = ["VisibleActivationMLP", "with_visible_activation"]


class _ActivationOnly:
    """Stands for an MLP whose linear layers do nothing: its forward is the activation function."""

    def __init__(self, mlp: Any) -> None:
        self.config = mlp.config
        self.activation_func = mlp.activation_func

    def __call__(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        activated: Tensor = MLP.forward(self, (hidden, bias))[0]
        return activated

    def linear_fc1(self, hidden_and_bias: tuple[Tensor, Tensor | None]) -> Any:
        return hidden_and_bias

    def linear_fc2(self, activated: Tensor) -> tuple[Tensor, None]:
        return activated, None


class VisibleActivationMLP(MLP):  # type: ignore[misc] # megatron is not typed
    """Megatron-core's MLP; `recompute_activation` can rebuild what its fused activation returns.

    With `bias_activation_fusion` the activation is an autograd Function, which is opaque. Here it
    is called as one operator. All else, the state dict too, is megatron-core's own.
    """

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the MLP on `hidden_states`, of shape (sequence, batch, hidden)."""
        fused = self.config.bias_activation_fusion and not self.config.use_te_activation_func
        if not fused or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        hidden, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(FusedActivation(_ActivationOnly(self))(hidden, bias))


def with_visible_activation(
    spec: ModuleSpec | TransformerBlockSubmodules,
) -> ModuleSpec | TransformerBlockSubmodules:
    """A layer's spec whose MLP lets `recompute_activation` see its fused activation function.

    Needed with `bias_activation_fusion=True` only; without the fusion the activation is made of
    operators that are seen anyway.

    Args:
        spec: Of a transformer layer, or of a block of layers. Stays as it is.

    Returns:
        The spec to build the model from.

    Raises:
        ConfigError: When an MLP of the spec is of another class than megatron-core's own.

    Example:
        >>> spec = with_visible_activation(get_gpt_layer_local_spec())
        >>> model = GPTModel(config, spec, vocabulary, sequence)
        >>> handle = recompute_activation(model)
    """
    spec = copy.copy(spec)
    if not isinstance(spec, TransformerBlockSubmodules):
        return _with_visible_activation(spec)
    layers = spec.layer_specs or []
    # A block may alternate between dense layers and mixtures of experts, which stay as they are.
    if not any(_is_known(layer) for layer in layers):
        raise _unknown(layers[0] if layers else spec)
    spec.layer_specs = [
        _with_visible_activation(copy.copy(layer)) if _is_known(layer) else layer
        for layer in layers
    ]
    return spec


def _with_visible_activation(spec: ModuleSpec) -> ModuleSpec:
    if not _is_known(spec):
        raise _unknown(spec)
    spec.submodules = copy.copy(spec.submodules)
    spec.submodules.mlp = copy.copy(spec.submodules.mlp)
    spec.submodules.mlp.module = VisibleActivationMLP
    return spec


def _mlp_of(spec: Any) -> Any:
    mlp = getattr(getattr(spec, "submodules", None), "mlp", None)
    return getattr(mlp, "module", mlp)


def _is_known(spec: Any) -> bool:
    return _mlp_of(spec) in (MLP, VisibleActivationMLP)


def _unknown(spec: Any) -> ConfigError:
    mlp = _mlp_of(spec)
    return ConfigError(
        f"the spec's MLP is {getattr(mlp, '__name__', mlp)}.",
        why="only the forward of megatron-core's own MLP is known here.",
        instead="wrap the activation function of your own class in FusedActivation, or build the "
        "model with bias_activation_fusion=False, which needs no change to the spec.",
    )
