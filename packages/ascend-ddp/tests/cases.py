"""What the ranks of test_cases.py do: a function for each case, all in one start of the ranks.

A case raises where something is wrong. Every rank runs every case, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import CommunicationError, ConfigError
from ascend_ddp import DDPConfig, reduce_gradients

WIDTH = 16
SMALL = DDPConfig(bucket_bytes=800)

CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def stack(layers: int = 4, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)))


def batch(rank: int, step: int = 0, rows: int = 8) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * rank + step)
    drawn = torch.randn(rows, WIDTH, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().sum()


def averages(model: nn.Module, loss: Callable[[int], Tensor], world: int) -> list[Tensor | None]:
    """What the gradients must be: those of each rank's loss, computed here, averaged."""
    summed: list[Tensor | None] = [None] * len(list(model.parameters()))
    for rank in range(world):
        grads = torch.autograd.grad(loss(rank), list(model.parameters()), allow_unused=True)
        for i, grad in enumerate(grads):
            if grad is not None:
                part = grad * (1 / world)
                old = summed[i]
                summed[i] = part if old is None else old + part
    return summed


def check_grads(model: nn.Module, expected: Sequence[Tensor | None]) -> None:
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        grad = parameter.grad
        assert (grad is None) == (wanted is None), name
        if grad is not None and wanted is not None:
            check_same(grad, wanted)


def check_same(found: Tensor, wanted: Tensor) -> None:
    """Two ranks add up in one order, whichever it is; more do not, so that it is near."""
    if distributed.get_world_size() == 2:
        assert torch.equal(found, wanted), (found - wanted).abs().max()
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@case
def unused_parameter(rank: int, world: int) -> None:
    """DD-01: a layer that no rank uses has no gradient; one that a rank uses has one on all."""
    model = stack()
    reduce_gradients(model, SMALL)

    def loss(rank: int) -> Tensor:
        used = nn.Sequential(model[0], model[1 if rank == 0 else 2])
        return loss_of(used, batch(rank))

    for _ in range(3):
        model.zero_grad()
        loss(rank).backward()
        check_grads(model, averages(model, loss, world))
    assert model[3].weight.grad is None and model[2].weight.grad is not None


@case
def branches_that_differ(rank: int, world: int) -> None:
    """DD-13: which branch a rank takes changes from step to step."""
    model = stack(5)
    reduce_gradients(model, SMALL)
    for step in range(4):

        def loss(rank: int, step: int = step) -> Tensor:
            taken = model[1 + (rank + step) % 3]
            return loss_of(nn.Sequential(model[0], taken, model[4]), batch(rank, step))

        model.zero_grad()
        loss(rank).backward()
        check_grads(model, averages(model, loss, world))


@case
def repeated_and_tied(rank: int, world: int) -> None:
    """DD-03, DD-04: a layer that is used three times, and one weight in two layers."""
    model = stack()
    model[3].weight = model[0].weight
    handle = reduce_gradients(model, SMALL)
    repeated = nn.Sequential(model[0], model[1], model[1], model[1], model[2], model[3])

    def loss(rank: int) -> Tensor:
        return loss_of(repeated, batch(rank))

    for _ in range(3):
        model.zero_grad()
        loss(rank).backward()
        check_grads(model, averages(model, loss, world))
    assert handle.report()["collectives"] == 3 * handle.report()["buckets"]


class Segments(nn.Sequential):
    """Three checkpointed segments, of which all use the second layer."""

    reentrant = False
    parts = ((0, 1), (1, 2), (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        for one, other in self.parts:
            part = nn.Sequential(self[one], nn.Tanh(), self[other])
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x

    def plain(self, x: Tensor) -> Tensor:
        for one, other in self.parts:
            x = self[other](torch.tanh(self[one](x)))
        return x


@case
def checkpointed(rank: int, world: int) -> None:
    """Both kinds, with a layer that all segments use; then with a model that is not called."""
    for reentrant, is_called in ((False, True), (True, True), (True, False)):
        model = Segments(*stack())
        model.reentrant = reentrant
        handle = reduce_gradients(model, SMALL)
        for step in range(3):

            def loss(rank: int, model: Segments = model, step: int = step) -> Tensor:
                return loss_of(model.plain, batch(rank, step))

            expected = averages(model, loss, world)
            model.zero_grad()
            x = batch(rank, step).requires_grad_()
            loss_of(model if is_called else model.forward, x).backward()
            if not is_called:
                handle.wait()
            # Parts of a gradient are averaged one by one where they come one by one.
            for parameter, wanted in zip(model.parameters(), expected, strict=True):
                assert wanted is not None
                assert parameter.grad is not None, (reentrant, is_called, step)
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-5)


@case
def more_parts_than_before(rank: int, world: int) -> None:
    """While its bucket is not full, a parameter may get more parts than in the steps before."""
    model = Segments(*stack())
    model.reentrant = True
    reduce_gradients(model)
    for parts in (((0, 1), (3, 2)),) * 2 + (Segments.parts,) * 2:
        model.parts = parts
        expected = averages(model, lambda r: loss_of(model.plain, batch(r)), world)
        model.zero_grad()
        loss_of(model, batch(rank).requires_grad_()).backward()
        # Parts of a gradient are averaged one by one where they come one by one.
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None and wanted is not None
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-5)


@case
def accumulation_with_changing_counts(rank: int, world: int) -> None:
    """And DD-08: what counts is where backward runs."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    for step, count in enumerate((1, 3, 2, 1)):
        model.zero_grad()
        sums: list[Tensor] = []
        for micro in range(count):
            loss = loss_of(model, batch(rank, 10 * step + micro))
            if micro < count - 1:
                with handle.no_sync():
                    loss.backward()
            else:
                loss.backward()
        for r in range(world):
            total: list[Tensor] = []
            for micro in range(count):
                inputs = loss_of(model, batch(r, 10 * step + micro))
                grads = torch.autograd.grad(inputs, list(model.parameters()))
                total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
            scaled = [t * (1 / world) for t in total]
            sums = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
        check_grads(model, list(sums))
    assert handle.report()["collectives"] == 4 * handle.report()["buckets"]


@case
def forward_in_no_sync_still_syncs(rank: int, world: int) -> None:
    """DD-08."""
    model = stack()
    handle = reduce_gradients(model, SMALL)
    with handle.no_sync():
        loss = loss_of(model, batch(rank))
    loss.backward()
    check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))
    model.zero_grad()
    loss = loss_of(model, batch(rank))
    with handle.no_sync():
        loss.backward()
    for parameter, grad in zip(
        model.parameters(),
        torch.autograd.grad(loss_of(model, batch(rank)), list(model.parameters())),
        strict=True,
    ):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)


@case
def order_is_learnt(rank: int, world: int) -> None:
    """DD-18: forward uses the layers in another order than they are registered, and changes it."""
    model = stack(6)
    handle = reduce_gradients(model, SMALL)
    for step in range(6):
        order = (5, 3, 1, 0, 2, 4) if step < 3 else (0, 2, 4, 1, 3, 5)
        if rank == 1 and step == 0:
            order = tuple(reversed(order))  # the first rank decides

        def loss(rank: int, order: tuple[int, ...] = order) -> Tensor:
            return loss_of(nn.Sequential(*(model[i] for i in order)), batch(rank))

        model.zero_grad()
        loss(rank).backward()
        if step:
            check_grads(model, averages(model, loss, world))
    filled = [i for kind, i in handle.events() if kind == "gradient"]
    launches = [n for kind, n in handle.events() if kind == "launch"]
    assert launches == sorted(launches)
    assert handle.report()["sent_early"] > 0.5, (filled, handle.events())


@case
def launched_before_the_last_gradient(rank: int, world: int) -> None:
    """DD-21, from the first backward on."""
    model = stack(6)
    handle = reduce_gradients(model, SMALL)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch(rank)).backward()
        kinds = [kind for kind, _ in handle.events()]
        assert kinds.index("launch") < len(kinds) - 1 - kinds[::-1].index("gradient")
    launched = [n for kind, n in handle.events() if kind == "launch"]
    assert launched == list(range(handle.report()["buckets"]))


@case
def no_tokens(rank: int, world: int) -> None:
    """DD-20: one rank has no rows; then it has no backward at all, and steps its optimizer."""
    model = stack()
    reduce_gradients(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(rank: int) -> Tensor:
        return loss_of(model, batch(rank, rows=0 if rank == 1 else 8))

    loss(rank).backward()
    check_grads(model, averages(model, loss, world))
    optimizer.step()
    optimizer.zero_grad()
    expected = averages(model, loss, world)
    if rank != 1:
        loss(rank).backward()
    optimizer.step()
    check_grads(model, expected)
    weights = [torch.empty_like(model[0].weight) for _ in range(world)]
    distributed.all_gather(weights, model[0].weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


@case
def frozen_and_unfrozen(rank: int, world: int) -> None:
    """DD-22."""
    model = stack()
    reduce_gradients(model, SMALL)
    for frozen in (None, 1, 2, None, 1):
        for index, layer in enumerate(model):
            layer.requires_grad_(index != frozen)
        model.zero_grad()
        loss_of(model, batch(rank)).backward()
        for index, layer in enumerate(model):
            assert (layer.weight.grad is None) == (index == frozen)
            layer.requires_grad_()
        expected = averages(model, lambda r: loss_of(model, batch(r)), world)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            if parameter.grad is not None and wanted is not None:
                check_same(parameter.grad, wanted)


@case
def strides_are_kept(rank: int, world: int) -> None:
    model = stack(2)
    model[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    model.register_parameter("gaps", nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]))

    def loss(rank: int) -> Tensor:
        return loss_of(model, batch(rank)) + (model.gaps * batch(rank, rows=WIDTH)).sum()

    reduce_gradients(model, SMALL)
    for _ in range(2):
        model.zero_grad()
        loss(rank).backward()
        check_grads(model, averages(model, loss, world))
        grad = model[0].weight.grad
        assert grad is not None and grad.stride() == model[0].weight.stride()


@case
def gradients_lie_in_buckets(rank: int, world: int) -> None:
    model = stack()
    reduce_gradients(model, DDPConfig())
    for _ in range(2):
        loss_of(model, batch(rank)).backward()
        addresses = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}  # type: ignore[union-attr]
        assert len(addresses) == 1
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    loss_of(model, batch(rank)).backward()
    check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))


@case
def gradients_that_are_not_zeroed(rank: int, world: int) -> None:
    """As torch's DDP: what was averaged before is added to."""
    ours, theirs = stack(), stack()
    wrapped = DistributedDataParallel(theirs)
    reduce_gradients(ours, SMALL)
    for step in range(3):
        loss_of(ours, batch(rank, step)).backward()
        loss_of(wrapped, batch(rank, step)).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        check_same(a.grad, b.grad)


@case
def gradients_of_which_some_are_zeroed(rank: int, world: int) -> None:
    """In one bucket, some are added to and some are new."""
    ours, theirs = stack(), stack()
    wrapped = DistributedDataParallel(theirs)
    reduce_gradients(ours)
    for step in range(4):
        loss_of(ours, batch(rank, step)).backward()
        loss_of(wrapped, batch(rank, step)).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            check_same(a.grad, b.grad)
        for layer in (ours[step], theirs[step]):
            layer.zero_grad()


@case
def halves_as_torch(rank: int, world: int) -> None:
    """Gradients that are small enough to be rounded when they are divided."""
    for dtype in (torch.float16, torch.bfloat16):
        ours, theirs = stack().to(dtype), stack().to(dtype)
        wrapped = DistributedDataParallel(theirs)
        reduce_gradients(ours, SMALL)
        for step in range(3):
            x = 1e-4 * batch(rank, step).to(dtype)
            ours.zero_grad()
            theirs.zero_grad()
            loss_of(ours, x).backward()
            loss_of(wrapped, x).backward()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None
                if world == 2:
                    assert torch.equal(a.grad, b.grad)
                else:  # added up in another order, and rounded each time
                    near = 4 * torch.finfo(dtype).eps
                    largest = near * b.grad.abs().max().item()
                    torch.testing.assert_close(a.grad, b.grad, rtol=near, atol=largest)


@case
def bf16_added_up_in_fp32(rank: int, world: int) -> None:
    model = stack().to(torch.bfloat16)
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=2000, reduce_dtype="float32"))
    parameters = list(model.parameters())

    def grads_of(rank: int, micro: int) -> tuple[Tensor, ...]:
        loss = loss_of(model, batch(rank, micro).bfloat16())
        return torch.autograd.grad(loss, parameters)

    for step in range(2):
        model.zero_grad()
        for micro in range(3):
            with handle.no_sync():
                loss_of(model, batch(rank, micro + step).bfloat16()).backward()
        loss_of(model, batch(rank, 9).bfloat16()).backward()
        for index, parameter in enumerate(parameters):
            parts = []
            for r in range(world):
                sums = torch.zeros(parameter.shape)
                for micro in (*range(step, step + 3), 9):
                    sums += grads_of(r, micro)[index].float()
                parts.append(sums * (1 / world))
            expected = sum(parts[1:], parts[0]).bfloat16()
            assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
            check_same(parameter.grad, expected)
    torch.optim.AdamW(parameters).step()


@case
def clipped_by_the_whole_norm(rank: int, world: int) -> None:
    """DD-17."""
    model = stack()
    reduce_gradients(model, SMALL)
    loss_of(model, batch(rank)).backward()
    expected = averages(model, lambda r: loss_of(model, batch(r)), world)
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(e) for e in expected if e is not None])
    )
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(found, norm)


@case
def exception_in_backward(rank: int, world: int) -> None:
    """On all ranks: the next step is right, whatever had been sent."""
    model = stack(6)
    reduce_gradients(model, SMALL)

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    for where in (None, 0, 3, None):
        model.zero_grad()
        x = batch(rank)
        for index, layer in enumerate(model):
            x = layer(x)
            if index == where:
                x.register_hook(fail)
        if where is None:
            x.square().sum().backward()
            check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))
            continue
        try:
            x.square().sum().backward()
        except ArithmeticError:
            continue
        raise AssertionError("it did not fail")


@case
def exception_on_one_rank(rank: int, world: int) -> None:
    """The others are told, and nobody has half of a gradient."""
    one_rank_fails(rank, world, None, told_at_once=True)
    device = torch.get_default_device().type
    alone = distributed.new_group(backend=distributed.get_default_backend_for_device(device))
    # Where hosts do not talk, they would have to wait for the device.
    one_rank_fails(rank, world, alone, told_at_once=device == "cpu")


def one_rank_fails(
    rank: int, world: int, group: distributed.ProcessGroup | None, *, told_at_once: bool
) -> None:
    model = stack(6)
    reduce_gradients(model, SMALL, group=group)
    loss_of(model, batch(rank)).backward()
    model.zero_grad()

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    x = model[:3](batch(rank))
    if rank == 1:
        x.register_hook(fail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error: Exception | None = None
    try:
        model[3:](x).square().sum().backward()
    except (ArithmeticError, CommunicationError) as caught:
        error = caught
    if rank == 1:
        assert isinstance(error, ArithmeticError)
        optimizer.step()  # sends what the others wait for
    else:
        assert isinstance(error, CommunicationError) == told_at_once, error
    if not told_at_once:
        model.zero_grad()
        error = None
        try:
            loss_of(model, batch(rank)).backward()
        except CommunicationError as caught:
            error = caught
        assert error is not None
    model.zero_grad()
    loss_of(model, batch(rank)).backward()
    check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))


@case
def called_past_the_model(rank: int, world: int) -> None:
    """DD-14: there is no wrapper that could be bypassed."""
    model = stack()
    reduce_gradients(model, SMALL)
    weight = model[1].weight
    F.linear(batch(rank), weight).sum().backward()
    expected = sum(batch(r).sum(0).expand(WIDTH, WIDTH) * (1 / world) for r in range(world))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


@case
def two_models(rank: int, world: int) -> None:
    """DD-11."""
    ours, other = stack(), stack(3)
    reduce_gradients(ours, SMALL)
    reduce_gradients(other, DDPConfig(average=False))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, other)]
    for step in range(2):
        (loss_of(ours, batch(rank, step)) + loss_of(other, batch(rank, step))).backward()
        check_grads(ours, averages(ours, lambda r, s=step: loss_of(ours, batch(r, s)), world))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case
def chunks_send_in_their_last_microbatch(rank: int, world: int) -> None:
    """Two model chunks as virtual pipelining runs them, three micro-batches."""
    chunks = [stack(2), stack(3)]
    handle = reduce_gradients(chunks, SMALL)
    for micro in range(3):
        for number in (1, 0):
            handle.set_is_last_microbatch(micro == 2, chunk=number)
            loss_of(chunks[number], batch(rank, micro)).backward()
    for chunk in chunks:

        def loss(rank: int, chunk: nn.Sequential = chunk) -> Tensor:
            return sum((loss_of(chunk, batch(rank, m)) for m in range(3)), torch.zeros(()))

        for parameter, wanted in zip(chunk.parameters(), averages(chunk, loss, world), strict=True):
            assert parameter.grad is not None and wanted is not None
            torch.testing.assert_close(parameter.grad, wanted)
    report = handle.report()
    assert report["collectives"] == report["buckets"] and report["backwards"] == 2


@case
def refused(rank: int, world: int) -> None:
    model = stack()
    handle = reduce_gradients(model)
    for wrong, message in (
        (lambda: reduce_gradients(model[:2]), "is reduced already"),
        (lambda: reduce_gradients(nn.ReLU()), "without parameters"),
        (lambda: reduce_gradients(stack(), "fast"), "as its config"),  # type: ignore[arg-type]
        (lambda: reduce_gradients([shared := stack(1), shared]), "two of the model chunks"),
        (lambda: handle.set_is_last_microbatch(True, chunk=1), "no model chunk 1"),
        (lambda: reduce_gradients(stack(2 + rank)), "different buckets"),
    ):
        try:
            wrong()
        except ConfigError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    sparse = nn.Embedding(4, 4, sparse=True)
    reduce_gradients(sparse)
    try:
        sparse(torch.tensor([rank])).sum().backward()
    except ConfigError as error:
        assert "sparse" in str(error)
    else:
        raise AssertionError("sparse")


@case
def removed(rank: int, world: int) -> None:
    model = stack()
    handle = reduce_gradients(model)
    loss_of(model, batch(rank)).backward()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    handle.remove()
    handle.remove()
    assert all(torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept, strict=True))  # type: ignore[arg-type]
    model.zero_grad()
    loss_of(model, batch(rank)).backward()
    own = torch.autograd.grad(loss_of(model, batch(rank)), list(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True))  # type: ignore[arg-type]
    reduce_gradients(model)


@case
def no_grad_and_eval(rank: int, world: int) -> None:
    model = stack()
    handle = reduce_gradients(model)
    with torch.no_grad():
        model.eval()(batch(rank))
    grads = torch.autograd.grad(loss_of(model, batch(rank)), list(model.parameters()))
    assert len(grads) == 8 and handle.report()["collectives"] == 0


@case
def retained_graph(rank: int, world: int) -> None:
    model = stack()
    reduce_gradients(model, SMALL)
    loss = loss_of(model, batch(rank))
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        check_grads(model, averages(model, lambda r: loss_of(model, batch(r)), world))


@case
def starts_from_the_first_rank(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model[1].running_mean.fill_(rank)  # type: ignore[union-attr]
    reduce_gradients(model)
    for tensor in (*model.parameters(), *model.buffers()):
        others = [torch.empty_like(tensor) for _ in range(world)]
        distributed.all_gather(others, tensor.detach())
        assert all(torch.equal(tensor, other) for other in others)


@case
def empty_and_scalar_parameters(rank: int, world: int) -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.scalar = nn.Parameter(torch.tensor(2.0))
    reduce_gradients(model)
    (model.empty.sum() + model.scalar * (rank + 1)).backward()
    assert model.scalar.grad is not None and model.empty.grad is not None
    assert model.scalar.grad.item() == sum(range(1, world + 1)) / world
