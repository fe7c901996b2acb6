"""Rotary embedding in C, held to the bits of the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops import reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize("interleaved", [False, True])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _angles(*shape: int) -> tuple[Tensor, Tensor]:
    angles = 100 * torch.randn(shape)
    return angles.cos(), angles.sin()


def _compare(
    x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor | None = None, *, interleaved: bool
) -> None:
    """Both directions; the gradient is the turn back, rounded as the reference rounds it."""
    assert ascend_ops.backend_of("rotary", x, cos, sin, interleaved=interleaved) == "cpu"
    x = x.detach().requires_grad_()
    before = x.detach().clone()
    y = ascend_ops.rotary(x, cos, sin, interleaved=interleaved, backend="cpu")
    assert y.is_contiguous()
    assert torch.equal(y, reference.rotary(x, cos, sin, interleaved=interleaved))
    grad = torch.randn(x.shape).to(x.dtype) if grad is None else grad
    of_x = torch.autograd.grad(y, x, grad)[0]
    assert torch.equal(of_x, reference.rotary(grad, cos, -sin, interleaved=interleaved))
    assert torch.equal(x, before)  # RO-04


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "of_angles"),
    [
        ((1,), (0,)),
        ((2,), (1,)),
        ((3,), (1,)),
        ((5, 3, 4), (5, 1, 2)),
        ((0, 3, 4), (1, 1, 2)),
        ((2, 7, 3, 70), (7, 1, 35)),
        ((2, 7, 3, 70), (2, 7, 1, 16)),
        ((2, 3, 7, 67), (1, 1, 7, 33)),
        ((2, 3, 7, 64), (32,)),
        ((2, 3, 7, 64), (2, 3, 7, 32)),
        ((2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 6), (2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 3)),
        ((6, 42, 123, 431), (123, 215)),
    ],
)
def test_odd_shapes(
    shape: tuple[int, ...], of_angles: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    _compare(torch.randn(shape).to(dtype), *_angles(*of_angles), interleaved=interleaved)


def _strided(dtype: torch.dtype) -> Iterator[Tensor]:
    """RO-02: all of shape [2, 7, 3, 10]."""
    yield torch.randn(2, 7, 3 * 30).to(dtype).split(30, -1)[1].view(2, 7, 3, 10)
    yield torch.randn(2, 3, 7, 10).to(dtype).transpose(1, 2)
    yield torch.randn(2, 7, 10, 3).to(dtype).transpose(2, 3)
    yield torch.randn(2, 7, 3, 20).to(dtype)[..., ::2]
    yield torch.randn(2, 7, 1, 10).to(dtype).expand(2, 7, 3, 10)
    yield torch.randn(()).to(dtype).expand(2, 7, 3, 10)


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_strides(dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = _angles(7, 1, 4)
    for x in _strided(dtype):
        for grad in _strided(dtype):
            _compare(x, cos, sin, grad, interleaved=interleaved)


@BOTH
def test_strided_angles(interleaved: bool) -> None:
    x = torch.randn(7, 3, 8)
    cos, sin = _angles(4, 7)
    _compare(x, cos.t().unsqueeze(1), sin.t().contiguous().unsqueeze(1), interleaved=interleaved)
    _compare(x, cos[:, :1].t().expand(7, 1, 4), sin.t().unsqueeze(1), interleaved=interleaved)


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
def test_angles_of_two_bytes(dtype: torch.dtype, interleaved: bool) -> None:
    """RO-08."""
    cos, sin = _angles(5, 4)
    for of_angles in (torch.bfloat16, torch.float16):
        _compare(
            torch.randn(5, 8).to(dtype), cos.to(of_angles), sin.to(of_angles),
            interleaved=interleaved,
        )  # fmt: skip


def test_long_positions() -> None:
    """RO-01: angles that were made in FP32 turn a BF16 query by themselves, at position 4095."""
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = 4095 * frequencies
    x = torch.randn(1, 64).to(torch.bfloat16)
    y = ascend_ops.rotary(x, angles.cos().float()[None], angles.sin().float()[None], backend="cpu")
    exact = reference.rotary(x.double(), angles.cos()[None], angles.sin()[None])
    torch.testing.assert_close(y.double(), exact, rtol=2.0**-8, atol=1e-6)


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_do_not_depend_on_threads(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(301, 3, 130).to(dtype)
    cos, sin = _angles(301, 1, 64)
    computed = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            computed.append(ascend_ops.rotary(x, cos, sin, interleaved=interleaved, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, computed[0]) for other in computed[1:])


def test_nan_and_infinity() -> None:
    x = torch.tensor([[1.0, float("inf"), float("nan"), 2.0]])
    cos, sin = _angles(1, 2)
    ours = ascend_ops.rotary(x, cos, sin, backend="cpu")
    expected = reference.rotary(x, cos, sin)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    odd = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert ascend_ops.rotary(torch.ones(2).bfloat16(), odd, odd, backend="cpu").isnan().all()


def test_fp64_is_computed_by_torch_without_a_word() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    assert ascend_ops.backend_of("rotary", x, *_angles(2)) == "eager"
    with pytest.raises(ConfigError, match="it computes in FP32"):
        ascend_ops.rotary(x, *_angles(2), backend="cpu")
