"""What is known of one option of training. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Holder", "Origin", "TrainingOption"]

Origin = Literal["megatron-core", "megatron-training", "mindspeed", "fact"]
Holder = Literal[
    "ModelParallelConfig",
    "TransformerConfig",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOption:
    """One thing that a plan may say of the training that its features meet.

    Attributes:
        name: What it is called in a plan.
        type: What its value may be, as an annotation: `int | None`, `Literal["full", "selective"]`.
        meaning: One line.
        origin: Whose option it is: a field of a config of megatron-core, an argument of
            megatron-core's training scripts, an argument of MindSpeed, or a fact about the
            training that is nobody's option.
        default: What it is where nobody gave it. Of a fact nothing is said by leaving it out.
        holder: The config of megatron-core whose field it is.
        argument: What the option is called among the arguments of a training script, where it
            has another name there.
        spelt: The flag of a training script that gives it, where that is another one than its
            name says.
        off: The flag that turns it off, where a training script has it on without.
        required: Whether a training script has no default of use, so that leaving it out says
            nothing.
        items: What each item of a list may be, where not every text may be one.
    """

    name: str
    type: object
    meaning: str
    origin: Origin
    default: object = None
    holder: Holder | None = None
    argument: str | None = None
    spelt: str | None = None
    off: str | None = None
    required: bool = False
    items: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """The name under which a training script's parsed arguments have it."""
        return self.argument or self.name

    @property
    def flag(self) -> str | None:
        """The flag of a training script that gives it, or turns it on; None where none does."""
        if self.origin == "fact" or self.off is not None:
            return None
        return self.spelt or "--" + self.attribute.replace("_", "-")
