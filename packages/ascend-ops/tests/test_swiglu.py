"""SwiGLU on every backend that this machine has."""

import contextlib
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ascend_ops
from ascend_core.errors import ConfigError, UnavailableError
from ascend_ops import reference


def test_equals_torchs_own_operators_in_bf16() -> None:
    x = torch.randn(3, 10, 64, dtype=torch.bfloat16, requires_grad=True)
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up
    grad = torch.randn_like(expected)
    expected_grad = torch.autograd.grad(expected, x, grad)[0]
    y = ascend_ops.swiglu(x, backend="eager")
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected_grad)


def test_gradients_are_right_in_fp64() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return ascend_ops.swiglu(x, bias=bias, limit=0.7)

    assert torch.autograd.gradcheck(run, (x, bias))
    assert torch.autograd.gradgradcheck(run, (x, bias))


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_clamped_gradients_are_as_torchs_clamp_has_them(backend: str) -> None:
    """SG-06: at the limit it passes, beyond and of NaN it does not."""
    values = [-3.0, -1.0, 0.5, 1.0, 3.0, math.inf, -math.inf, math.nan]
    gate, up = torch.tensor(values).repeat(8), torch.tensor(values).repeat_interleave(8)
    gate.requires_grad_(), up.requires_grad_()
    plain = F.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0)
    expected = torch.autograd.grad(plain, (gate, up), torch.ones_like(plain))
    ours = ascend_ops.swiglu_pair(gate, up, limit=1.0, backend=backend)
    found = torch.autograd.grad(ours, (gate, up), torch.ones_like(ours))
    torch.testing.assert_close(ours, plain, equal_nan=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_bias_of_a_single_row(backend: str) -> None:
    x, bias = torch.randn(2, 8).unbind()
    given = x.requires_grad_(), bias.requires_grad_()
    expected = torch.autograd.grad(reference.swiglu(x, bias=bias).sum(), given)
    y = ascend_ops.swiglu(x, bias=bias, backend=backend)
    for one, other in zip(torch.autograd.grad(y.sum(), given), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_limit_that_no_number_exceeds_is_none(backend: str) -> None:
    gate, up = torch.randn(2, 3, 8, dtype=torch.float16).unbind()
    plain = ascend_ops.swiglu_pair(gate, up, backend=backend)
    assert torch.equal(ascend_ops.swiglu_pair(gate, up, limit=1e5, backend=backend), plain)
    x = torch.cat((gate, up), -1)
    assert torch.equal(ascend_ops.swiglu(x, limit=1e5, backend=backend), plain)


@pytest.mark.parametrize(
    ("ours", "formula"),
    [
        (ascend_ops.swiglu, reference.swiglu),
        (lambda x: ascend_ops.swiglu_pair(x, x), lambda x: reference.swiglu_pair(x, x)),
        (ascend_ops.rms_norm, reference.rms_norm),
    ],
)
def test_a_third_derivative_is_right(
    ours: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def third(function: Callable[[Tensor], Tensor]) -> Tensor:
        y = function(x).sin().sum()
        for _ in range(2):  # `x ** 3` keeps the graph alive, as other operators of a model do
            y = torch.autograd.grad(y + x.pow(3).sum(), x, create_graph=True)[0].square().sum()
        return torch.autograd.grad(y, x)[0]

    torch.testing.assert_close(third(ours), third(formula))


@pytest.mark.parametrize(
    "function",
    [
        ascend_ops.swiglu,
        ascend_ops.rms_norm,
        lambda x: ascend_ops.swiglu_pair(x.to_dense(), x),
        lambda x: ascend_ops.rotary(x, torch.ones(4, 2), torch.ones(4, 2)),
    ],
)
def test_sparse_tensors_are_refused_by_name(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"is of layout torch\.sparse_coo"):
        function(torch.eye(4).to_sparse())


def test_a_refused_call_keeps_no_tensor() -> None:
    x = torch.randn(3, 8)
    kept = weakref.ref(x)
    with contextlib.suppress(UnavailableError):
        ascend_ops.swiglu(x, backend="npu")
    del x
    assert kept() is None


def test_opcheck() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.ascend_ops.swiglu.default, (x, -1, None, None, None))
    gate, up = torch.randn(2, 3, 8).unbind()
    pair = (gate.requires_grad_(), up.requires_grad_(), 0.5, None)
    torch.library.opcheck(torch.ops.ascend_ops.swiglu_pair.default, pair)


def test_whole_graph_is_compiled() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: ascend_ops.swiglu(x * 2).sum(), fullgraph=True, backend="aot_eager"
    )
    grad = torch.autograd.grad(compiled(x), x)[0]
    assert torch.equal(grad, torch.autograd.grad(ascend_ops.swiglu(x * 2).sum(), x)[0])
    assert ascend_ops.backend_of("swiglu", x) in ("eager", "cpu")
    torch.testing.assert_close(ascend_ops.swiglu(x), reference.swiglu(x))
