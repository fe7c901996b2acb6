"""One training: a model, its optimizer, and the features that are on for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, distributed

from ascend_core.errors import UnavailableError
from ascend_core.feature import Feature
from ascend_core.optim import windowed
from ascend_core.testing import bitwise_equal
from ascend_suite._order import in_order
from ascend_suite.demo.corpus import Batch
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.demo.settings import HEAD_SIZE, DemoSettings
from ascend_suite.plan import Plan
from ascend_suite.session import Session

__all__ = ["Outcome", "Training"]

_LEARNING_RATE = 3e-3
_LEARNING_RATE_WIDTH = 128


class Training:
    """A model in training, from the seed on.

    As a context manager it turns its features off again, the last one first. Where a feature works
    between ranks, this process is a group of one for as long.

    Args:
        settings: The model's shape, and the seed.
        device: Where the model is trained.
        features: Turned on in the order that fits them.
        configs: Options of features, by name; their defaults where left out.
        bf16: Whether weights are BF16. Without a feature for that their FP32 masters are beside.
    """

    def __init__(
        self,
        settings: DemoSettings,
        device: torch.device,
        features: Sequence[Feature] = (),
        configs: Mapping[str, Any] | None = None,
        *,
        bf16: bool = False,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.model = GPT(_model_config(settings)).to(device)
        if bf16:
            self.model.bfloat16()
        given: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_learning_rate(settings.hidden)
        )
        if bf16 and not any(feature.needs_bf16 for feature in features):
            given = windowed(given, master_weights=True)
        chosen = {f.name: (configs or {}).get(f.name, f.config()) for f in features}
        self._undo = contextlib.ExitStack()
        if any(feature.needs_ranks for feature in features):
            self._undo.enter_context(_group_of_one(device))
        self._session = Session(Plan(chosen), (), self.model, given, None)
        try:
            self._session.turn_on(in_order(features), {})
        except BaseException as error:
            self._session.give_up(error)
            self._undo.close()
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps: the plain one, or what stands for it."""
        optimizer = self._session.optimizer
        assert optimizer is not None
        return optimizer

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
        rows = self._session.report().features
        return {key: value for row in rows for key, value in row.values.items()}

    def close(self) -> None:
        """Turn the features off, the last one first."""
        with self._undo:
            self._session.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._undo:
            self._session.__exit__(kind, error, traceback)


@contextlib.contextmanager
def _group_of_one(device: torch.device) -> Iterator[None]:
    """Let this process be a group of one rank, unless it is in a group already."""
    if not distributed.is_available():
        raise UnavailableError("this torch has no torch.distributed.", instead="install another.")
    if distributed.is_initialized():
        yield
        return
    backend = distributed.get_default_backend_for_device(device)
    distributed.init_process_group(
        backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        store=distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


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
