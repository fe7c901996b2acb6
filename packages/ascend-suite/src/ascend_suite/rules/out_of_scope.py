"""Rows of the table of constraints that are no rule here, and why. Data; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = ["OUT_OF_SCOPE", "OutOfScope"]


@dataclasses.dataclass(frozen=True)
class OutOfScope:
    """A constraint of the incumbent's that is no rule here.

    Attributes:
        row: Its number in the table of constraints.
        subject: What it limits.
        reason: Why it is no rule.
    """

    row: int
    subject: str
    reason: str


_NO_FEATURE = "the feature is MindSpeed's alone, and has no counterpart here."
_OLD_BRANCH = "the feature is on an old branch of MindSpeed alone."
_DEAD = "the feature's code is in no release of MindSpeed any more."
_SCHEDULE = (
    "it is a schedule of pipelines, which MindSpeed or megatron-core checks itself; features that "
    "it changes are refused beside it."
)
_PARALLEL = (
    "it divides sequences over ranks, which MindSpeed checks itself; it is not shipped here."
)
_EXPERTS = "mixtures of experts are no feature here; MindSpeed or megatron-core checks itself."
_LINEAR = "it replaces MindSpeed's linear layers, and is not shipped here."

_ROWS: Mapping[tuple[str, str], Sequence[int]] = {
    ("virtual-optimizer", f"{_NO_FEATURE} Beside swap-optimizer it is refused."): (8,),
    ("virtual-optimizer, compress-optimizer", _NO_FEATURE): (9,),
    (
        "reuse-fp32-param",
        "it does not hold here: any parameter is taken, at any offset and of any size, and no "
        "buffer is padded for it.",
    ): (15,),
    (
        "recompute-norm",
        "it does not hold here: norms are found by their class, in any model.",
    ): (24,),
    (
        "CheckpointWithoutOutput",
        "it does not hold here: its replay takes gradients with autograd.grad, which may be called "
        "around it.",
    ): (29,),
    (
        "CheckpointWithoutOutput",
        "it is called in a model's code, and chosen by no plan; a call that it cannot serve says "
        "so itself.",
    ): (30,),
    (
        "swap-attention",
        "it does not hold here: the order of layers is learnt in the first step, and no step is "
        "profiled.",
    ): (40,),
    ("smart-swap", f"{_NO_FEATURE} Beside features that move it is refused."): (41, 42),
    ("adaptive-recompute-device-swap", _DEAD): (44,),
    ("memory-fragmentation", _OLD_BRANCH): (46,),
    ("recomp-communication-level", _OLD_BRANCH): (47, 48),
    ("recompute-in-bubble", _SCHEDULE): (49,),
    ("recompute-in-advance", _SCHEDULE): (50, 51),
    ("ripipe", _SCHEDULE): (52,),
    ("automated_pipeline", _DEAD): (54,),
    (
        "alibi pse",
        "it does not hold here: slopes are passed, and what the operator does not take is computed "
        "by torch's operators, with a warning.",
    ): (62,),
    ("attention patches", "nothing of attention is patched here."): (63,),
    ("use_flash_attn", "sparse_mode is an option of MindSpeed's attention alone."): (64,),
    ("overlap-grad-reduce, overlap-param-gather", f"ampipe: {_DEAD}"): (68,),
    ("reset-bucket-group-order", "it orders MindSpeed's buckets of weights alone."): (72,),
    ("param-and-grad-buffer-pad", "it pads MindSpeed's buffers alone."): (73,),
    ("quant-grads", f"{_NO_FEATURE} Beside features of the optimizer it is refused."): (75,),
    (
        "rope fusion op",
        "it does not hold here: what the operator does not take is computed by torch's operators, "
        "with a warning.",
    ): (80,),
    ("fused_ema_adamw", f"{_NO_FEATURE} Beside features of the optimizer it is refused."): (81, 82),
    ("moe-permute-fusion", _EXPERTS): (83, 84, 85, 86),
    ("mc2", _LINEAR): (87, 88, 89, 90),
    ("moe_alltoall_mc2", _EXPERTS): (91,),
    ("moe overlap (alltoall/allgather)", _EXPERTS): (92,),
    ("coc", _LINEAR): (93, 94),
    ("coc-fused-kernel", _LINEAR): (95,),
    ("ring context parallelism", _PARALLEL): (96,),
    ("ulysses context parallelism", _PARALLEL): (97,),
    ("hybrid context parallelism", _PARALLEL): (98,),
    ("adaptive context parallelism", _PARALLEL): (99,),
    ("kvallgather context parallelism", _PARALLEL): (100,),
    ("context parallelism's cache of keys and values", _PARALLEL): (101,),
    ("ulysses-allgather-kv", _PARALLEL): (102,),
    ("reset_attention_mask with context parallelism", _PARALLEL): (103,),
    (
        "virtual pipeline parallelism",
        "it is a schedule of pipelines, which megatron-core checks itself; features here work "
        "with it.",
    ): (104, 105, 106),
    ("pipeline layout", _SCHEDULE): (107,),
    ("dualpipev", _SCHEDULE): (108,),
    ("fb_overlap", _SCHEDULE): (109,),
    ("moe_zero_memory", _EXPERTS): (110,),
    ("tp_2d", f"{_LINEAR} Beside 'rms_norm' of fused-ops it is refused."): (112,),
    ("unaligned_linear", _LINEAR): (113,),
    ("fp8", "FP8 is no feature here; megatron-core checks itself."): (114,),
    (
        "any two replacements of one function",
        "nothing is patched here: features wrap, hook or subclass, and several meet in one place.",
    ): (124,),
}

OUT_OF_SCOPE = tuple(
    sorted(
        (
            OutOfScope(row, subject, reason)
            for (subject, reason), rows in _ROWS.items()
            for row in rows
        ),
        key=lambda entry: entry.row,
    )
)
"""In the order of the rows."""
