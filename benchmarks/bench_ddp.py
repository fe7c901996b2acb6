"""Gradient reduction by `reduce_gradients` and by torch's DistributedDataParallel, on two ranks.

The ranks are two processes that talk by gloo. The first runs the harness, and the second does each
step with it. Figures are those of the first, by the clock of its processor: what it spends on a
step, with the threads of gloo in its process, whatever the other rank waits for. So they are the
host's cost, and no overlap shows: two ranks and their threads share two processors here. That is a
benchmark of its own on a modelled clock, `ddp_timeline`.

The cases of small layers compute next to nothing, and time hooks and bookkeeping.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ascend_ddp import DDPConfig, reduce_gradients
from benchmarks.case import Case, Variant

RANKS = 2
MB = 2**20
SIZES = (1, 5, 25, 100)  # of buckets, in MB


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    small, large = ("64 layers of width 16", 64, 16), ("12 layers of width 1024", 12, 1024)
    return [
        _case(*small, sizes=(25,), rounds=60),
        *([] if quick else [_case(*large, sizes=SIZES, rounds=25)]),
    ]


def _case(name: str, layers: int, width: int, sizes: tuple[int, ...], rounds: int) -> Case:
    def setup() -> Mapping[str, Variant]:
        steps = _steps(layers, width, sizes)
        chosen = list(steps)

        def together(way: str) -> Callable[[], None]:
            def step() -> None:
                distributed.broadcast(torch.tensor(chosen.index(way)), 0)
                steps[way]()

            return step

        return {way: Variant(together(way)) for way in chosen}

    return Case(
        name,
        setup,
        baseline="DDP, 25 MB",
        rounds=rounds,
        around=lambda: _two_ranks(layers, width, sizes),
    )


def _steps(layers: int, width: int, sizes: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Forward and backward of a model for each way to reduce its gradients."""
    found = {}
    for size in sizes:
        found[f"DDP, {size} MB"] = _step(layers, width, lambda m, s=size: _torchs(m, s))
    for size in sizes:
        config = DDPConfig(bucket_bytes=size * MB)
        found[f"reduce_gradients, {size} MB"] = _step(
            layers, width, lambda m, c=config: _ours(m, c)
        )
    config = DDPConfig(overlap=False)
    found["overlap=False, 25 MB"] = _step(layers, width, lambda m, c=config: _ours(m, c))
    return found


def _step(layers: int, width: int, turn_on: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    called = turn_on(model)
    x = torch.randn(32, width)

    def step() -> None:
        model.zero_grad()
        loss: Tensor = called(x).sum()
        loss.backward()

    return step


def _torchs(model: nn.Module, size: int) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=size, gradient_as_bucket_view=True)


def _ours(model: nn.Module, config: DDPConfig) -> nn.Module:
    reduce_gradients(model, config)
    return model


@contextlib.contextmanager
def _two_ranks(layers: int, width: int, sizes: tuple[int, ...]) -> Iterator[None]:
    """Be the first rank, beside one that does the same steps."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = Path(folder)
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_follow, args=(place, layers, width, sizes), daemon=True)
        other.start()
        threads = torch.get_num_threads()
        _join(place, 0)
        try:
            yield
            distributed.broadcast(torch.tensor(-1), 0)
        finally:
            distributed.destroy_process_group()
            torch.set_num_threads(threads)
            other.join(10)
            other.kill()


def _follow(place: Path, layers: int, width: int, sizes: tuple[int, ...]) -> None:
    """Be the second rank: do the step that the first one names, until it names none."""
    _join(place, 1)
    steps = list(_steps(layers, width, sizes).values())
    chosen = torch.tensor(0)
    while True:
        distributed.broadcast(chosen, 0)
        if chosen.item() < 0:
            break
        steps[int(chosen.item())]()
    distributed.destroy_process_group()


def _join(place: Path, rank: int) -> None:
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS
    )
