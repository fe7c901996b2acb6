"""The second run of a function: it ends with the last tensor that somebody waits for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_core.errors import ReplayError
from ascend_core.rng import RngState
from ascend_core.testing import count_ops
from ascend_recompute import CheckpointWithoutOutput, recompute_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.down(F.dropout(F.gelu(self.up(x)), 0.1))
        except Exception as error:
            raise AssertionError("the end of the second run looked like an error") from error
        self.ends += 1
        return out


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = CheckpointWithoutOutput().checkpoint(function, False, x)
    return out


def test_what_comes_after_the_last_saved_tensor_runs_once() -> None:
    plain, x = Block(), torch.randn(8, 16)
    block = copy.deepcopy(plain)
    torch.manual_seed(1)
    plain(x).square().sum().backward()
    torch.manual_seed(1)
    with count_ops() as ops:
        checkpointed(block, x).square().sum().backward()
    # Of the two linear layers only the first feeds something that backward reads.
    assert (ops.forward["aten.addmm"], ops.backward["aten.addmm"]) == (2, 1)
    assert ops.backward["aten.gelu"] == block.ends == 1
    for ours, other in zip(block.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and other.grad is not None
        assert torch.equal(ours.grad, other.grad)


def test_no_more_is_run_than_what_is_left_of_the_graph_asks_for() -> None:
    runs: list[str] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin()
        runs.append("first")
        second = x.cos()
        runs.append("second")
        return first, second

    x = torch.randn(2000, requires_grad=True)
    first, second = CheckpointWithoutOutput().checkpoint(function, False, x)
    del second
    first.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
    assert runs == ["first", "second"]


def test_the_random_numbers_go_on_after_a_second_run_that_ended_early() -> None:
    block, x = Block(), torch.randn(8, 16)
    loss = checkpointed(block, x).sum()
    state = RngState.capture([torch.get_default_device()])
    expected = torch.rand(4)
    state.restore()
    loss.backward()
    assert torch.equal(torch.rand(4), expected)


def test_a_group_runs_to_its_end_where_the_next_layer_needs_the_output() -> None:
    model = nn.Sequential(Block(), Block(), Block(), Block())
    recompute_layers(model, method="uniform", num_layers=2)
    with count_ops() as ops:
        model(torch.randn(8, 16)).sum().backward()
    assert (ops.forward["aten.addmm"], ops.backward["aten.addmm"]) == (8, 2 + 1 + 2 + 1)


def test_with_verify_a_tensor_more_than_in_forward_is_found_out() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(16, 16), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.linear(x.sin())
            return out if self.calls == 1 else out.cos()

    for verify in (False, True):
        model = nn.Sequential(Growing(), Growing())
        recompute_layers(model, verify=verify)
        loss = model(torch.randn(8, 16)).sum()
        if not verify:
            loss.backward()  # every tensor of the forward is there; the surplus is never made
            continue
        with pytest.raises(ReplayError, match="saved 3 tensors in forward and 4"):
            loss.backward()
