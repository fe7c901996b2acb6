"""Reads the shape of a transformer, and of its training, off the model.

What cannot be read is left out, and named: nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn, optim

from ascend_core.stack import find_stack
from ascend_suite._facts import main_dtype
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
_PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
# Fields that words of a config, or its switches, decide: megatron-core's and Hugging Face's.
_WORDS: Sequence[tuple[str, str, Mapping[object, object]]] = (
    ("norm", "normalization", {"RMSNorm": "rms", "LayerNorm": "layer"}),
    ("activation", "gated_linear_unit", {True: "swiglu", False: "gelu"}),
    ("biases", "add_bias_linear", {True: "all", False: "none"}),
    ("sequence_parallel", "sequence_parallel", {True: True}),
    ("flash", "_attn_implementation", {"eager": False}),
)
_DTYPES: Mapping[torch.dtype | None, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


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
    config = _config_of(model)
    sources = (_of_structure(model), _of_config(config), _of_training(model, optimizer, plan))
    found: dict[str, Any] = {
        name: value for source in sources for name, value in source.items() if value is not None
    }
    if seen is not None and seen.batch is not None and seen.seq is not None:
        # Each context-parallel rank sees its part of a sequence.
        found.update(micro_batch=seen.batch, seq=seen.seq * found.get("cp", 1))
    found.setdefault("dp", _data_parallel_ranks(found, plan.training.get("world_size")))
    missing = tuple(name for name in _NEEDED if name not in found)
    return missing or ModelShape(**found)


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _config_of(model: nn.Module) -> Any:
    """The config of the outermost module that has one: a wrapper may have none, or its own."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names = list(chain.from_iterable(_NAMES.values()))
    return next((c for c in configs if any(hasattr(c, name) for name in names)), None)


def _of_config(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {field: _count(config, names) for field, names in _NAMES.items()}
    found.update({field: _count(config, [name]) for field, name in _PARALLEL.items()})
    expansion = _count(config, ["expansion"])
    if found["ffn"] is None and found["hidden"] is not None and expansion is not None:
        found["ffn"] = expansion * found["hidden"]
    words = {field: words.get(getattr(config, name, None)) for field, name, words in _WORDS}
    return found | words | ({"dropout": True} if _has_dropout(config) else {})


def _count(config: Any, names: Sequence[str]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _has_dropout(config: Any) -> bool:
    """Of megatron-core, which has it in functions."""
    rate = getattr(config, "hidden_dropout", None)
    return isinstance(rate, float) and rate > 0


def _of_structure(model: nn.Module) -> dict[str, Any]:
    stack = find_stack(model)
    embeddings: list[Any] = [m for m in model.modules() if _is_embedding(m)]
    largest = max(embeddings, key=lambda m: m.num_embeddings, default=None)
    kinds = [type(module).__name__.lower() for module in model.modules()]
    return {
        "layers": len(stack.layers) if stack is not None and stack.name else None,
        "vocab": None if largest is None else largest.num_embeddings,
        "hidden": None if largest is None else largest.embedding_dim,
        "tied": _is_tied(model, largest),
        "norm": "rms" if any("rmsnorm" in kind for kind in kinds) else "layer",
        "activation": "swiglu" if _any_called(model, ("gate", "gate_proj")) else "gelu",
        "positions": "rotary" if any("rotary" in kind for kind in kinds) else None,
        # That of megatron-core, in plain operators; not those of Transformer Engine or MindSpeed.
        "flash": False if "dotproductattention" in kinds else None,
        "dropout": any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()),
    }


def _is_embedding(module: Any) -> bool:
    """Torch's, or one of its kind: megatron-core's tells the sizes of all ranks' parts together."""
    sizes = (getattr(module, name, None) for name in ("num_embeddings", "embedding_dim"))
    return all(isinstance(size, int) for size in sizes) and hasattr(module, "weight")


def _is_tied(model: nn.Module, embedding: Any) -> bool:
    said = [getattr(m, "share_embeddings_and_output_weights", None) for m in model.modules()]
    return True in said or (embedding is not None and _is_shared(model, embedding.weight))


def _any_called(model: nn.Module, names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[2] in names for name, _ in model.named_modules())


def _is_shared(model: nn.Module, weight: torch.Tensor) -> bool:
    return sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1


def _of_training(model: nn.Module, optimizer: optim.Optimizer | None, plan: Plan) -> dict[str, Any]:
    said, known = plan.training, {**_PARALLEL, "dp": "data_parallel_size"}
    found: dict[str, Any] = {
        "masters": any(map(_has_masters, plan.features.items())),
        "dtype": _DTYPES.get(main_dtype(model.parameters())),
        "micro_batches": said.get("num_microbatches"),
        **{field: said.get(option) for field, option in known.items()},
        "sequence_parallel": said.get("sequence_parallel"),
    }
    if isinstance(optimizer, optim.SGD):
        momentum = any(group["momentum"] for group in optimizer.param_groups)
        found["optimizer"] = "momentum" if momentum else "sgd"
    if optimizer is not None and all(group.get("fused") for group in optimizer.param_groups):
        found["fused_step"] = True
    return found


def _data_parallel_ranks(found: Mapping[str, Any], ranks: object) -> int:
    """Those that no other kind of parallelism accounts for."""
    of_one_model = math.prod(found.get(field, 1) for field in ("tp", "pp", "cp"))
    return max(1, ranks // of_one_model) if isinstance(ranks, int) else 1


def _has_masters(feature: tuple[str, Any]) -> bool:
    name, config = feature
    return name == "reuse-fp32-param" or bool(getattr(config, "master_weights", False))
