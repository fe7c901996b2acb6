"""One training: a model, its optimizer, and the features that are on for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ascend_core.errors import UnavailableError
from ascend_core.feature import Feature, Handle
from ascend_core.testing import bitwise_equal
from ascend_suite.demo.corpus import Batch
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.demo.settings import HEAD_SIZE, DemoSettings

__all__ = ["Outcome", "Training"]

_LEARNING_RATE = 3e-3
_LEARNING_RATE_WIDTH = 128


class Training:
    """A model in training, from the seed on.

    As a context manager it turns its features off again, the last one first.

    Args:
        settings: The model's shape, and the seed.
        device: Where the model is trained.
        features: Turned on in this order: those for the model, then, once the optimizer exists,
            those for the optimizer. When the handle of one of the latter is itself an optimizer,
            that one is stepped from then on.
    """

    def __init__(
        self, settings: DemoSettings, device: torch.device, features: Sequence[Feature] = ()
    ) -> None:
        torch.manual_seed(settings.seed)
        self.model = GPT(_model_config(settings)).to(device)
        self._handles: list[Handle] = []
        try:
            self._apply(features, "model", self.model)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=_learning_rate(settings.hidden)
            )
            self._apply(features, "optimizer", self.optimizer)
        except BaseException:
            self.close()
            raise

    def step(self, batch: Batch) -> float:
        """Train on one batch.

        The step's gradients stay until the next one.

        Returns:
            The loss before the update, in nats per byte. Reading it waits for the device.
        """
        self.optimizer.zero_grad()
        loss = self.model.loss(batch.tokens, batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def report(self) -> Mapping[str, Any]:
        """Return what the features say about themselves, in one mapping."""
        return {key: value for handle in self._handles for key, value in handle.report().items()}

    def close(self) -> None:
        """Turn the features off, the last one first."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _apply(self, features: Sequence[Feature], target: str, to: object) -> None:
        for feature in features:
            if feature.needs_bf16:
                raise UnavailableError(
                    f"{feature.name} works on BF16 weights, and the demo trains FP32 ones.",
                    why="a CPU takes many times as long for BF16 matrices.",
                    instead=f"read what it saves on its page, {feature.name}.md.",
                )
            if feature.target == target:
                handle = feature.apply(to)
                self._handles.append(handle)
                if isinstance(handle, torch.optim.Optimizer):
                    self.optimizer = to = handle


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training came to. The tensors are copies on the CPU.

    Attributes:
        losses: The loss of every step.
        gradients: The gradients of the last step, by parameter name.
        weights: The weights after the last step, by parameter name.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, losses: Sequence[float], model: torch.nn.Module) -> Outcome:
        """Copy the weights and gradients of `model` to the CPU."""
        weights, gradients = {}, {}
        for name, parameter in model.named_parameters():
            weights[name] = _copy(parameter)
            if parameter.grad is not None:
                gradients[name] = _copy(parameter.grad)
        return cls(tuple(losses), gradients, weights)

    def difference_from(self, plain: Outcome) -> str | None:
        """Say where this outcome first differs from `plain` in a bit, None when nowhere."""
        for index, (ours, theirs) in enumerate(zip(self.losses, plain.losses, strict=True)):
            if ours.hex() != theirs.hex():
                return f"the loss of step {index + 1} is {ours!r} instead of {theirs!r}"
        for kind, mine, others in (
            ("gradient", self.gradients, plain.gradients),
            ("weight", self.weights, plain.weights),
        ):
            if mine.keys() != others.keys():
                return f"the {kind}s are not those of the same parameters"
            for name, tensor in mine.items():
                if not bitwise_equal(tensor, others[name]):
                    return f"the {kind} {name} differs after the last step"
        return None

    def loss_difference_from(self, plain: Outcome) -> float:
        """The most by which the loss of a step differs from that of `plain`, in nats per byte."""
        return max(abs(a - b) for a, b in zip(self.losses, plain.losses, strict=True))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _model_config(settings: DemoSettings) -> GPTConfig:
    return GPTConfig(
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.hidden // HEAD_SIZE,
        seq=settings.seq,
        activation=settings.activation,
        norm=settings.norm,
        dropout=settings.dropout,
    )


def _learning_rate(hidden: int) -> float:
    """Wider models want smaller steps; narrower ones do not need larger ones."""
    return _LEARNING_RATE * min(1.0, _LEARNING_RATE_WIDTH / hidden)
