"""Growth over steps, with the collector off."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from ascend_core.testing import Growth, alive_after, live_storage_count, parametrize_devices


@parametrize_devices()
def test_a_plain_training_step_leaves_nothing(device: torch.device) -> None:
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(8, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert alive_after(step, device=device) == Growth(nbytes=0, storages=0)


def test_a_list_that_grows_is_found() -> None:
    kept: list[torch.Tensor] = []
    grown = alive_after(lambda: kept.append(torch.empty(1000)), steps=3, device="cpu")
    assert grown == Growth(nbytes=3 * 4000, storages=3)


def test_a_cycle_that_only_the_collector_would_free_is_found() -> None:
    def step() -> None:
        cycle: list[Any] = [torch.empty(1000)]
        cycle.append(cycle)

    assert alive_after(step, steps=3, device="cpu") == Growth(nbytes=3 * 4000, storages=3)
    assert gc.isenabled()
    gc.collect()


def test_storages_that_only_a_graph_holds_are_counted() -> None:
    before = live_storage_count("cpu")
    x = torch.randn(8, requires_grad=True)
    y = x.exp().exp().sum()  # both results are saved, and no Python object names them
    assert live_storage_count("cpu") - before == 4
    y.backward()
    assert live_storage_count("cpu") - before == 3  # x, y and the gradient of x
