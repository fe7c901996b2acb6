"""The seed's example, and every case of activation recompute that the case list names (AR-..)."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_core.errors import ConfigError, StorageError
from ascend_core.memory import measure_peak
from ascend_core.storage import is_released
from ascend_core.testing import assert_bitwise_equal, count_ops, record_run
from ascend_recompute.without_output import CheckpointChain, CheckpointWithoutOutput

Same = Callable[..., None]


class CustomModule(nn.Module):
    """The seed's example: the object is made in forward and kept on the module."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.down = nn.Linear(32, 8)
        self.recompute = recompute

    def custom_function(self, hidden: Tensor, shift: float) -> Tensor:
        return F.dropout(F.gelu(hidden * self.scale + shift), 0.1, self.training)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.up(input)
        if not self.recompute:
            output: Tensor = self.down(self.custom_function(hidden, 0.5))
            return output
        self.activation_checkpoint_manager = CheckpointWithoutOutput()
        function_output = self.activation_checkpoint_manager.checkpoint(
            self.custom_function, False, hidden, 0.5
        )
        module_output: Tensor = self.down(function_output)
        self.activation_checkpoint_manager.discard_output()
        if module_output.requires_grad:
            module_output.register_hook(self.activation_checkpoint_manager.recompute)
        return module_output


def stack(recompute: bool) -> nn.Module:
    return nn.Sequential(*(CustomModule(recompute) for _ in range(3)))


def batch(number: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(number)  # the same numbers on every device
    numbers = torch.randn(4, 8, generator=generator, device="cpu")
    return numbers.to(torch.get_default_device())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_seeds_example_trains_bit_for_bit_as_without(
    autocast: torch.dtype | None, accumulate: int
) -> None:
    options: dict[str, Any] = {"autocast": autocast, "accumulate": accumulate}
    options["device"] = torch.get_default_device()
    plain = record_run(lambda: stack(False), batch, **options)
    ours = record_run(lambda: stack(True), batch, **options)
    assert_bitwise_equal(plain, ours)
    assert plain.losses[0] != plain.losses[-1]


def test_the_seeds_example_frees_the_output_and_runs_the_activation_twice() -> None:
    torch.manual_seed(0)
    module = CustomModule(recompute=True)
    seen: list[Tensor] = []
    module.down.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with count_ops() as ops:
        module(batch(0)).sum().backward()
    assert (ops.forward["aten.gelu"], ops.backward["aten.gelu"]) == (1, 1)
    assert ops.backward["aten.addmm"] == 0
    assert seen[0].untyped_storage().nbytes() == 4 * 32 * 4
    module(batch(0))
    assert is_released(seen[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_seeds_example_frees_nothing(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = CustomModule(recompute=True).eval()
    seen: list[Tensor] = []
    module.down.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with mode():
        output = module(batch(0))
        assert not output.requires_grad
        assert torch.equal(module.down(seen[0]), output)
    module.recompute = False
    assert torch.equal(module(batch(0)), output)


def test_eval_alone_does_not_switch_it_off() -> None:
    torch.manual_seed(0)
    module = CustomModule(recompute=True).eval()
    module(batch(0)).sum().backward()
    ours = [weight.grad for weight in module.parameters()]
    module.zero_grad()
    module.recompute = False
    module(batch(0)).sum().backward()
    for left, weight in zip(ours, module.parameters(), strict=True):
        assert left is not None and weight.grad is not None and torch.equal(left, weight.grad)


def test_distributing_the_saved_activations_is_refused() -> None:
    with pytest.raises(ConfigError, match="distribute_saved_activations=True is not supported"):
        CheckpointWithoutOutput().checkpoint(F.gelu, True, torch.ones(3))


def test_one_object_serves_one_call() -> None:
    x = torch.ones(3, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(torch.sin, False, x)
    with pytest.raises(ConfigError, match="already holds a call"):
        ckpt.checkpoint(torch.sin, False, x)
    z = y * 2
    ckpt.discard_output()
    with pytest.raises(ConfigError, match="already holds a call"):
        ckpt.checkpoint(torch.sin, False, x)
    z.register_hook(ckpt.recompute)
    z.sum().backward()
    del y, z
    assert ckpt.checkpoint(torch.sin, False, x).requires_grad  # free again after its backward


def test_ar_01_every_view_sees_the_restored_data_and_no_version_moves(
    same_as_plain: Same,
) -> None:
    a, b = nn.Linear(6, 5), nn.Linear(3, 2)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 48).view(2, 4, 6).requires_grad_()
        ckpt = make()
        y = ckpt.checkpoint(count(F.gelu), False, x)
        version, view = y._version, y[..., :3]
        d = a(y.view(-1, 6)).sum() + b(view).sum()
        ckpt.discard_output_and_register_recompute(d)
        d.backward()
        assert y._version == view._version == version
        return [y, view, x.grad, *grads(a), *grads(b)]

    same_as_plain(program, runs=2)


def test_ar_02_each_replayed_output_is_dead_as_soon_as_its_own_is_restored() -> None:
    alive: list[weakref.ref[Any]] = []
    seen: list[tuple[bool, ...]] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(x.new_ones(1).expand(n).sin() * x.sum() for n in (10, 200, 3000))
        alive[:] = [weakref.ref(output.untyped_storage()) for output in outputs]
        return outputs

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "copy_":
                seen.append(tuple(reference() is not None for reference in alive))
            return result

    x = torch.ones(4, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    outputs = ckpt.checkpoint(function, False, x)
    loss = torch.stack([output.square().sum() for output in outputs]).sum()
    ckpt.discard_output()
    with Watching():
        ckpt.recompute()
    assert seen == [(True, True, True), (False, True, True), (False, False, True)]
    assert [reference() for reference in alive] == [None, None, None]
    loss.backward()


def test_ar_02_the_peak_of_a_replay_is_its_outputs_and_one_restored_output() -> None:
    size = 1 << 20
    x = torch.ones(size, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    one, two = ckpt.checkpoint(lambda x: (torch.sin(x), torch.cos(x)), False, x)
    consumed = (one * one).sum() + (two * two).sum()
    ckpt.discard_output()
    with measure_peak(torch.get_default_device()) as memory:
        ckpt.recompute()
    noise = 64 * 1024
    assert 3 * 4 * size <= memory.peak_bytes < 3 * 4 * size + noise
    assert 2 * 4 * size <= memory.held_bytes < 2 * 4 * size + noise
    consumed.backward()


def test_ar_02_an_output_that_the_function_saves_exists_once_after_its_restoration() -> None:
    size = 1 << 20
    x = torch.ones(size, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(torch.tanh, False, x)
    d = y.square()
    ckpt.discard_output()
    with measure_peak(torch.get_default_device()) as memory:
        ckpt.recompute()
    assert 4 * size <= memory.held_bytes < 4 * size + 64 * 1024
    d.sum().backward()


def test_ar_03_arguments_come_back_by_position_and_keyword(same_as_plain: Same) -> None:
    mask = torch.tensor([True, False, True])

    def function(
        x: Tensor, nothing: None, power: int, keep: Tensor, *, flag: bool, extra: dict[str, Any]
    ) -> Tensor:
        assert nothing is None and flag is True and extra["name"] == "y"
        return (x**power).masked_fill(~keep, 0.5) * extra["by"][0].sigmoid()

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        by = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        ckpt = make()
        y = ckpt.checkpoint(
            count(function), False, x, None, 3, mask, flag=True, extra={"by": [by], "name": "y"}
        )
        d = y * y
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [d, x.grad, by.grad]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("hooks", ["in order", "in reverse", "only the last"])
def test_ar_03_a_chain_restores_what_a_later_link_reads(same_as_plain: Same, hooks: str) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
        first, second = make(), make()
        y1 = first.checkpoint(count(F.gelu), False, x)
        y2 = second.checkpoint(count(lambda y: torch.tanh(inner(y))), False, y1)
        d = down(y2)
        order = {"in order": [first, second], "in reverse": [second, first]}
        for ckpt in (first, second):
            ckpt.discard_output()
        for ckpt in order.get(hooks, [second]):
            d.register_hook(ckpt.recompute)
        d.square().sum().backward()
        return [y1, y2, d, x.grad, *grads(inner), *grads(down)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("off", [None, False, 0])
def test_ar_04_no_context_is_entered_unless_one_is_given(off: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    for ckpt in (CheckpointWithoutOutput(), CheckpointWithoutOutput(off)):
        d = ckpt.checkpoint(torch.sin, False, x) * 2
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 4 * torch.cos(torch.ones(3)))


def test_ar_04_what_is_no_context_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_fn is a str"):
        CheckpointWithoutOutput("fp8").checkpoint(  # type: ignore[arg-type]
            torch.sin, False, torch.ones(3, requires_grad=True)
        )


@pytest.mark.parametrize("raises", [False, True])
def test_ar_05_a_chain_lets_go_of_each_link_as_it_is_restored(raises: bool) -> None:
    layers = 8
    scale = torch.ones(3, requires_grad=True)
    inputs: list[weakref.ref[Any]] = []
    alive: list[int] = []
    running = False

    def function(x: Tensor) -> Tensor:
        if running:
            alive.append(sum(reference() is not None for reference in inputs))
            if raises and len(alive) == 4:
                raise ZeroDivisionError
        return x.sin()

    chain = CheckpointChain()
    total = torch.zeros(())
    for _ in range(layers):
        x = scale * 2
        inputs.append(weakref.ref(x.untyped_storage()))
        y = chain.checkpoint(function, x)
        total = total + (y * y).sum()
        del x, y
    chain.discard_outputs_and_register_recompute(total)
    assert len(chain) == layers
    assert all(reference() is not None for reference in inputs)
    running = True
    with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
        total.backward()
    assert len(alive) == (4 if raises else layers)
    assert len(chain) == 0
    del total
    # Autograd's thread of a device lets go of a task, and its exception, when it takes the next.
    (torch.ones((), requires_grad=True) * 2).backward()
    assert [reference() for reference in inputs] == [None] * layers


def test_ar_05_a_chain_equals_the_plain_run() -> None:
    def gradients(chained: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        norm, up, down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        x = batch(0).requires_grad_()
        if chained:
            chain = CheckpointChain()
            a = chain.checkpoint(norm, x)
            b = chain.checkpoint(F.gelu, up(a))
            d = down(b)
            chain.discard_outputs_and_register_recompute(d)
            assert is_released(a) and is_released(b)
        else:
            d = down(F.gelu(up(norm(x))))
        d.square().sum().backward()
        return [x.grad, *grads(norm), *grads(up), *grads(down)]

    for left, right in zip(gradients(False), gradients(True), strict=True):
        assert left is not None and right is not None and torch.equal(left, right)


def test_ar_06_dropout_gets_its_mask_again_and_nobody_else_notices(same_as_plain: Same) -> None:
    down = nn.Linear(64, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.randn(16, 64, requires_grad=True)
        ckpt = make()
        y = ckpt.checkpoint(count(lambda x: F.dropout(F.gelu(x), 0.5)), False, x)
        d = F.dropout(down(y), 0.5)
        ckpt.discard_output_and_register_recompute(d)
        torch.rand(3)
        d.square().sum().backward()
        return [d, x.grad, *grads(down), torch.rand(5)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("cache", [True, False])
def test_ar_08_a_replay_runs_under_the_autocast_of_its_forward(
    same_as_plain: Same, cache: bool
) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)
    dtypes: list[tuple[torch.dtype, bool]] = []

    def function(x: Tensor) -> Tensor:
        y: Tensor = F.gelu(inner(x))
        dtypes.append((y.dtype, torch.is_autocast_cache_enabled()))
        return y

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0).requires_grad_()
        ckpt = make()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, cache_enabled=cache):
            d = down(ckpt.checkpoint(count(function), False, x))
            ckpt.discard_output_and_register_recompute(d)
        d.float().square().sum().backward()
        assert not torch.is_autocast_enabled(torch.get_default_device().type)
        return [d, x.grad, *grads(inner), *grads(down)]

    same_as_plain(program, runs=2)
    assert dtypes == [(torch.bfloat16, cache)] * 3


@pytest.mark.parametrize("discard", [True, False])
def test_ar_10_the_output_requires_grad_when_only_parameters_do(
    same_as_plain: Same, discard: bool
) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0)
        ckpt = make()
        y = ckpt.checkpoint(count(inner), False, x)
        assert y.requires_grad and not x.requires_grad
        d = down(y)
        if discard:
            ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, x.grad, *grads(inner), *grads(down)]

    same_as_plain(program, runs=2)


def test_ar_11_blocks_behind_a_frozen_embedding_get_their_gradients() -> None:
    def frozen(recompute: bool) -> nn.Module:
        model = nn.Sequential(nn.Embedding(10, 8), stack(recompute))
        model[0].requires_grad_(False)
        return model

    def tokens(number: int) -> Tensor:
        return batch(number).abs().mul(3).long().clamp(max=9)[:, 0]

    options: dict[str, Any] = {"steps": 2, "device": torch.get_default_device()}
    plain = record_run(lambda: frozen(False), tokens, **options)
    ours = record_run(lambda: frozen(True), tokens, **options)
    assert len(ours.steps[0].gradients) == 3 * 5
    assert_bitwise_equal(plain, ours)


def test_ar_12_outputs_without_gradient_are_left_alone(same_as_plain: Same) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor, str]:
        return torch.sin(x), x > 0, x.argsort(), "text"

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        ckpt = make()
        y, mask, index, text = ckpt.checkpoint(count(function), False, x)
        assert text == "text"
        d = y * y
        ckpt.discard_output_and_register_recompute(d)
        kept = [mask.clone(), index.clone()]
        d[mask].sum().backward()
        return [*kept, x.grad]

    same_as_plain(program, runs=2)


def test_ar_13_a_frozen_function_is_not_recomputed_and_nothing_is_discarded(
    same_as_plain: Same,
) -> None:
    frozen, other = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0)
        ckpt = make()
        y = ckpt.checkpoint(count(lambda x: F.gelu(frozen(x))), False, x)
        assert not y.requires_grad
        d = other(x) * y
        ckpt.discard_output_and_register_recompute(d)
        value = y.clone()
        d.sum().backward()
        return [value, d, *grads(other)]

    same_as_plain(program, runs=1)


def _in_place_on_a_view(x: Tensor, p: Tensor) -> Tensor:
    return (x + p)[:].relu_()


def _norm_and_in_place_relu(x: Tensor, p: Tensor) -> Tensor:
    return F.relu(F.layer_norm(x * p, (4,)), inplace=True)


def _in_place_through_a_view(x: Tensor, p: Tensor) -> Tensor:
    h = x * p
    h[:, :2].mul_(3).tanh_()
    return h


@pytest.mark.parametrize(
    "function", [_in_place_on_a_view, _norm_and_in_place_relu, _in_place_through_a_view]
)
def test_ar_14_the_gradient_passes_in_place_operations(
    same_as_plain: Same, function: Callable[..., Tensor]
) -> None:
    down = nn.Linear(4, 3)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        p = torch.full((4,), 0.3, requires_grad=True)
        ckpt = make()
        d = down(ckpt.checkpoint(count(function), False, x, p))
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, x.grad, p.grad, *grads(down)]

    same_as_plain(program, runs=2)


def test_ar_18_retain_graph_twice(same_as_plain: Same) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0).requires_grad_()
        ckpt = make()
        d = down(ckpt.checkpoint(count(lambda x: F.gelu(inner(x))), False, x))
        ckpt.discard_output_and_register_recompute(d)
        loss = d.square().sum()
        loss.backward(retain_graph=True)
        once = [g.clone() for g in grads(inner) if g is not None]
        loss.backward()
        return [x.grad, *once, *grads(inner), *grads(down)]

    same_as_plain(program, runs=3)  # forward, and one replay for each backward


def test_ar_18_double_backward(same_as_plain: Same) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0).requires_grad_()
        ckpt = make()
        d = down(ckpt.checkpoint(count(lambda x: torch.sigmoid(inner(x) * x)), False, x))
        ckpt.discard_output_and_register_recompute(d)
        (first,) = torch.autograd.grad(d.square().sum(), x, create_graph=True)
        penalty = (first.square().sum() - 1) ** 2
        penalty.backward()
        return [first, penalty, x.grad, *grads(inner), *grads(down)]

    same_as_plain(program, runs=3)


def test_ar_18_a_gradient_taken_in_forward(same_as_plain: Same) -> None:
    inner = nn.Linear(8, 8)

    def force(x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = torch.tanh(inner(x)).square().sum()
            (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return gradient

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = batch(0).requires_grad_()
        ckpt = make()
        d = ckpt.checkpoint(count(force), False, x).square()
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [d, x.grad, *grads(inner)]

    same_as_plain(program, runs=3)  # one more in forward, for the gradient that it takes


@pytest.mark.parametrize("attempt", range(8))
def test_ar_19_two_threads_at_two_consumers_recompute_once(attempt: int) -> None:
    runs = 0

    def function(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return torch.sin(x)

    x = torch.linspace(0, 1, 4096).requires_grad_()
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(function, False, x)
    consumers = {"first": y.square(), "second": y.pow(3)}
    ckpt.discard_output()
    for consumer in consumers.values():
        consumer.register_hook(ckpt.recompute)
    results: dict[str, Tensor] = {}
    start = threading.Barrier(2)

    def backward(name: str) -> None:
        start.wait(30)
        (results[name],) = torch.autograd.grad(consumers[name].sum(), y, retain_graph=True)

    threads = [threading.Thread(target=backward, args=(name,)) for name in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert runs == 2  # forward and one replay, however the threads met
    assert torch.equal(results["first"], 2 * torch.sin(x.detach()))
    assert torch.equal(results["second"], 3 * torch.sin(x.detach()) ** 2)
    y.backward(results["first"] + results["second"])
    assert runs == 2
    assert torch.equal(x.grad, (results["first"] + results["second"]) * torch.cos(x.detach()))


@pytest.mark.parametrize("keep_object", [True, False])
def test_ar_21_inputs_die_with_the_backward_of_their_region(keep_object: bool) -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    source = torch.ones(4, 8, requires_grad=True)
    inputs: list[weakref.ref[Any]] = []
    objects: list[CheckpointWithoutOutput] = []
    alive: list[int] = []

    def chunk(number: int) -> Callable[[Tensor], Tensor]:
        return nn.Sequential(*layers[2 * number : 2 * number + 2])

    x = source * 1
    for number in range(2):
        inputs.append(weakref.ref(x.untyped_storage()))
        ckpt = CheckpointWithoutOutput()
        x = ckpt.checkpoint(chunk(number), False, x)
        x.register_hook(lambda _: alive.append(sum(ref() is not None for ref in inputs)))
        if keep_object:
            objects.append(ckpt)
    source.register_hook(lambda _: alive.append(sum(ref() is not None for ref in inputs)))
    loss = x.sum()
    del x
    loss.backward()
    # Before the second region's backward both inputs, before the first's too (its own backward
    # has just let go of the second's input), and none when the gradient arrives.
    assert alive[0] == 2 and alive[-1] == 0
    assert [reference() for reference in inputs] == [None, None]


@pytest.mark.parametrize("whose", ["chunk", "input"])
def test_ar_23_what_shares_its_storage_is_not_discarded(same_as_plain: Same, whose: str) -> None:
    def halves(x: Tensor) -> tuple[Tensor, ...]:
        return (x.sin() if whose == "chunk" else x).chunk(2, -1)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        ckpt = make()
        a, b = ckpt.checkpoint(count(halves), False, x)
        d = a * b
        ckpt.discard_output_and_register_recompute(d)
        readable = [a.clone(), b.clone()]
        d.sum().backward()
        return [*readable, d, x.grad]

    same_as_plain(program, runs=2 if whose == "chunk" else 1)


def test_ar_24_a_replay_runs_under_the_default_dtype_and_device_of_its_forward(
    same_as_plain: Same,
) -> None:
    seen: list[tuple[torch.dtype, str]] = []

    def function(x: Tensor) -> Tensor:
        made = torch.linspace(0, 1, 4)
        seen.append((made.dtype, torch.empty(1).device.type))
        return torch.sin(x * made.sum().item())

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        ckpt = make()
        torch.set_default_dtype(torch.float64)
        try:
            d = ckpt.checkpoint(count(function), False, x).square()
        finally:
            torch.set_default_dtype(torch.float32)
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        assert torch.get_default_dtype() is torch.float32
        return [d, x.grad]

    same_as_plain(program, runs=2)
    assert seen == [(torch.float64, torch.get_default_device().type)] * 3


def test_ar_24_the_default_device_of_forward_only() -> None:
    devices: list[str] = []

    def function(x: Tensor) -> Tensor:
        devices.append(torch.empty(2).device.type)
        return torch.sin(x)

    x = torch.ones(4, requires_grad=True)
    place = torch.get_default_device()
    ckpt = CheckpointWithoutOutput()
    with torch.device("meta"):
        d = ckpt.checkpoint(function, False, x).square()
    ckpt.discard_output_and_register_recompute(d)
    d.sum().backward()
    assert devices == ["meta", "meta"]
    assert torch.empty(1).device == place


@pytest.mark.parametrize("size", [2, 3])
def test_ar_26_a_chunk_equals_its_layers_one_after_the_other(
    same_as_plain: Same, size: int
) -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(6)]

    def program(make: Any, count: Any) -> list[Tensor | None]:
        def run(first: int) -> Callable[[Tensor], Tensor]:
            def chunk(x: Tensor) -> Tensor:
                for layer in layers[first : first + size]:
                    x = F.dropout(torch.tanh(layer(x)), 0.2)
                return x

            return count(chunk)

        x = source = batch(0).requires_grad_()
        for first in range(0, 6, size):
            x = make().checkpoint(run(first), False, x)
        x.square().sum().backward()
        return [x, source.grad, *(g for layer in layers for g in grads(layer))]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_ar_27_the_replay_does_not_depend_on_whether_the_input_needs_grad(
    needs_grad: bool,
) -> None:
    order: list[str] = []
    up, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        order.append("run")
        return torch.tanh(up(x))

    up.weight.register_hook(lambda _: order.append("up"))
    down.weight.register_hook(lambda _: order.append("down"))
    x = batch(0).requires_grad_(needs_grad)
    ckpt = CheckpointWithoutOutput()
    d = down(ckpt.checkpoint(function, False, x))
    ckpt.discard_output_and_register_recompute(d)
    order.append("backward")
    d.sum().backward()
    assert order == ["run", "backward", "run", "down", "up"]


def test_ar_28_a_users_context_is_entered_when_the_function_runs_again() -> None:
    active: list[str] = []
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def precision() -> Iterator[None]:
        active.append("fp8")
        try:
            yield
        finally:
            active.pop()

    def function(x: Tensor) -> Tensor:
        seen.append([*active])
        return torch.sin(x) * (2 if active else 1)

    x = torch.ones(3, requires_grad=True)
    ckpt = CheckpointWithoutOutput(precision)
    with precision():
        y = ckpt.checkpoint(function, False, x)
        d = y.square()
    value = y.detach().clone()
    ckpt.discard_output_and_register_recompute(d)
    d.sum().backward()
    assert seen == [["fp8"], ["fp8"]] and active == []
    assert torch.equal(y, value)


def test_reading_a_discarded_output_says_so() -> None:
    x = torch.ones(3, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(torch.sin, False, x)
    d = y * 2
    ckpt.discard_output_and_register_recompute(d)
    with pytest.raises(StorageError, match="reads a tensor whose storage was released"):
        y + 1
    d.sum().backward()
    assert torch.equal(y, torch.sin(torch.ones(3)))


def grads(module: nn.Module) -> list[Tensor | None]:
    """Take the gradients away, so that the next run begins without."""
    found = [weight.grad for weight in module.parameters()]
    for weight in module.parameters():
        weight.grad = None
    return found
