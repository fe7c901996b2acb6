"""Forward and backward of the fused operators, against torch's formulae and what it has itself.

The baseline is the formula as models write it. Bytes are what is held between forward and backward
in the tensors that backward reads: those of the inputs that it reads again count too, and the
result does not. Everything on a CPU runs on one thread: threads that wait for one another would
count as work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F

import ascend_ops
from ascend_core.device import current_backend
from ascend_core.testing import held_bytes
from benchmarks.case import Case, Variant
from benchmarks.threads import one_thread

_FORMULA = "torch's formula"
_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
Forward = Callable[[], Tensor]


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    tokens, wide = (64, 128) if quick else (4096, 22016)
    hidden, heads, head = (64, 2, 32) if quick else (4096, 32, 128)
    found = []
    for name, dtype in _DTYPES.items():
        made: dict[str, Callable[[torch.dtype], Mapping[str, Variant]]] = {
            f"swiglu, {tokens} x {wide}": lambda dtype: _swiglu(tokens, wide, dtype),
            f"rms_norm, {tokens} x {hidden}": lambda dtype: _rms_norm(tokens, hidden, dtype),
            f"rotary, {tokens} x {heads} x {head}": lambda dtype: _rotary(
                tokens, heads, head, dtype
            ),
        }
        found += [_case(f"{case}, {name}", make, dtype) for case, make in made.items()]
    return found


def _case(
    name: str, make: Callable[[torch.dtype], Mapping[str, Variant]], dtype: torch.dtype
) -> Case:
    def around() -> AbstractContextManager[object]:
        return one_thread() if current_backend().name == "cpu" else contextlib.nullcontext()

    return Case(
        name,
        lambda: make(dtype),
        baseline=_FORMULA,
        rounds=11,
        bytes_are="held for backward, the inputs that it reads among them",
        around=around,
    )


def _variants(
    forwards: Mapping[str, Forward], inputs: Sequence[Tensor], read_again: Sequence[Tensor]
) -> dict[str, Variant]:
    """Variants that run forward and backward, for one incoming gradient."""
    with torch.no_grad():
        grad = torch.randn_like(next(iter(forwards.values()))())
    kept = sum(tensor.nbytes for tensor in read_again) - grad.nbytes

    def variant(forward: Forward) -> Variant:
        return Variant(
            lambda: torch.autograd.grad(forward(), inputs, grad),
            lambda: held_bytes(forward) + kept,
        )

    return {name: variant(forward) for name, forward in forwards.items()}


def _backends() -> Sequence[str]:
    best = {"cpu": "cpu", "cuda": "triton", "npu": "npu"}[current_backend().name]
    return best, "eager"


def _random(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    device = current_backend().device()
    return torch.randn(*shape, device=device).to(dtype).requires_grad_(requires_grad)


def _swiglu(tokens: int, wide: int, dtype: torch.dtype) -> Mapping[str, Variant]:
    x = _random(tokens, wide, dtype=dtype, requires_grad=True)

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    compiled = torch.compile(formula)
    forwards = {_FORMULA: lambda: formula(x), "torch.compile": lambda: compiled(x)}
    for name in _backends():
        forwards[f"ascend_ops, {name}"] = lambda name=name: ascend_ops.swiglu(x, backend=name)
    return _variants(forwards, [x], [x])


def _rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> Mapping[str, Variant]:
    x = _random(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = _random(hidden, dtype=dtype, requires_grad=True)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight

    compiled = torch.compile(formula)
    forwards = {
        _FORMULA: lambda: formula(x, weight),
        "torch.compile": lambda: compiled(x, weight),
        "F.rms_norm": lambda: F.rms_norm(x, (hidden,), weight, 1e-6),
    }
    for name in _backends():
        forwards[f"ascend_ops, {name}"] = lambda name=name: ascend_ops.rms_norm(
            x, weight, backend=name
        )
    return _variants(forwards, [x, weight], [x, weight])


def _rotary(tokens: int, heads: int, head: int, dtype: torch.dtype) -> Mapping[str, Variant]:
    x = _random(1, tokens, heads, head, dtype=dtype, requires_grad=True)
    frequencies = 10000.0 ** (-torch.arange(0, head, 2, device=x.device) / head)
    angles = (torch.arange(tokens, device=x.device)[:, None] * frequencies).unsqueeze(1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    twice = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    compiled = torch.compile(formula)
    forwards = {_FORMULA: lambda: formula(x, *twice), "torch.compile": lambda: compiled(x, *twice)}
    for name in _backends():
        forwards[f"ascend_ops, {name}"] = lambda name=name: ascend_ops.rotary(
            x, cos, sin, backend=name
        )
    return _variants(forwards, [x], [cos, sin])
