"""More cases of test_cases.py: gradients that come in backwards within a backward, and waits."""

from __future__ import annotations

import contextlib

import torch
from cases import SMALL, batch, case, check_grads, check_same, loss_of, stack
from cases_of_misuse import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import ConfigError
from ascend_ddp import DDPConfig, GradientReduction, reduce_gradients, shard_optimizer


def in_segments(model: nn.Sequential, x: Tensor) -> Tensor:
    """The loss, each layer a segment of its own, and the model not called as a whole."""
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    return x.square().sum()


def accumulate(model: nn.Sequential, handle: GradientReduction, rank: int, step: int) -> None:
    for micro in range(3):
        with handle.no_sync() if micro < 2 else contextlib.nullcontext():
            in_segments(model, batch(rank, 3 * step + micro).requires_grad_()).backward()


def sums(model: nn.Module, world: int, step: int) -> list[Tensor]:
    """What three micro-batches come to: added up on each rank, and then over the ranks."""
    found: list[Tensor] = []
    for rank in range(world):
        model.zero_grad()
        for micro in range(3):
            loss_of(model, batch(rank, 3 * step + micro)).backward()
        parts = [p.grad * (1 / world) for p in model.parameters() if p.grad is not None]
        found = parts if not found else [a + b for a, b in zip(found, parts, strict=True)]
    return found


@case
def accumulated_in_segments(rank: int, world: int) -> None:
    """The backward that sends is told from those before it, which told nobody of their end."""
    for tied in (False, True):
        model, plain = stack(), stack()
        if tied:
            model[2].weight, plain[2].weight = model[0].weight, plain[0].weight
        handle = reduce_gradients(model, SMALL)
        for step in range(3):
            model.zero_grad()
            accumulate(model, handle, rank, step)
            handle.wait()
            assert handle.report()["backwards"] == step + 1
            for parameter, wanted in zip(model.parameters(), sums(plain, world, step), strict=True):
                assert parameter.grad is not None
                # Parts come one by one in segments, and four ranks add up in an order of theirs.
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-4)


@case
def accumulated_in_segments_and_scattered(rank: int, world: int) -> None:
    model, plain = stack(), stack()
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=800, mode="reduce-scatter"))
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), handle)
    for step in range(3):
        accumulate(model, handle, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        grads = sums(plain, world, step)
        with torch.no_grad():
            for parameter, grad in zip(plain.parameters(), grads, strict=True):
                parameter.sub_(grad, alpha=1e-4)
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        # Four ranks add up in an order of theirs.
        torch.testing.assert_close(parameter, wanted, rtol=1e-5, atol=1e-6)


@case
def accumulated_in_segments_alone(rank: int, world: int) -> None:
    """What nothing has sent leaves before the step, or in place of a backward."""
    for by_step in (True, False):
        model = stack()
        handle = reduce_gradients(model, SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with handle.no_sync():
            in_segments(model, batch(rank).requires_grad_()).backward()
        if by_step:
            optimizer.step()
        else:
            handle.skip_backward()
        assert handle.report()["backwards"] == 1


@case
def accumulated_in_segments_and_then_without(rank: int, world: int) -> None:
    """The next backward is one of its own; without an average, nothing is sent twice."""
    model = stack()
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=800, average=False))
    with handle.no_sync():
        in_segments(model, batch(rank).requires_grad_()).backward()
    loss_of(model, batch(rank, 1)).backward()
    assert handle.report()["backwards"] == 1
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    handle.remove()
    wanted = [torch.zeros_like(part) for part in found]
    for other in range(world):
        for step in range(2):
            grads = torch.autograd.grad(
                loss_of(model, batch(other, step)), list(model.parameters())
            )
            wanted = [a + b for a, b in zip(wanted, grads, strict=True)]
    for part, one in zip(found, wanted, strict=True):
        # Added up on each rank first, and there all one by one: another order of adding.
        torch.testing.assert_close(part, one, rtol=1e-5, atol=1e-4)


@case
def waits_within_a_backward(rank: int, world: int) -> None:
    """What is still to come would be sent twice; the next backward is right."""
    model = stack(5)
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=800, average=False))
    for call in (handle.wait, handle.skip_backward, handle.remove):
        model.zero_grad()
        x = model[:3](batch(rank))
        x.register_hook(lambda _, call=call: call())
        loss = model[3:](x).square().sum()
        refuses(loss.backward, ConfigError, "the reduction was waited for, or removed, within a")
    model.zero_grad()
    with handle.no_sync():  # where nothing travels, there is nothing to wait for
        x = model[:3](batch(rank))
        x.register_hook(lambda _: handle.wait())
        model[3:](x).square().sum().backward()
    handle.remove()
    grads = torch.autograd.grad(loss_of(model, batch(rank)), list(model.parameters()))
    check_grads(model, grads)


@case
def empty_gradients_are_averaged_alike(rank: int, world: int) -> None:
    """`backward(inputs=...)`: a backward that gives a few parameters gradients, or none."""
    model = stack()
    reduce_gradients(model, SMALL)
    x = batch(rank).requires_grad_()
    loss_of(model, x).backward(inputs=[x])
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model, batch(rank)).backward(inputs=[model[0].weight])
    assert model[0].weight.grad is not None and model[1].weight.grad is None
    wanted = torch.zeros_like(model[0].weight)
    for other in range(world):
        (grad,) = torch.autograd.grad(loss_of(model, batch(other)), [model[0].weight])
        wanted += grad * (1 / world)
    check_same(model[0].weight.grad, wanted)
