"""The flags of a training script that ask for features, as MindSpeed spells them.

Data: one row for each flag. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_suite._tokens import attribute_of

__all__ = ["FEATURE_FLAGS", "FeatureFlag"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureFlag:
    """One flag.

    Attributes:
        flag: How it is spelt.
        feature: The feature that it turns on, or that it is an option of.
        meaning: One line.
        type: What follows it; None where nothing does, and the flag turns the feature on.
        option: The option of the feature that it gives.
        item: What it adds to that option, which is a list.
        implies: Another option of the feature that is then as MindSpeed has it, and its value.
        aliases: Other spellings.
        framework: Whose training loop it asks for our feature in; in another it is an option of
            training (see the vocabulary). None: in all.
        unset: What it is where nobody gave it.
    """

    flag: str
    feature: str
    meaning: str
    type: type[int] | type[str] | None = None
    option: str | None = None
    item: str | None = None
    implies: tuple[str, object] | None = None
    aliases: tuple[str, ...] = ()
    framework: Literal["pytorch"] | None = None
    unset: int | str | None = None

    @property
    def attribute(self) -> str:
        """Its name among parsed arguments."""
        return attribute_of(self.flag)

    @property
    def is_switch(self) -> bool:
        """Whether it turns its feature on."""
        return self.type is None


FEATURE_FLAGS = (
    FeatureFlag(
        flag="--recompute-activation-function",
        feature="recompute-activation",
        meaning="rebuild the outputs of MLPs' activation functions",
    ),
    FeatureFlag(
        flag="--recompute-activation-function-num-layers",
        feature="recompute-activation",
        option="num_layers",
        type=int,
        meaning="in so many layers; in all that are left when left out",
    ),
    FeatureFlag(
        flag="--recompute-norm",
        feature="recompute-norm",
        meaning="rebuild the outputs of norms",
    ),
    FeatureFlag(
        flag="--recompute-norm-num-layers",
        feature="recompute-norm",
        option="num_layers",
        type=int,
        meaning="in so many layers; in all that are left when left out",
    ),
    FeatureFlag(
        flag="--swap-attention",
        feature="swap-attention",
        meaning="keep what attention saves for backward on the host, and fetch it ahead of need",
    ),
    FeatureFlag(
        flag="--swap-modules",
        feature="swap-attention",
        option="swap_modules",
        type=str,
        unset="input_norm,self_attention,post_attention_norm",
        meaning="names of the modules whose activations move, with commas between them",
    ),
    FeatureFlag(
        flag="--swap-optimizer",
        feature="swap-optimizer",
        implies=("master_weights", True),
        meaning="keep optimizer state on the host",
    ),
    FeatureFlag(
        flag="--swap-optimizer-times",
        feature="swap-optimizer",
        option="swap_optimizer_times",
        type=int,
        unset=16,
        meaning="into how many windows the parameters are cut: more are smaller",
    ),
    FeatureFlag(
        flag="--reuse-fp32-param",
        feature="reuse-fp32-param",
        meaning="keep FP32 masters in the bits of their BF16 weights",
    ),
    FeatureFlag(
        flag="--use-fused-swiglu",
        aliases=("--used-fused-swiglu",),
        feature="fused-ops",
        option="operators",
        item="swiglu",
        meaning="compute the gated activation of MLPs by one operator",
    ),
    FeatureFlag(
        flag="--use-fused-rmsnorm",
        feature="fused-ops",
        option="operators",
        item="rms_norm",
        meaning="compute RMSNorm by one operator",
    ),
    FeatureFlag(
        flag="--overlap-grad-reduce",
        feature="reduce-gradients",
        framework="pytorch",
        meaning="average gradients while backward runs",
    ),
    FeatureFlag(
        flag="--use-distributed-optimizer",
        feature="shard-optimizer",
        framework="pytorch",
        meaning="divide the optimizer among the ranks",
    ),
)
"""All of them. `--overlap-param-gather`, `--recompute-granularity` and what belongs to it take more
than a row: see `_reading_flags`."""
