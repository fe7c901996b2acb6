"""Specs of megatron-core whose modules compute by fused operators."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from ascend_core.errors import ConfigError
from ascend_ops.integrations.megatron._attention import AlibiCoreAttention, check_alibi
from ascend_ops.integrations.megatron._mlp import check_swiglu, with_fused_mlp
from ascend_ops.integrations.megatron._norm import FusedRMSNorm, check_rms_norm

__all__ = ["with_fused_ops"]

_NORMS = (WrappedTorchNorm, FusedLayerNorm, TENorm)
_OF_LAYER = ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm")
_OF_ATTENTION = ("q_layernorm", "k_layernorm", "kv_layernorm")


def with_fused_ops(
    spec: ModuleSpec | TransformerBlockSubmodules,
    config: Any,
    operators: Sequence[str] = ("swiglu", "rms_norm"),
    *,
    backend: str | None = None,
    vp_stage: int | None = None,
) -> ModuleSpec | TransformerBlockSubmodules:
    """A spec whose MLPs, norms or core attention compute by operators of `ascend_ops`.

    * "swiglu": the activation of each dense MLP. Experts stay as they are.
    * "rms_norm": each norm, that after the last layer too, which works with sequence parallelism.
    * "alibi_attention": core attention, with linear biases in place of a position embedding. Build
      the model with `position_embedding_type="alibi"` (or "none"), so that it has no other.

    Names and shapes of parameters stay, so that a checkpoint of the plain model fits. Losses are
    equal to rounding.

    Args:
        spec: Of a transformer layer, or of a block of layers. Stays as it is.
        config: The `TransformerConfig` that the model will be built from.
        operators: Which.
        backend: Of all of them; the best for each call when left out.
        vp_stage: The stage in virtual pipelining, as the model is given it.

    Returns:
        The spec to build the model from. With "rms_norm" it is that of a block, as the norm after
        the last layer is the block's.

    Raises:
        ConfigError: When an operator's name is not known, the config asks for something that an
            operator does not compute, or the spec has no module that it could replace.

    Example:
        >>> spec = with_fused_ops(get_gpt_layer_local_spec(normalization="RMSNorm"), config)
        >>> model = GPTModel(config, spec, vocabulary, sequence)
    """
    _check(config, operators)
    if "rms_norm" in operators and isinstance(spec, ModuleSpec):
        number = get_num_layers_to_build(config, vp_stage=vp_stage)
        spec = TransformerBlockSubmodules([spec] * number, layer_norm=WrappedTorchNorm)
    is_block = isinstance(spec, TransformerBlockSubmodules)
    layers: list[Any] = list(spec.layer_specs or []) if is_block else [spec]
    made: dict[int, ModuleSpec] = {}  # layers of one spec stay layers of one spec
    found: set[str] = set()
    for layer in layers:
        if id(layer) not in made:
            made[id(layer)] = _changed(layer, operators, backend, found)
    missed = [name for name in operators if name not in found]
    if config.num_moe_experts and "swiglu" in missed:
        missed.remove("swiglu")  # a stage of a pipeline may have mixtures of experts alone
    if layers and missed:
        raise _nothing_for(missed[0], layers[0])
    if not is_block:
        return made[id(spec)]
    block: Any = copy.copy(spec)
    block.layer_specs = [made[id(layer)] for layer in layers]
    if "rms_norm" in operators and _is_norm(block.layer_norm):
        block.layer_norm = _norm(backend)
    return block


def _check(config: Any, operators: Sequence[str]) -> None:
    unknown = [name for name in operators if name not in _CHANGES]
    if isinstance(operators, str) or unknown or not operators:
        raise ConfigError(
            f"with_fused_ops: operators is {operators!r}.",
            why=f"a sequence of these is wanted: {', '.join(_CHANGES)}.",
            instead='write for example operators=("swiglu",).',
        )
    if "swiglu" in operators:
        check_swiglu(config)
    if "rms_norm" in operators:
        check_rms_norm(config)
    if "alibi_attention" in operators:
        check_alibi(config)


def _changed(
    layer: ModuleSpec, operators: Sequence[str], backend: str | None, found: set[str]
) -> ModuleSpec:
    """The spec of a layer, changed; the operators that have something to do go to `found`."""
    module = layer.module if isinstance(layer, ModuleSpec) else layer
    submodules = getattr(layer, "submodules", None)
    is_layer = isinstance(module, type) and issubclass(module, BaseTransformerLayer)
    if not is_layer or not hasattr(submodules, "self_attention"):
        raise ConfigError(
            f"the spec builds {getattr(module, '__name__', module)}.",
            why="operators are put into transformer layers that have a self_attention.",
            instead="pass the spec of a layer, or of a block of layers, or call apply_fused_ops on "
            "the model.",
        )
    layer = copy.copy(layer)
    layer.submodules = copy.copy(submodules)
    layer.submodules.self_attention = copy.copy(layer.submodules.self_attention)
    attention = layer.submodules.self_attention
    if hasattr(attention, "submodules"):
        attention.submodules = copy.copy(attention.submodules)
    found.update(name for name in operators if _CHANGES[name](layer, backend))
    return layer


def _fuse_swiglu(layer: ModuleSpec, backend: str | None) -> bool:
    mlp = layer.submodules.mlp
    if getattr(mlp, "module", mlp) is not MLP:
        return False
    layer.module = with_fused_mlp(layer.module, backend)
    return True


def _fuse_norms(layer: ModuleSpec, backend: str | None) -> bool:
    attention = getattr(layer.submodules.self_attention, "submodules", None)
    places = [(layer.submodules, name) for name in _OF_LAYER]
    places += [(attention, name) for name in _OF_ATTENTION]
    places = [(place, name) for place, name in places if _is_norm(getattr(place, name, None))]
    for place, name in places:
        setattr(place, name, _norm(backend))
    return bool(places)


def _fuse_attention(layer: ModuleSpec, backend: str | None) -> bool:
    attention: Any = getattr(layer.submodules.self_attention, "submodules", None)
    core = getattr(attention, "core_attention", None)
    if core is None or core not in (DotProductAttention, TEDotProductAttention):
        return False
    made: Any = AlibiCoreAttention
    if backend is not None:  # megatron-core calls it, and knows no params for it
        made = functools.partial(AlibiCoreAttention, backend=backend)
    attention.core_attention = made
    return True


_CHANGES: Mapping[str, Callable[[ModuleSpec, str | None], bool]] = MappingProxyType(
    {"swiglu": _fuse_swiglu, "rms_norm": _fuse_norms, "alibi_attention": _fuse_attention}
)


def _is_norm(norm: Any) -> bool:
    return getattr(norm, "module", norm) in _NORMS


def _norm(backend: str | None) -> Any:
    if backend is None:
        return FusedRMSNorm
    return ModuleSpec(module=FusedRMSNorm, params={"backend": backend})


def _nothing_for(operator: str, layer: ModuleSpec) -> ConfigError:
    wanted = {
        "swiglu": "an MLP of megatron-core's own class",
        "rms_norm": "a norm of megatron-core's own classes (a norm that is part of a linear layer "
        "is none)",
        "alibi_attention": "core attention of megatron-core's own classes",
    }[operator]
    return ConfigError(
        f"with_fused_ops: {operator} has nothing to do in a layer of "
        f"{getattr(layer.module, '__name__', layer.module)}.",
        why=f"no layer of the spec has {wanted}.",
        instead="build the spec with get_gpt_layer_local_spec, or leave the operator out.",
    )
