"""Compares two training runs bit by bit, and reports the first difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ascend_core.testing.training import RunRecord, StepRecord

__all__ = ["Difference", "assert_bitwise_equal", "bits", "bitwise_equal", "compare_runs"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same width, so that NaN equals itself.

    Args:
        tensor: Any shape and dtype; sparse tensors are made dense.

    Returns:
        A contiguous integer tensor on the same device; complex values gain a last dimension of 2.
    """
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.resolve_neg().contiguous().view(_INTEGERS[plain.element_size()])


def bitwise_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits (`torch.equal` fails on NaN)."""
    same_form = left.shape == right.shape and left.dtype == right.dtype
    return same_form and torch.equal(bits(left).cpu(), bits(right).cpu())


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ.

    Attributes:
        step: Number of the optimizer step, from 0.
        what: `"loss"`, `"gradient"`, `"weight"`, `"buffer"` or `"random state"`.
        name: Of the parameter, buffer or device; the micro-batch for a loss.
        detail: How they differ: the first element with both values, or shapes and dtypes.
    """

    step: int
    what: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.what} {self.name}: {self.detail}"


def compare_runs(plain: RunRecord, changed: RunRecord) -> Difference | None:
    """Find the first difference of two runs, in the order in which training makes values.

    Within a step: losses, gradients, weights, buffers, random state (of CPU and devices).

    Args:
        plain: The run that is taken as right.
        changed: The run to check.

    Returns:
        The first difference, or None when every bit is equal.
    """
    for number, (left, right) in enumerate(zip(plain.steps, changed.steps, strict=False)):
        found = _compare_step(number, left, right)
        if found is not None:
            return found
    if len(plain.steps) != len(changed.steps):
        done = f"{len(plain.steps)} against {len(changed.steps)}"
        return Difference(min(len(plain.steps), len(changed.steps)), "number of", "steps", done)
    return None


def assert_bitwise_equal(plain: RunRecord, changed: RunRecord) -> None:
    """Assert that two runs are equal to the bit.

    Raises:
        AssertionError: With the first difference: step, name, element and both values.
    """
    difference = compare_runs(plain, changed)
    if difference is not None:
        raise AssertionError(f"the runs are not bitwise equal. First difference: {difference}")


def _compare_step(number: int, left: StepRecord, right: StepRecord) -> Difference | None:
    groups: tuple[tuple[str, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], ...] = (
        ("loss", left.losses, right.losses),
        ("gradient", left.gradients, right.gradients),
        ("weight", left.weights, right.weights),
        ("buffer", left.buffers, right.buffers),
        ("random state", left.random_states, right.random_states),
    )
    for what, ours, theirs in groups:
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            detail = _describe(ours.get(name), theirs.get(name))
            if detail is not None:
                return Difference(number, what, name, detail)
    return None


def _describe(left: torch.Tensor | None, right: torch.Tensor | None) -> str | None:
    if left is None or right is None:
        return "missing in the first run" if left is None else "missing in the second run"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
    if bitwise_equal(left, right):
        return None
    differs = bits(left).cpu() != bits(right).cpu()
    if left.is_complex():
        differs = differs.any(dim=-1)
    where = tuple(differs.nonzero()[0].tolist())
    count = int(differs.sum())
    first, second = (_dense(one)[where].item() for one in (left, right))
    return (
        f"element {list(where)} is {first!r} against {second!r} "
        f"({count} of {differs.numel()} elements differ)"
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
