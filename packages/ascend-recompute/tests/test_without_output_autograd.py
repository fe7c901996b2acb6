"""Hooks, partial and repeated backward, exceptions, and what is left behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_core.memory import measure_peak
from ascend_core.storage import is_released
from ascend_core.testing import (
    Growth,
    RunRecord,
    alive_after,
    assert_bitwise_equal,
    held_bytes,
    live_storage_count,
    record_run,
)
from ascend_recompute.without_output import CheckpointChain, CheckpointWithoutOutput

Same = Callable[..., None]
Taken = Callable[[int], int]


def x_of(*size: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size).requires_grad_()


def grads(*modules: nn.Module) -> list[Tensor | None]:
    weights = [weight for module in modules for weight in module.parameters()]
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


@pytest.mark.parametrize("hooked", [1, 2, 3])
def test_two_consumers_with_a_hook_each_restore_once(same_as_plain: Same, hooked: int) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        y = ckpt.checkpoint(count(F.gelu), False, x)
        a, b = one(y), two(y)
        ckpt.discard_output()
        for consumer in (a, b, b)[:hooked] if hooked > 1 else (a + b,):
            consumer.register_hook(ckpt.recompute)
        if hooked == 1:
            a.register_hook(ckpt.recompute)
            b.register_hook(ckpt.recompute)
        (a.square().sum() + b.sum()).backward()
        return [x.grad, *grads(one, two)]

    same_as_plain(program, runs=2)


def test_recomputing_by_hand_is_the_same_as_by_hook(same_as_plain: Same) -> None:
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(4)
        ckpt = make()
        y = ckpt.checkpoint(count(torch.sin), False, x)
        d = y.square()
        ckpt.discard_output()
        ckpt.recompute()
        ckpt.recompute(torch.ones(4))
        value = y.clone()
        d.sum().backward()
        return [value, x.grad]

    same_as_plain(program, runs=2)


def test_discarding_twice_or_too_late_is_harmless(same_as_plain: Same) -> None:
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(4)
        ckpt = make()
        ckpt.discard_output()
        ckpt.recompute()
        y = ckpt.checkpoint(count(torch.sin), False, x)
        d = y.square()
        ckpt.discard_output()
        ckpt.discard_output()
        d.register_hook(ckpt.recompute)
        d.sum().backward()
        ckpt.discard_output()
        return [y, x.grad]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("wanted", ["x", "inner", "down", "x and down", "output"])
def test_the_gradient_of_a_subset_of_inputs(same_as_plain: Same, wanted: str) -> None:
    inner, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x, other = x_of(3, 4), x_of(3, 4)
        ckpt = make()
        y = ckpt.checkpoint(count(lambda x, o: F.gelu(inner(x)) * o), False, x, other)
        d = down(y)
        ckpt.discard_output_and_register_recompute(d)
        inputs = {
            "x": [x], "inner": [inner.weight], "down": [down.weight],
            "x and down": [x, down.weight], "output": [y],
        }[wanted]  # fmt: skip
        found = torch.autograd.grad(d.square().sum(), inputs)
        assert x.grad is None and inner.weight.grad is None and down.weight.grad is None
        return [*found]

    same_as_plain(program, runs=2)


def test_the_gradient_of_a_discarded_outputs_sibling_alone(same_as_plain: Same) -> None:
    # The function's backward comes without its consumer's: its own saved output is still away.
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        y, z = ckpt.checkpoint(count(lambda x: ((t := torch.tanh(x)), t * 2)), False, x)
        d, sibling = y.square(), z.sum()
        ckpt.discard_output_and_register_recompute(d)
        (first,) = torch.autograd.grad(sibling, x, retain_graph=True)
        d.sum().backward()
        return [first, x.grad]

    same_as_plain(program, runs=3)


def test_hooks_on_parameters_fire_once(same_as_plain: Same) -> None:
    inner, down = nn.Linear(4, 4), nn.Linear(4, 4)
    fired: list[str] = []
    for name, module in (("inner", inner), ("down", down)):
        module.weight.register_hook(lambda _, name=name: fired.append(f"{name} hook"))
        module.weight.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.append(f"{name} accumulated")
        )

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        x.register_hook(lambda _: fired.append("x hook"))
        ckpt = make()
        d = down(ckpt.checkpoint(count(lambda x: F.gelu(inner(x))), False, x))
        ckpt.discard_output_and_register_recompute(d)
        fired.clear()
        d.sum().backward()
        assert sorted(fired) == sorted(
            ["down hook", "down accumulated", "inner hook", "inner accumulated", "x hook"]
        )
        return [x.grad, *grads(inner, down)]

    same_as_plain(program, runs=2)


def test_module_hooks_inside_the_function(same_as_plain: Same) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    backward: list[Tensor] = []
    inner[1].register_full_backward_hook(lambda _, __, out: backward.append(out[0]))

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        backward.clear()
        ckpt = make()
        d = ckpt.checkpoint(count(inner), False, x).square()
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        assert len(backward) == 1
        return [x.grad, backward[0], *grads(inner)]

    same_as_plain(program, runs=2)


def test_attributes_of_parameters_reach_the_backward_of_the_function() -> None:
    class FusedAccumulation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            x, weight = ctx.saved_tensors
            weight.main_grad.add_(x.t() @ gradient)
            return gradient @ weight.t(), None

    weight = nn.Parameter(torch.ones(4, 4))
    weight.main_grad = torch.zeros(4, 4)
    x = x_of(3, 4)
    ckpt = CheckpointWithoutOutput()
    d = ckpt.checkpoint(FusedAccumulation.apply, False, x, weight).square()
    ckpt.discard_output_and_register_recompute(d)
    d.sum().backward()
    assert torch.equal(weight.main_grad, x.detach().t() @ (2 * (x.detach() @ weight.detach())))


@pytest.mark.parametrize("accesses", [1, 2])
def test_a_custom_function_inside(same_as_plain: Same, accesses: int) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(x, keep)
            ctx.mark_non_differentiable(keep)
            return x**3, keep

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
            if accesses == 1:
                x, keep = ctx.saved_tensors
            else:
                x, keep = ctx.saved_tensors[0], ctx.saved_tensors[1]
            return gradient * 3 * x**2 * keep, None

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x, keep = x_of(6), torch.ones(6)
        ckpt = make()
        y, _ = ckpt.checkpoint(count(Cube.apply), False, x * 1, keep)
        d = y.square()
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [x.grad]

    # Asking twice for what was saved costs one more run (torch's checkpoint refuses it).
    same_as_plain(program, runs=1 + accesses)


def test_tensors_captured_by_a_closure(same_as_plain: Same) -> None:
    source, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        h = source(x)
        ckpt = make()
        y = ckpt.checkpoint(count(lambda a: F.silu(h) * a), False, source(x + 1))
        d = down(y)
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [x.grad, *grads(source, down)]

    same_as_plain(program, runs=2)


def test_keyword_only_and_no_arguments(same_as_plain: Same) -> None:
    weight = nn.Parameter(torch.ones(4))

    def program(make: Any, count: Any) -> list[Tensor | None]:
        ckpt, other = make(), make()
        x = x_of(4)
        y = ckpt.checkpoint(count(lambda: torch.sin(weight)), False)
        z = other.checkpoint(count(lambda *, a: torch.sin(a)), False, a=x)
        d = y * z
        ckpt.discard_output_and_register_recompute(d)
        other.discard_output_and_register_recompute(d)
        d.sum().backward()
        found, weight.grad = weight.grad, None
        return [x.grad, found]

    same_as_plain(program, runs=2)


class Block(nn.Module):
    """An MLP whose activation, or whole first half, is checkpointed; weights may be tied."""

    def __init__(self, recompute: bool, tied: bool = False, frozen: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.up = nn.Linear(8, 8)
        self.down = self.up if tied else nn.Linear(8, 8)
        if frozen:
            getattr(self, frozen).requires_grad_(False)

    def first(self, x: Tensor) -> Tensor:
        return F.dropout(F.silu(self.up(x)), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            output: Tensor = self.down(self.first(x))
            return output
        ckpt = CheckpointWithoutOutput()
        d: Tensor = self.down(ckpt.checkpoint(self.first, False, x))
        ckpt.discard_output_and_register_recompute(d)
        return d


@pytest.mark.parametrize("options", [{"tied": True}, {"frozen": "up"}, {"frozen": "down"}, {}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_tied_and_frozen_parameters_train_as_plain(
    options: dict[str, Any], accumulate: int
) -> None:
    def model(recompute: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Block(recompute, **options), nn.Linear(8, 8))

    def record(recompute: bool) -> RunRecord:
        return record_run(
            lambda: model(recompute),
            lambda _: torch.randn(4, 8),
            accumulate=accumulate,
            device=torch.get_default_device(),
        )

    plain, ours = record(False), record(True)
    assert_bitwise_equal(plain, ours)


def test_two_models_interleaved(same_as_plain: Same) -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        a, b = make(), make()
        x = x_of(3, 4)
        y = one(a.checkpoint(count(lambda x: F.dropout(F.gelu(x))), False, x))
        z = two(b.checkpoint(count(lambda x: F.dropout(F.silu(x))), False, x))
        b.discard_output_and_register_recompute(z)
        a.discard_output_and_register_recompute(y)
        y.square().sum().backward()
        z.square().sum().backward()
        return [x.grad, *grads(one, two)]

    same_as_plain(program, runs=2)


def test_micro_batches_whose_backward_comes_later(same_as_plain: Same) -> None:
    up, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        losses = []
        for _ in range(3):
            ckpt = make()
            d = down(ckpt.checkpoint(count(lambda x: F.dropout(torch.tanh(x))), False, up(x_of(4))))
            ckpt.discard_output_and_register_recompute(d)
            losses.append(d.square().sum())
        for loss in losses:
            loss.backward()
        return [*grads(up, down)]

    same_as_plain(program, runs=2)


def next_backward() -> None:
    """Let autograd's thread of the device take a task, so that it lets go of the one before."""
    (torch.ones((), requires_grad=True) * 2).backward()


@pytest.mark.parametrize("where", ["forward", "replay", "consumer"])
def test_after_an_exception_a_fresh_step_is_right_and_nothing_leaks(where: str) -> None:
    up, down = nn.Linear(8, 8), nn.Linear(8, 8)
    failing = ""

    class Consumer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            if failing == "consumer":
                raise ZeroDivisionError
            return gradient * (2 + 0 * y)

    def function(x: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        if failing == ("replay" if in_backward else "forward"):
            torch.rand(3)
            raise ZeroDivisionError
        return F.dropout(F.gelu(x), 0.5)

    def step() -> list[Tensor | None]:
        torch.manual_seed(0)
        x = x_of(4, 8)
        ckpt = CheckpointWithoutOutput()
        d = Consumer.apply(ckpt.checkpoint(function, False, up(x)))
        ckpt.discard_output_and_register_recompute(d)
        down(d).square().sum().backward()
        return [x.grad, *grads(up, down), torch.rand(2)]

    def failing_step() -> None:
        nonlocal failing
        failing = where
        with pytest.raises(ZeroDivisionError):
            step()
        next_backward()
        failing = ""
        grads(up, down)

    expected = step()
    failing_step()
    for left, right in zip(expected, step(), strict=True):
        assert left is not None and right is not None and torch.equal(left, right)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert alive_after(failing_step, gc_enabled=True) == Growth(nbytes=0, storages=0)


def test_a_replay_that_failed_can_be_tried_again() -> None:
    fails = [False, True, False]

    def function(x: Tensor) -> Tensor:
        if fails.pop(0):
            raise MemoryError
        return torch.sin(x)

    x = x_of(4)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(function, False, x)
    d = y.square()
    ckpt.discard_output_and_register_recompute(d)
    with pytest.raises(MemoryError):
        d.sum().backward()
    assert is_released(y)
    d.sum().backward()
    assert torch.equal(x.grad, 2 * torch.sin(x.detach()) * torch.cos(x.detach()))


def plus_one(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("on_module", [False, True])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("function", [F.gelu, torch.sigmoid, plus_one])
def test_a_backward_that_never_comes_leaves_nothing(
    function: Callable[[Tensor], Tensor], discard: bool, on_module: bool
) -> None:
    down = nn.Linear(8, 8)
    source = x_of(4, 8)

    def step() -> tuple[Any, Any]:
        x = source * 2
        ckpt = CheckpointWithoutOutput()
        if on_module:  # as in the seed's example
            down.manager = ckpt
        y = ckpt.checkpoint(function, False, x)
        d = down(y)
        if discard:
            ckpt.discard_output_and_register_recompute(d)
        return weakref.ref(x.untyped_storage()), weakref.ref(y.untyped_storage())

    gc.collect()
    gc.disable()
    try:
        x, y = step()
        assert y() is None
        # Where the function saves nothing, the object holds its argument until it is told to
        # discard; that is no growth.
        assert (x() is not None) == (on_module and not discard and function is plus_one)
    finally:
        gc.enable()
    assert alive_after(step) == Growth(nbytes=0, storages=0)


def test_a_chain_whose_backward_never_comes_leaves_nothing() -> None:
    norm, down = nn.LayerNorm(8), nn.Linear(8, 8)

    def step() -> None:
        chain = CheckpointChain()
        x = x_of(4, 8) * 2
        d = down(chain.checkpoint(F.gelu, chain.checkpoint(norm, x)))
        chain.discard_outputs_and_register_recompute(d)
        norm.chain = chain

    assert alive_after(step) == Growth(nbytes=0, storages=0)
    assert copy.deepcopy(norm.chain) is not norm.chain


def test_nothing_grows_over_steps_with_the_collector_off() -> None:
    model = nn.Sequential(Block(True), Block(True))

    def step() -> None:
        model(x_of(4, 8)).sum().backward()
        model.zero_grad(set_to_none=False)

    assert alive_after(step, steps=10) == Growth(nbytes=0, storages=0)


def test_after_backward_only_what_plain_would_keep_is_alive() -> None:
    inner = nn.Linear(64, 64)
    x = x_of(16, 64)
    ckpt = CheckpointWithoutOutput()
    device = torch.get_default_device()
    before = live_storage_count(device)
    d = ckpt.checkpoint(lambda x: F.gelu(inner(x)), False, x * 2).square()
    ckpt.discard_output_and_register_recompute(d)
    loss = d.sum()
    del d
    loss.backward()
    assert live_storage_count(device) - before == 4  # the loss, and three gradients


@pytest.mark.parametrize("shape", [(7, 33), (1, 4097)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_held_fall_by_exactly_the_outputs(
    shape: tuple[int, int], dtype: torch.dtype, taken: Taken
) -> None:
    up, down = nn.Linear(5, shape[1], dtype=dtype), nn.Linear(shape[1], 3, dtype=dtype)
    x = torch.ones(shape[0], 5, dtype=dtype)

    def plain() -> Tensor:
        output: Tensor = down(F.gelu(up(x)))
        return output

    def ours() -> Tensor:
        ckpt = CheckpointWithoutOutput()
        output: Tensor = down(ckpt.checkpoint(F.gelu, False, up(x)))
        ckpt.discard_output_and_register_recompute(output)
        return output

    saved = taken(shape[0] * shape[1] * dtype.itemsize)
    device = torch.get_default_device()
    assert held_bytes(plain, device=device) - held_bytes(ours, device=device) == saved - rng_bytes()


def rng_bytes() -> int:
    """Of the generator's state, which a replay keeps on the host."""
    return torch.get_rng_state().nbytes if torch.get_default_device().type == "cpu" else 0


def test_an_ordinary_checkpoint_holds_its_inputs_and_output_alone(taken: Taken) -> None:
    layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    x = x_of(32, 64)
    one, device = taken(32 * 64 * 4), torch.get_default_device()

    def ours() -> Tensor:
        output: Tensor = CheckpointWithoutOutput().checkpoint(layers, False, x)
        return output

    assert held_bytes(lambda: layers(x), device=device) == 8 * one
    assert held_bytes(ours, device=device) == one + rng_bytes()
    with measure_peak(device) as memory:
        output = ours()
        output.sum().backward()
        del output
    assert memory.held_bytes == sum(taken(4 * w.numel()) for w in [*layers.parameters(), x])


def test_an_interrupted_replay_leaves_no_hooks_behind() -> None:
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return torch.sin(x)

    x = x_of(4)
    ckpt = CheckpointWithoutOutput()
    d = ckpt.checkpoint(function, False, x).square()
    ckpt.discard_output_and_register_recompute(d)
    with pytest.raises(KeyboardInterrupt):
        d.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_gradcheck_and_batched_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        ckpt = CheckpointWithoutOutput()
        d = ckpt.checkpoint(lambda x: torch.tanh(x) * x, False, x).square()
        ckpt.discard_output_and_register_recompute(d)
        return d

    x = x_of(3).detach().double().requires_grad_()
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    plain = (torch.tanh(x) * x).square()
    for batched in (True, False):
        (ours,) = torch.autograd.grad(function(x), x, torch.eye(3), is_grads_batched=True)
        (expected,) = torch.autograd.grad(
            plain, x, torch.eye(3), is_grads_batched=True, retain_graph=batched
        )
        assert torch.equal(ours, expected)


def test_backward_in_another_thread(same_as_plain: Same) -> None:
    down = nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            d = down(ckpt.checkpoint(count(lambda x: F.dropout(down(x))), False, x))
        ckpt.discard_output_and_register_recompute(d)
        thread = threading.Thread(target=d.float().sum().backward)
        thread.start()
        thread.join(30)
        return [x.grad, *grads(down)]

    same_as_plain(program, runs=2)


def test_what_a_function_changes_outside_it_changes_twice() -> None:
    # The documented limit, which every checkpoint has.
    norm = nn.BatchNorm1d(4)
    ckpt = CheckpointWithoutOutput()
    d = ckpt.checkpoint(norm, False, x_of(3, 4)).square()
    ckpt.discard_output_and_register_recompute(d)
    d.sum().backward()
    assert norm.num_batches_tracked == 2
