"""What a model, an optimizer and this process say of the training that a plan meets.

What is told by a sign alone (a name, an attribute) is said where the sign is there, and is not said
to be false where it is not: gradient checkpointing may be turned on later, and by other names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import distributed, nn, optim

from ascend_core.device import device_of
from ascend_core.errors import ConfigError
from ascend_core.optim.rules import rule_for
from ascend_suite.doctor._software import cann
from ascend_suite.finding import Finding, Severity
from ascend_suite.versions import installed_versions
from ascend_suite.vocabulary import VOCABULARY

__all__ = ["contradictions", "found_facts", "main_dtype", "told_by_config"]

# Weights tell their type; which modules a model is made of is the choice of its spec.
_TOLD_BY_OTHERS = frozenset({"bf16", "fp16", "transformer_impl"})
_HOLDERS = ("ModelParallelConfig", "TransformerConfig")
_PLAIN = (bool, int, float, str, list)
_CHECKPOINTED = ("gradient_checkpointing", "is_gradient_checkpointing")


def found_facts(
    chunks: Sequence[nn.Module], optimizer: optim.Optimizer | None
) -> dict[str, object]:
    """Read off what can be, by the names of the vocabulary.

    Args:
        chunks: The model, or its chunks.
        optimizer: None where there is none yet.
    """
    facts: dict[str, object] = {
        **installed_versions(),
        "torch_version": torch.__version__,
        "world_size": _world_size(),
    }
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if parameters:
        facts["device"] = device_of(parameters[0]).type
        if facts["device"] == "npu":
            facts.update(_of_npu())
        facts.update(_of_parameters(chunks, parameters))
    facts.update(_of_modules(list(chain.from_iterable(chunk.modules() for chunk in chunks))))
    if optimizer is not None:
        facts.update(_of_optimizer(optimizer))
    return facts


def told_by_config(chunks: Sequence[nn.Module]) -> dict[str, object]:
    """Read off what a model's config of megatron-core says of its training, beside its defaults.

    Where the plan says something else that counts: a training script's arguments say some things in
    other words than the config that is made of them.
    """
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    configs: Iterable[Any] = (getattr(m, "config", None) for m in modules if _is_of_megatron(m))
    config = next((one for one in configs if dataclasses.is_dataclass(one)), None)
    told: dict[str, object] = {}
    for field in () if config is None else dataclasses.fields(config):
        value, option = getattr(config, field.name), VOCABULARY.get(field.name)
        known = option is not None and option.holder in _HOLDERS
        if known and value != field.default and isinstance(value, _PLAIN):
            told[field.name] = value
    if told.get("recompute_granularity") != "selective":
        told.pop("recompute_modules", None)  # megatron-core itself fills it in, for that alone
    return {name: value for name, value in told.items() if name not in _TOLD_BY_OTHERS}


def main_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    """The type of most elements, since norms are left in FP32 by some; None without elements."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda kind: sizes[kind], default=None)


def contradictions(stated: Mapping[str, object], found: Mapping[str, object]) -> list[Finding]:
    """What a plan says of its training, and is not so."""
    return [
        Finding(
            Severity.ERROR,
            f"training.{name}",
            f"the plan says that {name} is {stated[name]!r}, and it is {is_now!r}.",
            why="it was read off the model, the optimizer and this process.",
            instead=f"leave {name} out of the plan's training, or give what it was meant for.",
        )
        for name, is_now in found.items()
        if name in stated and stated[name] != is_now
    ]


def _world_size() -> int:
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if started else 1


def _of_npu() -> dict[str, object]:
    # That CANN is there shows in that the device works; where its version is not known, none is.
    version = cann().version
    names = torch._C._dispatch_get_all_op_names()
    operators = {name[5:].partition(".")[0] for name in names if name.startswith("npu::")}
    return {
        "npu_operators": tuple(sorted(operators)),
        **({} if version is None else {"cann_version": version}),
    }


def _of_parameters(
    chunks: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> dict[str, object]:
    dtype = main_dtype(parameters)
    uses = [
        id(parameter)
        for chunk in chunks
        for module in chunk.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    return {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "dtensor_parameters": any(hasattr(parameter, "placements") for parameter in parameters),
        "shared_parameters": len(set(uses)) < len(uses),
    }


def _of_modules(modules: Sequence[nn.Module]) -> dict[str, object]:
    kinds = {kind.__name__ for module in modules for kind in type(module).__mro__}
    fsdp = "fsdp1" if "FullyShardedDataParallel" in kinds else None
    facts: dict[str, object] = {
        "fsdp": "fsdp2" if "FSDPModule" in kinds else fsdp,
        "torch_ddp": "DistributedDataParallel" in kinds,
    }
    signs = {
        "torch_compile": "OptimizedModule" in kinds or any(map(_is_compiled, modules)),
        "gradient_checkpointing": any(map(_is_checkpointed, modules)),
        "lora": any("lora_" in name for m in modules for name, _ in m.named_children()),
    }
    facts.update({name: True for name, found in signs.items() if found})
    if any(map(_is_of_megatron, modules)):
        facts["framework"] = "megatron-core"
    return facts


def _is_checkpointed(module: nn.Module) -> bool:
    """As Hugging Face's models say: of each part that can be, and of a model as a whole."""
    said = (getattr(module, name, None) for name in _CHECKPOINTED)
    return any(one not in (None, False) and not callable(one) for one in said)


def _is_of_megatron(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("megatron.core.") for kind in type(module).__mro__)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _of_optimizer(optimizer: optim.Optimizer) -> dict[str, object]:
    return {
        "capturable": _is_given(optimizer.param_groups, "capturable"),
        "amsgrad": _is_given(optimizer.param_groups, "amsgrad"),
        "elementwise_optimizer": _is_elementwise(optimizer),
    }


def _is_given(groups: Iterable[Mapping[str, Any]], option: str) -> bool:
    return any(bool(group.get(option)) for group in groups)


def _is_elementwise(optimizer: optim.Optimizer) -> bool:
    try:
        rule_for(optimizer)
    except ConfigError:
        return False
    return True
