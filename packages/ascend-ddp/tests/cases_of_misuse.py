"""More of what the ranks do: what a program gets wrong, and must not get wrong silently."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import AscendError, CommunicationError, ConfigError
from ascend_ddp import DDPConfig, reduce_gradients

sys.path.insert(0, str(Path(__file__).parent))
from cases import SMALL, WIDTH, averages, batch, case, check_grads, check_same, loss_of, stack


def refuses(call: Callable[[], object], kind: type[AscendError], message: str) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)


def check_equal_everywhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(torch.distributed.get_world_size())]
        distributed.all_gather(others, parameter.detach())
        assert all(torch.equal(others[0], other) for other in others)


@case
def first_step_without_work(rank: int, world: int) -> None:
    """DD-20, in the very first step, and with gradients that are clipped before it."""
    for clips in (False, True):
        model, theirs = stack(), stack()
        handle = reduce_gradients(model, SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for step in range(3):
            idle = step % world

            def loss(
                r: int, model: nn.Module = theirs, idle: int = idle, step: int = step
            ) -> Tensor:
                return loss_of(model, batch(r, step, rows=0 if r == idle else 8))

            for p, grad in zip(theirs.parameters(), averages(theirs, loss, world), strict=True):
                p.grad = grad
            if rank != idle:
                loss_of(model, batch(rank, step)).backward()
            elif clips:
                handle.skip_backward()
            for one, trained in ((optimizer, model), (other, theirs)):
                if clips:
                    nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
                one.step()
                one.zero_grad()
        assert handle.report()["backwards"] == 3
        check_equal_everywhere(model)
        for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
            check_same(a.detach(), b.detach())


@case
def gradients_that_no_backward_sent(rank: int, world: int) -> None:
    """All micro-batches in no_sync(), or gradients set by hand: the step sends them."""
    for by_hand in (False, True):
        model = stack()
        handle = reduce_gradients(model, SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(2):

            def loss(r: int, model: nn.Module = model, step: int = step) -> Tensor:
                return loss_of(model, batch(r, step))

            expected = averages(model, loss, world)
            if by_hand:
                grads = torch.autograd.grad(loss(rank), list(model.parameters()))
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.grad = grad
            else:
                with handle.no_sync():
                    loss(rank).backward()
            optimizer.step()
            check_grads(model, expected)
            optimizer.zero_grad()


@case
def optimizers_that_would_train_nothing(rank: int, world: int) -> None:
    model = stack()
    reduce_gradients(model, DDPConfig(mode="reduce-scatter"))
    loss_of(model, batch(rank)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(optimizer.step, ConfigError, "a SGD steps parameters whose gradients are scattered.")


@case
def optimizers_within_a_backward(rank: int, world: int) -> None:
    """Of hooks that come before ours, and behind."""
    for first in (True, False):
        model = stack()

        def watch(model: nn.Module = model) -> None:
            for parameter in model.parameters():
                step = torch.optim.SGD([parameter], lr=0.1).step
                parameter.register_post_accumulate_grad_hook(lambda p, step=step: step())

        if first:
            watch()
        handle = reduce_gradients(model, SMALL)
        if not first:
            watch()
        loss = loss_of(model, batch(rank))
        refuses(loss.backward, ConfigError, "a SGD stepped within a backward.")
        handle.remove()


@case
def parameters_that_come_later(rank: int, world: int) -> None:
    """New ones, one exchanged, and all of them; frozen ones may come, and any may go."""
    model = stack()
    reduce_gradients(model, SMALL)
    model.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    del model[1]

    def loss(r: int, model: nn.Module = model) -> Tensor:
        return loss_of(model, batch(r))

    loss(rank).backward()
    check_grads(model[:3], averages(model[:3], loss, world))
    model[3].requires_grad_()
    message = "3.weight was given to the model after reduce_gradients."
    refuses(loss(rank).backward, ConfigError, message)

    model = stack()
    reduce_gradients(model, SMALL)
    model[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    wrong = loss_of(model, batch(rank))
    refuses(wrong.backward, ConfigError, "1.weight was given to the model")

    for keeps in (True, False):
        model = stack()
        kept = reduce_gradients(model, SMALL), list(model.parameters())
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
        message = "0.weight was given to the model"
        if not keeps:
            message = "nobody reduces the gradients of the model any more."
            kept = None, []
            gc.collect()
        refuses(lambda model=model: model(batch(rank)), ConfigError, message)  # type: ignore[misc]
        with torch.no_grad():
            model(batch(rank))
        del kept


@case
def functional_calls(rank: int, world: int) -> None:
    """Other tensors in the place of parameters, for one call."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    others = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()

    x = batch(rank)
    found = torch.func.grad(loss)(others, x)
    wanted = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
    assert all(map(torch.equal, found.values(), wanted))
    assert handle.report()["backwards"] == 0


@case
def models_that_others_reduce(rank: int, world: int) -> None:
    message = "is a DistributedDataParallel."
    wrapped = DistributedDataParallel(stack())
    refuses(lambda: reduce_gradients(wrapped), ConfigError, f"the model {message}")
    refuses(lambda: reduce_gradients(nn.Sequential(wrapped)), ConfigError, f"0 {message}")
    lazy = nn.LazyLinear(4)
    refuses(lambda: reduce_gradients(lazy), ConfigError, "weight has no shape yet.")

    class Special(nn.Parameter):
        pass

    special = nn.Linear(4, 4)
    special.weight = Special(torch.ones(4, 4))
    refuses(lambda: reduce_gradients(special), ConfigError, "weight is a Special.")
    flat = nn.Linear(4, 4)
    flat.bias._is_flat_param = True  # type: ignore[attr-defined]
    refuses(lambda: reduce_gradients(flat), ConfigError, "bias is a part of FullyShardedDataPar")


@case
def hooks_that_come_later(rank: int, world: int) -> None:
    """They see, and change, this rank's own gradient, also that which fills a bucket."""
    model = stack()
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=1))
    seen: list[Tensor] = []

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(2)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    for step in range(2):
        seen.clear()
        loss_of(model, batch(rank, step)).backward()
        own = torch.autograd.grad(loss_of(model, batch(rank, step)), list(model.parameters()))
        order = [index for kind, index in handle.events() if kind == "gradient"]
        assert all(torch.equal(s, own[i]) for s, i in zip(seen, order, strict=True))
        expected = averages(model, lambda r, s=step: 2 * loss_of(model, batch(r, s)), world)
        check_grads(model, expected)
        model.zero_grad()
    kinds = [kind for kind, _ in handle.events()]
    assert kinds[:2] == ["gradient", "launch"], "from the second time on, they are called first"


@case
def autograd_grad_in_a_hook(rank: int, world: int) -> None:
    """A backward within a backward, which ends first."""
    model = stack()
    handle = reduce_gradients(model, SMALL)

    other = batch(rank)

    def look(grad: Tensor) -> None:
        with torch.enable_grad():
            torch.autograd.grad(model(other).sum(), list(model.parameters()))

    x = model[:2](batch(rank))
    x.register_hook(look)
    model[2:](x).square().sum().backward()
    check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))
    assert handle.report()["backwards"] == 1


class Segments(nn.Sequential):
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = checkpoint(self[1], x, use_reentrant=True)
        return self[0](x)


@case
def more_parts_on_one_rank(rank: int, world: int) -> None:
    """All ranks are told: nobody steps with a part missing."""
    model = Segments(*stack(2))
    reduce_gradients(model, DDPConfig(bucket_bytes=1))
    for step in range(3):
        times = 2 if step == 2 and rank == 1 else 1
        loss = model(batch(rank, step).requires_grad_(), times).square().sum()
        if step < 2:
            loss.backward()
            model.zero_grad()
            continue
        if rank == 1:
            refuses(loss.backward, CommunicationError, "more parts than in the backward before")
        else:
            refuses(loss.backward, CommunicationError, "the backward of a rank was ended")
    assert all(parameter.grad is None for parameter in model.parameters())


@case
def models_in_another_order(rank: int, world: int) -> None:
    """Each rank sends the models' buckets as its own backward reaches them."""
    one, other = stack(), stack()
    for model in (one, other):
        reduce_gradients(model, DDPConfig())
    models = (one, other) if rank % 2 else (other, one)
    loss = loss_of(nn.Sequential(*models), batch(rank))
    refuses(loss.backward, CommunicationError, "the gradients of two models were added up.")
    assert all(parameter.grad is None for parameter in models[1].parameters())
    one, other = stack(), stack()
    both = nn.ModuleList([one, other])
    reduce_gradients(both, DDPConfig())

    def together(r: int) -> Tensor:
        return loss_of(nn.Sequential(*((one, other) if r % 2 else (other, one))), batch(r))

    together(rank).backward()
    check_grads(both, averages(both, together, world))


@case
def frozen_behind_a_gradient(rank: int, world: int) -> None:
    """In the middle of accumulation: what was accumulated is reduced with the rest."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    expected = averages(model, lambda r: loss_of(model, batch(r)), world)
    with handle.no_sync():
        loss_of(model, batch(rank)).backward()
    model[0].requires_grad_(False)
    loss_of(model, batch(rank, 1)).backward()
    check_grads(model[0], expected[:2])
    model.zero_grad()
    loss_of(model, batch(rank)).backward()
    assert model[0].weight.grad is None and handle.report()["parameters"] == 6


@case
def converted_later(rank: int, world: int) -> None:
    """Buckets are those of the new dtype."""
    model = stack()
    reduce_gradients(model, SMALL)
    loss_of(model, batch(rank)).backward()
    model.zero_grad()
    dtype = torch.float64 if torch.get_default_device().type == "cpu" else torch.bfloat16
    model.to(dtype)
    loss_of(model, batch(rank).to(dtype)).backward()
    expected = averages(model, lambda r: loss_of(model, batch(r).to(dtype)), world)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and wanted is not None
        assert parameter.grad.dtype == dtype
        bound = 1e-12 if dtype == torch.float64 else 2e-2
        torch.testing.assert_close(parameter.grad, wanted, rtol=bound, atol=bound)


@case
def removed_behind_a_gradient(rank: int, world: int) -> None:
    """With FP32 sums: gradients are of the parameter's dtype again."""
    model = stack().to(torch.bfloat16)
    handle = reduce_gradients(model, DDPConfig(reduce_dtype="float32"))
    with handle.no_sync():
        loss_of(model, batch(rank).bfloat16()).backward()
    model.zero_grad()
    handle.remove()
    loss_of(model, batch(rank).bfloat16()).backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


@case
def buffers_of_any_dtype(rank: int, world: int) -> None:
    if torch.get_default_device().type != "cpu":
        return  # the simulated NPU has not all of them
    model = stack(1)
    for dtype in (torch.bool, torch.int16, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        model.register_buffer(str(dtype)[6:], torch.full((3, 2), rank + 1).t().to(dtype))
        model.register_buffer(f"{dtype} of one"[6:], torch.tensor(rank + 1).to(dtype))
    reduce_gradients(model)
    for buffer in model.buffers():
        assert torch.equal(buffer.to(torch.complex64), torch.ones(buffer.shape).to(torch.complex64))


@case
def an_exception_before_an_optimizer_that_steps(rank: int, world: int) -> None:
    """All ranks go on to step, and stay in one sequence of collectives."""
    model = stack(6)
    handle = reduce_gradients(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    for step in range(4):
        x = model[:3](batch(rank, step))
        if step == 2 and rank == 1:
            x.register_hook(fail)
        told = (ArithmeticError, CommunicationError)
        with contextlib.suppress(*told) if step > 1 else contextlib.nullcontext():
            model[3:](x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.report()["backwards"] == 4
    check_equal_everywhere(model)


@case
def chunks_that_die(rank: int, world: int) -> None:
    """What is done before a step is done while one is left."""
    chunks = [stack(), stack()]
    handle = reduce_gradients(chunks, SMALL)
    seen, before = weakref.ref(handle._chunks[0]), handle._before_step
    handle._chunks = handle._chunks[1:]
    del chunks[0]
    gc.collect()
    assert seen() is None and before in _global_optimizer_pre_hooks.values()
    handle._chunks = ()
    chunks.clear()
    gc.collect()
    assert before not in _global_optimizer_pre_hooks.values()
