"""The second run of a layer, to its end or to the last tensor that somebody waits for."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_core.errors import ReplayError
from ascend_core.rng import RngState
from ascend_core.testing import count_ops
from ascend_recompute import recompute_layers


class Block(nn.Module):
    """A layer whose last matrix product feeds nothing that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.dropout(F.gelu(self.up(x)), 0.1))
        return out


class Careful(Block):
    """Looks at exceptions on their way."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception as error:
            raise AssertionError("the end of the second run looked like an error") from error


class SavesAtTheEnd(Block):
    """Saves a tensor while an exception leaves it."""

    def forward(self, x: Tensor) -> Tensor:
        out = None
        try:
            out = super().forward(x)
        finally:
            last = torch.tanh(x) if out is None else out
        return x + last


def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(torch.sigmoid(x), weight)


class EndsInAScript(Block):
    """The interpreter of TorchScript makes another exception of every exception."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and still in use
            self.end = torch.jit.script(scripted)
        for _ in range(3):  # it optimizes itself in its first calls, and saves others from then on
            self(torch.randn(8, 16)).sum().backward()
        self.zero_grad()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.end(F.gelu(self.up(x)), self.down.weight)
        return out


class Counts(Block):
    """Sets something, and puts it back at its end: the end has to be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        out = super().forward(x) * self.depth
        self.depth -= 1
        return out


class SetsInContext(Counts):
    @contextlib.contextmanager
    def deeper(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def forward(self, x: Tensor) -> Tensor:
        with self.deeper():
            out: Tensor = self.down(F.gelu(self.up(x) * self.depth))
        return out


class SetsInHooks(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_pre_hook(lambda *_: setattr(self, "depth", self.depth + 1))
        self.down.register_forward_hook(lambda *_: setattr(self, "depth", self.depth - 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x) * (1 + self.depth)))
        return out


STATEFUL = [Counts, SetsInContext, SetsInHooks]
early_or_not = pytest.mark.parametrize("early_stop", [False, True], ids=["to the end", "early"])


def model_of(kind: type[Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


def gradients(model: nn.Module, steps: int = 2) -> list[Tensor]:
    found = []
    for _ in range(steps):
        torch.manual_seed(1)
        model.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@early_or_not
@pytest.mark.parametrize("kind", [Block, Careful, SavesAtTheEnd, EndsInAScript])
def test_gradients_are_those_of_the_plain_run(kind: type[Block], *, early_stop: bool) -> None:
    ours, plain = model_of(kind), model_of(kind)
    recompute_layers(ours, early_stop=early_stop)
    assert_same(gradients(ours), gradients(plain))


@pytest.mark.parametrize("kind", STATEFUL)
def test_by_default_a_layer_runs_to_its_end(kind: type[Block]) -> None:
    ours, plain = model_of(kind), model_of(kind)
    recompute_layers(ours)
    assert_same(gradients(ours), gradients(plain))


@pytest.mark.parametrize("kind", STATEFUL)
def test_verify_finds_a_layer_that_has_to_run_to_its_end(kind: type[Block]) -> None:
    model = model_of(kind)
    recompute_layers(model, early_stop=True, verify=True)
    with pytest.raises(ReplayError, match=r"^1 (saved|gave) .*(?s:.*)leave early_stop out"):
        gradients(model)


@early_or_not
def test_the_matrix_products_that_run_again(*, early_stop: bool) -> None:
    model = model_of(Block)
    recompute_layers(model, early_stop=early_stop)
    with count_ops() as ops:
        model(torch.randn(8, 16)).square().sum().backward()
    assert ops.forward["aten.addmm"] == 4
    assert ops.backward["aten.addmm"] == (2 if early_stop else 4)
    assert ops.backward["aten.gelu"] == 2


def test_in_a_group_the_last_layer_alone_may_stop_early() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    plain = copy.deepcopy(model)
    recompute_layers(model, method="uniform", num_layers=2, early_stop=True)
    with count_ops() as ops:
        model(torch.randn(8, 16)).sum().backward()
    assert (ops.forward["aten.addmm"], ops.backward["aten.addmm"]) == (8, 2 + 1 + 2 + 1)
    assert_same(gradients(model), gradients(plain))


def test_no_more_is_run_than_what_is_left_of_the_graph_asks_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.ends = 0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = x.sin()
            second = x.cos() * self.weight
            self.ends += 1
            return first, second

    model = nn.ModuleList([Two(), Two()])
    recompute_layers(model, early_stop=True, layers=[0])
    x = torch.randn(2000, requires_grad=True)
    first, second = model[0](x)
    del second
    first.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
    assert model[0].ends == 1


@early_or_not
def test_the_random_numbers_go_on_after_a_second_run(*, early_stop: bool) -> None:
    model = model_of(Block)
    recompute_layers(model, early_stop=early_stop)
    loss = model(torch.randn(8, 16)).sum()
    state = RngState.capture([torch.get_default_device()])
    expected = torch.rand(4)
    state.restore()
    loss.backward()
    assert torch.equal(torch.rand(4), expected)


@early_or_not
def test_a_tensor_more_than_in_forward_is_found_out(*, early_stop: bool) -> None:
    class Growing(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.up(x.sin())
            return out[:, :16] if self.calls == 1 else out[:, :16].cos()

    model = model_of(Growing)
    recompute_layers(model, early_stop=early_stop, verify=early_stop)
    with pytest.raises(ReplayError, match="saved 3 tensors in forward and 4"):
        model(torch.randn(8, 16)).sum().backward()
