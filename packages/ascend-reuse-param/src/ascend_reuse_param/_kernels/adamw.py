"""What the steps of AdamW in one pass share: what they take, and how they are held to torch's."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch.optim.adam import adam

from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import Codec, Parts

__all__ = [
    "AdamWOptions",
    "AdamWStep",
    "Moments",
    "Reference",
    "check_operands",
    "equals",
    "torchs_step",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """What a step computes with, in Python's floats.

    Attributes:
        lr: Learning rate.
        betas: As in torch.
        eps: As in torch.
        weight_decay: As in torch.
        decoupled: Decay the weight (AdamW) rather than the gradient (Adam).
        maximize: Step up rather than down.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True
    maximize: bool = False


@dataclasses.dataclass(frozen=True)
class Moments:
    """The state of a step, FP32 [n] each; `max_exp_avg_sq` with amsgrad only."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None

    @classmethod
    def zeros(cls, numel: int, device: torch.device, *, amsgrad: bool) -> Moments:
        """The state before the first step."""
        kinds = range(3 if amsgrad else 2)
        return cls(*(torch.zeros(numel, dtype=torch.float32, device=device) for _ in kinds))

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        every = (self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq)
        return [tensor for tensor in every if tensor is not None]


class AdamWStep(Protocol):
    """A step in one pass, to the bits of one of torch's forms."""

    def step(
        self,
        weight: torch.Tensor,
        parts: Parts,
        gradient: torch.Tensor,
        moments: Moments,
        *,
        step: float,
        options: AdamWOptions,
    ) -> None:
        """Step a weight and its parts in place, and the moments.

        A block of the weight that somebody else wrote is taken as it is, as by `Codec.join`.

        Args:
            weight: BF16 [n].
            parts: Its parts.
            gradient: BF16 or FP32 [n].
            moments: Of n elements.
            step: The number of this step; the first is 1.
            options: Of this step.
        """


class Reference(Protocol):
    """What a step is to equal."""

    def __call__(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Moments,
        *,
        step: float,
        options: AdamWOptions,
    ) -> None:
        """Step an FP32 master and its moments in place."""


def check_operands(weight: torch.Tensor, gradient: torch.Tensor, moments: Moments) -> None:
    """Hold a caller of a step to what it promises."""
    assert gradient.dtype in (torch.bfloat16, torch.float32)
    for tensor in (gradient, *moments.tensors()):
        assert tensor.is_contiguous() and tensor.numel() == weight.numel()
    assert all(tensor.dtype == torch.float32 for tensor in moments.tensors())


def torchs_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    *,
    step: float,
    options: AdamWOptions,
    foreach: bool = False,
) -> None:
    """Step an FP32 master as torch's for-loop does, or its foreach."""
    largest = moments.max_exp_avg_sq
    adam(
        [master],
        [gradient],
        [moments.exp_avg],
        [moments.exp_avg_sq],
        [] if largest is None else [largest],
        [torch.tensor(step - 1.0, dtype=torch.float32, device="cpu")],
        foreach=foreach,
        fused=False,
        amsgrad=largest is not None,
        beta1=options.betas[0],
        beta2=options.betas[1],
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=options.maximize,
        decoupled_weight_decay=options.decoupled,
    )


def equals(
    ours: AdamWStep,
    codec: Codec,
    reference: Reference,
    *,
    numel: int,
    seed: int,
    device: torch.device,
    betas: tuple[float, float] = (0.9, 0.999),
) -> bool:
    """Step some elements twice by both, and compare their bits.

    Args:
        ours: The step.
        codec: What splits and joins its weights without scratch memory.
        reference: What it is to equal.
        numel: How many elements.
        seed: Chooses their values and, by whether it is odd and which of two it is in four, AMSGrad
            and how weights decay.
        device: Where they are.
        betas: Of the averages.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def drawn() -> torch.Tensor:
        on_host = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
        return on_host.to(device)

    # Steps are larger than weights, so that a root's last bit is not lost in a sum.
    master = drawn() / 1024
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
    parts, scratch = Parts.empty(numel, device, codec.rounding), Arena(0, device)
    codec.split(master, weight, parts, scratch)
    moments, theirs = (Moments.zeros(numel, device, amsgrad=seed % 2 == 1) for _ in range(2))
    options = AdamWOptions(lr=1.0, betas=betas, weight_decay=0.1, decoupled=seed % 4 < 2)
    for step in (1, 2):
        gradient = drawn()
        ours.step(weight, parts, gradient, moments, step=step, options=options)
        reference(master, gradient, theirs, step=step, options=options)
    joined = torch.empty_like(master)
    codec.join(weight, parts, joined, scratch)
    pairs = [(joined, master), *zip(moments.tensors(), theirs.tensors(), strict=True)]
    return all(torch.equal(left, right) for left, right in pairs)
