"""More of what the ranks do: what a program gets wrong, and must not get wrong silently."""

from __future__ import annotations

import io
import math
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

from ascend_core.errors import ConfigError, OptimizerFailedError
from ascend_ddp import (
    DDPConfig,
    join_state_dicts,
    reduce_gradients,
    shard_optimizer,
)

sys.path.insert(0, str(Path(__file__).parent))
from running_cases import are_gone
from sharded_cases import (
    IN,
    OPTIMIZERS,
    SCATTER,
    Model,
    batch,
    case,
    check_equal,
    check_same,
    refuses,
    sharded,
    train,
    weights,
)


@case
def clipped_without_work(rank: int, world: int) -> None:
    """DD-20: a rank without a batch clips and steps as the others do, from the first step on.

    The plain model adds up in another order, which AdamW's division by small roots enlarges.
    """
    ours, theirs = Model(), Model()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    for step in range(3):
        if rank != step % world:
            ours(batch(rank, step)).square().mean().backward()
        for r in range(world):
            if r != step % world:
                (theirs(batch(r, step)).square().mean() / world).backward()
        found = optimizer.clip_grad_norm_(0.1)
        wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    everywhere: list[Any] = [None] * world
    distributed.all_gather_object(everywhere, weights(ours))
    check_equal(everywhere[0], everywhere[rank])


@case
def norms_that_are_none(rank: int, world: int) -> None:
    """Of which the parts of the ranks do not make a whole: refused before anything is sent."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    model(batch(rank)).square().mean().backward()
    for order in (0, -1.0, -math.inf, math.nan, "two", None):
        refuses(
            lambda order=order: optimizer.clip_grad_norm_(1.0, order),
            ConfigError,
            f"norm_type is {order!r}.",
        )
    for most in (None, "1"):
        refuses(
            lambda most=most: optimizer.clip_grad_norm_(most), ConfigError, f"max_norm is {most!r}."
        )
    found = [optimizer.clip_grad_norm_(1e9, order) for order in ("2", 2)]
    assert torch.equal(*found) and optimizer.clip_grad_norm_(torch.tensor(1e9)) == found[0]


class Slow(list[nn.Parameter]):
    """Is gone through after a moment: what others do in between shows."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        time.sleep(0.1)
        return super().__iter__()


@case
def read_by_several_threads(rank: int, world: int) -> None:
    """While one ends the journey of a weight, others that read it wait until it has."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    for bucket in optimizer._chunks[0].weights.buckets:
        bucket._parameters = Slow(bucket._parameters)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    first = next(iter(model.parameters()))
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda _: first.detach().sum(), range(4)))
    assert all(torch.equal(sums[0], one) for one in sums)
    assert type(first) is nn.Parameter


@case
def norms_of_other_dtypes(rank: int, world: int) -> None:
    """Of FP64, complex and BF16 gradients, on a rank without any, and whatever the default is."""
    before = torch.get_default_dtype()
    for dtype, default in (
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.complex64, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        models = [nn.Linear(2, 2, bias=False, dtype=dtype) for _ in "ab"]
        models[1].load_state_dict(models[0].state_dict())
        optimizer = sharded(models[0], OPTIMIZERS["SGD"], DDPConfig(mode="reduce-scatter"))
        reduce_gradients(models[1])
        for model in models:
            (model(batch(rank, width=2).to(dtype)).abs().float().sum() * 10).backward()
        torch.set_default_dtype(default)
        try:
            norms = [optimizer.clip_grad_norm_(1.0) for _ in range(2)]
        finally:
            torch.set_default_dtype(before)
        wanted = torch.linalg.vector_norm(models[1].weight.grad)  # type: ignore[arg-type]
        bound = {torch.float64: 1e-12, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
        assert norms[0].dtype == (dtype if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norms[0], wanted.to(norms[0].dtype), rtol=bound, atol=bound)
        torch.testing.assert_close(norms[1].item(), 1.0, rtol=1e-2, atol=0)
        optimizer.step()
        optimizer.wait()


@case
def another_optimizer_beside_it(rank: int, world: int) -> None:
    """It would find no gradient, and train nothing."""
    model = Model()
    reduction = reduce_gradients(model, SCATTER)
    optimizer = shard_optimizer(optim.AdamW(model.first.parameters()), reduction)
    other = optim.SGD(model.last.parameters(), lr=0.1)
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    refuses(other.step, ConfigError, "a SGD steps parameters whose gradients are scattered.")
    optimizer.remove()
    refuses(optimizer._given.step, ConfigError, "a AdamW steps parameters whose gradients")


@case
def parts_that_do_not_fit(rank: int, world: int) -> None:
    """Of other buckets: a rank may own more than it did, and of that it has no state."""
    parts: list[list[Any]] = []
    for nbytes in (1, 3000, 1 << 20):
        model = Model()
        config = DDPConfig(bucket_bytes=nbytes, mode="reduce-scatter")
        optimizer = sharded(model, OPTIMIZERS["AdamW"], config)
        for found in parts:
            refuses(
                lambda one=optimizer, part=found[rank]: one.load_local_state_dict(part),
                ConfigError, "or parameters were divided otherwise",
            )  # fmt: skip
        train(model, optimizer, rank, range(1))
        own = optimizer.local_state_dict()
        told: list[Any] = [None] * world
        distributed.all_gather_object(told, own)
        parts.append(told)
        join_state_dicts(told)
    mixed = [parts[0][0], *parts[2][1:]]
    refuses(lambda: join_state_dicts(mixed), ConfigError, "or do not make a whole")
    more = [*parts[0][:-1], {**parts[0][-1], "ranks": world + 1}]
    refuses(lambda: join_state_dicts(more), ConfigError, "or do not make a whole")


@case
def saved_by_torchs_distributed_checkpoint(rank: int, world: int) -> None:
    """Into an optimizer that has not stepped: loading asks it for the form of its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    models = [Model(), Model()]
    configs = [SCATTER, DDPConfig(bucket_bytes=1, mode="reduce-scatter")]
    optimizers = [sharded(m, OPTIMIZERS["AdamW"], c) for m, c in zip(models, configs, strict=True)]
    train(models[0], optimizers[0], rank, range(2))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = [folder]
        distributed.broadcast_object_list(told, 0)
        saved, state = get_state_dict(models[0], optimizers[0])
        checkpoint.save({"model": saved, "state": state}, checkpoint_id=told[0])
        saved, state = get_state_dict(models[1], optimizers[1])
        loaded = {"model": saved, "state": state}
        checkpoint.load(loaded, checkpoint_id=told[0])
        distributed.barrier()  # all have read it
    set_state_dict(
        models[1], optimizers[1],
        model_state_dict=loaded["model"], optim_state_dict=loaded["state"],
    )  # fmt: skip
    check_equal(optimizers[1].state_dict()["state"], optimizers[0].state_dict()["state"])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, rank, range(2, 4))
    check_same(weights(models[1]), weights(models[0]))


@case
def copied_and_called_with_other_tensors(rank: int, world: int) -> None:
    """Pickles, while weights travel; and functional_call."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    train(model, optimizer, rank, range(1))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    other = torch.load(saved, weights_only=False)
    check_equal(weights(other), weights(model))
    other(batch(rank)).sum().backward()
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, copies, (batch(rank),)).sum().backward()
    grads = [value.grad for value in copies.values()]
    check_equal(grads, [parameter.grad for parameter in other.parameters()])
    train(model, optimizer, rank, range(1, 2))


@case
def forgotten(rank: int, world: int) -> None:
    """A model dies with its optimizer, also one whose step has failed."""
    for fails in (False, True):
        model = Model()
        optimizer = sharded(model, OPTIMIZERS["AdamW"])
        train(model, optimizer, rank, range(1))
        model(batch(rank)).sum().backward()
        if fails:
            optimizer.param_groups[0]["betas"] = None
            refuses(optimizer.step, OptimizerFailedError, "half-way")
            loss = model(batch(rank)).sum()
            refuses(loss.backward, OptimizerFailedError, f"on rank {rank}: TypeError")
            del loss
        seen = [weakref.ref(one) for one in (model, optimizer, optimizer._chunks[0])]
        del model, optimizer
        assert are_gone(seen)


class Mixed(nn.Module):
    """What reads weights beside its modules' own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(IN - 1, 2, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.recurrent = nn.LSTM(IN - 1, IN - 1, 2, batch_first=True)
        self.linear = nn.Linear(IN - 1, IN - 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recurrent(self.encoder(x[None, :, 1:]))[0][0]
        product: Tensor = torch.ops.aten.mm.default(x, self.linear.weight)
        return product


@case
def modules_that_read_for_others(rank: int, world: int) -> None:
    """In training, in evaluation with torch's fast path, and in inference mode."""
    ours, theirs = Mixed(), Mixed()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
    for step in range(2):
        train(ours, optimizer, rank, range(step, step + 1))
        train(wrapped, plain, rank, range(step, step + 1))
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors, a prototype
            check_same([ours.eval()(batch(0)).clone()], [theirs.eval()(batch(0)).clone()])
        ours.train(), theirs.train()
    check_same(weights(ours), weights(theirs))


@case
def compiled(rank: int, world: int) -> None:
    """As one graph where step() waits for the weights; otherwise with breaks."""
    if world > 2:
        return  # it would tell no more, and compiling takes long
    for overlap in (False, True):
        ours, theirs = nn.Linear(IN, 3), nn.Linear(IN, 3)
        theirs.load_state_dict(ours.state_dict())
        optimizer = sharded(ours, OPTIMIZERS["AdamW"], overlap_param_gather=overlap)
        other = sharded(theirs, OPTIMIZERS["AdamW"])
        called = torch.compile(ours, backend="aot_eager", fullgraph=not overlap)
        train(called, optimizer, rank, range(2))
        train(theirs, other, rank, range(2))
        check_equal(weights(ours), weights(theirs))
