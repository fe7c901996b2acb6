"""RMSNorm in C, held to the formula in FP64 and one rounding."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops import reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Half of the last bit, which rounding once may take, and the same in FP32 for what came before.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1, 1), (3,), (2, 63), (5, 64), (7, 65), (3, 4097), (2, 3, 129), (6, 42, 123, 431)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _check(ours: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Ours is `exact` after a rounding of its own, and 32 of FP32 of the largest term."""
    assert ours.dtype in FLOATS and ours.is_contiguous()
    error = (ours.double() - exact).abs()
    least = 2.0**-25 if ours.dtype == torch.float16 else 0.0
    in_fp32 = 32 * 2.0**-24 * terms.abs().amax()
    assert (error <= exact.abs() * ROUNDING[ours.dtype] * 1.001 + in_fp32 + least).all()


def _compare(x: Tensor, weight: Tensor | None, grad: Tensor, *, unit_offset: bool = False) -> None:
    """Ours and the formula in FP64, forward and backward."""
    leaves = [t for t in (x, weight) if t is not None]
    y = ascend_ops.rms_norm(x, weight, unit_offset=unit_offset, backend="cpu")
    grads = torch.autograd.grad(y, leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = reference.rms_norm(*wide, unit_offset=unit_offset)
    exact_grads = torch.autograd.grad(exact, wide, grad.double())
    _check(y, exact, exact)
    rstd = torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-6)
    scale = 1.0 if weight is None else wide[1] + float(unit_offset)
    _check(grads[0], exact_grads[0], grad * scale * rstd)
    if weight is not None:
        assert grads[1].dtype == weight.dtype
        of_rows = (grad * wide[0] * rstd).reshape(-1, x.shape[-1])
        _check(grads[1], exact_grads[1], of_rows.abs().sum(0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1]).to(dtype).requires_grad_()
    assert ascend_ops.backend_of("rms_norm", x, weight) == "cpu"
    _compare(x, weight, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("of_weight", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_weight_of_any_dtype(dtype: torch.dtype, of_weight: torch.dtype, unit_offset: bool) -> None:
    """RN-05, RN-09."""
    x = torch.randn(70, 129).to(dtype).requires_grad_()
    weight = torch.randn(129).to(of_weight).requires_grad_()
    _compare(x, weight, torch.randn(70, 129).to(dtype), unit_offset=unit_offset)


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_weight(dtype: torch.dtype) -> None:
    x = torch.randn(5, 129).to(dtype).requires_grad_()
    _compare(x, None, torch.randn(5, 129).to(dtype))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_nothing_at_all(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = ascend_ops.rms_norm(x, weight, backend="cpu")
    x_grad, weight_grad = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert y.shape == x_grad.shape == x.shape
    assert torch.equal(weight_grad, torch.zeros_like(weight))


def _strided() -> Iterator[Tensor]:
    x = torch.randn(4, 6, 10)
    yield x.transpose(0, 1)
    yield x.transpose(1, 2)
    yield x[..., ::2]
    yield x[..., 1:6]
    yield x[:, ::2]
    yield x[:1].expand(4, 6, 10)
    yield x[..., :1].expand(4, 6, 10)
    yield torch.randn(10, 7).t()


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_strides(dtype: torch.dtype) -> None:
    """RN-01, RN-02: of x and of the gradient that arrives."""
    for given in _strided():
        x = given.to(dtype).requires_grad_()
        weight = torch.randn(x.shape[-1]).to(dtype).requires_grad_()
        for grad in (
            torch.ones(()).expand(x.shape),
            torch.randn(x.shape[1:]).expand(x.shape),
            torch.randn(x.mT.shape).mT,
            torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., ::2],
        ):
            _compare(x, weight, grad.to(dtype))


def test_sum_and_slices_of_the_result() -> None:
    """RN-01."""
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    for use in (Tensor.sum, lambda y: y[..., ::2].sum(), lambda y: (y.t() * torch.ones(6)).sum()):
        ours = torch.autograd.grad(use(ascend_ops.rms_norm(x, weight, backend="cpu")), (x, weight))
        expected = torch.autograd.grad(use(reference.rms_norm(x, weight)), (x, weight))
        torch.testing.assert_close(ours, expected)


def test_a_gradient_that_is_given_stays_as_it_is() -> None:
    """RN-03."""
    x, grad = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64)
    before = grad.clone()
    y = ascend_ops.rms_norm(x, backend="cpu")
    first = torch.autograd.grad(y, x, grad, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], first)
    assert torch.equal(grad, before)
    of_residual = torch.autograd.grad(x + ascend_ops.rms_norm(x, backend="cpu"), x, grad)[0]
    torch.testing.assert_close(of_residual, grad + first)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", [0.0, 300.0, 1e20, 3e38])
def test_extreme_rows(row: float, dtype: torch.dtype) -> None:
    """RN-10: as torch's, and their gradients are numbers."""
    largest = torch.finfo(dtype).max
    x = torch.full((2, 64), min(row, largest), dtype=dtype, requires_grad=True)
    y = ascend_ops.rms_norm(x, backend="cpu")
    assert torch.equal(y, F.rms_norm(x, (64,), eps=1e-6))
    grad = torch.autograd.grad(y, x, torch.full_like(y, 2.0))[0]
    assert grad.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_stays_so(value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = value
    y = ascend_ops.rms_norm(x, backend="cpu")
    expected = reference.rms_norm(x)
    torch.testing.assert_close(y, expected, equal_nan=True)
    grads = []
    for function in (functools.partial(ascend_ops.rms_norm, backend="cpu"), reference.rms_norm):
        leaf = x.clone().requires_grad_()
        grads += torch.autograd.grad(function(leaf), leaf, torch.ones(3, 64))
    torch.testing.assert_close(*grads, equal_nan=True)
    odd = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert ascend_ops.rms_norm(torch.ones(1, 1).bfloat16(), odd, backend="cpu").isnan().all()


def test_long_rows_are_summed_accurately() -> None:
    """A single FP32 sum of a million squares would be off by 1e-5 or more."""
    x = torch.full((1, 1 << 20), 1.1, requires_grad=True)
    y = ascend_ops.rms_norm(x, eps=0.0, backend="cpu")
    assert ((y - 1).abs() <= 2.0**-21).all()


def test_many_rows_are_summed_accurately() -> None:
    x = torch.full((1 << 18, 2), 1.1)
    weight = torch.ones(2, requires_grad=True)
    y = ascend_ops.rms_norm(x, weight, eps=0.0, backend="cpu")
    (grad,) = torch.autograd.grad(y, weight, torch.full_like(y, 1.1))
    torch.testing.assert_close(grad, torch.full((2,), 1.1 * (1 << 18)), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    x = torch.randn(701, 999).to(dtype).requires_grad_()
    weight = torch.randn(999).requires_grad_()
    computed = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            y = ascend_ops.rms_norm(x, weight, backend="cpu")
            computed.append((y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))))
    finally:
        torch.set_num_threads(threads)
    for other in computed[1:]:
        assert all(map(torch.equal, other, computed[0]))


def test_fp64_is_computed_by_torch_without_a_word() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    assert ascend_ops.backend_of("rms_norm", x) == "eager"
    with pytest.raises(ConfigError, match="it computes in FP32"):
        ascend_ops.rms_norm(x, backend="cpu")
