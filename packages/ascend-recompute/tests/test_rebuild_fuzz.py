"""Random programs, run plain and inside a region: the same bits or the same refusal, no more bytes.

A program is a list of instructions over a growing list of values. An instruction that makes no
sense for the values it is given is left out, in both runs alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_core.testing import bitwise_equal
from ascend_recompute import policy
from ascend_recompute.activation import rebuild_region

EVERYTHING = dataclasses.replace(policy.DEFAULT.extended(*policy.NORMS), min_bytes=0)
# More of them, and others each time: REBUILD_FUZZ_EXAMPLES=20000.
DERANDOMIZE = "REBUILD_FUZZ_EXAMPLES" not in os.environ
EXAMPLES = int(os.environ.get("REBUILD_FUZZ_EXAMPLES", "300"))
ROWS, WIDTH = 3, 8

Context = contextlib.AbstractContextManager[Any]
Operator = Callable[["Values", Tensor, Tensor], Any]


class Values:
    """What a program works on; leaves are compared at the end, values may be written to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(ROWS, WIDTH).requires_grad_()
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * 0.3)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.constant = torch.randn(ROWS, WIDTH)
        self.leaves: list[Tensor] = [self.x, self.up, self.down, self.scale, self.bias]
        self.live: list[Tensor] = [self.x, self.x * 1.0, self.constant]

    def leaf(self, value: Tensor) -> Tensor:
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1]

    def forget(self, value: Tensor) -> None:
        if len(self.live) > 1:
            self.live = [other for other in self.live if other is not value]


def is_wide(value: Tensor) -> bool:
    return value.shape[-1] == 2 * WIDTH


def linear(values: Values, a: Tensor, _: Tensor) -> Tensor:
    # (Of two dtypes it is an error; a simulated NPU finds that late, and is stopped by it.)
    return F.linear(a, (values.down if is_wide(a) else values.up).to(a.dtype))


def matmul(values: Values, a: Tensor, _: Tensor) -> Tensor:
    return a @ (values.up if is_wide(a) else values.down).to(a.dtype)


def dropped_branch(_: Values, a: Tensor, b: Tensor) -> None:
    a * b


def pair(values: Values, a: Tensor, b: Tensor) -> Tensor:
    """An operand of the shape of `a`: `b` where it fits, else a parameter."""
    if a.shape == b.shape:
        return b
    return values.constant if a.shape == values.constant.shape else a


def norm(a: Tensor, weight: Tensor) -> Tensor | None:
    return None if is_wide(a) else F.layer_norm(a, (WIDTH,), weight.to(a.dtype))


def rms_norm(a: Tensor, weight: Tensor) -> Tensor | None:
    return None if is_wide(a) else F.rms_norm(a, (WIDTH,), weight.to(a.dtype))


# fmt: off
CHEAP: dict[str, Operator] = {
    "gelu": lambda v, a, b: F.gelu(a),
    "gelu tanh": lambda v, a, b: F.gelu(a, approximate="tanh"),
    "silu": lambda v, a, b: F.silu(a),
    "relu": lambda v, a, b: F.relu(a),
    "tanh": lambda v, a, b: torch.tanh(a),
    "sigmoid": lambda v, a, b: a.sigmoid(),
    "mul": lambda v, a, b: a * pair(v, a, b),
    "add": lambda v, a, b: a + pair(v, a, b),
    "sub": lambda v, a, b: torch.sub(a, pair(v, a, b), alpha=0.5),
    "div": lambda v, a, b: a / (pair(v, a, b).abs() + 0.5),
    "gate": lambda v, a, b: F.silu(a) * pair(v, a, b),
    "scalar": lambda v, a, b: 1.5 - a * 0.75,
    "square": lambda v, a, b: a**2,
    "itself": lambda v, a, b: a * a,
    "exp": lambda v, a, b: torch.exp(a.clamp(-2, 1)),
    "rsqrt": lambda v, a, b: torch.rsqrt(a.square() + 0.5),
    "log": lambda v, a, b: a.abs().log1p(),
    "where": lambda v, a, b: torch.where(a > 0, a, pair(v, a, b)),
    "scale": lambda v, a, b: a * (v.scale if not is_wide(a) else 0.7),
    "bias": lambda v, a, b: a + (v.bias if not is_wide(a) else 0.1),
    "bfloat16": lambda v, a, b: a.bfloat16(),
    "float": lambda v, a, b: a.float(),
    "type_as": lambda v, a, b: a.type_as(b),
    "dropout": lambda v, a, b: F.dropout(a, 0.3),
    "dropout by keyword": lambda v, a, b: torch.dropout(p=0.5, train=True, input=a),
    "layer norm": lambda v, a, b: norm(a, v.scale),
    "rms norm": lambda v, a, b: F.rms_norm(a, a.shape[-1:]),
    "scaled rms norm": lambda v, a, b: rms_norm(a, v.scale),
    "contiguous": lambda v, a, b: a.contiguous(),
    "clone": lambda v, a, b: a.clone(),
}
# These save what they are given. The gradient of the new leaf in `consume` is just that.
CONSUMERS: dict[str, Operator] = {
    "linear": linear,
    "matmul": matmul,
    "consume": lambda v, a, b: a * v.leaf(torch.ones_like(a)),
    "consume flat": lambda v, a, b: (a.reshape(-1) * v.leaf(torch.ones(a.numel()))).view(a.shape),
}
SHAPES: dict[str, Operator] = {
    "softmax": lambda v, a, b: a.softmax(-1),
    "sum": lambda v, a, b: a + a.sum(-1, keepdim=True),
    "half": lambda v, a, b: a.chunk(2, -1)[1] if is_wide(a) else None,
    "double": lambda v, a, b: None if is_wide(a) else torch.cat((a, a), -1),
    "view": lambda v, a, b: a.view(a.shape),
    "transposed": lambda v, a, b: a.t().contiguous().t(),
    "rolled": lambda v, a, b: torch.cat((a[1:], a[:1])),
    "flipped": lambda v, a, b: torch.cat(a.split(a.shape[-1] // 2, -1)[::-1], -1),
    "expand": lambda v, a, b: a[:1].expand(ROWS, -1) * a,
    "strided": lambda v, a, b: torch.cat((a[:, ::2], a[:, 1::2]), -1) if is_wide(a) else None,
    "copy of a view": lambda v, a, b: a.chunk(2, -1)[1].to(b, copy=True) if is_wide(a) else None,
    "weight cast": lambda v, a, b: F.linear(a, v.down.to(a.dtype)) if is_wide(a) else None,
}
CUTS: dict[str, Operator] = {
    "detach": lambda v, a, b: a.detach(),
    "leaf": lambda v, a, b: v.leaf(a),
    "view of leaf": lambda v, a, b: v.leaf(a).view(a.shape),
    "branch": dropped_branch,
    "forget": lambda v, a, b: v.forget(a),
}
WRITES: dict[str, Operator] = {
    "mul_": lambda v, a, b: a.mul_(1.5),
    "add_": lambda v, a, b: a.add_(pair(v, a, b)),
    "relu_": lambda v, a, b: F.relu(a, inplace=True),
    "silu_": lambda v, a, b: F.silu(a, inplace=True),
    "dropout_": lambda v, a, b: F.dropout(a, 0.3, inplace=True),
    "through a view": lambda v, a, b: a[:, :2].mul_(2),
    "through a half": lambda v, a, b: a.chunk(2, -1)[0].add_(1),
    "through detach": lambda v, a, b: a.detach().mul_(2),
    "without grad": lambda v, a, b: unrecorded_write(a),
    "copy_": lambda v, a, b: a.detach().copy_(pair(v, a, b).detach()),
    "update scale": lambda v, a, b: unrecorded_write(v.scale),
    "update down": lambda v, a, b: unrecorded_write(v.down),
    "update bias": lambda v, a, b: unrecorded_write(v.bias),
    "update constant": lambda v, a, b: v.constant.mul_(2),
}
MAKERS = {**CHEAP, **CONSUMERS, **SHAPES, **CUTS}
OPERATORS = {**MAKERS, **WRITES}
# fmt: on


def synchronize() -> None:
    device = torch.get_default_device()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def unrecorded_write(value: Tensor) -> None:
    with torch.no_grad():
        value.add_(1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name` applied to two of the live values; `seen` is False where no mode records it."""

    name: str
    first: int
    second: int
    seen: bool = True
    autocast: bool = False

    def run(self, values: Values) -> bool:
        a = values.live[self.first % len(values.live)]
        b = values.live[self.second % len(values.live)]
        with contextlib.ExitStack() as stack:
            if not self.seen:
                stack.enter_context(torch._C.DisableTorchFunction())
            if self.autocast:
                stack.enter_context(torch.autocast(torch.get_default_device().type, torch.bfloat16))
            try:
                result = OPERATORS[self.name](values, a, b)
                synchronize()  # a device tells late what it refuses
            except RuntimeError:  # a write that autograd forbids, shapes or types that do not fit
                return False
        if isinstance(result, Tensor) and self.name in MAKERS:
            values.live.append(result)
        return True


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs inside the region, what is forgotten and written to after it, what is the loss.

    Attributes:
        backwards: How often backward runs; all but the last time the graph is retained.
        autocast: Whether backward runs under autocast.
    """

    inside: list[Instruction]
    forgotten: list[int]
    after: list[Instruction]
    outputs: list[int]
    backwards: int
    autocast: bool


INSIDE = [*[CHEAP] * 5, *[CONSUMERS] * 4, SHAPES, *[CUTS] * 2, WRITES]
LATEST = [-1, -1, -1, -1, -2, -2, -3, 0, 1, 2]  # mostly: that gives deep programs


def random_program(seed: int) -> Program:
    """Hypothesis varies what it has tried; a seed gives programs that have nothing in common."""
    draw = random.Random(seed)
    all_autocast = draw.random() < 0.2

    def instruction(groups: Sequence[dict[str, Operator]]) -> Instruction:
        name = draw.choice([*draw.choice(groups)])
        autocast = all_autocast or draw.random() < 0.1
        places = draw.choice(LATEST), draw.choice(LATEST)
        return Instruction(name, *places, seen=draw.random() < 0.85, autocast=autocast)

    return Program(
        inside=[instruction(INSIDE) for _ in range(draw.randint(3, 15))],
        forgotten=[draw.randrange(20) for _ in range(draw.choice([0, 2, 20]))],
        after=[instruction([WRITES]) for _ in range(draw.choice([0, 1, 3]))],
        outputs=draw.choices([-1, -1, -1, -2, -3, -4], k=draw.randint(1, 3)),
        backwards=draw.choice([1, 1, 1, 2]),
        autocast=draw.random() < 0.3,
    )


def smallest(program: Program) -> Program:
    """Leave out what a failing program does not need to fail."""
    for field in ("inside", "after", "forgotten"):
        parts = getattr(program, field)
        for number in reversed(range(len(parts))):
            without = [*parts[:number], *parts[number + 1 :]]
            shorter = dataclasses.replace(program, **{field: without})
            if fault(shorter) is not None:
                program, parts = shorter, without
    return program


@dataclasses.dataclass
class Outcome:
    done: list[bool]
    refused: bool
    tensors: list[Tensor | None]
    held: list[int]  # before and after values are forgotten


def term(value: Tensor) -> Tensor:
    """A value's part of the loss; none when autograd forbids to read it after what was written."""
    try:
        return (value.float() * 0.5).sum()
    except RuntimeError:
        return torch.zeros(())


def run(program: Program, region: Context) -> Outcome:
    done = []
    with LiveStorages() as storages:
        values = Values()
        with region:
            for instruction in program.inside:
                done.append(instruction.run(values))
            chosen = [values.live[i % len(values.live)] for i in program.outputs]
            chosen += [one for one in values.live if one.requires_grad][-1:]
            loss = sum((term(one) for one in chosen), torch.zeros(()))
        del chosen
        held = [storages.nbytes()]
        for instruction in program.after:
            done.append(instruction.run(values))
        for index in program.forgotten:
            if len(values.live) > 1:
                del values.live[index % len(values.live)]
        held.append(storages.nbytes())
    refused = False
    if loss.requires_grad:
        try:
            with torch.autocast(
                torch.get_default_device().type, torch.bfloat16, enabled=program.autocast
            ):
                for left in reversed(range(program.backwards)):
                    loss.backward(retain_graph=left > 0)
        except RuntimeError as error:
            assert "inplace" in str(error)
            refused = True
    tensors = [loss.detach(), *(leaf.grad for leaf in values.leaves), torch.rand(1)]
    return Outcome(done, refused, tensors, held)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that were made while it was on and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def nbytes(self) -> int:
        alive = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def fault(program: Program) -> str | None:
    """What is wrong with a program inside a region."""
    plain = run(program, contextlib.nullcontext())
    ours = run(program, rebuild_region(EVERYTHING))
    if ours.done != plain.done:
        return f"ran {ours.done}, plain {plain.done}"
    if ours.refused != plain.refused:
        return f"refused: {ours.refused}, plain: {plain.refused}"
    if any(more > less for more, less in zip(ours.held, plain.held, strict=True)):
        return f"holds {ours.held} bytes, plain {plain.held}"
    if plain.refused:
        return None
    for number, (left, right) in enumerate(zip(plain.tensors, ours.tensors, strict=True)):
        if (left is None) != (right is None):
            return f"value {number} is missing in one run"
        if left is not None and right is not None and not bitwise_equal(left, right):
            return f"value {number} differs by {(left - right).abs().max().item()}"
    return None


@settings(max_examples=EXAMPLES, derandomize=DERANDOMIZE, deadline=None, database=None)
@given(seed=st.integers(0, 2**62))
def test_a_program_gives_the_same_bits_or_the_same_refusal_and_holds_no_more(seed: int) -> None:
    program = random_program(seed)
    found = fault(program)
    if found is not None:
        program = smallest(program)
    assert found is None, f"{fault(program)}\n{program}"


def test_the_programs_try_what_they_are_for() -> None:
    outcomes = {"refused": 0, "fewer bytes": 0, "no gradient": 0}
    for seed in range(60):
        program = random_program(seed)
        plain = run(program, contextlib.nullcontext())
        ours = run(program, rebuild_region(EVERYTHING))
        outcomes["refused"] += plain.refused
        outcomes["fewer bytes"] += ours.held[0] < plain.held[0]
        outcomes["no gradient"] += all(gradient is None for gradient in plain.tensors[1:-1])
    assert outcomes["refused"] > 3
    assert outcomes["fewer bytes"] > 8
    assert outcomes["no gradient"] < 15
