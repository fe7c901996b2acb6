"""More of what the ranks do: with a part of a batch each, they train as one that has the whole.

[Note: equal, and how near]
The joined batch is added up in another order, so that values which round differ. Where nothing
rounds, all is equal to the bit: inputs are small integers, weights are multiples of an eighth and
stay so (each step moves them by an eighth, along the sign of the gradient), the numbers of rows and
of ranks are powers of two, and FP64 holds every sum of such products.

Where FP32 rounds, a sum of m products of which each lies within t of what it should be is off by
gamma(m) * sum(|t|) at most, in whichever order it is added up, with gamma(m) = m u / (1 - m u) and
u = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3). Two orders differ
by twice that. `Bound` follows it through ten steps of linear regression.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, distributed, nn, optim

from ascend_ddp import DDPConfig, GradientReduction, reduce_gradients

sys.path.insert(0, str(Path(__file__).parent))
from cases import case

STEPS, ROWS, WIDTH, OUTPUTS = 10, 16, 12, 5  # rows of the joined batch: a power of two
RATE = 2.0**-6
UNIT = 2.0**-24


@dataclasses.dataclass
class Step:
    """One step of a run: gradients by parameter, and weights after it."""

    loss: Tensor
    grads: list[Tensor]
    weights: list[Tensor]


class Sign(optim.Optimizer):
    """Moves each weight by an eighth, against the sign of its gradient."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=0.125)


def deep() -> nn.Sequential:
    """Layers whose weights are multiples of an eighth, from -1 to 1."""
    generator = torch.Generator("cpu").manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(4):
        layer = nn.Linear(WIDTH, WIDTH if number < 3 else OUTPUTS, dtype=torch.float64)
        for parameter in layer.parameters():
            drawn = torch.randint(-8, 9, parameter.shape, generator=generator, device="cpu")
            parameter.data.copy_(drawn / 8)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, OUTPUTS, bias=False)


def joined(step: int, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Inputs [ROWS, WIDTH] and targets [ROWS, OUTPUTS], small integers or not."""
    generator = torch.Generator("cpu").manual_seed(step)
    shapes = (ROWS, WIDTH), (ROWS, OUTPUTS)
    if whole:
        drawn = [
            torch.randint(-2, 3, shape, generator=generator, device="cpu").double()
            for shape in shapes
        ]
    else:
        drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    x, y = (one.to(torch.get_default_device()) for one in drawn)
    return x, y


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    handle: GradientReduction | None,
    micro_batches: int = 1,
) -> list[Step]:
    """Ten steps, on this rank's rows where a handle is given, and else on all."""
    whole = next(model.parameters()).dtype == torch.float64
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for step in range(STEPS):
        x, y = joined(step, whole=whole)
        if handle is not None:
            x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = torch.zeros((), dtype=x.dtype)
        for micro, (some, wanted) in enumerate(
            zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        ):
            accumulates = handle is not None and micro < micro_batches - 1
            with handle.no_sync() if handle is not None and accumulates else nullcontext():
                part = (model(some) - wanted).square().sum(1).mean() / micro_batches
                part.backward()
            loss += part.detach()
        if handle is not None:
            distributed.all_reduce(loss)
            loss /= world
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found.append(Step(loss, grads, [p.detach().clone() for p in model.parameters()]))
    return found


# Equal to the bit --------------------------------------------------------------------------------


def is_exact(steps: list[Step]) -> bool:
    """Whether gradients are multiples of 2^-32 below 2^20, so that their sums did not round."""
    return all(
        torch.equal(grad * 2**32, (grad * 2**32).round()) and grad.abs().max() < 2**20
        for step in steps
        for grad in step.grads
    )


def check_equal(config: DDPConfig, micro_batches: int) -> None:
    alone, shared = deep(), deep()
    wanted = train(alone, Sign(alone.parameters()), None)
    assert is_exact(wanted)
    handle = reduce_gradients(shared, config)
    found = train(shared, Sign(shared.parameters()), handle, micro_batches)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.loss, theirs.loss)
        assert all(map(torch.equal, ours.grads, theirs.grads))
        assert all(map(torch.equal, ours.weights, theirs.weights))
    assert not torch.equal(wanted[0].loss, wanted[-1].loss)
    assert handle.report()["backwards"] == STEPS
    assert handle.report()["collectives"] == STEPS * handle.report()["buckets"]


@case
def equals_one_process_on_the_joined_batch(rank: int, world: int) -> None:
    if torch.get_default_device().type != "cpu":
        return  # HCCL adds up no FP64
    check_equal(DDPConfig(bucket_bytes=1300), 1)
    check_equal(DDPConfig(bucket_bytes=1300, overlap=False), 4)


# How near ----------------------------------------------------------------------------------------


def gamma(terms: int) -> float:
    return terms * UNIT / (1 - terms * UNIT)


class Bound:
    """By how much two runs of linear regression may differ, elementwise, in FP64.

    Attributes:
        weight: [OUTPUTS, WIDTH], of the weights so far.
        grad: Of the gradients of the last step.
        loss: Of its loss.
    """

    def __init__(self) -> None:
        self.weight = torch.zeros(OUTPUTS, WIDTH, dtype=torch.float64)

    def follow(self, before: Tensor, x: Tensor, y: Tensor, step: Step) -> None:
        """Take one step, from the weights before it.

        Where a value stands as the argument of a rounding, it is that of one run, and the
        other's is no larger than that and the bound.
        """
        x, y, weight, grad = (one.double() for one in (x, y, before, step.grads[0]))
        error = x @ weight.T - y  # [ROWS, OUTPUTS]
        largest = x.abs() @ (weight.abs() + self.weight).T + y.abs()
        off = x.abs() @ self.weight.T + 2 * gamma(WIDTH + 1) * largest
        scale = 2 / ROWS  # a power of two, as are all by which a gradient is multiplied
        largest = scale * (error.abs() + off).T @ x.abs()
        self.grad = scale * off.T @ x.abs() + 2 * gamma(ROWS) * largest
        squares = (error.abs() + off).square()
        self.loss = (2 * error.abs() * off + off.square()).sum() / ROWS
        self.loss += 2 * gamma(ROWS * OUTPUTS + 1) * squares.sum() / ROWS
        moved = weight.abs() + self.weight + RATE * (grad.abs() + self.grad)
        self.weight = self.weight + RATE * self.grad + 2 * gamma(2) * moved


@case
def is_near_one_process_where_sums_round(rank: int, world: int) -> None:
    alone, shared = linear(), linear()
    wanted = train(alone, optim.SGD(alone.parameters(), RATE), None)
    handle = reduce_gradients(shared, DDPConfig(bucket_bytes=1))
    found = train(shared, optim.SGD(shared.parameters(), RATE), handle)
    bound, before, used = Bound(), linear().weight.detach(), 0.0
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        bound.follow(before, *joined(number, whole=False), theirs)
        for mine, other, limit in (
            (ours.loss, theirs.loss, bound.loss),
            (ours.grads[0], theirs.grads[0], bound.grad),
            (ours.weights[0], theirs.weights[0], bound.weight),
        ):
            share = float(((mine.double() - other.double()).abs() / limit).max())
            assert share <= 1, (number, share)
            used = max(used, share)
        assert bound.grad.max() < 1e-3 * theirs.grads[0].abs().max()  # it says something
        before = theirs.weights[0]
    assert used > 0  # something was rounded
