"""What the tests of collectives run on every rank. See `launch_ranks`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_npu
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

import ascend_sim
from ascend_sim.spans import Kind

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)

full = functools.partial(torch.full, device="npu")
empty = functools.partial(torch.empty, device="npu")
arange = functools.partial(torch.arange, device="npu")


def check_all_reduce(rank: int, world: int) -> None:
    mine = [torch.randn(1003, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    expected = functools.reduce(torch.add, mine)
    given = mine[rank].npu()
    distributed.all_reduce(given)
    assert torch.equal(given.cpu(), expected)


def check_all_reduce_of_every_type(rank: int, world: int) -> None:
    product = functools.reduce(lambda a, b: a * b, range(1, world + 1))
    reductions = (
        (ReduceOp.SUM, world * (world + 1) // 2),
        (ReduceOp.PRODUCT, product),
        (ReduceOp.MAX, world),
        (ReduceOp.MIN, 1),
    )
    for dtype in (*FLOATS, *INTEGERS):
        for operator, expected in reductions:
            given = full((5,), rank + 1, dtype=dtype)
            distributed.all_reduce(given, op=operator)
            assert given.tolist() == [expected] * 5, (dtype, operator)
    given = full((3,), rank == 0, dtype=torch.bool)
    distributed.all_reduce(given)
    assert given.tolist() == [True] * 3


def check_average(rank: int, world: int) -> None:
    given = full((5,), rank + 1, dtype=torch.bfloat16)
    distributed.all_reduce(given, op=ReduceOp.AVG)
    assert given.tolist() == [(world + 1) / 2] * 5


def check_reduce(rank: int, world: int) -> None:
    given = full((4,), float(rank))
    distributed.reduce(given, dst=world - 1)
    if rank == world - 1:
        assert given.tolist() == [sum(range(world))] * 4


def check_broadcast(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.float64, torch.bool):
        given = full((7,), rank, dtype=dtype)
        distributed.broadcast(given, src=world - 1)
        assert given.tolist() == full((7,), world - 1, dtype=dtype).tolist()


def check_all_gather(rank: int, world: int) -> None:
    parts = [empty(3) for _ in range(world)]
    distributed.all_gather(parts, full((3,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(r)] * 3 for r in range(world)]


def check_all_gather_into_tensor(rank: int, world: int) -> None:
    gathered = empty(2 * world)
    distributed.all_gather_into_tensor(gathered, full((2,), float(rank)))
    assert gathered.tolist() == [float(r) for r in range(world) for _ in range(2)]


def check_reduce_scatter(rank: int, world: int) -> None:
    parts = [full((3,), float(10 * r + rank)) for r in range(world)]
    result = empty(3)
    distributed.reduce_scatter(result, parts)
    assert result.tolist() == [float(10 * rank * world + sum(range(world)))] * 3


def check_reduce_scatter_tensor(rank: int, world: int) -> None:
    result = empty(4)
    distributed.reduce_scatter_tensor(result, arange(4.0 * world) + rank)
    expected = world * torch.arange(4.0 * world) + sum(range(world))
    assert torch.equal(result.cpu(), expected[4 * rank : 4 * rank + 4])


def check_scatter(rank: int, world: int) -> None:
    root = world - 1
    parts = [full((3,), float(r)) for r in range(world)] if rank == root else None
    result = empty(3)
    distributed.scatter(result, parts, src=root)
    assert result.tolist() == [float(rank)] * 3


def check_all_to_all(rank: int, world: int) -> None:
    result = empty(2 * world)
    distributed.all_to_all_single(result, arange(2.0 * world) + 10 * rank)
    expected = [value + 10 * r for r in range(world) for value in (2.0 * rank, 2.0 * rank + 1)]
    assert result.tolist() == expected


def check_all_to_all_of_unequal_parts(rank: int, world: int) -> None:
    sent = [r + 1 for r in range(world)]  # to rank r, r + 1 elements
    given = torch.cat([full((count,), float(100 * rank + r)) for r, count in enumerate(sent)])
    result = empty(world * (rank + 1))
    distributed.all_to_all_single(result, given, [rank + 1] * world, sent)
    assert result.tolist() == [float(100 * r + rank) for r in range(world) for _ in range(rank + 1)]


def check_send_and_receive(rank: int, world: int) -> None:
    for sender in range(world - 1):
        if rank == sender:
            distributed.send(full((3,), 7.0 + sender), dst=sender + 1)
        elif rank == sender + 1:
            received = empty(3)
            distributed.recv(received, src=sender)
            assert received.tolist() == [7.0 + sender] * 3


def check_batch_isend_irecv(rank: int, world: int) -> None:
    if world == 1:
        return
    received = empty(4)
    to, source = (rank + 1) % world, (rank - 1) % world
    operations = [
        distributed.P2POp(distributed.isend, full((4,), float(rank)), to),
        distributed.P2POp(distributed.irecv, received, source),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [float(source)] * 4


def check_isend_and_irecv(rank: int, world: int) -> None:
    if world == 1:
        return
    peer = rank ^ 1
    received = [empty(4) for _ in range(100)]  # more than a channel holds
    works = []
    for number in range(100):
        works.append(distributed.isend(full((4,), float(1000 * rank + number)), peer))
        works.append(distributed.irecv(received[number], peer))
    for work in works:
        work.wait()
    assert [r[0].item() for r in received] == [1000 * peer + number for number in range(100)]


def check_barrier(rank: int, world: int) -> None:
    distributed.barrier()


def check_groups(rank: int, world: int) -> None:
    groups = [distributed.new_group(list(range(first, world, 2))) for first in range(min(world, 2))]
    given = full((3,), float(rank))
    distributed.all_reduce(given, group=groups[rank % 2])
    assert given.tolist() == [sum(range(rank % 2, world, 2))] * 3


def check_an_asynchronous_one_is_ordered_on_streams(rank: int, world: int) -> None:
    factor = torch.full((300, 300), 0.5, device="npu")
    product = factor @ factor
    distributed.all_reduce(product, async_op=True).wait()
    product += 1
    assert (product == 75 * world + 1).all().item()


def check_all_to_all_of_a_matrix(rank: int, world: int) -> None:
    matrix = [[i + j + 1 for j in range(world)] for i in range(world)]  # from rank i to rank j
    parts = [full((count,), float(10 * rank + j)) for j, count in enumerate(matrix[rank])]
    result = empty(sum(row[rank] for row in matrix))
    torch_npu.distributed.all_to_all_vc(result, torch.cat(parts), matrix)
    expected = [float(10 * i + rank) for i in range(world) for _ in range(matrix[i][rank])]
    assert result.tolist() == expected


def check_uneven_parts(rank: int, world: int) -> None:
    sizes = [2 * r + 1 for r in range(world)]
    gathered, mine = empty(sum(sizes)), full((sizes[rank],), float(rank))
    torch_npu.distributed.all_gather_into_tensor_uneven(gathered, mine, sizes)
    assert gathered.tolist() == [float(r) for r in range(world) for _ in range(sizes[r])]
    torch_npu.distributed.reduce_scatter_tensor_uneven(mine, gathered + rank, sizes)
    assert mine.tolist() == [float(world * rank + sum(range(world)))] * sizes[rank]


def check_lists_of_unequal_tensors(rank: int, world: int) -> None:
    parts = [empty(r + 1) for r in range(world)]
    distributed.all_gather(parts, full((rank + 1,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(r)] * (r + 1) for r in range(world)]
    result = empty(rank + 1)
    distributed.reduce_scatter(result, [part + rank for part in parts])
    assert result.tolist() == [float(world * rank + sum(range(world)))] * (rank + 1)
    received = [empty(rank + r) for r in range(world)]
    distributed.all_to_all(received, [full((rank + r,), float(rank)) for r in range(world)])
    assert [part.tolist() for part in received] == [[float(r)] * (rank + r) for r in range(world)]


def check_coalesced_ones(rank: int, world: int) -> None:
    group, device = distributed.group.WORLD, torch.device("npu")
    several = [full((4,), float(rank + i)) for i in range(3)]
    with distributed._coalescing_manager(group=group, device=device, async_ops=True) as work:
        for one in several:
            distributed.all_reduce(one)
    work.wait()
    assert [one[0].item() for one in several] == [sum(range(world)) + i * world for i in range(3)]
    gathered = [empty(4 * world) for _ in range(3)]
    with distributed._coalescing_manager(group=group, device=device):
        for one in gathered:
            distributed.all_gather_into_tensor(one, full((4,), float(rank)))
    assert [one[-1].item() for one in gathered] == [world - 1.0] * 3


def check_an_empty_one(rank: int, world: int) -> None:
    distributed.all_reduce(empty(0))
    torch.npu.synchronize()


def check_objects(rank: int, world: int) -> None:
    objects: list[Any] = [None] * world
    distributed.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]


CHECKS: dict[str, Callable[[int, int], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def all_checks(rank: int, world: int) -> list[str]:
    """Run every check, and return their names."""
    for check in CHECKS.values():
        check(rank, world)
    return list(CHECKS)


def tensors_of_both_devices(rank: int, world: int) -> list[float]:
    """Use one group for tensors on the CPU and on the device."""
    host, device = torch.full((2,), float(rank)), full((2,), float(rank))
    distributed.all_reduce(host)
    distributed.all_reduce(device)
    return host.tolist() + device.tolist()


def spans(timeline: ascend_sim.Timeline) -> list[list[Any]]:
    """Of all work: its name, and when it began and ended, in microseconds."""
    work = (span for span in timeline.spans if span.kind.is_work)
    return [[span.name, span.begin_ns / 1000, span.end_ns / 1000] for span in work]


def late_to_a_collective(rank: int, world: int) -> dict[str, Any]:
    """Let rank 1 compute before a collective, and both beside it. Of 12 MB, all over."""
    simulator = ascend_sim.current()
    assert simulator is not None
    shared, own = full((3_000_000,), 1.0), full((3_000_000,), 1.0)
    distributed.all_reduce(shared)
    torch.npu.synchronize()
    time.sleep(0.2 * rank)  # of no account
    with simulator.timeline() as timeline:
        if rank == 1:
            own.mul_(2)
            own.mul_(2)
        work = distributed.all_reduce(shared, async_op=True)
        own.mul_(2)
        work.wait()
        shared.mul_(2)
        torch.npu.synchronize()
    report = timeline.report()
    return {
        "spans": spans(timeline),
        "idle": [report.streams[0].collective_idle_us, report.streams[0].other_idle_us],
        "exposed": report.exposed_collective_us,
        "text": str(report),
    }


def early_and_late_receives(rank: int, world: int) -> list[list[Any]]:
    """Let rank 1 receive 1 MB before it is sent, and 1 MB more long after."""
    simulator = ascend_sim.current()
    assert simulator is not None
    message, own = full((250_000,), 1.0), full((3_000_000,), 1.0)
    for peer in (rank, 1 - rank):  # make the communicator
        (distributed.send if peer == 0 else distributed.recv)(message, 1 - rank)
    distributed.all_reduce(own)  # a long one, so that the clocks agree
    torch.npu.synchronize()
    with simulator.timeline() as timeline:
        if rank == 0:
            own.mul_(2)
            distributed.send(message, dst=1)
            distributed.send(message, dst=1)
        else:
            distributed.recv(message, src=0)
            for _ in range(5):
                own.mul_(2)
            distributed.recv(message, src=0)
        torch.npu.synchronize()
    return spans(timeline)


def two_groups_in_two_orders(rank: int, world: int) -> list[list[Any]]:
    """Let the ranks begin two collectives of 100 kB in different orders, with work in between."""
    simulator = ascend_sim.current()
    assert simulator is not None
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    shared, own = [full((25_000,), 1.0) for _ in groups], full((3_000_000,), 1.0)
    for group in groups:
        distributed.all_reduce(own, group=group)  # a long one, so that the clocks agree
    torch.npu.synchronize()
    with simulator.timeline() as timeline:
        works = []
        for number in (rank, 1 - rank):
            reduced, group = shared[number], groups[number]
            works.append(distributed.all_reduce(reduced, group=group, async_op=True))
            own.mul_(2)
            own.mul_(2)
        for work in works:
            work.wait()
        torch.npu.synchronize()
    return spans(timeline)


def how_long_each_takes(rank: int, world: int) -> dict[str, float]:
    """Time every collective of a tensor of 1 MB on the modelled clock."""
    simulator = ascend_sim.current()
    assert simulator is not None
    whole, part = full((250_000,), 1.0), full((250_000 // world,), 1.0)
    parts = list(whole.chunk(world)) if rank == 0 else None
    half = [part.numel() + (part.numel() // 2 if peer == 0 else 0) for peer in range(world)]
    mine = half[rank] * world
    alone = [distributed.new_group([peer]) for peer in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "reduce": lambda: distributed.reduce(whole, dst=0),
        "broadcast": lambda: distributed.broadcast(whole, src=0),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
        "scatter": lambda: distributed.scatter(part, parts, src=0),
        "all_to_all": lambda: distributed.all_to_all_single(empty(250_000), whole),
        "unequal": lambda: distributed.all_to_all_single(
            empty(mine), empty(sum(half)), [half[rank]] * world, half
        ),
        "alone": lambda: distributed.all_reduce(whole, group=alone[rank]),
    }
    times = {}
    for name, call in calls.items():
        torch.npu.synchronize()
        with simulator.timeline() as timeline:
            call()
            torch.npu.synchronize()
        (span,) = (span for span in timeline.spans if span.kind is Kind.COLLECTIVE)
        times[name] = (span.end_ns - span.begin_ns) / 1000
    return times


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7))


def train(device: str, rank: int, steps: int) -> list[Tensor]:
    """Train under DDP and return the losses, the last gradients and the weights."""
    model = DistributedDataParallel(network(seed=3).to(device), bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(16, 33, generator=generator).to(device)
        targets = torch.randn(16, 7, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.cpu() for t in (*losses, *gradients, *(p.detach() for p in model.parameters()))]


def ddp(rank: int, world: int) -> dict[str, Any]:
    """Compare DDP over HCCL on the device with DDP over gloo on the CPU."""
    expected, found = train("cpu", rank, steps=4), train("npu", rank, steps=4)
    alone = network(seed=3)
    return {
        "equal": [torch.equal(*pair) for pair in zip(expected, found, strict=True)],
        "moved": not torch.equal(found[-1], list(alone.parameters())[-1]),
        "losses": [loss.item() for loss in found[:4]],
    }


def early_reads(rank: int, world: int) -> dict[str, list[float]]:
    """Read the result of a collective before it was waited for, and after."""

    def early_and_late(start: Callable[[], Any], result: Tensor) -> list[float]:
        work = start()
        early = result.clone()
        work.wait()
        return [early[0].item(), result[0].item()]

    ones, zeros, whole = full((8,), 1.0), full((16,), 0.0), full((16,), 1.0)
    part = whole[8 * rank : 8 * rank + 8]
    reduce_scatter = distributed.reduce_scatter_tensor
    all_gather = distributed.all_gather_into_tensor
    return {
        "all_reduce": early_and_late(lambda: distributed.all_reduce(ones, async_op=True), ones),
        "all_gather": early_and_late(lambda: all_gather(zeros, ones, async_op=True), zeros),
        "reduce_scatter": early_and_late(lambda: reduce_scatter(part, whole, async_op=True), part),
    }


def a_peer_on_gloo(rank: int, world: int) -> float:
    """Rank 0 lets a collective lie and waits on gloo for rank 1, which waits for the collective."""
    given = full((4,), float(rank + 1))
    distributed.all_reduce(given)
    if rank == 1:
        torch.npu.synchronize()
    distributed.all_reduce(torch.ones(1))
    return float(given[0].item())


def a_circle_of_waits(rank: int, world: int) -> list[float]:
    """Rank 0 lets two collectives lie. What the first waits for, waits for the second.

    Rank 1 waits for rank 2 (in the first), that for rank 3 (on gloo), and that for rank 0 (in the
    second), which waits for all on gloo.
    """
    first, second = distributed.new_group([0, 1, 2]), distributed.new_group([0, 3])
    one, other, signal_of_3 = full((4,), float(rank)), full((4,), float(rank)), torch.ones(1)
    for group in (first, second):  # make the communicators
        if rank in distributed.get_process_group_ranks(group):
            distributed.all_reduce(full((1,), 1.0), group=group)
    torch.npu.synchronize()
    if rank == 2:
        distributed.recv(signal_of_3, src=3)
    works = []
    if rank < 3:
        works.append(distributed.all_reduce(one, group=first, async_op=True))
    if rank in (0, 3):
        works.append(distributed.all_reduce(other, group=second, async_op=True))
    for work in works:
        work.wait()
    if rank > 0:
        torch.npu.synchronize()
    if rank == 3:
        distributed.send(signal_of_3, dst=2)
    distributed.all_reduce(torch.ones(1))
    return [one[0].item(), other[0].item()]


def reset() -> None:
    """Let a device go on that stopped at an error; a real one is to be reset, and loses all."""
    simulator = ascend_sim.current()
    assert simulator is not None
    simulator.drain()
    simulator.take_error()


@contextlib.contextmanager
def fails() -> Iterator[list[str]]:
    """Expect a RuntimeError; its text and the seconds until then are put into the list."""
    caught: list[str] = []
    began = time.monotonic()
    try:
        yield caught
    except RuntimeError as error:
        caught += [str(error), f"{time.monotonic() - began:.1f}"]
        reset()
    assert caught, "nothing failed"


def killed(rank: int, world: int) -> list[str]:
    """Kill rank 1 while rank 0 is in a collective."""
    group = distributed.new_group([0, 1])
    given = full((100_000,), 1.0)
    distributed.all_reduce(given, group=group)
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with fails() as caught:
        distributed.all_reduce(given, group=group)
        torch.npu.synchronize()
    with fails() as again:
        distributed.all_reduce(given, group=group)
    return caught + again


def never_there(rank: int, world: int) -> list[str]:
    """Let rank 1 never use a group."""
    group = distributed.new_group([0, 1])
    caught: list[str] = []
    if rank == 0:
        with fails() as caught:
            distributed.all_reduce(full((4,), 1.0), group=group)
    return caught


def wrong_uses(rank: int, world: int) -> dict[str, list[str]]:
    """Never come, call something else, disagree on a length, send and send."""
    found = {}
    given = full((4,), float(rank))
    absent, different, lengths = (distributed.new_group([0, 1]) for _ in range(3))
    distributed.all_reduce(given, group=absent)
    torch.npu.synchronize()
    if rank == 0:
        with fails() as found["absent"]:
            distributed.all_reduce(given, group=absent)
            torch.npu.synchronize()
    distributed.all_reduce(torch.ones(1))
    with fails() as found["different"]:
        if rank == 0:
            distributed.all_reduce(given, group=different)
        else:
            distributed.broadcast(given, src=1, group=different)
        torch.npu.synchronize()
    if rank == 0:
        distributed.send(given, dst=1, group=lengths)
    else:
        with fails() as found["lengths"]:
            distributed.recv(empty(3), src=0, group=lengths)
            torch.npu.synchronize()
    distributed.all_reduce(torch.ones(1))
    return found


def send_and_send(rank: int, world: int) -> list[str]:
    """Let both ranks send before they receive."""
    received = empty(4)
    exchange = [
        distributed.P2POp(distributed.isend, full((4,), float(rank)), 1 - rank),
        distributed.P2POp(distributed.irecv, received, 1 - rank),
    ]
    for work in distributed.batch_isend_irecv(exchange):
        work.wait()
    assert received.tolist() == [1.0 - rank] * 4
    try:
        distributed.send(full((4,), float(rank)), dst=1 - rank)
        distributed.recv(received, src=1 - rank)
        torch.npu.synchronize()
    except RuntimeError as error:
        reset()
        return [str(error)]
    assert received.tolist() == [1.0 - rank] * 4
    return []
