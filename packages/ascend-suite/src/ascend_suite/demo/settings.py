"""What the demo trains and measures, checked before anything is built. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_core.errors import ConfigError

__all__ = ["HEAD_SIZE", "DemoSettings"]

HEAD_SIZE = 32
"""Channels of one attention head in the demo's model."""

_SEEDS = 2**63


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """The settings of one demo; every run in it, plain or with a feature, shares them.

    The defaults keep the demo well under a minute for two runs on two CPU cores, and give the
    feed-forward layers a third of the peak memory, so that a feature's saving shows in the picture.

    Attributes:
        layers: Decoder blocks of the model.
        hidden: Model width, a multiple of 32 (the size of a head).
        seq: Bytes in a sequence.
        batch: Sequences in a step.
        steps: Training steps of the runs whose losses and weights are compared.
        seed: Decides the initial weights, the batches and the dropout masks.
        dropout: Probability of the model's dropout.
        activation: The model's feed-forward layer, gated (`"swiglu"`) or not (`"gelu"`).
        norm: The model's normalisation.
        memory_steps: Training steps over which peak memory is measured. From the second on the
            optimizer's state exists.
        time_rounds: Rounds in which the runs take turns to be timed.
        timed_steps: Timed steps in one round, after one step that is not timed.

    Raises:
        ConfigError: When a value cannot be right.
    """

    layers: int = 4
    hidden: int = 128
    seq: int = 256
    batch: int = 8
    steps: int = 20
    seed: int = 0
    dropout: float = 0.1
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    memory_steps: int = 3
    time_rounds: int = 5
    timed_steps: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "seq", "batch", "memory_steps", "time_rounds"):
            self._require_at_least(name, 1, "there would be nothing to train")
        self._require_at_least("steps", 2, "a loss can only fall from one step to a later one")
        self._require_at_least("timed_steps", 1, "there would be nothing to time")
        self._require_at_least("seed", 0, "random generators take seeds that are not negative")
        if self.seed >= _SEEDS:
            raise ConfigError(
                f"seed is {self.seed}.",
                why="random generators take 63 bits.",
                instead=f"choose a whole number below {_SEEDS}.",
            )
        if self.hidden % HEAD_SIZE:
            lower = max(HEAD_SIZE, self.hidden // HEAD_SIZE * HEAD_SIZE)
            raise ConfigError(
                f"hidden is {self.hidden}, which cannot be split into attention heads.",
                why=f"the demo's model has heads of {HEAD_SIZE} channels.",
                instead=f"choose a multiple of {HEAD_SIZE}, such as {lower}.",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                f"dropout is {self.dropout}.",
                why="it is the probability that a value is dropped, and some must remain.",
                instead="choose a number from 0 up to, but not including, 1.",
            )

    @property
    def batches(self) -> int:
        """Batches that the longest of a run's parts needs; all parts start with the first one."""
        return max(self.steps, self.memory_steps, 1 + self.timed_steps)

    @property
    def steps_per_run(self) -> int:
        """Training steps of one run, over its memory, training and time parts."""
        return self.memory_steps + self.steps + self.time_rounds * (1 + self.timed_steps)

    def briefly(self) -> DemoSettings:
        """The same with fewer rounds of timing, for a run that is no memory feature's."""
        return dataclasses.replace(self, time_rounds=min(self.time_rounds, 2))

    def slowly(self) -> DemoSettings:
        """The same with fewer steps of every kind, for a run whose steps are slow."""
        return dataclasses.replace(
            self.briefly(),
            steps=min(self.steps, 5),
            memory_steps=min(self.memory_steps, 2),
            timed_steps=1,
        )

    def _require_at_least(self, name: str, least: int, why: str) -> None:
        value = getattr(self, name)
        if value < least:
            raise ConfigError(
                f"{name.replace('_', '-')} is {value}.",
                why=f"{why}.",
                instead=f"choose a whole number of at least {least}.",
            )
