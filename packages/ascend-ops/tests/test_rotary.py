"""Rotary embedding: the operator, whatever backend computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_core.errors import ConfigError


def _angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*shape, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_right_in_fp64(interleaved: bool) -> None:
    x = torch.randn(2, 3, 2, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = _angles(3, 1, 4, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return ascend_ops.rotary(x, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_both_pairings_by_hand() -> None:
    """RO-05: a quarter turn of (a, b) is (-b, a)."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    cos, sin = torch.zeros(2), torch.ones(2)
    assert ascend_ops.rotary(x, cos, sin).tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert ascend_ops.rotary(x, cos, sin, interleaved=True).tolist() == [-2.0, 1.0, -4.0, 3.0]
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]  # RO-04


def test_opcheck() -> None:
    x = torch.randn(2, 3, 2, 10, requires_grad=True)
    cos, sin = _angles(3, 1, 4)
    operator = torch.ops.ascend_ops.rotary.default
    torch.library.opcheck(operator, (x, cos, sin, True, False, None))
    torch.library.opcheck(
        operator, (x.detach().transpose(1, 2), *_angles(1, 3, 5), False, True, None)
    )


@pytest.mark.parametrize("shape", [(3, 4), (2, 1, 3, 2), (4, 1, 2)])
def test_angles_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="rotary: cos of shape"):
        ascend_ops.rotary(torch.randn(3, 2, 6), *_angles(*shape))


def test_gradient_of_angles_is_refused() -> None:
    cos, sin = _angles(3)
    with pytest.raises(ConfigError, match="requires a gradient"):
        ascend_ops.rotary(torch.randn(6), cos.requires_grad_(), sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("of_angles", [torch.float32, torch.bfloat16, torch.float64])
def test_result_is_of_the_dtype_of_x(dtype: torch.dtype, of_angles: torch.dtype) -> None:
    """RO-08."""
    x = torch.randn(5, 8, dtype=dtype)
    assert ascend_ops.rotary(x, *_angles(5, 4, dtype=of_angles)).dtype == dtype
