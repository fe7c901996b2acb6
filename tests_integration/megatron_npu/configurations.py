"""What is trained: configurations of one tiny GPT, as data. Imports neither torch nor megatron.

A configuration is known by its name. `BY_WORLD[n]` holds those of n ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 4, 64, 4, 32, 128
SEQUENCES_PER_STEP = 4  # a micro batch is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """How the GPT is trained.

    Attributes:
        losses_of: The configuration whose losses on the CPU these must be. None: its own.
        change: What is changed in megatron-core, by its name in `changes.CHANGES`.
        steps: How many, all on the same batch.
        resume_after: After how many everything is saved, built anew and loaded; None: never.
        dtype: Of the parameters: "fp32", "bf16" or "fp16".
        tensor: Ranks that share a layer.
        pipeline: Ranks that share the layers.
        virtual: Model chunks of each rank, None for no interleaving.
        distributed_optimizer: Shard its state over the ranks.
        overlap: Reduce gradients (and with a distributed optimizer, gather parameters) during
            backward (and forward).
        bucket: Parameters of a bucket, about; None: megatron-core's choice.
        swiglu: A gated activation without bias, or GELU with one.
        norm: "RMSNorm" or "LayerNorm".
        positions: "rope", "learned_absolute" or "alibi".
        tied: Share the embedding with the output layer.
        dropout: Of attention and hidden states.
        swap: How attention is swapped: "model", "options" or "spec"; None: it is not.
        swapped: More for `SwapAttentionConfig`, or of the options that ask for it.
        fused: Operators of ascend_ops that the spec asks for.
        model: More for `TransformerConfig`.
        optimizer: More for `OptimizerConfig`.
    """

    losses_of: str | None = None
    change: str | None = None
    steps: int = 3
    resume_after: int | None = None
    dtype: str = "fp32"
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    distributed_optimizer: bool = False
    overlap: bool = False
    bucket: int | None = None
    swiglu: bool = True
    norm: str = "RMSNorm"
    positions: str = "rope"
    tied: bool = False
    dropout: float = 0.0
    swap: str | None = None
    swapped: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fused: tuple[str, ...] = ()
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _recompute(granularity: str, **how: Any) -> dict[str, Any]:
    return {"recompute_granularity": granularity, **how}


def _offload(*modules: str) -> dict[str, Any]:
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": 1,
    }


BUCKETS = 20_000  # makes nine of the model
UNIFORM = _recompute("full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = _recompute("full", recompute_method="block", recompute_num_layers=2)
ATTENTION = _offload("core_attn", "attn_proj", "qkv_linear")
NORMS = _offload("attn_norm", "mlp_norm")


def _offloading(change: str | None = None, model: Mapping[str, Any] = ATTENTION) -> Configuration:
    return Configuration(losses_of="fp32", steps=4, model=model, change=change)


def _swapping(losses_of: str, **options: Any) -> Configuration:
    return Configuration(
        losses_of=losses_of, distributed_optimizer=True, change="swap-optimizer", **options
    )


# One rank.
WORLD_1 = {
    "fp32": Configuration(steps=4),
    "bf16": Configuration(dtype="bf16"),
    "fp16": Configuration(dtype="fp16", optimizer={"initial_loss_scale": 4096}),
    "gelu, LayerNorm": Configuration(swiglu=False, norm="LayerNorm", positions="learned_absolute"),
    "grouped queries": Configuration(model={"num_query_groups": 2}),
    "tied embedding": Configuration(tied=True),
    "sgd": Configuration(optimizer={"optimizer": "sgd"}),
    "fp32, distributed optimizer": Configuration(distributed_optimizer=True),
    "bf16, distributed optimizer": Configuration(dtype="bf16", distributed_optimizer=True),
    "fp32, swap-optimizer": _swapping("fp32, distributed optimizer"),
    "bf16, swap-optimizer": _swapping("bf16, distributed optimizer", dtype="bf16"),
    "fp32, swap-optimizer, resumed": _swapping("fp32, distributed optimizer", resume_after=1),
    "bf16, swap-optimizer, resumed": _swapping(
        "bf16, distributed optimizer", dtype="bf16", resume_after=1
    ),
    "overlap": Configuration(distributed_optimizer=True, overlap=True, bucket=BUCKETS),
    "fused swiglu": Configuration(model={"bias_activation_fusion": True}),
    "uniform recompute": Configuration(losses_of="fp32", model=UNIFORM),
    "block recompute": Configuration(losses_of="fp32", model=BLOCK),
    "recompute of attention": Configuration(
        losses_of="fp32", model=_recompute("selective", recompute_modules=["core_attn"])
    ),
    "recompute of the MLP": Configuration(
        losses_of="fp32", model=_recompute("selective", recompute_modules=["mlp"])
    ),
}

# Random numbers are the device's, so these have no losses on the CPU; recompute changes nothing.
DROPOUT = {
    "dropout": Configuration(dropout=0.1),
    "dropout, uniform recompute": Configuration(dropout=0.1, model=UNIFORM),
    "dropout, recompute of attention": Configuration(
        dropout=0.1, model=_recompute("selective", recompute_modules=["core_attn"])
    ),
}

# megatron-core's fine-grained activation offload, as it is and with the wait that it lacks.
OFFLOAD = {
    "offload of attention, unmodified": _offloading(),
    "offload of norms, unmodified": _offloading(model=NORMS),
    "offload of attention, with the wait": _offloading("wait in tensor_pop"),
    "offload of norms, with the wait": _offloading("wait in tensor_pop", NORMS),
    # Its identities in the graph change the order in which gradients are added: these move nothing.
    "offload of norms, of nothing": _offloading(
        model={**NORMS, "min_offloaded_tensor_size": 2**40}
    ),
}

# The offload with that wait, and without one of its synchronisations.
TWINS = {
    f"offload, {change}": _offloading(change)
    for change in (
        "no wait_offload_event",
        "no wait_reload_event",
        "no wait before the copy to the host",
        "no wait before the copy to the device",
        "no record_stream",
    )
}

# Two ranks.
WORLD_2 = {
    "dp2": Configuration(),
    "dp2, overlap": Configuration(overlap=True, bucket=BUCKETS),
    "dp2, distributed optimizer, overlap": Configuration(
        steps=4, distributed_optimizer=True, overlap=True, bucket=BUCKETS
    ),
    "dp2, bf16": Configuration(dtype="bf16", distributed_optimizer=True),
    "dp2, bf16, swap-optimizer": _swapping("dp2, bf16", dtype="bf16"),
    "dp2, bf16, swap-optimizer, resumed": _swapping("dp2, bf16", dtype="bf16", resume_after=1),
    "tp2": Configuration(tensor=2),
    "tp2, sequence parallel": Configuration(tensor=2, model={"sequence_parallel": True}),
    "pp2": Configuration(pipeline=2),
    "pp2, tied embedding": Configuration(pipeline=2, tied=True),
    "pp2, vpp2": Configuration(pipeline=2, virtual=2),
    "pp2, vpp2, bf16, distributed optimizer, overlap": Configuration(
        pipeline=2,
        virtual=2,
        dtype="bf16",
        distributed_optimizer=True,
        overlap=True,
        bucket=BUCKETS,
    ),
    "tp2, uniform recompute": Configuration(
        losses_of="tp2", tensor=2, model={**UNIFORM, "distribute_saved_activations": True}
    ),
    "pp2, offload of attention": Configuration(
        losses_of="pp2", pipeline=2, model=ATTENTION, change="wait in tensor_pop"
    ),
}

# Data parallelism that overlaps, without one of its two waits.
TWINS_2 = {
    f"dp2, {change}": Configuration(
        losses_of="dp2, distributed optimizer, overlap",
        steps=4,
        change=change,
        distributed_optimizer=True,
        overlap=True,
        bucket=BUCKETS,
    )
    for change in ("no wait for gradients", "no wait for parameters")
}


def _moving(losses_of: str, by: str, **options: Any) -> Configuration:
    """A configuration of the kept ones, with its attention swapped."""
    kept = {**WORLD_1, **WORLD_2}[losses_of]
    return dataclasses.replace(kept, losses_of=losses_of, swap=by, **options)


# Where copies wait as long as they may, every layer is late, and would stay.
EVERY = {"keep_last": 0}

SWAP_1 = {
    "swap-attention": _moving("fp32", "model"),
    "swap-attention, MLPs": _moving(
        "fp32", "options", swapped={**EVERY, "recompute_num_layers": 2}
    ),
    "swap-attention by spec": _moving(
        "fp32", "spec", swapped={"keep_last": 1, "recompute_num_layers": 1}
    ),
    "swap-attention, selective": _moving(
        "fp32",
        "model",
        swapped=EVERY,
        model=_recompute("selective", recompute_modules=["core_attn"]),
    ),
    "swap-attention, selective of the MLP": _moving(
        "fp32",
        "options",
        swapped=EVERY,
        model=_recompute("selective", recompute_modules=["core_attn", "mlp"]),
    ),
    "swap-attention, block recompute": _moving("fp32", "options", swapped=EVERY, model=BLOCK),
    "swap-attention, uniform recompute": _moving("fp32", "options", model=UNIFORM),
    "swap-attention, bf16, swap-optimizer, resumed": _moving(
        "bf16, distributed optimizer",
        "options",
        swapped={**EVERY, "recompute_num_layers": 2},
        change="swap-optimizer",
        resume_after=1,
    ),
}

SWAP_2 = {
    "swap-attention, tp2": _moving("tp2", "model", swapped=EVERY),  # SA-28
    "swap-attention, tp2, sequence parallel": _moving(
        "tp2, sequence parallel", "options", swapped={**EVERY, "recompute_num_layers": 2}
    ),
    "swap-attention, pp2": _moving("pp2", "model"),
    "swap-attention, pp2, all move": _moving("pp2", "model", swapped=EVERY),
    "swap-attention, pp2, MLPs": _moving("pp2", "options", swapped={"recompute_num_layers": 1}),
    "swap-attention, pp2, vpp2": _moving("pp2, vpp2", "options", swapped=EVERY),
    "swap-attention, pp2, vpp2, by chunk": _moving("pp2, vpp2", "model", swapped=EVERY),
    "swap-attention, pp2, vpp2, bf16, overlap": _moving(
        "pp2, vpp2, bf16, distributed optimizer, overlap",
        "spec",
        swapped={"recompute_num_layers": 2},
    ),
    "swap-attention, dp2, swap-optimizer": _moving(
        "dp2, bf16", "model", swapped=EVERY, change="swap-optimizer", resume_after=1
    ),
}


# Fused operators. What they round differs, so that losses are near the plain ones, not equal.
OPS = ("swiglu", "rms_norm")
ALIBI: dict[str, Any] = {"positions": "alibi", "fused": (*OPS, "alibi_attention")}
GROUPS = {"num_query_groups": 2}

OPS_1 = {
    "ops": Configuration(losses_of="fp32", fused=OPS),
    "ops, bf16": Configuration(losses_of="bf16", fused=OPS, dtype="bf16"),
    "ops, alibi": Configuration(**ALIBI),
    "ops, alibi, grouped queries": Configuration(**ALIBI, model=GROUPS),
}

OPS_2 = {
    "ops, tp2, sequence parallel": Configuration(
        losses_of="tp2, sequence parallel",
        tensor=2,
        fused=OPS,
        model={"sequence_parallel": True},
    ),
    "ops, alibi, tp2": Configuration(tensor=2, **ALIBI),
    "ops, alibi, tp2, grouped queries, sequence parallel": Configuration(
        tensor=2, **ALIBI, model={**GROUPS, "sequence_parallel": True}
    ),
    "ops, alibi, pp2": Configuration(pipeline=2, **ALIBI),
}

BY_WORLD = {
    1: {**WORLD_1, **DROPOUT, **OFFLOAD, **TWINS, **SWAP_1, **OPS_1},
    2: {**WORLD_2, **TWINS_2, **SWAP_2, **OPS_2},
}


def reference(name: str, world: int) -> str:
    """The configuration whose losses on the CPU are those of `name`."""
    return BY_WORLD[world][name].losses_of or name


def trained_on_cpu(world: int) -> list[str]:
    """The configurations of which the repository keeps the CPU's losses."""
    own = {1: WORLD_1, 2: WORLD_2}[world]
    return [name for name, found in own.items() if found.losses_of is None]
