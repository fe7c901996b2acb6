"""`F.rms_norm` where autograd sees its parts: the normalised value is not held either."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.testing import (
    assert_bitwise_equal,
    bitwise_equal,
    count_ops,
    held_bytes,
    record_run,
)
from ascend_recompute import policy, recompute_norm
from ascend_recompute.activation import rebuild_region

TOKENS, WIDTH = 24, 64
ONE = TOKENS * WIDTH * 4  # bytes of a hidden state in FP32
ALL = dataclasses.replace(policy.DEFAULT.extended(*policy.NORMS), min_bytes=0)
# Torch says that its RMSNorm of BF16 with FP32 weights is not the fused one.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

Region = Callable[[], contextlib.AbstractContextManager[Any]]


class Layer(nn.Module):
    """Two norms, each before a linear layer."""

    def __init__(self, dtype: torch.dtype = torch.float32, of_weights: Any = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, dtype=of_weights or dtype) for _ in range(2))
        self.fc1, self.fc2 = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fc1(self.norm1(x))
        out: Tensor = x + self.fc2(self.norm2(x))
        return out


class Stack(nn.Module):
    """Layers behind one that makes hidden states of what needs no gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, of_weights: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype, of_weights) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def turn_on(model: nn.Module, _: object = None) -> Any:
    small = dataclasses.replace(policy.Policy(policy.NORMS | policy.CASTS), min_bytes=0)
    return recompute_norm(model, policy=small)


def batch(_: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=dtype)


def held(model: nn.Module, x: Tensor) -> int:
    return held_bytes(lambda: model(x), device=torch.get_default_device())


def gradients(program: Callable[[Region], Sequence[Tensor]], region: Region) -> list[Tensor]:
    torch.manual_seed(0)
    return [value.detach().clone() for value in program(region)]


def assert_same(program: Callable[[Region], Sequence[Tensor]]) -> None:
    plain = gradients(program, contextlib.nullcontext)
    ours = gradients(program, lambda: rebuild_region(ALL))
    assert len(plain) == len(ours) > 0
    assert all(map(bitwise_equal, plain, ours))


def assert_dropped(program: Callable[[], object], nbytes: int) -> None:
    """Assert how much less the result of a program holds when it ran inside a region."""
    figures = []
    for region in (contextlib.nullcontext(), rebuild_region(ALL)):
        torch.manual_seed(0)
        with region:
            figures.append(held_bytes(program, device=torch.get_default_device()))
    assert figures[0] - figures[1] == nbytes


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "of_weights", "dropped"),
    [
        (torch.float32, torch.float32, [ONE, ONE]),
        # The norm computes in FP32, and its output is cast.
        (torch.bfloat16, torch.float32, [ONE, ONE // 2]),
        (torch.bfloat16, torch.bfloat16, [ONE, ONE // 2]),
        (torch.float16, torch.float16, [ONE, ONE // 2]),
    ],
    ids=str,
)
def test_a_norm_drops_the_normalised_value_and_its_output(
    dtype: torch.dtype,
    of_weights: torch.dtype,
    dropped: list[int],
    taken: Callable[[int], int],
) -> None:
    model, x = Stack(dtype, of_weights), batch(dtype=dtype)
    plain = held(model, x)
    handle = turn_on(model)
    assert plain - held(model, x) == 4 * sum(map(taken, dropped))
    assert handle.report()["saved_bytes"] == 4 * sum(dropped)
    handle.remove()
    assert held(model, x) == plain


def test_a_small_normalised_value_is_kept() -> None:
    model, x = Stack(), batch()
    plain = held(model, x)
    large = dataclasses.replace(policy.Policy(policy.NORMS), min_bytes=ONE + 1)
    recompute_norm(model, policy=large)
    assert held(model, x) == plain


def test_a_frozen_norm_saves_no_normalised_value(taken: Callable[[int], int]) -> None:
    model, x = Stack(), batch()
    for layer in model.layers:
        layer.norm1.requires_grad_(requires_grad=False)
    plain = held(model, x)
    turn_on(model)
    assert plain - held(model, x) == 6 * taken(ONE)


@pytest.mark.parametrize("affine", [True, False])
def test_an_input_without_gradient(affine: bool) -> None:
    # Nobody holds such an input: the normalised value is all that there is.
    def program() -> object:
        norm = nn.RMSNorm(WIDTH, elementwise_affine=affine)
        return nn.Linear(WIDTH, WIDTH)(norm(batch()))

    assert_dropped(program, 0)


def test_an_input_that_is_a_parameter() -> None:
    def program(region: Region) -> list[Tensor]:
        x, norm, fc = nn.Parameter(batch()), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with region():
            y = fc(norm(x))
        y.square().sum().backward()
        assert x.grad is not None and fc.weight.grad is not None
        return [x.grad, fc.weight.grad]

    assert_same(program)


def test_no_grad_holds_nothing(taken: Callable[[int], int]) -> None:
    model, x = Stack(), batch()
    handle = turn_on(model)
    with torch.no_grad():
        assert held(model, x) == taken(x.nbytes)  # the result
    assert handle.report()["saved_bytes"] == 0


def test_an_input_that_is_rebuilt_itself(taken: Callable[[int], int]) -> None:
    def program() -> object:
        x, norm, fc = leaf(TOKENS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        return fc(norm(F.silu(x)))

    # silu's output, the normalised value, and the norm's output; `x` is held by silu.
    assert_dropped(program, 3 * taken(ONE))


# Bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_five_steps(dtype: torch.dtype, of_weights: torch.dtype) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x.to(dtype)).float().square().mean()
        return loss

    def make() -> nn.Module:
        return Stack(dtype, of_weights)

    options: Any = {"forward": forward, "device": torch.get_default_device()}
    plain = record_run(make, batch, **options)
    assert_bitwise_equal(plain, record_run(make, batch, apply=turn_on, **options))
    assert plain.losses[0] != plain.losses[-1]


@pytest.mark.parametrize("frozen", ["layers.0.norm1", "layers.0.fc1", "layers", "first", None])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_five_steps_of_a_frozen_part(frozen: str | None, autocast: torch.dtype | None) -> None:
    def make() -> nn.Module:
        model = Stack()
        if frozen is not None:
            model.get_submodule(frozen).requires_grad_(requires_grad=False)
        return model

    options: Any = {"autocast": autocast, "device": torch.get_default_device()}
    plain = record_run(make, batch, **options)
    assert_bitwise_equal(plain, record_run(make, batch, apply=turn_on, **options))


@pytest.mark.parametrize("retain", [False, True])
def test_two_backwards_and_double_backward(retain: bool) -> None:
    def program(region: Region) -> list[Tensor]:
        x, model = leaf(TOKENS, WIDTH), Stack()
        with region():
            loss = model(x).square().sum()
        if retain:
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.square().sum().backward()
        assert x.grad is not None
        return [loss, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_same(program)


def test_verify_finds_no_difference() -> None:
    model = Stack()
    handle = recompute_norm(model, policy=ALL, verify=True)
    model(batch()).square().sum().backward()
    assert handle.report()["saved_bytes"] == 8 * ONE


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Stack()
    ours = copy.deepcopy(plain)
    turn_on(ours)
    found = []
    for model in (plain, ours):
        torch.manual_seed(1)
        x = leaf(TOKENS, WIDTH)
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(bitwise_equal, *found))


def test_a_product_of_another_region_whose_saves_have_the_same_numbers() -> None:
    def program(region: Region) -> list[Tensor]:
        a, b, fc = leaf(TOKENS, WIDTH), leaf(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        norm = nn.RMSNorm(WIDTH)
        with region():
            x = a * b  # the first two saves of its frame, as the norm's are of its own
        with region():
            y = fc(norm(x))
        y.square().sum().backward()
        assert a.grad is not None and b.grad is not None and norm.weight.grad is not None
        return [a.grad, b.grad, norm.weight.grad]

    assert_same(program)


# Writes and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["input", "weight"])
def test_a_write_after_the_save_is_refused_as_plain_autograd_refuses_it(written: str) -> None:
    for region in (contextlib.nullcontext(), rebuild_region(ALL)):
        a, norm, fc = leaf(TOKENS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with region:
            x = a * 1
            y = fc(norm(x))
        with torch.no_grad():
            (x if written == "input" else norm.weight).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_write_before_the_norm_is_seen() -> None:
    def program(region: Region) -> list[Tensor]:
        a, norm, fc = leaf(TOKENS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with region():
            x = a * 1
            with torch.no_grad():
                x.mul_(2)
            y = fc(norm(x))
        y.square().sum().backward()
        assert a.grad is not None and norm.weight.grad is not None and fc.weight.grad is not None
        return [a.grad, norm.weight.grad, fc.weight.grad]

    assert_same(program)


def test_a_norm_that_raises_leaves_the_next_one_alone() -> None:
    def program(region: Region) -> list[Tensor]:
        x, norm, fc = leaf(TOKENS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with region():
            with pytest.raises(RuntimeError):
                F.rms_norm(x, (WIDTH + 1,), norm.weight)
            y = fc(norm(x))
        y.square().sum().backward()
        assert x.grad is not None and norm.weight.grad is not None
        return [x.grad, norm.weight.grad]

    assert_same(program)


# Time --------------------------------------------------------------------------------------------


def test_a_norm_is_rebuilt_by_two_products() -> None:
    model = Stack()
    with count_ops() as plain:
        model(batch()).sum().backward()
    turn_on(model)
    with count_ops() as ours:
        model(batch()).sum().backward()
    extra = ours.extra_in_backward(plain)
    assert extra["aten.mul"] == 2 * 4
    assert not extra.keys() & {"aten.pow", "aten.mean", "aten.rsqrt"}, extra
