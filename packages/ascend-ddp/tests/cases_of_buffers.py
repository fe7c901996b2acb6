"""More cases of test_cases.py: buffers, of which every rank gets those of the first one."""

from __future__ import annotations

from typing import Any

import torch
from cases import case, stack
from cases_of_misuse import refuses
from torch import nn

from ascend_core.errors import ConfigError
from ascend_ddp import DDPConfig, reduce_gradients


@case
def buffers_that_differ(rank: int, world: int) -> None:
    """In shape, dtype, number, or in what is there twice: nothing is written, and nobody waits."""
    others: list[Any] = [
        ("mask", torch.full((4 + rank,), float(rank))),
        ("mask", torch.ones(4, dtype=torch.int64 if rank else torch.int32)),
        (f"mask of {rank}", torch.ones(4)),
        ("mask", torch.ones(4, 3) if rank else torch.ones(3).expand(4, 3)),
        *([] if rank else [("mask", torch.ones(4))]),
    ]
    for number in range(5):
        model = stack(1)
        model.register_buffer("before", torch.full((3,), float(rank)))
        if number < len(others):
            name, values = others[number]
            model.register_buffer(name.replace(".", ""), values)
        refuses(lambda model=model: reduce_gradients(model), ConfigError, "the buffers of ranks 0")
        assert torch.equal(model.before, torch.full((3,), float(rank)))
        reduce_gradients(model, DDPConfig(sync_parameters=False)).remove()  # nothing was left on


@case
def buffers_that_are_expanded(rank: int, world: int) -> None:
    model = stack(1)
    model.register_buffer("ids", torch.arange(5).mul(rank + 1).expand(4, -1))
    model.register_buffer("one", torch.tensor(float(rank)).expand(3, 2))
    model.register_buffer("none", torch.ones(0).expand(3, 0))
    reduce_gradients(model)
    assert torch.equal(model.ids, torch.arange(5).expand(4, -1))
    assert torch.equal(model.one, torch.zeros(3, 2))


@case
def buffers_that_cannot_be_sent(rank: int, world: int) -> None:
    model = stack(1)
    model.register_buffer("mask", torch.empty(3, device="meta"))
    refuses(lambda: reduce_gradients(model), ConfigError, "mask is a buffer on the meta device.")
    reduce_gradients(model, DDPConfig(sync_parameters=False)).remove()
    model.register_buffer("mask", torch.eye(3, device="cpu").to_sparse())
    refuses(lambda: reduce_gradients(model), ConfigError, "mask is a buffer of layout torch.sparse")


@case
def what_is_no_model(rank: int, world: int) -> None:
    model = stack(1)
    for given in (None, [model, 3], model.parameters(), nn.Linear):
        refuses(lambda given=given: reduce_gradients(given), ConfigError, "reduce_gradients was g")
    refuses(lambda: reduce_gradients(model, group=[0]), ConfigError, "reduce_gradients was given a")
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3, device="cpu").to_sparse())
    refuses(lambda: reduce_gradients(sparse), ConfigError, "weight is of layout torch.sparse_coo.")
    handle = reduce_gradients(iter([model]))
    for chunk in (True, "0", 0.0):
        refuses(
            lambda chunk=chunk: handle.set_is_last_microbatch(True, chunk),
            ConfigError,
            f"there is no model chunk {chunk!r}.",
        )
    handle.remove()
