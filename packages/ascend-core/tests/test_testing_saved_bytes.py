"""What a forward pass holds, against hand arithmetic and against each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ascend_core.testing import held_bytes, parametrize_devices, saved_storages

KIB = 1024


def occupied(*sizes: int, device: torch.device) -> int:
    """What tensors of so many bytes take of a device, whose allocator may round each up."""

    def tensors() -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    return held_bytes(tensors, device=device)


@parametrize_devices()
def test_held_bytes_are_what_backward_needs_and_the_result(device: torch.device) -> None:
    x_BH = torch.randn(64, 32, device=device)
    up = nn.Linear(32, 128).to(device)
    down = nn.Linear(128, 32).to(device)
    held = held_bytes(lambda: down(F.gelu(up(x_BH))), device=device)
    hidden, output = 64 * 128 * 4, 64 * 32 * 4
    assert occupied(hidden, hidden, output, device=device) == held
    assert 0 <= held - (2 * hidden + output) < 3 * KIB


@parametrize_devices()
def test_nothing_is_held_without_grad(device: torch.device) -> None:
    x = torch.randn(64, 32, device=device)
    with torch.no_grad():
        assert held_bytes(lambda: x.exp().exp(), device=device) == occupied(x.nbytes, device=device)


def test_saved_storages_are_listed_once_and_sum_to_what_is_held() -> None:
    x = torch.randn(64, 32, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x.exp()
        return (y * y.t().contiguous().t()).sum()

    saved = saved_storages(forward())
    fields = sorted(storage.saved_as for storage in saved)
    assert fields == [
        (("MulBackward0", "other"),),
        (("MulBackward0", "self"), ("ExpBackward0", "result")),
    ]
    total = sum(storage.nbytes for storage in saved)
    assert total == held_bytes(forward, device="cpu") - 4


def test_parameters_and_inputs_are_told_apart_from_activations() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    saved = saved_storages(linear(x.exp()).exp())
    assert [storage.nbytes for storage in saved if storage.is_leaf] == []
    x.requires_grad_()
    saved = saved_storages(linear(x.exp()).exp())
    assert [storage.nbytes for storage in saved if storage.is_leaf] == [linear.weight.nbytes]


def test_looking_at_what_is_saved_runs_no_unpack_hook() -> None:
    def unpack(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("unpacked")

    x = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), unpack):
        y = x.exp()
    assert [storage.nbytes for storage in saved_storages(y)] == [64 * 8]


def test_a_graph_that_was_run_backward_holds_nothing() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    x = torch.randn(8, requires_grad=True)
    y = Double.apply(x.exp()).sum()
    assert saved_storages(y)[0].saved_as == (
        ("DoubleBackward", "tensors"),
        ("ExpBackward0", "result"),
    )
    y.backward()
    assert saved_storages(y) == []
