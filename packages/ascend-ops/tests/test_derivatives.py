"""Derivatives that the operators do not have are refused, where torch would lose them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import ascend_ops
from ascend_core.errors import ConfigError


def _attend(x: Tensor) -> Tensor:
    heads = torch.ones(1, 4, 5, 8)
    return ascend_ops.alibi_attention(heads, heads, heads, x.flatten()[:4])


FUNCTIONS = [
    ascend_ops.swiglu,
    lambda x: ascend_ops.swiglu(torch.ones(3, 8), bias=x[0]),
    lambda x: ascend_ops.swiglu_pair(torch.ones(3, 8), x),
    lambda x: ascend_ops.rms_norm(torch.ones(3, 8), x[0]),
    lambda x: ascend_ops.rotary(x, torch.ones(4), torch.zeros(4)),
    _attend,
    lambda x: ascend_ops.alibi_attention(*[x.view(1, 1, 3, 8)] * 3, torch.ones(1)),
]


@pytest.mark.filterwarnings(r"ignore:`torch.jit.script\w*` is deprecated")  # torch's own import
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode(function: Callable[[Tensor], Tensor]) -> None:
    """Torch would return a result without a tangent, and say nothing."""
    x = torch.rand(3, 8)
    with forward_ad.dual_level(), pytest.raises(ConfigError, match="forward-mode AD"):
        function(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_transforms_of_torch_func(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(3, 8)
    with pytest.raises(ConfigError, match=r"instead  use ascend_ops\.reference"):
        torch.func.grad(lambda x: function(x).sum())(x)
