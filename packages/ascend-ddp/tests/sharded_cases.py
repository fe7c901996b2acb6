"""What the ranks of test_sharded.py do: a function for each case, all in one start of the ranks.

A case raises where something is wrong. Every rank runs every case, in one order.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import AscendError, ConfigError, FeatureError, OptimizerFailedError
from ascend_core.optim import windowed
from ascend_ddp import (
    DDPConfig,
    ShardedConfig,
    ShardedOptimizer,
    join_state_dicts,
    reduce_gradients,
    shard_optimizer,
)
from ascend_ddp._ranks import Ranks

STEPS = 10
SCATTER = DDPConfig(bucket_bytes=3000, mode="reduce-scatter")
IN, HIDDEN, OUT = 13, 37, 5

CASES: dict[str, Callable[[int, int], None]] = {}

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    "SGD foreach": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


class Model(nn.Module):
    """Odd sizes, a transposed weight, a tied one, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(IN, HIDDEN)
        self.twice = nn.Linear(HIDDEN, HIDDEN)
        self.twice.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t() / 6)
        self.norm = nn.LayerNorm(HIDDEN)
        self.wide = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.last = nn.Linear(3 * HIDDEN, OUT)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = self.last(torch.tanh(self.wide(self.norm(x))))
        return x * self.scale + F.linear(x, self.first.weight[:OUT, :OUT])


def batch(rank: int, step: int = 0, rows: int = 8, width: int = IN) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * rank + step))


def sharded(
    model: nn.Module, make: Make, config: DDPConfig = SCATTER, **options: Any
) -> ShardedOptimizer:
    wrap = options.pop("wrap", None)
    group = options.pop("group", None)
    reduction = reduce_gradients(model, config, group=group)
    return shard_optimizer(make(model.parameters()), reduction, ShardedConfig(**options), wrap=wrap)


def train(
    called: nn.Module,
    optimizer: optim.Optimizer,
    rank: int,
    steps: range = range(STEPS),
    loss_of: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = loss_of(called(batch(rank, step)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def check_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Two ranks add up in one order, whichever it is; more do not, so that it is near."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if distributed.get_world_size() == 2:
            assert torch.equal(a, b), (a - b).abs().max()
        else:
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def check_equal(found: Any, wanted: Any) -> None:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found, wanted)
        assert torch.equal(found, wanted)
    elif isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
        for key in wanted:
            check_equal(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            check_equal(a, b)
    else:
        assert found == wanted, (found, wanted)


def refuses(call: Callable[[], object], kind: type[AscendError], message: str) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)


@case
def equals_torchs_ddp(rank: int, world: int) -> None:
    """Losses, weights and state over ten steps, for each form of each optimizer."""
    for make in OPTIMIZERS.values():
        ours, theirs = Model(), Model()
        optimizer = sharded(ours, make)
        plain = make(theirs.parameters())
        expected = train(DistributedDataParallel(theirs), plain, rank)
        check_same(train(ours, optimizer, rank), expected)
        check_same(weights(ours), weights(theirs))
        assert ours.twice.weight.stride() == theirs.twice.weight.stride() == (1, HIDDEN)
        if world == 2:
            check_equal(optimizer.state_dict()["state"], plain.state_dict()["state"])


@case
def equals_torchs_zero_redundancy_optimizer(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module warns of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ours, theirs = Model(), Model()
    zero = ZeroRedundancyOptimizer(theirs.parameters(), optim.AdamW, lr=1e-2)
    expected = train(DistributedDataParallel(theirs), zero, rank)
    check_same(train(ours, sharded(ours, lambda p: optim.AdamW(p, lr=1e-2)), rank), expected)
    check_same(weights(ours), weights(theirs))


@case
def equals_one_process_on_the_joined_batch(rank: int, world: int) -> None:
    """In FP64, so that rows that are added up in another order differ by 1e-9 at most."""
    ours, theirs = Model().double(), Model().double()
    optimizer = sharded(ours, lambda p: optim.AdamW(p, lr=1e-2))
    plain = optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(STEPS):
        ours(batch(rank, step).double()).square().mean().backward()
        theirs(
            torch.cat([batch(r, step) for r in range(world)]).double()
        ).square().mean().backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@case
def overlap_changes_nothing(rank: int, world: int) -> None:
    """DD-05: two steps of two micro-batches each."""
    results = []
    for overlap in (True, False):
        model = Model()
        reduction = reduce_gradients(model, SCATTER)
        optimizer = shard_optimizer(
            optim.AdamW(model.parameters(), lr=1e-2),
            reduction,
            ShardedConfig(overlap_param_gather=overlap),
        )
        losses = []
        for step in range(2):
            for micro in range(2):
                reduction.set_is_last_microbatch(micro == 1)
                loss = model(batch(rank, 2 * step + micro)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            travels = {type(p) is not nn.Parameter for p in model.parameters()}
            assert travels == {overlap}
        results.append(losses + weights(model))
    check_equal(results[0], results[1])
    theirs = Model()
    wrapped = DistributedDataParallel(theirs)
    plain = optim.AdamW(theirs.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        with wrapped.no_sync():
            losses.append(wrapped(batch(rank, 2 * step)).square().mean())
            losses[-1].backward()
        losses.append(wrapped(batch(rank, 2 * step + 1)).square().mean())
        losses[-1].backward()
        plain.step()
        plain.zero_grad()
    check_same(results[0], [loss.detach() for loss in losses] + weights(theirs))


@case
def forward_waits_for_its_own_bucket(rank: int, world: int) -> None:
    """Bucket by bucket, in the order of forward; no read beside forward has to wait."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = sharded(
        model, OPTIMIZERS["AdamW"], DDPConfig(bucket_bytes=1, mode="reduce-scatter")
    )
    model(batch(rank, width=16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append([type(layer.weight) is not nn.Parameter for layer in model])

    for layer in model:
        layer.register_forward_pre_hook(look)
    model(batch(rank, width=16))
    assert seen == [[n > layer for n in range(4)] for layer in range(4)], seen
    report = optimizer.report()
    assert report["gathers"] == 8 and report["late_waits"] == 0, report


class Tied(nn.Module):
    """The head reads the weight of the embedding, which is not called before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = nn.Linear(16, 16)
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(torch.tanh(self.body(F.linear(x, self.late.weight))))


@case
def whoever_reads_a_weight_waits(rank: int, world: int) -> None:
    ours, theirs = Tied(), Tied()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs)
    kept = list(ours.parameters())
    readers: list[Callable[[nn.Module, list[nn.Parameter]], Any]] = [
        lambda m, p: [torch.lerp(x.detach(), torch.zeros_like(x), 0.5) for x in p],
        lambda m, p: [x.detach().clone() for x in m.state_dict().values()],
        lambda m, p: list(copy.deepcopy(m).parameters()),
        lambda m, p: torch._foreach_norm(p),
        lambda m, p: [x.data.clone() for x in p],
        lambda m, p: [torch.cat([x.reshape(-1) for x in p])],
        lambda m, p: [p[0][:3, 1].detach(), p[1].norm().detach()],
        lambda m, p: [m.late.weight.tolist()],
    ]
    for step, reader in enumerate(readers):
        for model, one in ((ours, optimizer), (wrapped, plain)):
            model(batch(rank, step, width=16)).square().mean().backward()
            one.step()
            one.zero_grad()
        assert all(type(p) is not nn.Parameter for p in kept)
        assert [p.shape for p in kept] == [p.shape for p in theirs.parameters()]
        assert all(p.grad is None and p.requires_grad for p in kept)
        assert all(type(p) is not nn.Parameter for p in kept), "the shape is no reading"
        found, wanted = reader(ours, kept), reader(theirs, list(theirs.parameters()))
        assert all(type(x) in (Tensor, nn.Parameter, list) for x in found)
        if world == 2:
            check_equal(
                [x.detach() if isinstance(x, Tensor) else x for x in found],
                [x.detach() if isinstance(x, Tensor) else x for x in wanted],
            )
        optimizer.wait()
        assert all(type(p) is nn.Parameter for p in kept)
    assert optimizer.report()["late_waits"] >= len(readers)
    check_same(weights(ours), weights(theirs))


@case
def writes_while_weights_travel(rank: int, world: int) -> None:
    """A checkpoint that is loaded behind a step is what stays."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, rank, range(2))
    model.load_state_dict(saved)
    optimizer.wait()
    check_equal(dict(model.state_dict()), saved)
    train(model, optimizer, rank, range(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    optimizer.wait()
    assert all((p == 2).all() for p in model.parameters())


@case
def a_step_is_seen_by_autograd(rank: int, world: int) -> None:
    """A graph from before a step is refused, as where weights are stepped in place."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    loss = model(batch(rank)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("the weights of the graph are gone")
    optimizer.wait()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(5))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[4](self.layers[which](self.layers[0](x)))


@case
def unused_parameters_are_not_stepped(rank: int, world: int) -> None:
    """No weight decay for what no rank used; a branch of one rank is stepped on all."""
    ours, theirs = Branches(), Branches()
    make: Make = lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.5)  # noqa: E731
    optimizer = sharded(ours, make, DDPConfig(bucket_bytes=1, mode="reduce-scatter"))
    plain = make(theirs.parameters())
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
    before = theirs.layers[3].weight.detach().clone()
    for step in range(4):
        which = 1 + (step + rank) % 2
        for model, one in ((ours, optimizer), (wrapped, plain)):
            model(batch(rank, step), which).square().mean().backward()
            one.step()
            one.zero_grad()
    check_same(weights(ours), weights(theirs))
    assert torch.equal(ours.layers[3].weight, before)
    state = optimizer.state_dict()["state"]
    assert state.keys() == plain.state_dict()["state"].keys() and len(state) == 8
    assert optimizer.report()["gathers"] == 4 * 8


@case
def clipped_by_the_whole_norm(rank: int, world: int) -> None:
    """DD-17. Twice is once and once more.

    Squares are added up in another order, which AdamW's division by small roots enlarges.
    """
    for norm_type in (2.0, 1.0, math.inf):
        ours, theirs = Model(), Model()
        optimizer = sharded(ours, OPTIMIZERS["AdamW"])
        plain = OPTIMIZERS["AdamW"](theirs.parameters())
        wrapped = DistributedDataParallel(theirs)
        for step in range(3):
            ours(batch(rank, step)).square().mean().backward()
            wrapped(batch(rank, step)).square().mean().backward()
            for most in (0.3, 0.1):
                found = optimizer.clip_grad_norm_(most, norm_type)
                wanted = nn.utils.clip_grad_norm_(theirs.parameters(), most, norm_type)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
        for a, b in zip(weights(ours), weights(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@case
def clipping_that_clips_nothing_changes_nothing(rank: int, world: int) -> None:
    ours, theirs = Model(), Model()
    optimizer = sharded(ours, OPTIMIZERS["AdamW fused"])
    plain = OPTIMIZERS["AdamW fused"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs)
    for step in range(3):
        ours(batch(rank, step)).square().mean().backward()
        wrapped(batch(rank, step)).square().mean().backward()
        optimizer.clip_grad_norm_(1e6)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    check_same(weights(ours), weights(theirs))


@case
def gradient_scaler(rank: int, world: int) -> None:
    """An inf on one rank skips the step of all, and all scale alike."""
    ours, theirs = Model(), Model()
    optimizer = sharded(ours, OPTIMIZERS["AdamW fused"], grad_scaler=True)
    plain = OPTIMIZERS["AdamW fused"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2) for _ in "ab"]
    skipped = 0
    for step in range(8):
        before = weights(ours)
        for model, one, scaler in ((ours, optimizer, scalers[0]), (wrapped, plain, scalers[1])):
            loss = model(batch(rank, step)).square().mean()
            if step in (2, 5) and rank == step % world:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
            if step % 3 == 0 and model is ours:
                model.zero_grad()
            one.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        skipped += all(map(torch.equal, before, weights(ours)))
    assert skipped == 2, skipped
    check_same(weights(ours), weights(theirs))


@case
def scaler_without_the_option_is_no_silence(rank: int, world: int) -> None:
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(rank)).square().mean()).backward()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        assert "No inf checks" in str(error)
    else:
        raise AssertionError("it stepped scaled gradients")
    optimizer.zero_grad()


@case
def closures_schedulers_and_groups(rank: int, world: int) -> None:
    def groups(model: Model) -> list[dict[str, Any]]:
        bare = [model.scale, *model.norm.parameters(), model.first.bias]
        rest = [p for p in model.parameters() if all(p is not b for b in bare)]
        return [{"params": rest}, {"params": bare, "weight_decay": 0.0, "lr": 3e-2}]

    ours, theirs = Model(), Model()
    reduction = reduce_gradients(ours, SCATTER)
    given = optim.AdamW(groups(ours), lr=1e-2, weight_decay=0.3)
    early = optim.lr_scheduler.StepLR(given, 2, 0.5)  # of the given one, before
    optimizer = shard_optimizer(given, reduction)
    plain = optim.AdamW(groups(theirs), lr=1e-2, weight_decay=0.3)
    wrapped = DistributedDataParallel(theirs)
    schedulers = [
        [early, optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=5)],
        [
            optim.lr_scheduler.StepLR(plain, 2, 0.5),
            optim.lr_scheduler.LinearLR(plain, 0.3, total_iters=5),
        ],
    ]
    assert isinstance(optimizer, optim.AdamW) and optimizer.param_groups is given.param_groups
    for step in range(6):
        for model, one, both in ((ours, optimizer, schedulers[0]), (wrapped, plain, schedulers[1])):

            def closure(model: nn.Module = model, one: Any = one, step: int = step) -> Any:
                one.zero_grad()
                loss = model(batch(rank, step)).square().mean()
                loss.backward()
                return loss

            assert one.step(closure).requires_grad
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # `given` itself does not step
                for scheduler in both:
                    scheduler.step()
    check_same(weights(ours), weights(theirs))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


@case
def groups_that_come_later(rank: int, world: int) -> None:
    ours, theirs = Model(), Model()
    reduction = reduce_gradients(ours, SCATTER)
    optimizer = shard_optimizer(optim.AdamW(ours.first.parameters(), lr=1e-2), reduction)
    plain = optim.AdamW(theirs.first.parameters(), lr=1e-2)
    wrapped = DistributedDataParallel(theirs)
    before = ours.last.weight.detach().clone()
    train(ours, optimizer, rank, range(2))
    train(wrapped, plain, rank, range(2))
    assert torch.equal(ours.last.weight, before)
    theirs.zero_grad()  # the plain optimizer does not know the others
    for model, one in ((ours, optimizer), (theirs, plain)):
        one.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
    refuses(
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        ConfigError, "is not reduced",
    )  # fmt: skip
    assert len(optimizer.param_groups) == 2
    for step in range(2):
        for model, one in ((ours, optimizer), (wrapped, plain)):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            one.step()
            one.zero_grad()
    check_same(weights(ours), weights(theirs))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.gaps = nn.Parameter(torch.randn(5, 14)[:, ::2])
        self.large = nn.Parameter(torch.randn(4097))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean() * self.large.sum() + self.scalar * self.one + self.empty.sum()
        return x * self.gaps + self.frozen.sum()


@case
def odd_parameters(rank: int, world: int) -> None:
    for name in ("AdamW foreach", "AdamW fused", "SGD"):
        for nbytes in (1, 1 << 20):
            ours, theirs = Odd(), Odd()
            if "fused" in name:  # torch's fused kernel steps a tensor with gaps wrongly
                theirs.gaps.data = theirs.gaps.data.contiguous()
            make = OPTIMIZERS[name]
            optimizer = sharded(ours, make, DDPConfig(bucket_bytes=nbytes, mode="reduce-scatter"))
            plain = make(theirs.parameters())
            check_same(
                train(ours, optimizer, rank, range(4)),
                train(DistributedDataParallel(theirs), plain, rank, range(4)),
            )
            check_same(weights(ours), weights(theirs))
            if world == 2:
                check_equal(optimizer.state_dict()["state"], plain.state_dict()["state"])


@case
def only_empty_parameters_in_a_bucket(rank: int, world: int) -> None:
    model = Odd()
    config = DDPConfig(bucket_bytes=1, mode="reduce-scatter")
    optimizer = sharded(model, OPTIMIZERS["AdamW"], config)
    train(model, optimizer, rank, range(2))
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (0, 3)


@case
def tied_weights_stay_tied(rank: int, world: int) -> None:
    """DD-04."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, IN)
            self.body = nn.Linear(IN, IN)
            self.head = nn.Linear(IN, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.embedding(tokens))))

    ours, theirs = Both(), Both()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs)
    for step in range(4):
        for model, one in ((ours, optimizer), (wrapped, plain)):
            tokens = torch.arange(4) + rank + step
            F.cross_entropy(model(tokens), tokens).backward()
            one.step()
            one.zero_grad()
        assert ours.head.weight is ours.embedding.weight
    check_same(weights(ours), weights(theirs))


@case
def two_models(rank: int, world: int) -> None:
    """DD-11: two optimizers, of which one steps every other time."""
    ours, theirs = [Model(), Branches()], [Model(), Branches()]
    optimizers = [sharded(m, OPTIMIZERS["AdamW"]) for m in ours]
    plains = [OPTIMIZERS["AdamW"](m.parameters()) for m in theirs]
    wrapped = [
        DistributedDataParallel(theirs[0]),
        DistributedDataParallel(theirs[1], find_unused_parameters=True),
    ]
    for step in range(4):
        for models, ones in ((ours, optimizers), (wrapped, plains)):
            models[0](batch(rank, step)).square().mean().backward()
            ones[0].step()
            ones[0].zero_grad()
            if step % 2:
                models[1](batch(rank, step), 1).square().mean().backward()
                ones[1].step()
                ones[1].zero_grad()
    for a, b in zip(ours, theirs, strict=True):
        check_same(weights(a), weights(b))


@case
def chunks_of_a_pipeline_stage(rank: int, world: int) -> None:
    chunks = [Model(), Model()]
    reduction = reduce_gradients(chunks, SCATTER)
    optimizer = shard_optimizer(
        optim.AdamW([p for c in chunks for p in c.parameters()], lr=1e-2), reduction
    )
    theirs = [Model(), Model()]
    plain = optim.AdamW([p for c in theirs for p in c.parameters()], lr=1e-2)
    wrapped = [DistributedDataParallel(c) for c in theirs]
    for step in range(3):
        for micro in range(2):
            for number in (1, 0):
                reduction.set_is_last_microbatch(micro == 1, chunk=number)
                x = batch(rank, 2 * step + micro)
                chunks[number](x).square().mean().backward()
                wrapped[number].require_backward_grad_sync = micro == 1
                wrapped[number](x).square().mean().backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for a, b in zip(chunks, theirs, strict=True):
        check_same(weights(a), weights(b))


@case
def parts_of_gradients_that_come_late(rank: int, world: int) -> None:
    """A layer in several reentrant segments: its second part comes behind its bucket."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for one, other in ((0, 1), (1, 2), (3, 1)):
                part = nn.Sequential(self.layers[one], nn.Tanh(), self.layers[other])
                x = checkpoint(part, x, use_reentrant=True)
            return x

    ours, theirs = Segments(), Segments()
    optimizer = sharded(ours, OPTIMIZERS["SGD"], DDPConfig(bucket_bytes=1, mode="reduce-scatter"))
    reduce_gradients(theirs, DDPConfig(bucket_bytes=1))
    plain = OPTIMIZERS["SGD"](theirs.parameters())
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, plain)):
            model(batch(rank, step).requires_grad_()).square().sum().backward()
            one.step()
            one.zero_grad()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        # Parts of a gradient are averaged one by one where they come one by one.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@case
def a_rank_without_a_backward(rank: int, world: int) -> None:
    """DD-20."""
    ours = Model()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    theirs = Model()
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    for step in range(3):
        if rank == 0 or step == 0:
            ours(batch(rank, step)).square().mean().backward()
        losses = [theirs(batch(r, step)).square().mean() for r in range(world if step == 0 else 1)]
        sum(losses[1:], losses[0]).mul(1 / world).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        # Losses are added up before backward there, and gradients here; AdamW enlarges that.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    everywhere: list[Any] = [None] * world
    distributed.all_gather_object(everywhere, weights(ours))
    check_equal(everywhere[0], everywhere[rank])


@case
def bf16_with_masters(rank: int, world: int) -> None:
    """Each rank keeps FP32 masters of its part; no sum is rounded before it is a gradient."""
    config = DDPConfig(bucket_bytes=3000, mode="reduce-scatter", reduce_dtype="float32")
    for name in ("AdamW foreach", "AdamW fused", "SGD"):
        ours, theirs = Model().bfloat16(), Model().bfloat16()
        ours.norm.float(), theirs.norm.float()

        def call(model: Model, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        make = OPTIMIZERS[name]
        optimizer = sharded(
            ours, make, config, wrap=lambda o: windowed(o, times=3, master_weights=True)
        )
        reduce_gradients(theirs, DDPConfig(bucket_bytes=3000, reduce_dtype="float32"))
        plain = windowed(make(theirs.parameters()), master_weights=True)
        for step in range(STEPS):
            for model, one in ((ours, optimizer), (theirs, plain)):
                call(model, batch(rank, step)).float().square().mean().backward()
                one.step()
                one.zero_grad()
        if world == 2:
            check_equal(weights(ours), weights(theirs))
            check_equal(optimizer.state_dict()["state"], plain.state_dict()["state"])
        masters = [s["master_param"] for s in optimizer.state.values() if "master_param" in s]
        assert masters and all(m.dtype == torch.float32 for m in masters)


@case
def state_is_divided(rank: int, world: int) -> None:
    """Bytes of state: 8 for each element, divided by the ranks, where sizes are round."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64 * world, bias=False) for _ in range(1)))
    config = DDPConfig(bucket_bytes=1, mode="reduce-scatter")
    optimizer = sharded(model, OPTIMIZERS["AdamW"], config)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    report = optimizer.report()
    assert report["own_elements"] == report["elements"] // world == 64 * 64
    assert report["own_state_bytes"] == 8 * 64 * 64
    odd = Model()
    other = sharded(odd, OPTIMIZERS["AdamW"])
    train(odd, other, rank, range(1))
    numel = sum(p.numel() for p in odd.parameters())
    totals: list[Any] = [None] * world
    distributed.all_gather_object(totals, other.report()["own_state_bytes"])
    assert sum(totals) == 8 * numel
    buckets = len(other._chunks[0].weights.buckets)
    assert max(totals) <= 8 * (numel / world + 64 * (buckets + 7)), totals


@case
def state_is_held_once(rank: int, world: int) -> None:
    """What the profiler of memory saw allocated by the first step: the own state, and steps."""
    from ascend_core.memory import measure_peak

    model = nn.Linear(512, 512 * world, bias=False)
    optimizer = sharded(model, OPTIMIZERS["AdamW"], overlap_param_gather=False)
    model(torch.ones(2, 512)).sum().backward()
    with measure_peak("cpu") as memory:
        optimizer.step()
        optimizer.zero_grad()
    assert 0 <= memory.held_bytes - 8 * 512 * 512 <= 256, memory.held_bytes


@case
def checkpoints(rank: int, world: int) -> None:
    """Whole, in parts, joined, and that of a plain optimizer: all go on as if never stopped."""
    for make in (OPTIMIZERS["AdamW fused"], OPTIMIZERS["SGD"]):
        model = Model()
        optimizer = sharded(model, make)
        train(model, optimizer, rank, range(4))
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        whole, part = optimizer.state_dict(), copy.deepcopy(optimizer.local_state_dict())
        parts: list[Any] = [None] * world
        distributed.all_gather_object(parts, part)
        check_equal(join_state_dicts(parts[::-1]), whole)
        refuses(lambda parts=parts: join_state_dicts(parts[1:]), ConfigError, "those of ranks")
        train(model, optimizer, rank, range(4, 7))
        wanted = weights(model)

        again = Model()
        other = sharded(again, make)
        again.load_state_dict(saved)
        other.load_state_dict(whole)
        train(again, other, rank, range(4, 7))
        check_equal(weights(again), wanted)
        again.load_state_dict(saved)
        other.load_local_state_dict(part)
        train(again, other, rank, range(4, 7))
        check_equal(weights(again), wanted)
        refuses(lambda other=other, parts=parts: other.load_local_state_dict(parts[rank - 1]),
                ConfigError, "the checkpoint is that of rank")  # fmt: skip

        plain_model = Model()
        plain_model.load_state_dict(saved)
        plain = make(plain_model.parameters())
        plain.load_state_dict(whole)
        train(DistributedDataParallel(plain_model), plain, rank, range(4, 7))
        check_same(weights(plain_model), wanted)
        again.load_state_dict(plain_model.state_dict())
        other.load_state_dict(plain.state_dict())
        if world == 2:
            check_equal(other.state_dict()["state"], plain.state_dict()["state"])


@case
def torchs_checkpoint_functions(rank: int, world: int) -> None:
    """Keys by the names of parameters; loading steps once, with zeros, before it loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint import state_dict as functions
    model, again = Model(), Model()
    optimizer, other = sharded(model, OPTIMIZERS["AdamW"]), sharded(again, OPTIMIZERS["AdamW"])
    train(model, optimizer, rank, range(2))
    found = functions.get_optimizer_state_dict(model, optimizer)
    assert "first.weight" in found["state"]
    again.load_state_dict(model.state_dict())
    functions.set_optimizer_state_dict(again, other, found)
    train(model, optimizer, rank, range(2, 4))
    train(again, other, rank, range(2, 4))
    check_equal(weights(again), weights(model))


@case
def another_number_of_ranks(rank: int, world: int) -> None:
    """One, two and all ranks, with one batch for all: each goes on from where another stopped."""
    sizes = [1, 2, world, 1]
    groups = [distributed.new_group(list(range(size))) for size in sizes]
    for wrap in (None, lambda o: windowed(o, master_weights=True)):
        dtype = torch.float32 if wrap is None else torch.bfloat16
        state: Any = None
        saved: Any = None
        for turn, (size, group) in enumerate(zip(sizes, groups, strict=True)):
            if rank < size:
                model = Model().to(dtype)
                optimizer = sharded(model, OPTIMIZERS["AdamW fused"], wrap=wrap, group=group)
                if state is not None:
                    model.load_state_dict(saved)
                    optimizer.load_state_dict(state)
                for step in range(2 * turn, 2 * turn + 2):
                    model(batch(0, step).to(dtype)).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                saved = {key: value.clone() for key, value in model.state_dict().items()}
                state = optimizer.state_dict()
            told = [(saved, state)]
            distributed.broadcast_object_list(told, 0)
            saved, state = told[0]
        theirs = Model().to(dtype)
        plain = OPTIMIZERS["AdamW fused"](theirs.parameters())
        one = plain if wrap is None else wrap(plain)
        for step in range(2 * len(sizes)):
            theirs(batch(0, step).to(dtype)).float().square().mean().backward()
            one.step()
            one.zero_grad()
        check_equal(saved, dict(theirs.state_dict()))
        check_equal(state["state"], one.state_dict()["state"])


@case
def an_optimizer_that_has_state(rank: int, world: int) -> None:
    ours, theirs = Model(), Model()
    plain = OPTIMIZERS["AdamW fused"](theirs.parameters())
    train(DistributedDataParallel(theirs), plain, rank, range(3))
    ours.load_state_dict(theirs.state_dict())
    given = OPTIMIZERS["AdamW fused"](ours.parameters())
    given.load_state_dict(copy.deepcopy(plain.state_dict()))
    optimizer = shard_optimizer(given, reduce_gradients(ours, SCATTER))
    assert not given.state
    train(ours, optimizer, rank, range(3, 6))
    train(DistributedDataParallel(theirs), plain, rank, range(3, 6))
    check_same(weights(ours), weights(theirs))
    optimizer.remove()
    optimizer.remove()
    refuses(optimizer.step, FeatureError, "was removed")
    if world == 2:
        check_equal(given.state_dict(), plain.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in ours.parameters())
    again = shard_optimizer(given, optimizer._reduction)
    train(ours, again, rank, range(6, 8))
    train(DistributedDataParallel(theirs), plain, rank, range(6, 8))
    check_same(weights(ours), weights(theirs))


@case
def reduction_removed_first(rank: int, world: int) -> None:
    """It trains no more, and its state can be saved, and comes back, all the same."""
    ours, theirs = Model(), Model()
    plain = OPTIMIZERS["AdamW fused"](theirs.parameters())
    given = OPTIMIZERS["AdamW fused"](ours.parameters())
    reduction = reduce_gradients(ours, SCATTER)
    optimizer = shard_optimizer(given, reduction)
    train(ours, optimizer, rank, range(3))
    train(DistributedDataParallel(theirs), plain, rank, range(3))
    reduction.remove()
    group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
    for call in (
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.add_param_group(group),
    ):
        refuses(call, FeatureError, "works with was removed")  # type: ignore[arg-type]
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.remove()
    check_same(weights(ours), weights(theirs))
    if world == 2:
        check_equal(saved["state"], plain.state_dict()["state"])
        check_equal(given.state_dict(), plain.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in ours.parameters())
    again = shard_optimizer(given, reduce_gradients(ours, SCATTER))
    train(ours, again, rank, range(3, 5))
    train(DistributedDataParallel(theirs), plain, rank, range(3, 5))
    check_same(weights(ours), weights(theirs))


@case
def refused(rank: int, world: int) -> None:
    model = Model()
    whole = reduce_gradients(model)
    adamw = optim.AdamW(model.parameters())
    refuses(lambda: shard_optimizer(adamw, whole), ConfigError, "mode='all-reduce'")
    refuses(lambda: shard_optimizer(adamw, model), ConfigError, "as its reduction")  # type: ignore[arg-type]
    whole.remove()
    reduction = reduce_gradients(model, SCATTER)
    refuses(lambda: shard_optimizer(model, reduction), ConfigError, "given a Model")  # type: ignore[arg-type]
    refuses(
        lambda: shard_optimizer(optim.LBFGS(model.parameters()), reduction),
        ConfigError, "LBFGS cannot be sharded",
    )  # fmt: skip
    refuses(
        lambda: shard_optimizer(windowed(optim.AdamW(model.parameters())), reduction),
        ConfigError, "windowed one already",
    )  # fmt: skip
    strange = optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))])
    refuses(lambda: shard_optimizer(strange, reduction), ConfigError, "is not reduced")
    optimizer = shard_optimizer(adamw, reduction)
    refuses(lambda: shard_optimizer(adamw, reduction), ConfigError, "sharded along this")
    refuses(lambda: copy.deepcopy(optimizer), FeatureError, "cannot be copied")
    refuses(lambda: pickle.dumps(optimizer), FeatureError, "cannot be pickled")
    for call in ("step", "state_dict"):
        refuses(getattr(adamw, call), FeatureError, f"its own {call}()")
    optimizer.param_groups[0]["params"].reverse()
    refuses(optimizer.step, ConfigError, "were exchanged")
    optimizer.param_groups[0]["params"].reverse()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"].pop()
    refuses(lambda: optimizer.load_state_dict(state), ConfigError, "the checkpoint has groups")
    alias = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    alias[0].weight.data = alias[1].weight.data
    refuses(lambda: sharded(alias, OPTIMIZERS["SGD"]), ConfigError, "in the same memory")


@case
def gradients_that_no_step_used(rank: int, world: int) -> None:
    """A second backward is refused, not half added; zero_grad of the optimizer makes way."""
    for scaler in (False, True):
        model = Model()
        optimizer = sharded(model, OPTIMIZERS["AdamW"], grad_scaler=scaler)
        model(batch(rank)).square().mean().backward()
        loss = model(batch(rank)).square().mean()
        refuses(loss.backward, ConfigError, "not yet used")
        optimizer.zero_grad()
        train(model, optimizer, rank, range(2))
        model(batch(rank)).square().mean().backward()
        model.zero_grad()
        if scaler:  # they show
            train(model, optimizer, rank, range(1))


@case
def frozen_later(rank: int, world: int) -> None:
    """DD-22: refused, since parts would be others."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    train(model, optimizer, rank, range(2))
    model.first.requires_grad_(False)
    loss = model(batch(rank)).square().mean()
    refuses(loss.backward, ConfigError, "first.weight, first.bias was frozen")
    model.first.requires_grad_()
    model.zero_grad()
    train(model, optimizer, rank, range(2))


@case
def a_step_that_fails(rank: int, world: int) -> None:
    """On all ranks: named, until a checkpoint is loaded."""
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    train(model, optimizer, rank, range(2))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    state = optimizer.state_dict()
    model(batch(rank)).square().mean().backward()
    optimizer.param_groups[0]["betas"] = None
    refuses(optimizer.step, OptimizerFailedError, "half-way")
    refuses(optimizer.step, OptimizerFailedError, "TypeError")
    refuses(optimizer.state_dict, OptimizerFailedError, "half-way")
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    train(model, optimizer, rank, range(2, 4))
    other = Model()
    train(other, sharded(other, OPTIMIZERS["AdamW"]), rank, range(4))
    check_equal(weights(model), weights(other))


@case
def weights_that_are_not_the_stepped_ones(rank: int, world: int) -> None:
    model = Model()
    optimizer = sharded(model, OPTIMIZERS["AdamW"])
    train(model, optimizer, rank, range(1))
    ema = copy.deepcopy(model)
    ema.load_state_dict(model.state_dict(), assign=True)
    ema(batch(rank))  # a copy may be given what it likes
    model.to(torch.float64)
    model(batch(rank).double()).square().mean().backward()
    refuses(optimizer.step, ConfigError, "were moved after the optimizer was sharded")
    other = Model()
    optimizer = sharded(other, OPTIMIZERS["AdamW"])
    other.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
    refuses(lambda: other(batch(rank)), ConfigError, "was given another parameter")


class Late:
    """A gather of which nothing is seen until it is waited for."""

    def __init__(self, flat: Tensor, gathered: Tensor) -> None:
        self._flat = flat
        self._gathered = gathered

    def wait(self, *timeout: Any) -> None:
        self._flat.copy_(self._gathered)


@case
def gathers_that_come_at_the_last_moment(rank: int, world: int) -> None:
    """Whoever reads without waiting reads what the others have not stepped."""
    gather = Ranks.all_gather

    def late(self: Ranks, whole: Tensor, part: Tensor) -> Any:
        gathered = torch.empty_like(whole)
        gather(self, gathered, part).wait()
        return Late(whole, gathered)

    with mock.patch.object(Ranks, "all_gather", late):
        for function in (
            overlap_changes_nothing, whoever_reads_a_weight_waits, writes_while_weights_travel,
            unused_parameters_are_not_stepped, tied_weights_stay_tied, no_grad_and_eval,
        ):  # fmt: skip
            function(rank, world)
        model = Model()
        optimizer = sharded(model, OPTIMIZERS["AdamW"])
        train(model, optimizer, rank, range(1))
        stale = [bucket.flat.clone() for c in optimizer._chunks for bucket in c.weights.buckets]
        optimizer.wait()
        fresh = [bucket.flat for c in optimizer._chunks for bucket in c.weights.buckets]
        assert not any(map(torch.equal, stale, fresh)), "this would prove nothing"


@case
def ranks_that_own_nothing(rank: int, world: int) -> None:
    """A model of four elements: one rank has them all, the others wrap nothing."""
    for wrap in (None, lambda o: windowed(o, master_weights=True)):
        model, theirs = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        config = DDPConfig(mode="reduce-scatter")
        optimizer = sharded(model, OPTIMIZERS["AdamW"], config, wrap=wrap)
        theirs.load_state_dict(model.state_dict())
        plain = OPTIMIZERS["AdamW"](theirs.parameters())
        wrapped = DistributedDataParallel(theirs)
        for step in range(3):
            for called, one in ((model, optimizer), (wrapped, plain)):
                called(batch(rank, step, width=2)).square().mean().backward()
                if one is optimizer:
                    optimizer.clip_grad_norm_(1e6)
                one.step()
                one.zero_grad()
        check_same(weights(model), weights(theirs))
        assert (optimizer.report()["own_elements"] > 0) == (rank == 0)
        state = optimizer.state_dict()
        assert state["state"].keys() == {0}
        optimizer.load_state_dict(state)


@case
def no_grad_and_eval(rank: int, world: int) -> None:
    """Weights that travel are whole in evaluation."""
    ours, theirs = Model(), Model()
    optimizer = sharded(ours, OPTIMIZERS["AdamW"])
    plain = OPTIMIZERS["AdamW"](theirs.parameters())
    wrapped = DistributedDataParallel(theirs)
    for step in range(3):
        train(ours, optimizer, rank, range(step, step + 1))
        train(wrapped, plain, rank, range(step, step + 1))
        with torch.no_grad():
            check_same([ours.eval()(batch(0))], [theirs.eval()(batch(0))])
        ours.train(), theirs.train()
