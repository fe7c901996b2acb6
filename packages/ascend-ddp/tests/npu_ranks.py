"""What the ranks of test_reduce_npu.py do on a simulated NPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

import ascend_sim
from ascend_ddp import DDPConfig, ShardedConfig, reduce_gradients, shard_optimizer
from ascend_ddp._fillers import Fillers
from ascend_ddp._gather import WeightBucket
from ascend_ddp._ranks import Ranks
from ascend_ddp._tally import Tally, TallyResult

sys.path.insert(0, str(Path(__file__).parent))
import cases
import cases_joined  # noqa: F401  registers more
import cases_of_buffers  # noqa: F401  registers more
import cases_of_misuse  # noqa: F401  registers more
import cases_of_segments  # noqa: F401  registers more
import cases_of_use  # noqa: F401  registers more
import sharded_cases
from running_cases import run_cases

LARGE = 96
LAYER = 4 * LARGE * LARGE + 4 * LARGE  # bytes of a layer's gradients
# In which the layers are used, step by step. Backward goes the other way round.
SAME = ((0, 1, 2, 3),) * 3
CHANGING = ((0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 3, 1), (0, 2, 3, 1))

Orders = Sequence[Sequence[int]]


def all_cases(rank: int, world: int) -> dict[str, str]:
    """The tracebacks of the cases that failed."""
    return run_cases(rank, cases.CASES, "npu")


class Split(nn.Module):
    """Layers on two devices. From the third step on they are used in another order.

    Args:
        devices: On which the first two layers are, and the last two.
    """

    def __init__(self, *devices: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))).to(device) for device in devices
        )
        self.devices = devices

    def forward(self, x: Tensor, step: int) -> Tensor:
        for half, device in zip(self.halves, self.devices, strict=True):
            x = torch.tanh(x).to(device)
            for layer in half if step < 2 else reversed(half):
                x = layer(x)
        return x


def on_two_devices(rank: int, world: int) -> list[bool]:
    """Whether the gradients of each step are the average, of a model on two devices a rank."""
    devices = torch.device("npu", rank), torch.device("npu", world + rank)
    model, alone, found = Split(*devices), Split(*devices), list[bool]()
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=1500))
    assert {bucket.flat.device for bucket in handle.reducers[0].buckets} == set(devices)
    for step in range(6):

        def loss(rank: int, model: nn.Module, step: int = step) -> Tensor:
            return model(inputs(rank, step)[:4, :16].to(devices[0]), step).square().sum()

        model.zero_grad()
        loss(rank, model).backward()
        wanted = cases.averages(alone, lambda r: loss(r, alone), world)
        grads = [p.grad for p in model.parameters()]
        found.append(all(map(torch.equal, grads, wanted)))
    return found


class Branches(nn.Module):
    """Layers side by side, each on a stream of its own."""

    def __init__(self, *, on_streams: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(LARGE, LARGE) for _ in range(4))
        self.to("npu")
        own = torch.npu.current_stream()
        self.streams = [torch.npu.Stream() if on_streams else own for _ in self.layers]
        self.order: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.npu.current_stream()
        outputs = []
        for index in self.order:
            self.streams[index].wait_stream(main)
            with torch.npu.stream(self.streams[index]):
                outputs.append(self.layers[index](x).square().sum())
            outputs[-1].record_stream(main)
        for stream in self.streams:
            main.wait_stream(stream)
        return torch.stack(outputs).sum()


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(LARGE, LARGE, generator=generator).npu()


def on_streams(orders: Orders) -> list[Tensor]:
    """The gradients of some steps, new ones in their hooks and old ones where they are added to."""
    return steps_on_streams(orders, set_to_none=True) + steps_on_streams(orders, set_to_none=False)


def steps_on_streams(orders: Orders, *, set_to_none: bool) -> list[Tensor]:
    """With two layers to a bucket."""
    rank, found = distributed.get_rank(), []
    model = Branches(on_streams=True)
    reduce_gradients(model, DDPConfig(bucket_bytes=2 * LAYER))
    for step, order in enumerate(orders):
        model.order = order
        x = inputs(rank, step)
        model.zero_grad(set_to_none=set_to_none)
        model(x).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [one.cpu() for one in found]


def expected(orders: Orders) -> list[Tensor]:
    """The same, of plain autograd on one stream."""
    model, found = Branches(on_streams=False), list[Tensor | None]()
    for step, order in enumerate(orders):
        model.order = order

        def loss(rank: int, step: int = step) -> Tensor:
            return model(inputs(rank, step))

        found += cases.averages(model, loss, 2)
    return 2 * [one.cpu() for one in found if one is not None]


def nothing(*args: Any) -> None:
    pass


def wait_for_the_latest(self: Any, running: Any, number: int, bucket: Any) -> None:
    """`Fillers.wait`, for those alone that have filled since the last bucket left."""
    current = torch.npu.current_stream()
    for streams in running.filled_on.values():
        for stream in streams:
            if stream != current:
                current.wait_stream(stream)
        streams.clear()


def order_nobody(self: Any) -> None:
    """`Fillers.let_wait_for_plan`, which lets nobody wait."""
    self._planned_on = {device: torch.npu.current_stream() for device in self._devices}


def wait_for_no_gradients(self: Ranks, work: Any, what: str, names: str) -> None:
    """`Ranks.wait`, for plans alone."""
    if "bucket" not in what and "tally" not in what:
        real_wait(self, work, what, names)


real_wait = Ranks.wait

# What is taken away: whose method does without, and where it shows.
AWAY: dict[str, tuple[type, str, Callable[..., Any], Orders]] = {
    "a bucket waits for the streams that fill it": (Fillers, "wait", nothing, SAME),
    "for all of them": (Fillers, "wait", wait_for_the_latest, CHANGING),
    "streams wait for a new plan": (Fillers, "let_wait_for_plan", order_nobody, CHANGING),
    "gradients wait for their bucket": (Ranks, "wait", wait_for_no_gradients, SAME),
}


def waits(rank: int, world: int) -> dict[str, bool]:
    """Whether gradients are right, with all waits and without each; and without a race."""
    simulator = ascend_sim.current()
    assert simulator is not None
    found = {}
    wanted = {orders: expected(orders) for orders in (SAME, CHANGING)}
    simulator.races()
    for name, orders in (("the same order", SAME), ("a changing order", CHANGING)):
        found[name] = same(on_streams(orders), wanted[orders]) and not simulator.races()
    for name, (kind, method, mutant, orders) in AWAY.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, method, mutant)
            found[name] = same(on_streams(orders), wanted[orders])
        distributed.barrier()
    return found


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


class Reached:
    """An event that has been reached, whatever it stands for."""

    def synchronize(self) -> None:
        pass


def told(rank: int, world: int) -> list[bool]:
    """Whether the tally is right; then, where the host does not wait, or the stream does not."""
    return [tally(rank), tally(rank, host=False), tally(rank, stream=False)]


def tally(rank: int, *, host: bool = True, stream: bool = True) -> bool:
    used, arrivals, device = [rank == 0, True], [rank, 3 - rank], torch.device("npu", rank)
    one = Tally(used, arrivals, rank == 0, False, 7, device, Ranks(None, None))
    if stream:
        one.work.wait()
    one.arrived()
    if not host:
        one._event = Reached()
    right = one.result() == TallyResult([True, True], [0, 3], True, False, False)
    torch.npu.synchronize()
    distributed.barrier()
    return right


def synchronisations(rank: int, world: int) -> list[list[int]]:
    """How often the host waits for the device, in a step and in its backward.

    With a group whose hosts talk, and with one of devices alone.
    """
    return [waited(rank, None), waited(rank, distributed.new_group(backend="hccl"))]


def waited(rank: int, group: distributed.ProcessGroup | None) -> list[int]:
    simulator = ascend_sim.current()
    assert simulator is not None
    with torch.device("npu"):
        model = cases.stack()
        reduce_gradients(model, cases.SMALL, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = [cases.batch(rank, step) for step in range(4)]
        for step in range(4):
            before = simulator.counters().synchronisations
            loss = cases.loss_of(model, x[step])
            between = simulator.counters().synchronisations
            loss.backward()
            behind = simulator.counters().synchronisations
            optimizer.step()
            optimizer.zero_grad()
    return [simulator.counters().synchronisations - before, behind - between]


def sharded(rank: int, world: int) -> dict[str, bool]:
    """Whether ten steps give torch's DDP's weights and losses; and whether without the wait."""
    simulator = ascend_sim.current()
    assert simulator is not None
    wanted = trained(rank, None)
    simulator.races()
    found = {}
    for overlap in (True, False):
        right = same(trained(rank, ShardedConfig(overlap_param_gather=overlap)), wanted)
        found[f"overlap {overlap}"] = right and not simulator.races()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightBucket, "_wait", nothing)
        found["without the wait"] = same(trained(rank, ShardedConfig()), wanted)
    distributed.barrier()
    return found


def trained(rank: int, config: ShardedConfig | None) -> list[Tensor]:
    """Losses and weights of ten steps: sharded, or by DDP and the whole optimizer."""
    model = sharded_cases.Model().to("npu")
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    called: nn.Module = model
    if config is None:
        called = DistributedDataParallel(model)
    else:
        reduction = reduce_gradients(model, sharded_cases.SCATTER)
        optimizer = shard_optimizer(optimizer, reduction, config)
    losses = []
    for step in range(10):
        loss = called(sharded_cases.batch(rank, step).npu()).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, sharded_cases.ShardedOptimizer):
        optimizer.wait()
    return [one.detach().cpu() for one in (*losses, *model.parameters())]
