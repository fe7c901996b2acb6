"""Trains a small model and records every value that two equal runs must share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ascend_core.device import available_backends, backend_of, get_backend
from ascend_core.errors import ConfigError

__all__ = ["RunRecord", "StepRecord", "random_states", "record_run"]

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Copies, on the CPU, of what one optimizer step made.

    Attributes:
        losses: By micro-batch number.
        gradients: By parameter name, as the optimizer saw them; parameters without one are left
            out.
        weights: By parameter name, after the step.
        buffers: By buffer name, after the step.
        random_states: By device, after the step.
    """

    losses: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    random_states: Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One training run.

    Attributes:
        steps: One record per optimizer step.
        report: What the feature's handle reported at the end; empty without a handle.
    """

    steps: tuple[StepRecord, ...]
    report: Mapping[str, Any]

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches in order."""
        return [loss.item() for step in self.steps for loss in step.losses.values()]


def _mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def record_run(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    *,
    steps: int = 5,
    apply: Callable[[nn.Module, Any], Any] | None = None,
    make_optimizer: Callable[[nn.Module], Any] = _adamw,
    forward: Callable[[nn.Module, Batch], torch.Tensor] = _mean_square,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> RunRecord:
    """Train for some steps and record losses, gradients, weights, buffers and random state.

    Two calls with the same arguments are equal to the bit; give one of them an `apply` and
    compare with `assert_bitwise_equal`. Seeds PyTorch's global generators of every device.

        plain = record_run(make_model, make_batch)
        changed = record_run(make_model, make_batch, apply=lambda model, opt: verb(model))
        assert_bitwise_equal(plain, changed)

    Args:
        make_model: Builds the model, on any device; called after seeding.
        make_batch: Builds micro-batch number n, on any device; may draw random numbers.
        steps: Optimizer steps.
        apply: Turns the feature on for `(model, optimizer)`, before the first step; what it
            returns is the handle, whose `report()` is kept and whose `remove()` is called at the
            end, also after an exception. It may return None.
        make_optimizer: Builds the optimizer, or a facade of one, for the model.
        forward: Computes the scalar loss of one micro-batch; by default the mean of the squared
            output.
        accumulate: Micro-batches per optimizer step; their gradients add up.
        autocast: Run `forward` under autocast to this dtype.
        device: Where model and batches are moved.
        seed: Of PyTorch's generators.

    Raises:
        ConfigError: When `steps` or `accumulate` is below 1.
    """
    if steps < 1 or accumulate < 1:
        raise ConfigError(
            f"a run of {steps} steps with {accumulate} micro-batches each records nothing.",
            instead="give steps and accumulate of 1 or more.",
        )
    place = torch.device(device)
    torch.manual_seed(seed)
    model = make_model().to(place)
    optimizer = make_optimizer(model)
    handle: Any = apply(model, optimizer) if apply is not None else None
    records = []
    try:
        for step in range(steps):
            losses = {}
            optimizer.zero_grad()
            for micro in range(accumulate):
                batch = _to_device(make_batch(step * accumulate + micro), place)
                with _autocast(place, autocast):
                    loss = forward(model, batch)
                torch.autograd.backward(loss)
                losses[str(micro)] = _copy(loss)
            gradients = _gradients(model)
            optimizer.step()
            records.append(_record(model, losses, gradients))
        report = handle.report() if hasattr(handle, "report") else {}
    finally:
        if hasattr(handle, "remove"):
            handle.remove()
    return RunRecord(tuple(records), report)


def random_states(devices: tuple[torch.device, ...] | None = None) -> dict[str, torch.Tensor]:
    """The position of PyTorch's global generators, by device; all of them when left out.

    Returns:
        `uint8` tensors on the CPU.
    """
    if devices is None:
        found = [get_backend(name) for name in available_backends()]
        devices = tuple(b.device(n) for b in found for n in range(b.device_count()))
    return {str(device): backend_of(device).get_rng_state(device) for device in devices}


def _record(
    model: nn.Module, losses: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> StepRecord:
    return StepRecord(
        losses,
        gradients,
        {name: _copy(weight) for name, weight in model.named_parameters()},
        {name: _copy(buffer) for name, buffer in model.named_buffers()},
        random_states(),
    )


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: _copy(weight.grad) for name, weight in named if weight.grad is not None}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, (torch.Tensor, nn.Module)):
        return batch.to(device)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(_to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: _to_device(part, device) for key, part in batch.items()}
    return batch
