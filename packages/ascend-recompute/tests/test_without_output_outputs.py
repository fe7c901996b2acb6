"""What may be discarded, what must stay, and what reading a discarded output does."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascend_core.errors import ReplayError, StorageError
from ascend_core.storage import is_released
from ascend_recompute.without_output import CheckpointWithoutOutput

Same = Callable[..., None]


def x_of(*size: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size).requires_grad_()


def discarded(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Which of the function's tensors are away after `discard_output`."""
    ckpt = CheckpointWithoutOutput()
    outputs = ckpt.checkpoint(function, False, *args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    graph = [output * 1 for output in outputs if isinstance(output, Tensor)]
    ckpt.discard_output()
    assert graph
    return [is_released(output) for output in outputs if isinstance(output, Tensor)]


@pytest.mark.parametrize(
    ("function", "away"),
    [
        (torch.sin, [True]),
        (lambda x: torch.sin(x).t(), [True]),
        (lambda x: torch.sin(x).view(-1), [True]),
        (lambda x: (torch.sin(x), torch.cos(x), x > 0, "text"), [True, True, False]),
        (lambda x: torch.sin(x)[1:], [False]),
        (lambda x: torch.sin(x)[:, ::2], [False]),
        (lambda x: torch.sin(x[:1]).expand(4, -1), [False]),
        (lambda x: torch.sin(x).chunk(2, -1), [False, False]),
        (lambda x: torch.sin(x)[:0], [False]),
        (lambda x: torch.sin(x[:0]), [False]),
        (lambda x: torch.sin(x).detach(), [False]),
        (lambda x: (y := torch.sin(x), y.detach()), [False, False]),
        (lambda x: (y := torch.sin(x), y), [False, False]),
        (lambda x: torch.complex(x, x).conj(), [False]),
        (lambda x: torch.complex(x, x), [True]),
        pytest.param(lambda x: x.to_sparse(), [False], marks=pytest.mark.without_npu),
    ],
)
def test_only_what_solely_owns_a_dense_storage_is_discarded(
    function: Callable[..., Any], away: list[bool]
) -> None:
    assert discarded(function, x_of(2, 4)) == away


@pytest.mark.parametrize(
    "function",
    [
        nn.Dropout(0.5).eval(),
        nn.Identity(),
        lambda x: x.to(x.dtype),
        lambda x: x.contiguous(),
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x.view_as(x),
    ],
)
def test_an_output_that_is_an_input_or_a_view_of_one_stays(
    same_as_plain: Same, function: Callable[..., Tensor]
) -> None:
    assert discarded(function, x_of(2, 4) * 2) == [False]

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(2, 4)
        h = x * 2
        ckpt = make()
        d = ckpt.checkpoint(count(function), False, h).square()
        ckpt.discard_output_and_register_recompute(d)
        seen = h + 1
        (d.sum() + seen.sum()).backward()
        return [d, seen, x.grad]

    same_as_plain(program, runs=1)


@pytest.mark.parametrize("view", [False, True])
def test_captured_tensors_and_parameters_stay(view: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    captured = x_of(2, 4) * 2

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if view:
            return torch.sin(x), captured.view(-1), weight.t(), weight.view(-1)
        return torch.sin(x), captured, weight

    assert discarded(function, x_of(3)) == [True, *[False] * (3 if view else 2)]
    assert torch.equal(weight, torch.ones(2, 4))


def test_an_output_of_another_call_stays() -> None:
    x = x_of(4)
    first = CheckpointWithoutOutput()
    y = first.checkpoint(torch.sin, False, x)
    assert discarded(lambda z: (z, z * 2), y) == [False, True]


def test_a_tensor_subclass_stays() -> None:
    class Mine(Tensor):
        pass

    assert discarded(lambda x: torch.sin(x).as_subclass(Mine), x_of(3)) == [False]


def test_outputs_in_nested_containers_are_restored(same_as_plain: Same) -> None:
    def function(x: Tensor) -> dict[str, Any]:
        return {"a": [torch.sin(x), 3], "b": (torch.cos(x).t(), None), "c": x.exp().view(-1)}

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(2, 4)
        ckpt = make()
        out = ckpt.checkpoint(count(function), False, x)
        assert out["a"][1] == 3 and out["b"][1] is None
        tensors = [out["a"][0], out["b"][0], out["c"]]
        d = sum(t.square().sum() for t in tensors)
        ckpt.discard_output_and_register_recompute(d)
        if make is CheckpointWithoutOutput:
            assert all(is_released(t) for t in tensors)
        d.backward()
        return [*tensors, x.grad]

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("saves", ["input", "output"])
def test_an_output_written_to_before_it_is_discarded_stays_with_a_warning(saves: str) -> None:
    function = torch.sin if saves == "input" else torch.sigmoid
    x = x_of(4)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(function, False, x)
    with torch.no_grad():
        y.mul_(2)
    d = y.square()
    with pytest.warns(UserWarning, match="modified in place after it was checkpointed"):
        ckpt.discard_output()
    d.register_hook(ckpt.recompute)
    assert not is_released(y)
    if saves == "input":
        d.sum().backward()
        assert torch.equal(x.grad, 4 * torch.sin(x.detach()) * torch.cos(x.detach()))
    else:  # sigmoid needs its output as it was; plain autograd says the same
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            d.sum().backward()


def test_a_differentiable_write_after_the_discarded_output_was_used(same_as_plain: Same) -> None:
    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(4)
        ckpt = make()
        y = ckpt.checkpoint(count(torch.sin), False, x)
        d = y.square()
        ckpt.discard_output_and_register_recompute(d)
        d.mul_(2)  # the hook stays with the value that it was set on
        d.sum().backward()
        return [d, x.grad]

    same_as_plain(program, runs=2)


def test_an_output_that_only_autograd_holds_is_discarded(same_as_plain: Same) -> None:
    down = nn.Linear(4, 4)

    def program(make: Any, count: Any) -> list[Tensor | None]:
        x = x_of(2, 2, 4)
        ckpt = make()
        d = down(ckpt.checkpoint(count(torch.sin), False, x))
        ckpt.discard_output_and_register_recompute(d)
        d.square().sum().backward()
        found = [d, x.grad, down.weight.grad, down.bias.grad]
        down.weight.grad = down.bias.grad = None
        return found

    same_as_plain(program, runs=2)


@pytest.mark.parametrize("saves", ["input", "output"])
@pytest.mark.parametrize("target", ["argument", "view", "captured", "weight", "bias", "buffer"])
def test_a_write_to_what_the_function_reads_raises_and_is_never_silently_wrong(
    target: str, saves: str
) -> None:
    torch.manual_seed(0)
    inner, down = nn.Linear(4, 4), nn.Linear(4, 4)
    buffer, captured = torch.ones(4), x_of(2, 4) * 3
    x = (x_of(2, 4) * 2).detach().requires_grad_()
    argument = x * 1

    def function(a: Tensor) -> Tensor:
        act = torch.sin if saves == "input" else torch.tanh
        return act(inner(a) * captured * buffer)

    ckpt = CheckpointWithoutOutput()
    d = down(ckpt.checkpoint(function, False, argument))
    ckpt.discard_output_and_register_recompute(d)
    written = {
        "argument": argument, "view": argument[:, :1], "captured": captured,
        "weight": inner.weight, "bias": inner.bias, "buffer": buffer,
    }  # fmt: skip
    with torch.no_grad():
        written[target].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        d.sum().backward()


def test_a_write_within_the_function_to_what_it_saved_raises_as_plain() -> None:
    def wrong(x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        z = y * y
        y.mul_(2)
        return z

    for run in (wrong, lambda x: CheckpointWithoutOutput().checkpoint(wrong, False, x)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(x_of(3)).sum().backward()


@pytest.mark.parametrize("target", ["weight", "captured"])
def test_a_write_that_plain_autograd_would_not_mind_is_not_silent_either(target: str) -> None:
    # Plain has the old output saved; a replay would make another one.
    first, down = nn.Linear(4, 4), nn.Linear(4, 4)
    captured = x_of(2, 4) * 3
    ckpt = CheckpointWithoutOutput()
    c = ckpt.checkpoint(lambda x: torch.sin(first(x) * captured), False, torch.ones(2, 4))
    d = down(c)
    ckpt.discard_output_and_register_recompute(d)
    with torch.no_grad():
        (first.weight if target == "weight" else captured).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(d.sum(), down.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: torch.sin(x) * 2 * x, "saved 1 tensors in forward and 3"),
        (lambda x: torch.sin(torch.cat([x, x])), "of \\[4\\] .* and one of \\[8\\]"),
        (lambda x: torch.sin(x.double()), "float32 in forward and one of .* torch.float64"),
        (lambda x: (torch.sin(x), None)[1], "returned no tensor as its value number 0"),
        (lambda x: torch.sin(x).sum(), "cannot be restored from one of \\[\\]"),
    ],
)
def test_a_function_that_does_something_else_when_it_runs_again_is_found_out(
    change: Callable[..., Any], message: str
) -> None:
    functions = [torch.sin, change]

    def function(x: Tensor) -> Any:
        return functions.pop(0)(x)

    ckpt = CheckpointWithoutOutput()
    c = ckpt.checkpoint(function, False, x_of(4))
    d = c.square()
    ckpt.discard_output_and_register_recompute(d)
    with pytest.raises((ReplayError, StorageError), match=message):
        d.sum().backward()


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c + 1,
        lambda c: c.sum(),
        lambda c: c[0],
        lambda c: c.tolist(),
        lambda c: c.numpy(),
        lambda c: c.detach(),
        lambda c: c.detach().numpy(),
        lambda c: c.view(-1),
        lambda c: c.data,
        lambda c: c.T,
        lambda c: c.mT,
        lambda c: c._base,
        repr,
        lambda c: f"{c}",
        lambda c: bool(c[0, 0]),
        list,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda c: torch.stack([c, c]),
        torch.ops.aten.sin,
        lambda c: F.linear(c, torch.ones(4, 4)),
        nn.Linear(4, 4),
        lambda c: torch.zeros(2, 4).copy_(c),
        lambda c: c.zero_(),
        lambda c: c.clone(),
        lambda c: CheckpointWithoutOutput().checkpoint(torch.sin, False, c),
        lambda c: torch.utils.checkpoint.checkpoint(torch.sin, c, use_reentrant=True),
    ],
)
def test_reading_a_discarded_output_raises(read: Callable[[Tensor], Any]) -> None:
    x = x_of(2, 4)
    ckpt = CheckpointWithoutOutput()
    c = ckpt.checkpoint(lambda x: torch.sin(x.view(-1)).view(2, 4), False, x)
    d = c.square()
    ckpt.discard_output_and_register_recompute(d)
    with pytest.raises(Exception, match=r"storage was released|storage of size 0"):
        read(c)
    d.sum().backward()
    assert torch.equal(c, torch.sin(x.detach()))


def test_what_reads_no_element_of_a_discarded_output_works() -> None:
    x = x_of(2, 4)
    ckpt = CheckpointWithoutOutput()
    c = ckpt.checkpoint(torch.sin, False, x)
    d = c.square()
    ckpt.discard_output_and_register_recompute(d)
    assert isinstance(c, Tensor) and c.shape == c.size() == (2, 4) and len(c) == 2
    assert c.dtype is torch.float32 and c.device == x.device and c.ndim == c.dim() == 2
    assert c.requires_grad and not c.is_leaf and c.grad_fn is not None
    assert c.is_contiguous() and c.stride() == (4, 1) and c.numel() == 8 and hash(c) == id(c)
    c.retain_grad()
    seen: list[Tensor] = []
    c.register_hook(seen.append)
    (gradient,) = torch.autograd.grad(d.sum(), c, retain_graph=True)
    assert torch.equal(gradient, 2 * torch.sin(x.detach()))
    d.sum().backward()
    assert torch.equal(seen[1], gradient) and len(seen) == 2 and c.grad is not None


CRASH = """
    import torch
    from ascend_recompute.without_output import CheckpointWithoutOutput
    x = torch.ones(1 << 20, requires_grad=True)
    weight = torch.ones(1 << 20, requires_grad=True)
    ckpt = CheckpointWithoutOutput()
    c = ckpt.checkpoint(torch.sin, False, x)
    d = c * weight
    ckpt.discard_output()
    try:
        {read}
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


@pytest.mark.host
@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("print(c.sum())", "StorageError sum reads a tensor"),
        # The hook was forgotten: autograd refuses, where it would otherwise read freed memory.
        ("d.sum().backward()", "RuntimeError one of the variables needed for gradient"),
    ],
)
def test_reading_freed_memory_does_not_end_the_process(read: str, message: str) -> None:
    script = textwrap.dedent(CRASH.format(read=read))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(message)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_module_that_keeps_the_object_can_be_copied_between_forward_and_backward(
    duplicate: Callable[[Any], Any],
) -> None:
    keeper = nn.Linear(2, 2)
    keeper.manager = ckpt = CheckpointWithoutOutput()
    x = x_of(2, 4)
    d = ckpt.checkpoint(torch.sin, False, x).square()
    ckpt.discard_output_and_register_recompute(d)
    other = duplicate(keeper)
    if other.manager is not ckpt:  # a shallow copy of the module shares it
        other.manager.recompute()
        other.manager.discard_output()
    d.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "change",
    [pytest.param("share_memory", marks=pytest.mark.without_npu), "set data", "resize"],
)
def test_an_output_whose_storage_the_caller_changed_stays(change: str) -> None:
    x, other = x_of(4), torch.full((4,), 5.0)
    ckpt = CheckpointWithoutOutput()
    y = ckpt.checkpoint(torch.sin, False, x)
    d = y * 2
    if change == "share_memory":
        y.share_memory_()
    elif change == "set data":
        y.data = other
    else:
        y.untyped_storage().resize_(64)
    ckpt.discard_output_and_register_recompute(d)
    assert not is_released(y)
    assert torch.equal(other, torch.full((4,), 5.0))
    d.sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(x.detach()))
