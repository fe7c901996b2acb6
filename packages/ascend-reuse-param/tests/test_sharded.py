"""Two ranks that each own a slice of a flat BF16 buffer, as those of a distributed optimizer."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn, optim

from ascend_core import ConfigError, FeatureError, windowed
from ascend_core.memory import measure_peak
from ascend_core.testing import bitwise_equal, run_ranks
from ascend_reuse_param import ReuseParamConfig, reuse_param

RANKS, STEPS, BLOCK = 2, 5, 4096

# Torch's fused kernels round a tail with other instructions, so that a shard ends where SIMD ends:
# 2048 elements into the second parameter. For-loop takes any cut.
ON_THE_GRID, OFF_THE_GRID = (7, 4097, 6), (7, 4097, 66)


def begun(numels: Sequence[int]) -> torch.Tensor:
    """The flat buffer at first: BF16, [sum of numels]."""
    return torch.randn(sum(numels), generator=torch.Generator().manual_seed(0)).bfloat16()


def gradient(step: int, rank: int, numel: int) -> torch.Tensor:
    """What a rank finds for the whole model, in BF16."""
    seeded = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(numel, generator=seeded).bfloat16()


def owned(numels: Sequence[int], rank: int) -> list[slice]:
    """Of each parameter what a rank owns, in the flat buffer."""
    half, begin, found = sum(numels) // RANKS, 0, []
    for numel in numels:
        start = max(begin, rank * half)
        stop = min(begin + numel, (rank + 1) * half)
        if start < stop:
            found.append(slice(start, stop))
        begin += numel
    return found


class Trained(NamedTuple):
    """What a rank ends with.

    Attributes:
        weights: The whole flat buffer.
        masters: Those of what it owns.
        report: Of its optimizer.
    """

    weights: torch.Tensor
    masters: torch.Tensor
    report: dict[str, Any]


def train_shard(rank: int, numels: Sequence[int], options: dict[str, Any]) -> Trained:
    """Reduce and scatter gradients, step what is owned, gather weights."""
    flat = begun(numels)
    mine = flat.chunk(RANKS)[rank]
    slices = owned(numels, rank)
    shards = [nn.Parameter(flat[part]) for part in slices]
    assert all(s.untyped_storage().data_ptr() == flat.data_ptr() for s in shards)
    optimizer = reuse_param(optim.AdamW(shards, **options), ReuseParamConfig(times=3))
    for step in range(STEPS):
        reduced = torch.empty_like(mine)
        distributed.reduce_scatter_tensor(reduced, gradient(step, rank, flat.numel()))
        for shard, part in zip(shards, slices, strict=True):
            begin = part.start - rank * mine.numel()
            shard.grad = reduced[begin : begin + shard.numel()]
        optimizer.step()
        # Writes the foreign half, and its own once more, with the same bits.
        distributed.all_gather_into_tensor(flat, mine.clone())
    state = optimizer.state
    masters = torch.cat([state[shard]["master_param"] for shard in shards])
    return Trained(flat, masters, dict(optimizer.report()))


def train_whole(numels: Sequence[int], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Weights and FP32 masters of one process that keeps both by hand."""
    weights = begun(numels)
    masters = [nn.Parameter(part.float()) for part in weights.split(list(numels))]
    optimizer = optim.AdamW(masters, **options)
    for step in range(STEPS):
        summed = sum(gradient(step, rank, weights.numel()) for rank in range(RANKS))
        assert isinstance(summed, torch.Tensor)
        for master, part in zip(masters, summed.split(list(numels)), strict=True):
            master.grad = part.float()
        optimizer.step()
        weights = torch.cat([master.detach() for master in masters]).bfloat16()
    return weights, torch.cat([master.detach() for master in masters])


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "for-loop": (OFF_THE_GRID, {"lr": 1e-2}),
    "foreach": (OFF_THE_GRID, {"lr": 1e-2, "foreach": True}),
    "fused": (ON_THE_GRID, {"lr": 1e-2, "fused": True}),
}


def train_shards(rank: int) -> dict[str, Trained]:
    """Every case, in one start of the ranks."""
    return {name: train_shard(rank, *case) for name, case in CASES.items()}


@functools.cache
def sharded() -> list[dict[str, Trained]]:
    return run_ranks(train_shards, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_with_masters_by_hand(case: str) -> None:
    numels, options = CASES[case]
    weights, masters = train_whole(numels, options)
    ranks = [rank[case] for rank in sharded()]
    assert all(bitwise_equal(rank.weights, weights) for rank in ranks)
    assert bitwise_equal(torch.cat([rank.masters for rank in ranks]), masters)


def test_each_rank_keeps_what_it_owns() -> None:
    for rank, cases in enumerate(sharded()):
        for case, (numels, _) in CASES.items():
            sizes = [part.stop - part.start for part in owned(numels, rank)]
            assert sum(sizes) == sum(numels) // RANKS
            assert cases[case].report["residual_bytes"] == 2 * sum(sizes)
            assert cases[case].report["moment_bytes"] == 8 * sum(sizes)


def held_by_both(rank: int, numel: int) -> tuple[int, int, int]:
    """Bytes that are held for a shard: beside the weights, in them, and of these the extras."""
    beside, _ = held_by_shard(rank, numel, reuse=False)
    return beside, *held_by_shard(rank, numel, reuse=True)


def held_by_shard(rank: int, numel: int, *, reuse: bool) -> tuple[int, int]:
    flat = torch.ones(numel, dtype=torch.bfloat16)
    with measure_peak("cpu") as memory:
        shard = nn.Parameter(flat.chunk(RANKS)[rank])
        adamw = optim.AdamW([shard])
        optimizer = reuse_param(adamw) if reuse else windowed(adamw, master_weights=True)
        shard.grad = torch.ones_like(shard)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    report = optimizer.report()
    return memory.held_bytes, report.get("fingerprint_bytes", 0) + report.get("exception_bytes", 0)


def test_each_rank_saves_two_bytes_of_each_parameter_that_it_owns() -> None:
    numel = 2_000_000
    for more, less, extra in run_ranks(held_by_both, RANKS, numel):
        step = 4
        assert more == 12 * numel // RANKS + step
        # (A fingerprint's table of its block of 4096 elements is kept once for all.)
        assert less - (10 * numel // RANKS + extra + step) in range(2 * BLOCK)
        assert extra < numel // RANKS // 400


# Torch's own sharded optimizer -------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(61, 257), nn.GELU(), nn.Linear(257, 3)).bfloat16()


def shard_adamw(parameters: Any, **options: Any) -> optim.Optimizer:
    """What ZeroRedundancyOptimizer takes as its optimizer_class."""
    return reuse_param(optim.AdamW(parameters, **options))


def zero(of: nn.Module, bucket_view: bool) -> Any:
    # Imported in the ranks alone: its module warns of torch.jit.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        of.parameters(), shard_adamw, parameters_as_bucket_view=bucket_view, lr=1e-2
    )


def train(of: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """Train as after an all-reduce: with the same gradients on each rank."""
    for step in steps:
        seeded = torch.Generator().manual_seed(step)
        for parameter in of.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=seeded).bfloat16()
        optimizer.step()


def train_zero(rank: int, bucket_view: bool) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """The weights in the end, and the state of all ranks half-way."""
    first = model()
    before = zero(first, bucket_view)
    train(first, before, range(3))
    before.consolidate_state_dict(0)
    saved = [before.state_dict() if rank == 0 else None]
    distributed.broadcast_object_list(saved, 0)
    second = model()
    second.load_state_dict(first.state_dict())
    after = zero(second, bucket_view)
    with pytest.raises(FeatureError, match="cannot be replaced entry by entry"):
        after.load_state_dict({**saved[0], "state": dict(saved[0]["state"])})
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer cannot be stepped in windows"):
        reuse_param(after)
    after.optim.load_state_dict(before.optim.state_dict())
    train(second, after, range(3, 5))
    return [p.detach() for p in second.parameters()], saved[0]["state"]


def train_both(rank: int) -> list[tuple[list[torch.Tensor], dict[int, Any]]]:
    return [train_zero(rank, bucket_view) for bucket_view in (False, True)]


def test_zero_redundancy_optimizer_steps_it_on_each_rank() -> None:
    """What it cannot do, to load a checkpoint of all ranks or to be wrapped itself, it says."""
    plain = model()
    beside = windowed(optim.AdamW(plain.parameters(), lr=1e-2), master_weights=True)
    train(plain, beside, range(3))
    masters = [beside.state[p]["master_param"].clone() for p in plain.parameters()]
    train(plain, beside, range(3, 5))
    for weights, state in itertools.chain(*run_ranks(train_both, RANKS)):
        assert all(map(bitwise_equal, weights, (p.detach() for p in plain.parameters())))
        kept = [state[number]["master_param"] for number in range(len(masters))]
        assert all(map(bitwise_equal, kept, masters))
