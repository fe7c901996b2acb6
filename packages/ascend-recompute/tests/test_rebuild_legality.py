"""Where rebuilding a value would be wrong, refused by nobody, or dearer than keeping it.

Each program runs plain and inside a region; the values that it returns must be the same bits, and
what it keeps alive must hold no more bytes. `test_rebuild_fuzz.py` looks for more such programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ascend_core.memory import measure_peak
from ascend_core.testing import bitwise_equal, held_bytes
from ascend_recompute import policy
from ascend_recompute.activation import rebuild_region
from ascend_recompute.policy import Policy

EVERYTHING = dataclasses.replace(policy.DEFAULT.extended(*policy.NORMS), min_bytes=0)
WIDTH = 4096  # of the tensors whose bytes are counted

Region = Callable[[], contextlib.AbstractContextManager[Any]]
Program = Callable[[Region], Sequence[Tensor | None]]
MODIFIED = "modified by an inplace operation"


def leaf(*shape: int, device: str | None = None) -> Tensor:
    return torch.randn(*shape, requires_grad=True, device=device)


def results(program: Program, region: Region) -> list[Tensor | None]:
    torch.manual_seed(0)
    values = [None if value is None else value.detach().clone() for value in program(region)]
    return [*values, torch.rand(1)]


def assert_same(program: Program, allowed: Policy = EVERYTHING) -> None:
    plain = results(program, contextlib.nullcontext)
    ours = results(program, lambda: rebuild_region(allowed))
    assert len(plain) == len(ours)
    for number, (left, right) in enumerate(zip(plain, ours, strict=True)):
        assert (left is None) == (right is None), number
        assert left is None or right is None or bitwise_equal(left, right), f"value {number}"


def assert_refused(program: Program) -> None:
    """Assert that plain autograd refuses the program, and that it is refused inside a region."""
    for region in (contextlib.nullcontext, lambda: rebuild_region(EVERYTHING)):
        with pytest.raises(RuntimeError, match=MODIFIED):
            program(region)


def assert_holds_no_more(program: Callable[[], object]) -> None:
    held = []
    for region in (contextlib.nullcontext(), rebuild_region(EVERYTHING)):
        torch.manual_seed(0)
        with region:
            held.append(held_bytes(program, device=torch.get_default_device()))
    plain, ours = held
    assert ours <= plain


def gated() -> tuple[nn.Linear, nn.Linear, nn.Linear, Tensor]:
    return nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16), leaf(8, 16)


# Writes ------------------------------------------------------------------------------------------


def with_write(write: Callable[[Tensor], object], when: str) -> Program:
    """`fc(h) + fc2(h)` for `h = gelu(x)`, with a write to `h` around one of the saves."""

    def program(region: Region) -> list[Tensor | None]:
        x, fc, fc2 = leaf(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        with region():
            h = F.gelu(x)
            if when == "before":
                write(h)
            y = fc(h)
            if when == "between":
                write(h)
            y = y + fc2(h)
        if when == "after":
            write(h)
        y.square().sum().backward()
        return [y, x.grad, fc.weight.grad, fc2.weight.grad]

    return program


def without_grad(h: Tensor) -> None:
    with torch.no_grad():
        h.mul_(2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda h: h.mul_(2),
    "through a view": lambda h: h[:, :3].mul_(2),
    "through detach": lambda h: h.detach().mul_(2),
    "without grad": without_grad,
    "relu in place": lambda h: F.relu(h, inplace=True),
    "dropout in place": lambda h: F.dropout(h, 0.5, inplace=True),
    "copy_": lambda h: h.detach().copy_(torch.ones(8, 16)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_before_the_save_is_in_the_weight_gradient(write: Callable[..., object]) -> None:
    assert_same(with_write(write, "before"))


@pytest.mark.parametrize("when", ["between", "after"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_after_a_save_is_refused(write: Callable[..., object], when: str) -> None:
    assert_refused(with_write(write, when))


def test_a_write_under_no_grad_before_autocast_copies_the_output() -> None:
    # The graph does not show it: the copy's node still leads to the node of gelu.
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16), region():
            h = F.gelu(x)
            with torch.no_grad():
                h.mul_(2)
            y = fc(h)
        y.float().square().sum().backward()
        return [y, x.grad, fc.weight.grad]

    assert_same(program)


def test_a_write_to_what_a_dead_branch_saved_is_allowed() -> None:
    # exp saves its result and not x; the square of x is no part of the loss.
    def program(region: Region) -> list[Tensor | None]:
        fc, x0 = nn.Linear(16, 16), leaf(8, 16)
        with region():
            x = x0 * 1.0
            metric = x * x
            y = fc(torch.exp(x))
        x.detach().zero_()
        y.sum().backward()
        del metric
        return [x0.grad, fc.weight.grad]

    assert_same(program)


def test_an_update_of_a_weight_whose_cast_was_saved_is_allowed() -> None:
    def program(region: Region) -> list[Tensor | None]:
        w, x = nn.Parameter(torch.randn(16, 16)), leaf(8, 16)
        with region():
            y = F.linear(x.bfloat16(), w.to(torch.bfloat16))
        with torch.no_grad():
            w.add_(1)
        y.float().sum().backward()
        return [x.grad, w.grad]

    assert_same(program)


def test_an_update_of_a_bias_that_nobody_saved_is_allowed() -> None:
    def program(region: Region) -> list[Tensor | None]:
        b, x0, fc = nn.Parameter(torch.zeros(16)), leaf(8, 16), nn.Linear(16, 16)
        with region():
            x = x0 * 1.0
            square = x * x
            y = fc(x + b) + square
        with torch.no_grad():
            b.add_(1)
        y.sum().backward()
        return [x0.grad, b.grad, fc.weight.grad]

    assert_same(program)


def test_an_update_of_a_weight_that_was_saved_is_refused() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, scale, fc = leaf(8, 16), nn.Parameter(torch.ones(16)), nn.Linear(16, 16)
        with region():
            y = fc(F.gelu(x) * scale)
        with torch.no_grad():
            scale.add_(1)
        y.sum().backward()
        return [fc.weight.grad]

    assert_refused(program)


class Cloning:
    """A pair of hooks that keeps copies: what happens to the saved tensors later is no matter."""

    def __enter__(self) -> None:
        self._hooks = saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda kept: kept)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)  # type: ignore[arg-type]


def test_a_write_after_a_pair_of_hooks_below_took_copies_is_allowed() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, _, _, x = gated()
        down = nn.Linear(32, 16)
        with Cloning(), region():
            g = gate(x)
            h = F.silu(g)
            y = down(h)
        g.detach().zero_()
        h.detach().zero_()
        y.square().sum().backward()
        return [y, x.grad, gate.weight.grad, down.weight.grad]

    assert_same(program)


@pytest.mark.parametrize("source", [False, True], ids=["the output", "its source"])
def test_a_write_through_data_before_the_save(*, source: bool) -> None:
    # It moves no version counter: whoever reads `data` inside a region may write there.
    def program(region: Region) -> list[Tensor | None]:
        x0, fc = leaf(8, 16), nn.Linear(16, 16)
        with region():
            x = x0 * 1.0
            h = F.gelu(x)
            (x if source else h).data.clamp_(-0.1, 0.1)
            y = fc(h)
        y.square().sum().backward()
        return [y, x0.grad, fc.weight.grad]

    assert_same(program)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_data_that_is_bound_to_another_tensor(*, autocast: bool) -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with (
            torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast),
            region(),
        ):
            h = F.gelu(x)
            h.data = torch.ones(8, 16)
            y = fc(h)
        y.float().square().sum().backward()
        return [y, x.grad, fc.weight.grad]

    assert_same(program)


def test_a_list_argument_that_is_changed_later() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc, shape = leaf(8, 16), nn.Linear(16, 16), [16]
        with region():
            y = fc(F.layer_norm(x, shape))
        shape[0] = 8
        y.square().sum().backward()
        return [x.grad, fc.weight.grad]

    assert_same(program)


# Edges of the graph ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [lambda d, w, c: d * w, lambda d, w, c: d.view(-1) * w.view(-1), lambda d, w, c: d * c * w],
    ids=["itself", "through a view", "beside a constant"],
)
def test_a_new_leaf_over_a_recorded_output_has_no_edge_to_it(use: Callable[..., Tensor]) -> None:
    # Nothing but the graph of h, which d is cut off from, needs x.
    def program(region: Region) -> list[Tensor | None]:
        x0, w, c = leaf(8, 16), leaf(8, 16), torch.randn(8, 16)
        with region():
            x = x0 * 1.0
            h = F.gelu(x)
            d = h.detach().requires_grad_()
            y = use(d, w, c)
        x.detach().zero_()
        y.sum().backward()
        return [d.grad, w.grad]

    assert_same(program)


def test_a_parameter_made_of_a_recorded_output_is_a_parameter() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x0, fc = leaf(16, 16), nn.Linear(16, 16)
        with region():
            x = x0 * 1.0
            p = nn.Parameter(F.gelu(x).detach())
            y = fc(p.t().contiguous()) * p.view(16, 16)
        x.detach().zero_()
        y.sum().backward()
        return [p.grad, fc.weight.grad]

    assert_same(program)


def test_a_detached_use_of_an_output() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, w, fc = leaf(8, 16), leaf(8, 16), nn.Linear(16, 16)
        with region():
            h = F.silu(x * 2.0)
            y = fc(h) + w * h.detach()
        y.square().sum().backward()
        return [x.grad, w.grad, fc.weight.grad]

    assert_same(program)


# Layouts and devices -----------------------------------------------------------------------------


@pytest.mark.without_npu
def test_a_cast_outside_the_recording_to_another_memory_format() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
        w = leaf(2, 4, 3, 5)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16), region():
            h = F.gelu(x)
            y = h.to(torch.bfloat16, memory_format=torch.contiguous_format) * w.bfloat16()
        y.float().square().sum().backward()
        return [x.grad, w.grad]

    assert_same(program, Policy(policy.ACTIVATIONS, min_bytes=0))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "an offset": lambda x: x[3:],
    "expanded": lambda x: x[:1].expand(5, -1),
    "a scalar": lambda x: x[0, 0],
    "no element": lambda x: x[:0],
    "a size of one": lambda x: x.unsqueeze(1).transpose(0, 1),
    "permuted": lambda x: x.view(2, 4, 16).permute(2, 0, 1),
    "conjugate": lambda x: torch.view_as_complex(x.view(8, 8, 2)).conj(),
}


def channels_last(x: Tensor) -> Tensor:
    return x.view(2, 4, 4, 4).to(memory_format=torch.channels_last)


VIEWS = [
    *(pytest.param(view, id=name) for name, view in LAYOUTS.items()),
    pytest.param(channels_last, id="channels last", marks=pytest.mark.without_npu),
]


@pytest.mark.parametrize("view", VIEWS)
def test_sa_08_every_layout_of_an_operand(view: Callable[[Tensor], Tensor]) -> None:
    def program(region: Region) -> list[Tensor | None]:
        x = leaf(8, 16)
        with region():
            seen = view(torch.tanh(x) * 3.0)
            h = seen * seen
            w = torch.randn_like(h).requires_grad_()
            y = h * w
        torch.view_as_real(y).sum().backward() if y.is_complex() else y.sum().backward()
        return [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y, x.grad, w.grad]

    assert_same(program)


@pytest.mark.parametrize("view", VIEWS)
def test_sa_07_every_view_of_an_output(view: Callable[[Tensor], Tensor]) -> None:
    def program(region: Region) -> list[Tensor | None]:
        x = leaf(8, 16)
        with region():
            seen = view(F.gelu(x))
            w = torch.randn_like(seen).requires_grad_()
            y = seen * w
        torch.view_as_real(y).sum().backward() if y.is_complex() else y.sum().backward()
        return [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y, x.grad, w.grad]

    assert_same(program)


def test_ar_23_the_halves_of_an_output_are_views_of_one_storage() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, down, other = leaf(8, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        with region():
            gate, up = F.silu(x).chunk(2, -1)
            y = down(gate * up) + other(up)
        y.square().sum().backward()
        return [x.grad, down.weight.grad, other.weight.grad]

    assert_same(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_of_part_of_an_output_to_the_dtype_of_another(dtype: torch.dtype) -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16).to(dtype)
        with region():
            y = fc(F.gelu(x)[2:].to(x.to(dtype), copy=True))
        y.float().square().sum().backward()
        return [x.grad, fc.weight.grad]

    assert_same(program)


def test_shapes_can_be_tried_on_the_meta_device() -> None:
    x, fc = leaf(8, 16, device="meta"), nn.Linear(16, 16, device="meta")
    with rebuild_region(EVERYTHING):
        y = fc(F.gelu(x))
    y.sum().backward()
    assert fc.weight.grad is not None
    assert fc.weight.grad.shape == (16, 16)


@pytest.mark.without_npu
def test_sparse_outputs_are_left_alone() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, w = torch.eye(8).to_sparse().requires_grad_(), leaf(8, 4)
        with region():
            y = torch.sparse.mm(x * 2.0, w)
        y.sum().backward()
        return [w.grad]

    assert_same(program)


def test_an_inference_tensor_as_an_operand() -> None:
    def program(region: Region) -> list[Tensor | None]:
        with torch.inference_mode():
            position = torch.randn(16)
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with region():
            y = fc(F.gelu(x) + position)
        y.sum().backward()
        return [x.grad, fc.weight.grad]

    assert_same(program)


def test_vmap_inside_a_region() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with region():
            y = torch.vmap(lambda row: fc(F.gelu(row * 2.0) * row))(x)
        y.square().sum().backward()
        return [x.grad, fc.weight.grad]

    assert_same(program)


# Threads and modes -------------------------------------------------------------------------------


def test_nodes_of_two_threads_are_not_taken_for_one_another() -> None:
    # Nodes are numbered per thread: the other thread makes one with the number of gelu's.
    def program(region: Region) -> list[Tensor | None]:
        a, b, x, x2 = nn.Linear(16, 16), nn.Linear(16, 16), leaf(8, 16), leaf(8, 16)
        made: dict[str, Tensor] = {}
        with torch.autocast(torch.get_default_device().type, torch.bfloat16), region():
            h = F.gelu(x)
            node: Any = h.grad_fn
            number = node._sequence_nr()
            y = a(h)

            def other() -> None:
                z: Any = x2 * 1.0
                while z.grad_fn._sequence_nr() < number:
                    z = x2 * 1.0
                made["z"] = z

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            y2 = b(made["z"])
        (y.float().square().sum() + y2.float().square().sum()).backward()
        return [a.weight.grad, b.weight.grad, x.grad, x2.grad]

    assert_same(program)


def test_another_number_of_threads_in_backward_changes_no_bit() -> None:
    # Where the work is divided decides which elements a vectorised kernel leaves to its remainder.
    before = torch.get_num_threads()

    def program(region: Region) -> list[Tensor | None]:
        x, w = leaf(100_003), leaf(100_003)
        torch.set_num_threads(1)
        with region():
            y = F.silu(x * 3) * w
        torch.set_num_threads(3)
        y.sum().backward()
        assert torch.get_num_threads() == 3
        return [x.grad, w.grad]

    try:
        assert_same(program)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inside", [True, False], ids=["forward", "backward"])
def test_ar_08_autocast_is_on_in_one_of_forward_and_backward(*, inside: bool) -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with (
            torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=inside),
            region(),
        ):
            y = down(F.softplus(gate(x)) * up(x) * torch.ones(32))
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=not inside):
            y.float().square().sum().backward()
        return [y, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


def test_ar_24_the_default_dtype_of_forward_is_used_again() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, w = leaf(8, 16), leaf(8, 16)
        torch.set_default_dtype(torch.float64)
        try:
            with region():
                h = torch.where(torch.sigmoid(x).detach() > 0.5, F.silu(x), 0.1)
                y = h * w
        finally:
            torch.set_default_dtype(torch.float32)
        y.sum().backward()
        assert torch.get_default_dtype() == torch.float32
        return [x.grad, w.grad]

    assert_same(program)


def test_ar_06_dropout_draws_the_same_mask_and_moves_nothing() -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with region():
            y = F.dropout(fc(F.dropout(F.gelu(x), 0.5)), 0.5)
        y.square().sum().backward()
        return [y, x.grad, fc.weight.grad, torch.rand(1)]

    assert_same(program)


class Halving(TorchFunctionMode):
    """Somebody else's mode that changes what gelu returns."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is F.gelu else result


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_somebody_elses_mode_that_changes_results(*, outside: bool) -> None:
    def program(region: Region) -> list[Tensor | None]:
        x, fc = leaf(8, 16), nn.Linear(16, 16)
        with contextlib.ExitStack() as stack:
            for context in (Halving(), region()) if outside else (region(), Halving()):
                stack.enter_context(context)
            y = fc(F.gelu(x))
        y.square().sum().backward()
        return [x.grad, fc.weight.grad]

    assert_same(program)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_inside_a_region() -> None:
    torch._dynamo.reset()

    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        swiglu = torch.compile(lambda a, b: F.silu(a) * b, backend="aot_eager")
        with region():
            y = down(swiglu(gate(x), up(x)) * 2.0)
        y.square().sum().backward()
        return [y, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


# Other hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("region_inside", [True, False])
def test_sa_27_checkpoint_and_region(*, reentrant: bool, region_inside: bool) -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()

        def mlp(x: Tensor) -> Tensor:
            with region() if region_inside else contextlib.nullcontext():
                return down(F.dropout(F.silu(gate(x)) * up(x), 0.3))

        with contextlib.nullcontext() if region_inside else region():
            y = checkpoint(mlp, x * 1.0, use_reentrant=reentrant)
            z = down(F.silu(gate(x)) * up(x))
        (y + z).square().sum().backward()
        return [y, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


def test_hooks_below_that_may_be_asked_once() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with saved_tensors_hooks(lambda t: [t.detach()], lambda held: held.pop()), region():
            y = down(F.silu(gate(x)) * up(x))
        y.square().sum().backward()
        return [y, x.grad, gate.weight.grad, down.weight.grad]

    assert_same(program)


@pytest.mark.parametrize("region_inside", [True, False])
def test_save_on_cpu_and_region(*, region_inside: bool) -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        contexts = [save_on_cpu(), region()] if region_inside else [region(), save_on_cpu()]
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            y = down(F.silu(gate(x)) * up(x))
        y.square().sum().backward()
        return [y, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


def test_a_region_in_a_region() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with region():
            g = F.silu(gate(x))
            with region():
                h = g * up(x)
            y = down(h) + down(h * 2.0)
        y.square().sum().backward()
        return [y, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


# Backwards ---------------------------------------------------------------------------------------


def test_ar_18_backward_twice_over_a_retained_graph() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with region():
            y = down(F.dropout(F.silu(gate(x)) * up(x), 0.3)).square().sum()
        y.backward(retain_graph=True)
        once = x.grad.clone() if x.grad is not None else None
        y.backward()
        return [once, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


def test_ar_18_double_backward() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with region():
            y = down(torch.tanh(gate(x)) * up(x)).square().sum()
        [slope] = torch.autograd.grad(y, x, create_graph=True)
        slope.square().sum().backward()
        return [slope, x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


def test_gradients_of_some_inputs_only() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with region():
            y = down(F.silu(gate(x)) * up(x)).square().sum()
        [of_down] = torch.autograd.grad(y, down.weight, retain_graph=True)
        [of_up] = torch.autograd.grad(y, up.weight, retain_graph=True)
        return [of_down, of_up, *torch.autograd.grad(y, [x, gate.weight, down.weight])]

    assert_same(program)


def test_the_graph_of_one_output_on_many_threads() -> None:  # AR-19
    gate, up, down, x = gated()
    with rebuild_region(EVERYTHING):
        loss = down(F.silu(gate(x)) * up(x)).sum()
    weights = [*gate.parameters(), *up.parameters(), *down.parameters()]
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    equal: list[bool] = []

    def work() -> None:
        for _ in range(50):
            got = torch.autograd.grad(loss, weights, retain_graph=True)
            equal.append(all(map(torch.equal, got, expected)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 200


def test_anomaly_detection_names_the_same_operator() -> None:
    def message(region: Region) -> str:
        gate, up, down, x = gated()
        with pytest.warns(UserWarning), torch.autograd.detect_anomaly():
            with region():
                y = down(F.silu(gate(x)) * up(x)).sum()
            with pytest.raises(RuntimeError) as caught:
                (y * float("nan")).backward()
        return str(caught.value)

    assert message(lambda: rebuild_region(EVERYTHING)) == message(contextlib.nullcontext)


def test_backward_inside_the_region() -> None:
    def program(region: Region) -> list[Tensor | None]:
        gate, up, down, x = gated()
        with region():
            for _ in range(3):
                down(F.dropout(F.silu(gate(x)) * up(x), 0.3)).square().sum().backward()
        return [x.grad, gate.weight.grad, up.weight.grad, down.weight.grad]

    assert_same(program)


# Memory ------------------------------------------------------------------------------------------


def test_an_input_that_only_a_dropped_branch_held_is_not_kept() -> None:
    def program() -> object:
        x0, fc = leaf(1, WIDTH), nn.Linear(WIDTH, 4)
        x = x0 * 1.0
        square = x * x
        h = torch.exp(x)
        y = fc(h)
        del square, x
        return y, h, x0  # a user may hold the output (hidden states)

    assert_holds_no_more(program)


def test_a_result_that_the_user_holds_is_not_held_twice() -> None:
    def program() -> object:
        x0 = leaf(1, WIDTH)
        x = x0 * 1.0
        square = x * x
        h = torch.sigmoid(x)
        del square, x
        return h, x0

    assert_holds_no_more(program)


def test_a_detached_save_keeps_the_storage() -> None:
    def program() -> object:
        x0, w, fc = leaf(1, WIDTH), leaf(1, WIDTH), nn.Linear(WIDTH, 4)
        x = x0 * 1.0
        square = x * x
        h = torch.exp(x)
        y, z = fc(h), w * h.detach()
        del square, x, h
        return y, z, x0

    assert_holds_no_more(program)


def test_an_operand_that_gets_no_gradient_is_not_held() -> None:
    # type_as(h) leads to x alone, so that the graph of h may go.
    def program() -> object:
        x0, g0, u0, fc = leaf(1, WIDTH), leaf(1, WIDTH), leaf(1, WIDTH), nn.Linear(WIDTH, 4)
        g, u, x = g0 * 1.0, u0 * 1.0, x0 * 1.0
        h, square = F.silu(g) * u, x * x
        y = fc(x.half().type_as(h))
        del g, u, h, x
        return y, square, x0, g0, u0

    assert_holds_no_more(program)


def test_a_new_leaf_does_not_hold_what_its_values_were_made_from() -> None:
    def program() -> object:
        g0, u0, w = leaf(1, WIDTH), leaf(1, WIDTH), leaf(1, WIDTH)
        g, u = g0 * 1.0, u0 * 1.0
        h = F.silu(g) * u
        d = h.detach().requires_grad_()
        y = d * w
        del g, u, h
        return y, d, g0, u0, w

    assert_holds_no_more(program)


@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid, torch.tanh, torch.exp])
def test_where_a_recipe_does_not_pay_nothing_more_is_held(activation: Any) -> None:
    def program() -> object:
        x, up, down = leaf(4, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        return down(activation(up(x)))

    assert_holds_no_more(program)


def test_a_long_region_forgets_the_saves_of_a_lasting_storage() -> None:
    table, x = torch.randn(16), leaf(8, 16)
    with rebuild_region(EVERYTHING):
        for _ in range(200):
            (x * table).sum().backward()
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        record = hooks[0].__self__.table.find(table)
        assert len(record._saved) < 100


# Wider copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_operand_is_made_from_the_wider_copy_that_the_call_saved(dtype: torch.dtype) -> None:
    held = []
    for region in (contextlib.nullcontext(), rebuild_region(EVERYTHING)):
        x, linear = leaf(8, WIDTH), nn.Linear(WIDTH, 16, dtype=dtype)
        with measure_peak(torch.get_default_device()) as memory, region:
            kept = linear(F.rms_norm(x.to(dtype) + 1, (WIDTH,)))
        held.append(memory.held_bytes)
        del kept
    assert held[0] - held[1] >= 8 * WIDTH * dtype.itemsize


def test_a_wider_copy_from_before_a_write_is_none() -> None:
    def program(region: Region) -> list[Tensor | None]:
        a, fc = leaf(8, 16), nn.Linear(16, 16)
        with region():
            x = (a * 1).bfloat16()
            wide = x.float()
            without_grad(x)
            # Saves `wide`, a copy of what `x` was, and not `x`.
            y = fc(torch.addcmul(x, wide, wide))
        y.square().sum().backward()
        return [y, a.grad, fc.weight.grad]

    assert_same(program)


def test_a_write_to_the_input_of_a_norm_that_widens_it_does_not_matter() -> None:
    def program(region: Region) -> list[Tensor | None]:
        a, fc = leaf(8, 16), nn.Linear(16, 16).bfloat16()
        with region():
            x = (a * 1).bfloat16() + 1
            y = fc(F.rms_norm(x, (16,)))
        without_grad(x)
        y.square().sum().backward()
        return [y, a.grad, fc.weight.grad]

    assert_same(program)


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_an_expanded_input_that_is_as_large_as_its_storage(norm: Callable[..., Tensor]) -> None:
    def program(region: Region) -> list[Tensor | None]:
        a, fc = leaf(16, 16), nn.Linear(16, 16).bfloat16()
        with region():
            x = (a * 1).bfloat16()[:1].expand(16, 16)
            y = fc(norm(x, (16,)))
        y.square().sum().backward()
        return [y, a.grad, fc.weight.grad]

    assert_same(program)
