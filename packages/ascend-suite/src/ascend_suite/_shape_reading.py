"""Reads the shape of a transformer, and of its training, off the model.

What cannot be read is left out, and named: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from ascend_core.stack import find_stack
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["SeenTokens", "read_shape"]

# What models' configs call it: ours, Hugging Face's (two generations), megatron-core's.
_NAMES: Mapping[str, Sequence[str]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden", "hidden_size", "n_embd"),
    "heads": ("heads", "num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_query_groups"),
    "head_size": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab": ("vocabulary", "vocab_size", "padded_vocab_size"),
}
_NEEDED = ("layers", "hidden", "heads", "seq", "vocab")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class SeenTokens:
    """Sees the shape of the tokens that a model is given: the latest integers of two dimensions.

    Keeps no tensor.

    Args:
        model: The model; it has a hook from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch: int | None = None
        self.seq: int | None = None
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def remove(self) -> None:
        """Look no longer."""
        self._hook.remove()

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim() == 2 and _counts(value):
                self.batch, self.seq = value.shape
                return


def read_shape(
    model: nn.Module, optimizer: optim.Optimizer | None, plan: Plan, seen: SeenTokens | None
) -> ModelShape | tuple[str, ...]:
    """The shape of a model and its training.

    Args:
        model: The model.
        optimizer: What steps it.
        plan: What is on, and known of its training.
        seen: The tokens that it was given.

    Returns:
        The shape; or, where it cannot be told, the names of what is missing.
    """
    structure = _of_structure(model).items()
    found: dict[str, Any] = {name: value for name, value in structure if value is not None}
    found.update(_of_config(model))
    if seen is not None and seen.batch is not None:
        found.update(micro_batch=seen.batch, seq=seen.seq)
    found.update(_of_training(model, optimizer, plan))
    missing = tuple(name for name in _NEEDED if name not in found)
    return missing or ModelShape(**found)


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _of_config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    found: dict[str, Any] = {}
    for field, names in _NAMES.items():
        values = (getattr(config, name, None) for name in names)
        value = next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
        if value is not None:
            found[field] = value
    expansion = getattr(config, "expansion", None)
    if "ffn" not in found and "hidden" in found and isinstance(expansion, int):
        found["ffn"] = expansion * found["hidden"]
    return found


def _of_structure(model: nn.Module) -> dict[str, Any]:
    stack = find_stack(model)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    largest = max(embeddings, key=lambda m: m.num_embeddings, default=None)
    kinds = [type(module).__name__.lower() for module in model.modules()]
    return {
        "layers": len(stack.layers) if stack is not None and stack.name else None,
        "vocab": None if largest is None else largest.num_embeddings,
        "hidden": None if largest is None else largest.embedding_dim,
        "tied": largest is not None and _is_shared(model, largest.weight),
        "norm": "rms" if any("rmsnorm" in kind for kind in kinds) else "layer",
        "activation": "swiglu" if _any_called(model, ("gate", "gate_proj")) else "gelu",
        "dropout": any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()),
    }


def _any_called(model: nn.Module, names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[2] in names for name, _ in model.named_modules())


def _is_shared(model: nn.Module, weight: torch.Tensor) -> bool:
    return sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


def _of_training(model: nn.Module, optimizer: optim.Optimizer | None, plan: Plan) -> dict[str, Any]:
    dtypes = {_DTYPES.get(parameter.dtype) for parameter in model.parameters()}
    found: dict[str, Any] = {"masters": any(map(_has_masters, plan.features.items()))}
    if len(dtypes) == 1 and None not in dtypes:
        found["dtype"] = dtypes.pop()
    if isinstance(optimizer, optim.SGD):
        momentum = any(group["momentum"] for group in optimizer.param_groups)
        found["optimizer"] = "momentum" if momentum else "sgd"
    for field, option in _PARALLEL.items():
        if isinstance(plan.training.get(option), int):
            found[field] = plan.training[option]
    return found


_PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "micro_batches": "num_microbatches",
}


def _has_masters(feature: tuple[str, Any]) -> bool:
    name, config = feature
    return name == "reuse-fp32-param" or bool(getattr(config, "master_weights", False))
