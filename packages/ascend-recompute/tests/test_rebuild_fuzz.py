"""Random programs, run plain and inside a region: the same bits or the same refusal, no more bytes.

A program is a list of instructions over a growing list of values. An instruction that makes no
sense for the values it is given is left out, in both runs alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_core.testing import bitwise_equal
from ascend_recompute import policy
from ascend_recompute.activation import rebuild_region

EVERYTHING = dataclasses.replace(policy.DEFAULT.extended(*policy.NORMS), min_bytes=0)
EXAMPLES = int(os.environ.get("REBUILD_FUZZ_EXAMPLES", "400"))
ROWS, WIDTH = 3, 8

Context = contextlib.AbstractContextManager[Any]


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


def is_wide(value: Tensor) -> bool:
    return value.shape[-1] == 2 * WIDTH


def linear(values: Values, a: Tensor, _: Tensor) -> Tensor:
    return F.linear(a, values.down) if is_wide(a) else F.linear(a, values.up)


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


# fmt: off
PURE: dict[str, Callable[[Values, Tensor, Tensor], Any]] = {
    "linear": linear,
    "matmul": matmul,
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
    "dropout by keyword": lambda v, a, b: F.dropout(input=a, p=0.5, training=True),
    "layer norm": lambda v, a, b: norm(a, v.scale),
    "rms norm": lambda v, a, b: F.rms_norm(a, a.shape[-1:]),
    "softmax": lambda v, a, b: a.softmax(-1),
    "sum": lambda v, a, b: a + a.sum(-1, keepdim=True),
    "half": lambda v, a, b: a.chunk(2, -1)[1] if is_wide(a) else None,
    "double": lambda v, a, b: None if is_wide(a) else torch.cat((a, a), -1),
    "view": lambda v, a, b: a.view(a.shape),
    "transposed": lambda v, a, b: a.t().contiguous().t(),
    "slice": lambda v, a, b: None if a.shape[0] < ROWS else torch.cat((a[1:], a[:1])),
    "flip halves": lambda v, a, b: torch.cat(a.split(a.shape[-1] // 2, -1)[::-1], -1),
    "contiguous": lambda v, a, b: a.contiguous(),
    "clone": lambda v, a, b: a.clone(),
    "expand": lambda v, a, b: a[:1].expand(ROWS, -1) * a,
    "weight cast": lambda v, a, b: F.linear(a, v.down.to(a.dtype)) if is_wide(a) else None,
    "detach": lambda v, a, b: a.detach(),
    "leaf": lambda v, a, b: v.leaf(a),
    "view of leaf": lambda v, a, b: v.leaf(a).view(a.shape),
    "branch": dropped_branch,
}
WRITES: dict[str, Callable[[Values, Tensor, Tensor], Any]] = {
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
    "parameter": lambda v, a, b: unrecorded_write(v.scale),
    "weight": lambda v, a, b: unrecorded_write(v.down),
    "bias": lambda v, a, b: unrecorded_write(v.bias),
    "constant": lambda v, a, b: v.constant.mul_(2),
}
# fmt: on


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
        operator = PURE.get(self.name) or WRITES[self.name.removeprefix("write ")]
        with contextlib.ExitStack() as stack:
            if not self.seen:
                stack.enter_context(torch._C.DisableTorchFunction())
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            try:
                result = operator(values, a, b)
            except RuntimeError:  # a write that autograd forbids, shapes or types that do not fit
                return False
        if isinstance(result, Tensor) and self.name in PURE:
            values.live.append(result)
        return True


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs inside the region, what is forgotten and written to after it, what is the loss."""

    inside: list[Instruction]
    forgotten: list[int]
    after: list[Instruction]
    outputs: list[int]


def instructions(names: list[str], **sizes: int) -> st.SearchStrategy[list[Instruction]]:
    # Mostly the latest values: that gives deep programs.
    which = st.one_of(st.integers(-3, -1), st.integers(-8, 8))
    seen = st.integers(0, 5).map(bool)
    one = st.builds(
        Instruction,
        st.sampled_from(names),
        which,
        which,
        seen,
        st.integers(0, 3).map(lambda n: not n),
    )
    return st.lists(one, **sizes)


ANY_WRITE = [f"write {name}" for name in WRITES]
PROGRAMS = st.builds(
    Program,
    inside=instructions([*PURE, *PURE, *PURE, *ANY_WRITE], min_size=3, max_size=15),
    forgotten=st.lists(st.integers(0, 20), max_size=6),
    after=instructions(ANY_WRITE, max_size=2),
    outputs=st.lists(st.one_of(st.just(-1), st.integers(-6, -1)), min_size=1, max_size=3),
)


@dataclasses.dataclass
class Outcome:
    done: list[bool]
    refused: bool
    tensors: list[Tensor | None]
    held: int


def run(program: Program, region: Context) -> Outcome:
    done = []
    with LiveStorages() as storages:
        values = Values()
        with region:
            for instruction in program.inside:
                done.append(instruction.run(values))
            chosen = [values.live[i % len(values.live)] for i in program.outputs]
            loss = sum((one.float() * 0.5).sum() for one in chosen)
        assert isinstance(loss, Tensor)
        del chosen
        for index in program.forgotten:
            if len(values.live) > 1:
                del values.live[index % len(values.live)]
        held = storages.nbytes()
        for instruction in program.after:
            done.append(instruction.run(values))
    refused = False
    if loss.requires_grad:
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
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


def check(program: Program) -> None:
    plain = run(program, contextlib.nullcontext())
    ours = run(program, rebuild_region(EVERYTHING))
    assert ours.done == plain.done
    assert ours.refused == plain.refused
    assert ours.held <= plain.held
    if plain.refused:
        return
    assert len(ours.tensors) == len(plain.tensors)
    for number, (left, right) in enumerate(zip(plain.tensors, ours.tensors, strict=True)):
        assert (left is None) == (right is None), number
        assert left is None or right is None or bitwise_equal(left, right), number


@settings(
    max_examples=EXAMPLES,
    derandomize="REBUILD_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(PROGRAMS)
def test_a_program_gives_the_same_bits_or_the_same_refusal_and_holds_no_more(
    program: Program,
) -> None:
    check(program)
