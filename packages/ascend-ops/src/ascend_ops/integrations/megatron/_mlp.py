"""Megatron-core's MLP with its gated activation as one operator."""

from __future__ import annotations

import types
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn import functional as F

from ascend_core.errors import ConfigError
from ascend_ops.functional import swiglu

__all__ = ["FusedSwiGLUMLP", "check_swiglu", "with_fused_mlp"]


class FusedSwiGLUMLP(MLP):  # type: ignore[misc] # megatron is not typed
    """Megatron-core's MLP, whose SwiGLU is `ascend_ops.swiglu`: bias, clamp and product in one.

    Parameters, state dict and linear layers are those of megatron-core's.

    Attributes:
        ops_backend: See `ascend_ops.swiglu`.
    """

    ops_backend: str | None = None

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the MLP on `hidden_states`, [sequence, batch, hidden]."""
        if per_token_scale is not None:  # an expert's
            return super().forward(hidden_states, per_token_scale, **kwargs)
        hidden, bias = self.linear_fc1(hidden_states)
        limit = self.config.activation_func_clamp_value
        activated = swiglu(hidden, bias=bias, limit=limit, backend=self.ops_backend)
        return self.linear_fc2(activated)


def check_swiglu(config: Any) -> None:
    """Refuse a `TransformerConfig` whose MLPs compute something else than `swiglu` does.

    Raises:
        ConfigError: Names the first option that says so.
    """
    activation = config.activation_func
    wrong = {
        "gated_linear_unit is False": not config.gated_linear_unit,
        f"activation_func is {getattr(activation, '__name__', activation)}": activation != F.silu,
        f"glu_linear_offset is {config.glu_linear_offset}": config.glu_linear_offset,
        "use_te_activation_func is True": config.use_te_activation_func,
        "activation_func_fp8_input_store is True": config.activation_func_fp8_input_store,
        # megatron-core's own fused function leaves the clamp out.
        "activation_func_clamp_value is given and bias_activation_fusion is True": (
            config.activation_func_clamp_value is not None and config.bias_activation_fusion
        ),
    }
    if what := next((what for what, is_so in wrong.items() if is_so), None):
        raise ConfigError(
            f"swiglu cannot compute the model's MLPs: {what}.",
            why="it is silu(gate) * up of the halves of what the first linear layer returns.",
            instead='leave "swiglu" out of operators (--use-fused-swiglu), or change the option.',
        )


def with_fused_mlp(layer: type[Any], backend: str | None) -> type[Any]:
    """A subclass of a layer's class that makes its MLP a `FusedSwiGLUMLP` once it is built.

    megatron-core gives the group of tensor parallelism to its own MLP alone, known by its class in
    the spec, which therefore stays as it is. The layer is of its own class in the end.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        layer.__init__(self, *args, **kwargs)
        self.mlp.__class__ = FusedSwiGLUMLP
        self.mlp.ops_backend = backend
        if type(self) is made:
            self.__class__ = layer

    body = {"__init__": __init__, "__module__": layer.__module__, "__doc__": layer.__doc__}
    made = types.new_class(layer.__name__, (layer,), exec_body=lambda names: names.update(body))
    return made
