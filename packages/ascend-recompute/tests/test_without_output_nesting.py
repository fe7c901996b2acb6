"""Inside and around other ways to save memory, other modes, compilers and transforms."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ascend_core.saved import region
from ascend_core.storage import is_released
from ascend_core.testing import held_bytes
from ascend_recompute.activation import rebuild_region
from ascend_recompute.without_output import CheckpointWithoutOutput

Same = Callable[..., None]


class Mover:
    """A keeper that claims everything and copies it elsewhere."""

    moves = True

    def open(self, frame: Any) -> Mover:
        return self

    def claim(self, tensor: Tensor, record: Any) -> Any:
        copy = tensor.detach().clone()
        return type("Copy", (), {"value": lambda self, layout: copy})()

    def close(self) -> None:
        pass


class Bystander(Mover):
    """A keeper that claims nothing, so that the dispatcher keeps what is saved."""

    moves = False

    def claim(self, tensor: Tensor, record: Any) -> Any:
        return None


CONTEXTS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "identity hooks": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "region that keeps": lambda: region(Bystander()),
    "region that moves": lambda: region(Mover()),
    "rebuild region": rebuild_region,
    "region in save_on_cpu": lambda: _both(save_on_cpu(), region(Bystander())),
    "save_on_cpu in region": lambda: _both(region(Bystander()), save_on_cpu()),
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "autocast": lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16),
}


def _both(*contexts: Any) -> Any:
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def x_of(*size: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size).requires_grad_()


def grads(*modules: nn.Module) -> list[Tensor | None]:
    weights = [weight for module in modules for weight in module.parameters()]
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


class Mlp(nn.Module):
    """up, an activation that is checkpointed by `make`, down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, make: Any, count: Any) -> Tensor:
        ckpt = make()
        b = self.up(x)
        c = ckpt.checkpoint(count(lambda b: F.dropout(F.gelu(b), 0.3)), False, b)
        d: Tensor = self.down(c)
        ckpt.discard_output_and_register_recompute(d)
        return d


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("where", ["whole", "function", "consumer"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_inside_and_around_other_contexts(same_as_plain: Same, name: str, where: str) -> None:
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)

    def around(part: str) -> Any:
        return CONTEXTS[name]() if part == where else contextlib.nullcontext()

    def function(b: Tensor) -> Tensor:
        with around("function"):
            return F.dropout(F.gelu(b) * b, 0.3)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        with around("whole"):
            ckpt = make()
            c = ckpt.checkpoint(count(function), False, up(x))
            with around("consumer"):
                d = down(c.to(down.weight.dtype))
            ckpt.discard_output_and_register_recompute(d)
        d.float().square().sum().backward()
        return [d, c, x.grad, *grads(up, down)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_inside_torchs_checkpoint(
    same_as_plain: Same, reentrant: bool, early_stop: bool, blocks: int
) -> None:
    mlps = [Mlp() for _ in range(blocks)]

    def program(make: Any, count: Any) -> list[Tensor | None]:
        def layers(x: Tensor) -> Tensor:
            for mlp in mlps:
                x = mlp(x, make, count)
            return x

        x = x_of(3, 4)
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            y = checkpoint(layers, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y, x.grad, *grads(*mlps)]

    # Plain runs the function twice already. In the reentrant form the discarded output is
    # recomputed once more, within the recomputation; the other form needs no more runs.
    same_as_plain(_counting(program, plain=2, ours=3 if reentrant else 2), runs=1)


def _counting(program: Any, *, plain: int, ours: int) -> Any:
    """Let each run of the program count as one call after checking how many there were."""

    def wrapped(make: Any, count: Any) -> list[Tensor | None]:
        calls = 0

        def counter(function: Any) -> Any:
            @functools.wraps(function)
            def counted(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                return function(*args)

            return counted

        values: list[Tensor | None] = program(make, counter)
        expected = ours if make is CheckpointWithoutOutput else plain
        assert calls % expected == 0 and calls > 0, (calls, expected)
        count(lambda: None)()
        return values

    return wrapped


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_checkpoint_inside_the_function(same_as_plain: Same, reentrant: bool) -> None:
    inner, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            lambda x: F.dropout(F.gelu(inner(x)), 0.3), x, use_reentrant=reentrant
        )
        return y * 2

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        d = down(ckpt.checkpoint(count(function), False, x))
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, x.grad, *grads(inner, down)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_checkpoint_as_the_consumer(same_as_plain: Same, reentrant: bool) -> None:
    down = nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        c = ckpt.checkpoint(count(F.gelu), False, x)
        d = checkpoint(lambda c: F.dropout(down(c.sin()), 0.3), c, use_reentrant=reentrant)
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, c, x.grad, *grads(down)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("context", ["region that keeps", "region that moves", "rebuild region"])
def test_regions_between_torchs_checkpoint_and_ours(
    same_as_plain: Same, context: str, reentrant: bool
) -> None:
    mlp = Mlp()

    def program(make: Any, count: Any) -> list[Tensor | None]:
        def layer(x: Tensor) -> Tensor:
            with CONTEXTS[context]():
                return mlp(x, make, count)

        x = x_of(3, 4)
        with CONTEXTS[context]():
            y = checkpoint(layer, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y, x.grad, *grads(mlp)]

    same_as_plain(_counting(program, plain=2, ours=3 if reentrant else 2), runs=1)


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("discard", [False, True])
def test_nested_in_one_another(same_as_plain: Same, discard: bool, regions: bool) -> None:
    mlp, down = Mlp(), nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        def layer(x: Tensor) -> Tensor:
            with region(Bystander()) if regions else contextlib.nullcontext():
                return torch.tanh(mlp(x, make, count))

        x = x_of(3, 4)
        ckpt = make()
        d = down(ckpt.checkpoint(layer, False, x))
        if discard:
            ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, x.grad, *grads(mlp, down)]

    same_as_plain(program, runs=2)  # the outer one runs the inner one again, which then is plain


def test_nested_by_hand_outside_of_a_backward(same_as_plain: Same) -> None:
    mlp = Mlp()

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        y = ckpt.checkpoint(lambda x: torch.tanh(mlp(x, make, count)), False, x)
        d = y.square()
        ckpt.discard_output()
        ckpt.recompute()
        d.sum().backward()
        return [y, x.grad, *grads(mlp)]

    same_as_plain(program, runs=2)


def test_a_non_reentrant_checkpoint_around_it_holds_no_more_than_alone() -> None:
    mlp = Mlp()
    x = x_of(64, 4)

    def outer(make: Any) -> int:
        return held_bytes(
            lambda: checkpoint(
                mlp, x, make, lambda f: f, use_reentrant=False, preserve_rng_state=False
            ),
            device=torch.get_default_device(),
        )

    class Off(CheckpointWithoutOutput):
        def checkpoint(self, function: Any, _: bool, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    assert outer(CheckpointWithoutOutput) == outer(Off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast(same_as_plain: Same, dtype: torch.dtype, backward_inside: bool) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(inner(F.gelu(inner(x)))), 0.2)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 8)
        with torch.autocast(torch.get_default_device().type, dtype):
            ckpt = make()
            d = down(ckpt.checkpoint(count(function), False, inner(x)))
            ckpt.discard_output_and_register_recompute(d)
            loss = d.float().square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return [d, x.grad, *grads(inner, down)]

    same_as_plain(program, runs=2)


def test_a_region_of_no_autocast_inside_the_function(same_as_plain: Same) -> None:
    inner, down = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(torch.get_default_device().type, enabled=False):
            return F.gelu(inner(x.float()))

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 8)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            ckpt = make()
            d = down(ckpt.checkpoint(count(function), False, x))
            ckpt.discard_output_and_register_recompute(d)
        d.float().square().sum().backward()
        return [d, x.grad, *grads(inner, down)]

    same_as_plain(program, runs=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["function", "consumer"])
def test_a_compiled_function_or_consumer(same_as_plain: Same, what: str, backend: str) -> None:
    torch._dynamo.reset()
    inner, down = nn.Linear(4, 4), nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(inner(x)) * x

    compiled = torch.compile(function if what == "function" else down, backend=backend)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        c = ckpt.checkpoint(count(compiled if what == "function" else function), False, x)
        d = (compiled if what == "consumer" else down)(c)
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        return [d, x.grad, *grads(inner, down)]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_a_compiled_function_it_is_right(backend: str) -> None:
    torch._dynamo.reset()
    down = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        ckpt = CheckpointWithoutOutput()
        d: Tensor = down(ckpt.checkpoint(torch.sin, False, x))
        ckpt.discard_output()
        if d.requires_grad:
            d.register_hook(ckpt.recompute)
        return d.square().sum()

    x, plain = x_of(3, 4), x_of(3, 4)
    torch.compile(step, backend=backend)(x).backward()
    found = grads(down)
    down(torch.sin(plain)).square().sum().backward()
    for left, right in zip([x.grad, *found], [plain.grad, *grads(down)], strict=True):
        assert left is not None and right is not None and torch.equal(left, right)


def test_torch_func_transforms_get_the_plain_call() -> None:
    def function(x: Tensor) -> Tensor:
        ckpt = CheckpointWithoutOutput()
        d = ckpt.checkpoint(torch.sin, False, x).square()
        ckpt.discard_output_and_register_recompute(d)
        return d.sum()

    def plain(x: Tensor) -> Tensor:
        return torch.sin(x).square().sum()

    x = torch.linspace(-1, 1, 6).view(2, 3)
    for transform in (
        torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(torch.func.grad(f)),
    ):  # fmt: skip
        assert torch.equal(transform(function)(x), transform(plain)(x))
    weight = torch.ones(3, requires_grad=True)
    torch.func.vmap(lambda x: function(x * weight))(x).sum().backward()
    left, weight.grad = weight.grad, None
    torch.func.vmap(lambda x: plain(x * weight))(x).sum().backward()
    assert left is not None and torch.equal(left, weight.grad)


@pytest.mark.host  # torch_npu has no zero tensor for it
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp
def test_forward_mode_gets_the_plain_call() -> None:
    def function(x: Tensor) -> Tensor:
        ckpt = CheckpointWithoutOutput()
        d = ckpt.checkpoint(torch.sin, False, x).square()
        ckpt.discard_output_and_register_recompute(d)
        return d.sum()

    def plain(x: Tensor) -> Tensor:
        return torch.sin(x).square().sum()

    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(torch.func.hessian(function)(x), torch.func.hessian(plain)(x))
    primal, tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    expected = torch.func.jvp(plain, (x,), (torch.ones_like(x),))
    assert torch.equal(primal, expected[0]) and torch.equal(tangent, expected[1])


def test_functional_call_inside_the_function(same_as_plain: Same) -> None:
    inner = nn.Linear(4, 4)

    def function(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.gelu(torch.func.functional_call(inner, weights, (x,)))

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        weights = {name: (w * 2) for name, w in inner.named_parameters()}
        ckpt = make()
        d = ckpt.checkpoint(
            count(lambda w, x: F.gelu(torch.func.functional_call(inner, w, (x,)))),
            False,
            weights,
            x,
        ).square()
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [d, x.grad, *grads(inner)]

    same_as_plain(program, runs=2)


def test_where_hooks_are_forbidden_the_function_is_just_called(same_as_plain: Same) -> None:
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(4)
        ckpt = make()
        with disable_saved_tensors_hooks("not here"):
            y = ckpt.checkpoint(count(torch.sin), False, x)
            d = y.square()
            ckpt.discard_output_and_register_recompute(d)
        assert not is_released(y)
        d.sum().backward()
        return [d, x.grad]

    same_as_plain(program, runs=1)


def test_inference_tensors_among_the_arguments(same_as_plain: Same) -> None:
    with torch.inference_mode():
        shift = torch.ones(4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(4)
        ckpt = make()
        d = ckpt.checkpoint(count(lambda x, s: torch.sin(x + s)), False, x, shift).square()
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [d, x.grad]

    same_as_plain(program, runs=2)


@pytest.mark.host  # torch_npu has no sparse tensors
def test_sparse_and_meta_tensors_among_the_arguments(same_as_plain: Same) -> None:
    matrix = torch.eye(3).to_sparse()

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(3, 4)
        ckpt = make()
        d = ckpt.checkpoint(
            count(lambda m, x, _: torch.sin(torch.sparse.mm(m, x))), False, matrix, x,
            torch.empty(2, device="meta"),
        ).square()  # fmt: skip
        ckpt.discard_output_and_register_recompute(d)
        d.sum().backward()
        return [d, x.grad]

    same_as_plain(program, runs=2)


def test_meta_tensors_train() -> None:
    down = nn.Linear(4, 4, device="meta")
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    d = down(ckpt.checkpoint(F.gelu, False, x))
    ckpt.discard_output_and_register_recompute(d)
    d.sum().backward()
    assert x.grad is not None and down.weight.grad is not None


def test_complex_and_double_values(same_as_plain: Same) -> None:
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = torch.complex(x_of(4).double(), x_of(4).double()).detach().requires_grad_()
        ckpt = make()
        y = ckpt.checkpoint(count(lambda x: torch.sin(x) * x.conj()), False, x)
        d = y * y.conj()
        ckpt.discard_output_and_register_recompute(d)
        d.real.sum().backward()
        return [y, x.grad]

    same_as_plain(program, runs=2)


def test_many_threads_train_models_of_their_own() -> None:
    device = torch.get_default_device()  # each thread has its own

    def train(results: dict[int, list[Tensor]], number: int, make: Any) -> None:
        with device:
            results[number] = trained(number, make)

    def trained(number: int, make: Any) -> list[Tensor]:
        inner = torch.full((16, 16), 0.1 + number).requires_grad_()
        for _ in range(5):
            x = x_of(8, 16)
            ckpt = make()
            y = ckpt.checkpoint(lambda x, w=inner: torch.tanh(x @ w) * x, False, x)
            d = y @ inner
            ckpt.discard_output_and_register_recompute(d)
            d.square().sum().backward()
        assert inner.grad is not None and x.grad is not None
        return [inner.grad, x.grad]

    class Off(CheckpointWithoutOutput):
        def checkpoint(self, function: Any, _: bool, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    plain: dict[int, list[Tensor]] = {}
    ours: dict[int, list[Tensor]] = {}
    for number in range(4):
        train(plain, number, Off)
    threads = [
        threading.Thread(target=train, args=(ours, n, CheckpointWithoutOutput)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(4):
        for left, right in zip(plain[number], ours[number], strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("operator", [lambda c, g: F.silu(c), lambda c, g: c * g])
def test_a_value_that_is_rebuilt_from_a_discarded_output(
    same_as_plain: Same, operator: Callable[[Tensor, Tensor], Tensor]
) -> None:
    down = nn.Linear(64, 64)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x, g = x_of(64, 64), x_of(64, 64)
        with rebuild_region() as tally:
            ckpt = make()
            c = ckpt.checkpoint(count(torch.tanh), False, x * 2)
            d = down(operator(c, g))
            ckpt.discard_output_and_register_recompute(d)
        assert tally.by_label() == {"region": 64 * 64 * 4}
        d.square().sum().backward()
        return [x.grad, g.grad, *grads(down)]

    same_as_plain(program, runs=2)
