"""What is on its way between device and host: what is counted, and what is given up again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from ascend_core.transfer import DeviceCopy
from ascend_swap import AttentionSwap, SwapAttentionConfig, swap_attention
from ascend_swap._traffic import Traffic


class Thirds(nn.Module):
    """Saves three views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k * v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Thirds()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.self_attention(x)
        return x + mixed


def swapped(layers: int) -> tuple[nn.Sequential, AttentionSwap]:
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    return model, swap_attention(model, SwapAttentionConfig(min_bytes=1, keep_last=0))


def test_a_storage_counts_once_however_many_views_of_it_were_saved() -> None:
    model, handle = swapped(1)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    report = handle.report()
    # The batch itself, which is still there; queries, keys and values; and the product of two.
    assert report["moved_bytes"] == 4 * 4 * (8 + 24 + 8)
    assert report["in_vain_bytes"] == 4 * 4 * 8
    assert report["prefetch_misses"] == 2
    assert report["prefetch_hits"] == 0


def brought() -> int:
    """How many storages are on the device again."""
    return sum(type(one) is DeviceCopy for one in gc.get_objects())


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    gc.collect()


def test_what_was_looked_at_before_backward_is_given_up_when_another_pass_is_reached() -> None:
    model, _ = swapped(3)
    x = torch.randn(4, 8)
    first = model[0](x)
    product = first.grad_fn.next_functions[1][0]
    product._saved_self  # noqa: B018 - which asks for it, outside of any backward
    assert brought() == 1
    model[2](model[1](first))
    assert brought() == 0
    first.sum().backward()


def test_after_steps_of_single_layers_a_whole_step_moves() -> None:
    """As in a training layer by layer, or where each layer is timed before."""
    model = nn.Sequential(*(Layer() for _ in range(4)))
    handle = swap_attention(model, SwapAttentionConfig(min_bytes=1))
    x = torch.randn(4, 8)
    for _ in range(2):
        for layer in model:
            layer(x).sum().backward()
    model(x).sum().backward()
    # Of the first, which has turned around at this very place, nothing: that is all that is known.
    moved = handle.report()["moved_bytes_by_layer"]
    assert [moved[name] > 0 for name in "0123"] == [False, True, True, True]
    model(x).sum().backward()
    moved = handle.report()["moved_bytes_by_layer"]
    assert [moved[name] > 0 for name in "0123"] == [True, True, True, False]


def test_a_layer_that_was_late_is_tried_again_now_and_then() -> None:
    traffic = Traffic(2, 1, None)
    kept = []
    for _ in range(210):
        kept.append(traffic.begin(0).keeps)
        if not kept[-1]:
            traffic._note_leaving(0, 100, late=True)
    assert [number for number, keeps in enumerate(kept) if not keeps] == [0, 1, 102, 203]
    assert set(kept) == {0, 100}
    while traffic.begin(0).keeps:
        pass
    traffic._note_leaving(0, 100, late=False)  # the trouble is over
    assert not any(traffic.begin(0).keeps for _ in range(10))
