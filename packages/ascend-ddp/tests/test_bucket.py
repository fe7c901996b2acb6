"""A gradient is multiplied once, whichever way it comes into its bucket."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ascend_ddp._bucket import Bucket
from ascend_ddp._parameters import Parameters
from ascend_ddp._plan import Size, plan_buckets

FACTOR = 1 / 3
SHAPES = ((), (1,), (7,), (4097,), (33, 65))


class Filled:
    """A bucket of parameters with gradients that autograd has just made."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.kept = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        self.kept.append(nn.Parameter(torch.randn(33, 65).to(dtype).t()))
        parameters = Parameters({str(n): p for n, p in enumerate(self.kept)})
        sizes = {
            n: Size(str(n), p.numel(), p.itemsize, (str(dtype), "cpu"))
            for n, p in enumerate(self.kept)
        }
        (plan,) = plan_buckets(sizes, [], 2**20, 3)
        self.bucket = Bucket(plan, parameters, None, 0)
        self.bucket.await_all()
        for parameter in self.kept:
            parameter.grad = self.drawn(parameter)

    @staticmethod
    def drawn(parameter: Tensor) -> Tensor:
        grad = torch.empty_like(parameter)
        return grad.copy_(torch.randn(parameter.shape).to(parameter.dtype)).detach()

    def take(self, index: int, *, whole: bool) -> None:
        parameter = self.kept[index]
        assert parameter.grad is not None
        if whole:
            self.bucket.take_whole(index, parameter, parameter.grad, FACTOR)
        else:
            self.bucket.take(index, parameter, parameter.grad)

    def sent(self) -> list[Tensor]:
        assert all(self.bucket.let_go(FACTOR))
        assert all(parameter.grad is None for parameter in self.kept)
        return [self.bucket.view(n).clone() for n in range(len(self.kept))]


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole", ["none", "some", "all"])
def test_bits_are_those_of_a_pass_over_the_bucket(dtype: torch.dtype, whole: str) -> None:
    filled = Filled(dtype)
    expected = [p.grad * FACTOR for p in filled.kept if p.grad is not None]
    for index in range(len(filled.kept)):
        filled.take(index, whole=whole == "all" or (whole == "some" and index % 2 == 0))
    for found, wanted in zip(filled.sent(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_what_lies_in_the_bucket_is_multiplied_when_it_leaves() -> None:
    filled = Filled()
    expected = [2 * p.grad * FACTOR for p in filled.kept if p.grad is not None]
    for index, parameter in enumerate(filled.kept):
        filled.take(index, whole=False)
        assert parameter.grad is filled.bucket.view(index)
        parameter.grad += parameter.grad  # as autograd adds the next micro-batch's
        filled.take(index, whole=True)
    for found, wanted in zip(filled.sent(), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("again", [True, False])
def test_a_part_behind_a_whole_gradient_is_added_and_multiplied_once(again: bool) -> None:
    """Not `again`: a hook of the user's has still to see it, or it was put there by hand."""
    filled = Filled()
    expected = []
    for index, parameter in enumerate(filled.kept):
        first, second = filled.drawn(parameter), filled.drawn(parameter)
        parameter.grad = first.clone()
        filled.take(index, whole=True)
        assert parameter.grad is None
        parameter.grad = second.clone()
        filled.take(index, whole=again)
        assert again == (parameter.grad is None)
        expected.append(torch.add(first * FACTOR, second, alpha=FACTOR))
    for found, wanted in zip(filled.sent(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_round_that_failed_leaves_no_mark() -> None:
    filled = Filled()
    for index in range(len(filled.kept)):
        filled.take(index, whole=True)
    filled.bucket.await_all()
    assert not any(filled.bucket.let_go(FACTOR))
    assert not filled.bucket.flat.any()


@pytest.mark.parametrize("stride", [(0, 1), (2, 66), (1, 33)])
def test_a_gradient_of_any_strides_is_taken(stride: tuple[int, int]) -> None:
    filled = Filled()
    drawn = torch.randn(5000).as_strided((33, 65), stride)
    expected = drawn.clone() * FACTOR
    filled.kept[4].grad = drawn
    for index in range(len(filled.kept)):
        filled.take(index, whole=True)
    assert torch.equal(filled.sent()[4], expected)
