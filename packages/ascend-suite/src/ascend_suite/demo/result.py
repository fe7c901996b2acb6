"""What a demo found out: one `Run` per row of its table, and whether it is a success.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_suite.demo.settings import DemoSettings

if TYPE_CHECKING:
    from ascend_core.memory import MemoryTimeline

__all__ = ["BEST", "PLAIN", "PLAIN_BF16", "DemoResult", "Run", "Status"]

PLAIN = "plain"
"""The name of the run without any feature, which the others are compared with."""

PLAIN_BF16 = "plain bf16"
"""That of BF16 weights with FP32 masters beside, which features that need BF16 are compared with.
"""

BEST = "best combination"
"""The name of the run with those features together that take the least memory."""


class Status(enum.StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    NOT_AVAILABLE = "not available"
    NOTHING_TO_DO = "nothing to do"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the demo. What could not be found out is None.

    Attributes:
        feature: Name of the feature that was on, `"plain"`, or another name of those above.
        against: Name of the run that it is compared with.
        features: Names of all features that were on.
        status: How the run ended.
        bitwise_promised: Whether the feature promises the plain run's bits.
        peak_bytes: Most device memory in use at once, weights and optimizer state included.
        saved_bytes: By how much that is below the plain run's; negative when it is above.
        step_seconds: Median time of a training step.
        step_time_ratio: Median over the time rounds of its step time over the plain run's.
        bitwise_equal: Whether the losses of all steps, the gradients of the last one and the final
            weights are those of the plain run, bit for bit. None where either did not finish.
        difference: The first place where they are not.
        loss_difference: The most by which the loss of a step differs from the plain run's.
        losses: The loss of every training step, in nats per byte.
        reason: Why the run did not finish.
        report: What the feature says about itself.
    """

    feature: str
    against: str = PLAIN
    features: tuple[str, ...] = ()
    status: Status = Status.FINISHED
    bitwise_promised: bool = True
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    step_seconds: float | None = None
    step_time_ratio: float | None = None
    bitwise_equal: bool | None = None
    difference: str | None = None
    loss_difference: float | None = None
    losses: tuple[float, ...] = ()
    reason: str | None = None
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def final_loss(self) -> float | None:
        """The loss of the last training step."""
        return self.losses[-1] if self.losses else None

    @property
    def loss_fell(self) -> bool:
        """Whether the last third of the losses is lower, on average, than the first third."""
        third = max(1, len(self.losses) // 3)
        return statistics.fmean(self.losses[-third:]) < statistics.fmean(self.losses[:third])

    def as_json(self) -> dict[str, Any]:
        """Return the run as JSON values; a number that is not finite becomes null."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _json_value(value) for name, value in fields.items()} | {
            "final_loss": _json_value(self.final_loss)
        }


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """All runs of a demo.

    Attributes:
        settings: What was trained and measured.
        device: Name of the device, such as `"cpu"` or `"cuda:0"`.
        torch_version: The PyTorch that ran.
        parameters: Number of parameters of the model.
        runs: The plain run first.
        timelines: Memory over time, by what is written over it in the picture: the run's name,
            and how it ended when it did not finish.
    """

    settings: DemoSettings
    device: str
    torch_version: str
    parameters: int
    runs: tuple[Run, ...]
    timelines: Mapping[str, MemoryTimeline]

    def plain_of(self, run: Run) -> Run | None:
        """The run that one is compared with."""
        return next((one for one in self.runs if one.feature == run.against), None)

    @property
    def failures(self) -> tuple[str, ...]:
        """Say, one sentence each, what makes the demo a failure; nothing when it is a success.

        A run fails the demo when its loss did not fall, when it promises the plain run's bits and
        has others, or when it ran out of memory where the plain run did not. That the plain run
        runs out of memory and another does not is what features are for, and no failure; a demo in
        which no run finished shows nothing, and is one. A feature that this machine lacks
        something for, or for which there is nothing in the model, is none.
        """
        if not any(run.status is Status.FINISHED for run in self.runs):
            return ("no run finished: choose a smaller model, batch or sequence",)
        finished = {run.feature for run in self.runs if run.status is Status.FINISHED}
        failures = []
        for run in self.runs:
            if run.status is Status.OUT_OF_MEMORY and run.against in finished:
                failures.append(f"{run.feature} ran out of memory where the plain run did not")
            if run.status is Status.FINISHED and not run.loss_fell:
                failures.append(
                    f"the loss of {run.feature} did not fall: it began at {run.losses[0]:.4f} and "
                    f"ended at {run.losses[-1]:.4f} (more steps may help)"
                )
            if run.bitwise_promised and run.bitwise_equal is False:
                failures.append(
                    f"{run.feature} promises the plain run's bits, but {run.difference}"
                )
        return tuple(failures)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values, without the timelines."""
        return {
            "device": self.device,
            "torch_version": self.torch_version,
            "parameters": self.parameters,
            "settings": dataclasses.asdict(self.settings),
            "runs": [run.as_json() for run in self.runs],
            "failures": list(self.failures),
        }


def _json_value(value: object) -> object:
    """Keep what JSON knows, and name the rest."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)
