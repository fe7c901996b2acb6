"""Every operator that a policy lists is really recorded, and rebuilt to the bit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import resolve_name

from ascend_core.testing import bitwise_equal
from ascend_recompute import policy
from ascend_recompute.activation import rebuild_region
from ascend_recompute.fused import FusedActivation, run_fused
from ascend_recompute.policy import Policy

SHAPE = (6, 37)  # odd: vectorised kernels have a remainder
EVERYTHING = dataclasses.replace(policy.DEFAULT.extended(*policy.NORMS), min_bytes=0)

Call = Callable[[Tensor, Tensor], Tensor]

TWO_TENSORS = frozenset({
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.multiply,
    torch.divide, torch.subtract, torch.true_divide, torch.rsub,
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.maximum, Tensor.minimum,
    Tensor.multiply, Tensor.divide, Tensor.subtract, Tensor.true_divide,
    Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__mul__, Tensor.__rmul__,
    Tensor.__truediv__,
})  # fmt: skip
# How the others are called that are not called on one tensor alone.
OTHERS: dict[Any, Call] = {
    F.prelu: lambda a, b: F.prelu(a, b[0, :1].detach()),
    F.threshold: lambda a, b: F.threshold(a, 0.5, -2.0),
    F.glu: lambda a, b: F.glu(a.sigmoid()[:, :36]),
    F.dropout: lambda a, b: F.dropout(a, 0.4),
    F.layer_norm: lambda a, b: F.layer_norm(a, SHAPE[1:], b[0], b[1]),
    F.rms_norm: lambda a, b: F.rms_norm(a, SHAPE[1:], b[0]),
    torch.prelu: lambda a, b: torch.prelu(a, b[0, :1].detach()),
    torch.pow: lambda a, b: torch.pow(a, 2.5),
    torch.clamp: lambda a, b: torch.clamp(a, 0.5, 0.8),
    torch.where: lambda a, b: torch.where(b.detach() > 0.6, a, b),
    torch.addcmul: lambda a, b: torch.addcmul(a, a, b, value=0.5),
    torch.reshape: lambda a, b: torch.reshape(a.t(), (-1,)),
    torch.dropout: lambda a, b: torch.dropout(a, 0.4, True),
    torch.layer_norm: lambda a, b: torch.layer_norm(a, SHAPE[1:], b[0], b[1]),
    torch.rms_norm: lambda a, b: torch.rms_norm(a, SHAPE[1:], b[0]),
    Tensor.pow: lambda a, b: a.pow(3),
    Tensor.clamp: lambda a, b: a.clamp(min=0.6),
    Tensor.where: lambda a, b: a.where(b.detach() > 0.6, b),
    Tensor.addcmul: lambda a, b: a.addcmul(a, b),
    Tensor.masked_fill: lambda a, b: a.masked_fill(b.detach() > 0.6, -1.0),
    Tensor.to: lambda a, b: a.to(torch.bfloat16),
    Tensor.type: lambda a, b: a.type(torch.float64),
    Tensor.type_as: lambda a, b: a.double().type_as(a),
    Tensor.float: lambda a, b: a.bfloat16().float(),
    Tensor.contiguous: lambda a, b: a.t().contiguous(),
    Tensor.reshape: lambda a, b: a.t().reshape(-1),
    Tensor.__rsub__: lambda a, b: Tensor.__rsub__(a, 2.0),
    Tensor.__rtruediv__: lambda a, b: Tensor.__rtruediv__(a, 2.0),
    Tensor.__pow__: lambda a, b: Tensor.__pow__(a, 1.5),
    Tensor.__rpow__: lambda a, b: Tensor.__rpow__(a, 1.5),
    run_fused: lambda a, b: run_fused(FusedActivation(F.silu), a),
}
KEYWORDS: dict[str, Call] = {
    "add": lambda a, b: torch.add(input=a, other=b, alpha=0.5),
    "sub, the other way round": lambda a, b: torch.sub(other=b, input=a),
    "Tensor.mul": lambda a, b: a.mul(other=b),
    "div": lambda a, b: torch.div(input=a, other=b),
    "div, rounded by position": lambda a, b: torch.div(a, b, rounding_mode=None),
    "pow": lambda a, b: torch.pow(exponent=3, input=a),
    "clamp": lambda a, b: torch.clamp(max=0.8, min=0.5, input=a),
    "clamp between tensors": lambda a, b: torch.clamp(a, max=b.detach() * 1.0, min=None),
    "where": lambda a, b: torch.where(input=a, other=b, condition=b.detach() > 0.6),
    "addcmul": lambda a, b: torch.addcmul(tensor2=b, tensor1=a, input=a, value=0.3),
    "gelu": lambda a, b: F.gelu(input=a, approximate="tanh"),
    "silu": lambda a, b: F.silu(input=a),
    "leaky_relu": lambda a, b: F.leaky_relu(negative_slope=0.2, input=a - 0.6),
    "elu": lambda a, b: F.elu(input=a - 0.6, alpha=0.7),
    "softplus": lambda a, b: F.softplus(threshold=0.7, beta=1.5, input=a),
    "hardtanh": lambda a, b: F.hardtanh(max_val=0.7, min_val=0.2, input=a),
    "glu": lambda a, b: F.glu(dim=0, input=a.sigmoid()),
    "threshold": lambda a, b: F.threshold(value=-1.0, input=a, threshold=0.5),
    "prelu": lambda a, b: F.prelu(weight=b[0, :1].detach(), input=a - 0.6),
    "to a dtype": lambda a, b: a.to(dtype=torch.bfloat16),
    "to another's dtype": lambda a, b: a.double().to(tensor=a),
    "to with a copy": lambda a, b: a.to(torch.float32, copy=True),
    "clone": lambda a, b: torch.clone(input=a),
    "layer_norm": lambda a, b: F.layer_norm(
        input=a, bias=b[0], weight=b[1], normalized_shape=SHAPE[1:], eps=1e-3
    ),
    "rms_norm": lambda a, b: F.rms_norm(weight=b[0], normalized_shape=[SHAPE[1]], input=a),
    "F.dropout": lambda a, b: F.dropout(training=True, p=0.3, input=a),
    "torch.dropout": lambda a, b: torch.dropout(input=a, p=0.3, train=True),
    "torch.dropout, the other way round": lambda a, b: torch.dropout(train=True, p=0.3, input=a),
}  # fmt: skip
OPERATORS: dict[str, Call] = {
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "a ** b": lambda a, b: a**b,
    "a ** 2": lambda a, b: a**2,
    "-a": lambda a, b: -a,
    "2 + a": lambda a, b: 2 + a,
    "2 - a": lambda a, b: 2 - a,
    "2 * a": lambda a, b: 2 * a,
    "2 / a": lambda a, b: 2 / a,
    "2 ** a": lambda a, b: 2**a,
    "abs(a)": lambda a, b: abs(a - 0.6),
    "a + row": lambda a, b: a + b[:1],
    "a * column": lambda a, b: a * b[:, :1],
}
MODULES = [
    torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(), torch.nn.ReLU(), torch.nn.ReLU6(),
    torch.nn.LeakyReLU(), torch.nn.ELU(), torch.nn.SELU(), torch.nn.CELU(), torch.nn.Mish(),
    torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.Softplus(), torch.nn.Softsign(),
    torch.nn.Softshrink(), torch.nn.Hardshrink(), torch.nn.Tanhshrink(), torch.nn.Hardswish(),
    torch.nn.Hardsigmoid(), torch.nn.Hardtanh(), torch.nn.LogSigmoid(), torch.nn.PReLU(),
    torch.nn.Threshold(0.5, -1.0), torch.nn.Dropout(0.4), torch.nn.LayerNorm(SHAPE[1]),
    torch.nn.RMSNorm(SHAPE[1]),
]  # fmt: skip


def call_of(function: Any) -> Call:
    if function in OTHERS:
        return OTHERS[function]
    return function if function in TWO_TENSORS else lambda a, b: function(a)


def run(call: Call, region: Any) -> tuple[list[Tensor | None], int, int]:
    """Call on two tensors whose sources are saved; the output is saved by a product.

    Returns:
        Values and gradients; bytes of the output; bytes that are not held.
    """
    torch.manual_seed(0)
    a0, b0 = (torch.rand(SHAPE).add(0.5).requires_grad_() for _ in range(2))
    with region as tally:
        output = call(F.silu(a0), F.silu(b0))
        weight = torch.rand_like(output, requires_grad=True)
        result = (output * weight).float().sum()
    nbytes = output.untyped_storage().nbytes()
    dropped = 0 if tally is None else tally.by_label().get("region", 0)
    del output
    result.backward()
    return [result.detach(), a0.grad, b0.grad, weight.grad, torch.rand(1)], nbytes, dropped


def assert_rebuilt(call: Call, allowed: Policy = EVERYTHING) -> None:
    """Assert that the call's output is not held for the product, and that all values are equal."""
    plain, nbytes, _ = run(call, contextlib.nullcontext())
    ours, _, dropped = run(call, rebuild_region(allowed))
    for number, (left, right) in enumerate(zip(plain, ours, strict=True)):
        assert (left is None) == (right is None), number
        assert left is None or right is None or bitwise_equal(left, right), number
    assert dropped >= nbytes


LISTED = sorted(EVERYTHING.operators | EVERYTHING.random, key=lambda f: str(resolve_name(f)))


@pytest.mark.parametrize("function", LISTED, ids=lambda f: str(resolve_name(f)))
def test_each_listed_operator_is_recorded_and_rebuilt(function: Any) -> None:
    # Nothing but what makes its arguments is listed beside it.
    beside = {F.silu, Tensor.sigmoid, Tensor.double, Tensor.bfloat16}
    random = frozenset({function}) & EVERYTHING.random
    operators = frozenset({*beside, function}) - random
    on_cpu_beside_npu = "torch_npu" in sys.modules and torch.get_default_device().type == "cpu"
    if on_cpu_beside_npu and function in {torch.true_divide, Tensor.true_divide}:
        pytest.skip("torch_npu registers true_divide for the CPU without a derivative")
    assert_rebuilt(call_of(function), Policy(operators, random, min_bytes=0))


@pytest.mark.parametrize("call", KEYWORDS.values(), ids=KEYWORDS)
def test_arguments_by_keyword_in_any_order(call: Call) -> None:
    assert_rebuilt(call)


@pytest.mark.without_npu
def test_a_memory_format_by_keyword() -> None:
    def call(a: Tensor, _: Tensor) -> Tensor:
        image = a[:, :36].view(6, 4, 3, 3)
        return image.to(torch.bfloat16, memory_format=torch.channels_last)

    assert_rebuilt(call)


@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS)
def test_operators_of_the_language(call: Call) -> None:
    assert_rebuilt(call)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_of_torch(module: torch.nn.Module) -> None:
    here = copy.deepcopy(module).to(torch.get_default_device())
    assert_rebuilt(lambda a, _: here(a))


def test_matrix_products_attention_and_softmax_are_in_no_group() -> None:
    expensive = {
        torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, F.linear,
        Tensor.matmul, Tensor.__matmul__, F.scaled_dot_product_attention, F.conv1d, F.conv2d,
        F.embedding, torch.softmax, F.softmax,
    }  # fmt: skip
    assert not expensive & (EVERYTHING.operators | EVERYTHING.random)
    assert not any(policy.DEFAULT.covers(function) for function in expensive)
    assert not any(policy.DEFAULT.covers(function) for function in policy.NORMS)


def test_a_policy_is_extended_without_changing_it() -> None:
    mine = policy.DEFAULT.extended(torch.softmax, random=[F.alpha_dropout])
    assert mine.covers(torch.softmax)
    assert mine.covers(F.alpha_dropout)
    assert F.alpha_dropout in mine.random
    assert mine.covers(F.gelu)
    assert not policy.DEFAULT.covers(torch.softmax)
    assert not policy.DEFAULT.covers(F.alpha_dropout)
    assert (mine.max_operators, mine.min_bytes) == (16, 4096)


def test_what_a_policy_is_extended_with_is_rebuilt() -> None:
    added = EVERYTHING.extended(torch.softmax, torch.sinc)
    assert_rebuilt(lambda a, _: torch.softmax(a, -1), added)
    assert_rebuilt(lambda a, _: torch.sinc(a), added)


def test_random_operators_of_ones_own_draw_the_same_numbers_again() -> None:  # AR-06
    added = EVERYTHING.extended(random=[F.rrelu])
    assert_rebuilt(lambda a, _: F.rrelu(a - 0.6, training=True), added)


def test_an_operator_of_a_library_is_rebuilt() -> None:
    with torch.library._scoped_library("ascend_test", "FRAGMENT") as library:
        library.define("half_of(Tensor x) -> Tensor")
        library.impl("half_of", lambda x: x * 0.5, "CompositeImplicitAutograd")
        half_of = torch.ops.ascend_test.half_of
        assert_rebuilt(lambda a, _: half_of(a), EVERYTHING.extended(half_of))
        assert_rebuilt(lambda a, _: half_of.default(a), EVERYTHING.extended(half_of.default))


def test_what_is_not_listed_is_kept() -> None:
    only_silu = Policy(frozenset({F.silu}), min_bytes=0)
    _, _, dropped = run(lambda a, b: a * b, rebuild_region(only_silu))
    assert dropped == 2 * SHAPE[0] * SHAPE[1] * 4  # what both calls of silu made


def dropped_by(call: Call, allowed: Policy) -> int:
    return run(call, rebuild_region(allowed))[2]


def test_small_tensors_are_kept() -> None:
    nbytes = SHAPE[0] * SHAPE[1] * 4
    at = dataclasses.replace(EVERYTHING, min_bytes=nbytes)
    above = dataclasses.replace(EVERYTHING, min_bytes=nbytes + 1)
    assert dropped_by(lambda a, _: torch.exp(a), at) == nbytes
    assert dropped_by(lambda a, _: torch.exp(a), above) == 0


def chain(length: int) -> Call:
    def call(a: Tensor, _: Tensor) -> Tensor:
        for _ in range(length):
            a = a + 1.0  # saves nothing, so that all is rebuilt from the start
        return a

    return call


@pytest.mark.parametrize("most", [1, 3, 16])
def test_a_rebuild_runs_no_more_operators_than_allowed(most: int) -> None:
    allowed = dataclasses.replace(EVERYTHING, max_operators=most)
    assert dropped_by(chain(most - 1), allowed) > 0  # and silu is one
    assert dropped_by(chain(most), allowed) == 0
    assert_rebuilt(chain(most - 1), allowed)
