"""More of what the ranks do: other modes, groups and models, and what models are used with."""

from __future__ import annotations

import copy
import io
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from ascend_core.errors import ConfigError
from ascend_ddp import DDPConfig, reduce_gradients

sys.path.insert(0, str(Path(__file__).parent))
from cases import (
    SMALL,
    WIDTH,
    Segments,
    averages,
    batch,
    case,
    check_grads,
    check_same,
    loss_of,
    stack,
)
from running_cases import are_gone


@case
def scattered(rank: int, world: int) -> None:
    """A shard is this rank's slice of the bucket that all would have."""
    ours, whole = stack(), stack()
    scattering = reduce_gradients(ours, DDPConfig(bucket_bytes=3000, mode="reduce-scatter"))
    reducing = reduce_gradients(whole, DDPConfig(bucket_bytes=3000))
    for step in range(3):
        for model in (ours, whole):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        assert all(p.grad is None for p in ours.parameters())
        (mine,), (theirs,) = scattering._chunks, reducing._chunks
        for bucket, other in zip(mine.buckets, theirs.buckets, strict=True):
            assert bucket.shard is not None and bucket.plan == other.plan
            numel = bucket.shard.numel()
            assert numel * world == other.flat.numel() and numel % 64 == 0
            check_same(bucket.shard, other.flat[rank * numel : (rank + 1) * numel])


@case
def steps_with_a_closure(rank: int, world: int) -> None:
    """Each sends once: the backward in it, and no zeros before."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, step))
            loss.backward()
            return loss

        expected = averages(model, lambda r, s=step: loss_of(model, batch(r, s)), world)
        optimizer.step(closure)
        check_grads(model, expected)
        assert handle.report()["backwards"] == step + 1


@case
def in_groups(rank: int, world: int) -> None:
    """Ranks of a group average among themselves, and leave the others alone."""
    groups = [distributed.new_group([r, r + 1]) for r in range(0, world, 2)]
    first, model = rank - rank % 2, stack(6)
    reduce_gradients(model, SMALL, group=groups[rank // 2])
    for step in range(3):

        def loss(number: int, step: int = step) -> Tensor:
            order = (5, 3, 1, 0, 2, 4)
            return loss_of(nn.Sequential(*(model[i] for i in order)), batch(first + number, step))

        model.zero_grad()
        loss(rank - first).backward()
        expected = averages(model, loss, 2)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None and wanted is not None
            assert torch.equal(parameter.grad, wanted)


@case
def outside_of_the_group(rank: int, world: int) -> None:
    alone = distributed.new_group([0])
    if rank == 0:
        reduce_gradients(stack(), group=alone)
        return
    try:
        reduce_gradients(stack(), group=alone)
    except ConfigError as error:
        assert "this rank is not in the group" in str(error)
    else:
        raise AssertionError("it is not in the group")


@case
def without_values(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    try:
        reduce_gradients(model)
    except ConfigError as error:
        assert "1.weight is on the meta device." in str(error)
    else:
        raise AssertionError("it has no gradient to send")


@case
def copied(rank: int, world: int) -> None:
    """Copies and pickles are models of their own, which nobody reduces."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    loss_of(model, batch(rank)).backward()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    sent = handle.report()["collectives"]
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        other.zero_grad()
        loss_of(other, batch(rank)).backward()
        own = torch.autograd.grad(loss_of(other, batch(rank)), list(other.parameters()))
        for parameter, grad in zip(other.parameters(), own, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, grad)
    assert handle.report()["collectives"] == sent
    model.zero_grad()
    loss_of(model, batch(rank)).backward()
    check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))


@case
def complex_parameters(rank: int, world: int) -> None:
    if torch.get_default_device().type != "cpu":
        return  # the simulated NPU has no complex numbers
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    model.bias = nn.Parameter(torch.randn(4))
    try:
        reduce_gradients(model, DDPConfig(reduce_dtype="float32"))
    except ConfigError as error:
        assert "no imaginary part" in str(error)
    else:
        raise AssertionError("an imaginary part would be lost")
    reduce_gradients(model)

    def loss(rank: int) -> Tensor:
        x = torch.view_as_complex(batch(rank, rows=8).view(8, 4, 4)[..., :2].contiguous())
        return (x @ model.weight + model.bias).abs().sum()

    for _ in range(2):
        model.zero_grad()
        loss(rank).backward()
        check_grads(model, averages(model, loss, world))


@case
def scaled_losses(rank: int, world: int) -> None:
    """Autocast and GradScaler: an overflow on one rank lets all of them skip the step."""
    device = torch.get_default_device().type
    model = stack()
    reduce_gradients(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            out = model(batch(rank, step))
        loss = out.float().square().sum()
        if step == 1 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert moved == (step == 0)
        before = [p.detach().clone() for p in model.parameters()]
    assert scaler.get_scale() == 2.0
    others = [torch.empty_like(before[0]) for _ in range(world)]
    distributed.all_gather(others, before[0])
    assert all(torch.equal(before[0], other) for other in others)


@case
def compiled(rank: int, world: int) -> None:
    """Turned on before torch.compile, and on what it returns."""
    if torch.get_default_device().type != "cpu":
        return  # torch_npu compiles with a compiler of its own
    for turn_on_first in (True, False):
        model = stack()
        if turn_on_first:
            handle = reduce_gradients(model, SMALL)
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
        else:
            called = torch.compile(model, backend="aot_eager", fullgraph=True)
            handle = reduce_gradients(called, SMALL)
        for step in range(3):
            model.zero_grad()
            loss_of(called, batch(rank, step)).backward()

            def loss(rank: int, model: nn.Module = model, step: int = step) -> Tensor:
                return loss_of(model, batch(rank, step))

            check_grads(model, averages(model, loss, world))
        assert handle.report()["backwards"] == 3


@case
def forgotten(rank: int, world: int) -> None:
    """A model that dies takes its buckets with it, also when the handle is kept."""
    for keep in (True, False):
        model = stack()
        handle = reduce_gradients(model, SMALL)
        loss_of(model, batch(rank)).backward()
        (reducer,) = handle._chunks
        seen = [weakref.ref(reducer), weakref.ref(model), weakref.ref(reducer.buckets[0])]
        del reducer, model
        if keep:
            handle.remove()
        else:
            del handle
        assert are_gone(seen)


@case
def own_hooks(rank: int, world: int) -> None:
    """Hooks of the user's see the rank's own gradient, which is in p.grad."""
    model = stack(1)
    reduce_gradients(model, SMALL)
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    model[0].weight.register_hook(lambda grad: grad * 2)
    loss_of(model, batch(rank)).backward()
    assert len(seen) == 1
    expected = averages(model, lambda r: loss_of(model, batch(r)), world)
    assert expected[0] is not None and model[0].weight.grad is not None
    check_same(model[0].weight.grad, expected[0])


@case
def a_step_ends_what_was_not_noticed(rank: int, world: int) -> None:
    """A backward in which all gradients came from within another is sent by the step, once."""
    model = Segments(*stack())
    model.reentrant = True
    handle = reduce_gradients(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model.forward, batch(rank, step).requires_grad_()).backward()
        optimizer.step()
        report = handle.report()
        assert report["backwards"] == step + 1
        assert report["collectives"] == report["backwards"] * report["buckets"]


assert WIDTH == 16  # `complex_parameters` cuts it
