"""Live storages against hand arithmetic and against the profiler."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ascend_core.memory import BACKWARD, OUTSIDE, Kind, measure_peak, track_live

N, H, F = 4, 8, 16
FLOAT = 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, F)
        self.act = nn.GELU()
        self.down = nn.Linear(F, H, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def added(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """What came since: tensors that other tests left in this process do not count."""
    changes = {key: size - before.get(key, 0) for key, size in now.items()}
    return {key: size for key, size in changes.items() if size}


WEIGHTS = (F * H + F + H * F) * FLOAT
HIDDEN = N * F * FLOAT
OUTPUT = N * H * FLOAT


def test_each_kind_has_the_bytes_of_hand_arithmetic_through_a_training_step() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(N, H)
    with track_live(model, optimizer) as live:
        assert live.by_kind()[Kind.PARAMETER] == WEIGHTS
        assert live.by_kind()[Kind.BUFFER] == 3 * FLOAT
        assert live.by_kind()[Kind.GRADIENT] == 0
        before = live.by_kind()[Kind.SAVED_ACTIVATION]
        y = model(x)
        # The input of up, the input of gelu, the input of down.
        assert live.by_kind()[Kind.SAVED_ACTIVATION] - before == x.nbytes + 2 * HIDDEN
        loss = y.sum()
        loss.backward()
        assert live.by_kind()[Kind.SAVED_ACTIVATION] == before
        assert live.by_kind()[Kind.GRADIENT] == WEIGHTS
        optimizer.step()
        steps = 3 * FLOAT  # AdamW counts steps in a tensor of its own per parameter
        assert live.by_kind()[Kind.OPTIMIZER_STATE] == 2 * WEIGHTS + steps
        assert live.by_module(Kind.OPTIMIZER_STATE) == {
            "up": 2 * (F * H + F) * FLOAT + 2 * FLOAT,
            "down": 2 * H * F * FLOAT + FLOAT,
        }


def test_activations_belong_to_the_module_that_made_them() -> None:
    model = Mlp()
    x = torch.randn(N, H)
    with track_live(model) as live:
        before = live.by_module(Kind.SAVED_ACTIVATION)
        y = model(x)
        saved = added(live.by_module(Kind.SAVED_ACTIVATION), before)
        assert saved == {"up": HIDDEN, "act": HIDDEN, OUTSIDE: x.nbytes}
        assert live.by_module()["down"] == H * F * FLOAT + y.nbytes


def test_what_the_tracker_counts_is_what_the_profiler_counts() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(N, H)
    with measure_peak("cpu") as memory, track_live(model, optimizer) as live:
        before = live.total
        y = model(x)
        after_forward = live.total - before
        y.sum().backward()
        optimizer.step()
        del y
        left = live.total - before
    sizes = [size for _, size in memory.timeline.events]
    assert after_forward == 2 * HIDDEN + OUTPUT
    assert after_forward in sizes
    assert left == memory.held_bytes == WEIGHTS + 2 * WEIGHTS + 3 * FLOAT


def test_a_value_behind_a_pack_hook_is_a_saved_activation() -> None:
    x = torch.randn(N, H, requires_grad=True)

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()

    def unpack(packed: Packed) -> torch.Tensor:
        raise AssertionError("looking must not unpack")

    hooks = torch.autograd.graph.saved_tensors_hooks(Packed, unpack)
    with track_live(nn.Identity(), device="cpu") as live, hooks:
        before = live.by_kind()
        y = x.exp()
        assert added(live.by_kind(), before) == {Kind.SAVED_ACTIVATION: y.nbytes}


def test_a_recomputation_in_backward_is_attributed_to_its_module() -> None:
    model = Mlp()
    x = torch.randn(N, H, requires_grad=True)
    seen: dict[str, int] = {}
    with track_live(model) as live:
        before = live.by_kind()
        y = checkpoint(model, x, use_reentrant=False)
        assert added(live.by_kind(), before) == {
            Kind.OTHER: OUTPUT
        }  # it keeps x itself, not a save of it
        model.down.weight.register_post_accumulate_grad_hook(
            lambda _: seen.update(live.by_module())
        )
        y.sum().backward()
    # What down used is gone again by then; what gelu needs is there, made by up, in backward.
    assert seen["up"] == (F * H + F) * FLOAT + HIDDEN
    assert seen[BACKWARD] > 0


def test_what_was_released_below_the_tensor_counts_nothing() -> None:
    with track_live(nn.Identity(), device="cpu") as live:
        before = live.total
        tensor = torch.empty(1000)
        assert live.total - before == 4000
        tensor.untyped_storage().resize_(0)
        assert live.total == before


def test_a_forward_that_raises_leaves_the_places_and_the_model_as_they_were() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError

    model = nn.Sequential(Raises())
    with track_live(model, device="cpu") as live:
        with pytest.raises(KeyError):
            model(torch.ones(1))
        kept = torch.empty(1000)
        assert live.by_module()[OUTSIDE] >= kept.nbytes
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_tracking_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        with measure_peak("cpu") as memory, track_live(nn.Identity(), device="cpu"):
            torch.empty(1000)
        assert memory.held_bytes == 0
    finally:
        gc.enable()
