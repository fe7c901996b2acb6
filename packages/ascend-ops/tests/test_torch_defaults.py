"""What torch makes tensors of by default, elsewhere in the process, changes no result."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import ascend_ops


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def _swiglu(x: Tensor, weight: Tensor) -> Tensor:
    return ascend_ops.swiglu(x, bias=weight, limit=0.5)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return ascend_ops.rms_norm(ascend_ops.rms_norm(x), weight, unit_offset=True)


def _rotary(x: Tensor, weight: Tensor) -> Tensor:
    angle = weight.detach()[:4]
    return ascend_ops.rotary(x, angle.cos(), angle.sin()) * weight


def _alibi(x: Tensor, weight: Tensor) -> Tensor:
    heads = (x * weight).view(1, 4, 8, 8)
    return ascend_ops.alibi_attention(heads, heads, heads, ascend_ops.alibi_slopes(4), window=5)


@pytest.mark.parametrize("function", [_swiglu, _rms_norm, _rotary, _alibi])
@pytest.mark.parametrize("default_dtype", [torch.float64, torch.bfloat16], indirect=True)
def test_dtype(function: Callable[[Tensor, Tensor], Tensor], default_dtype: torch.dtype) -> None:
    """BF16 is what models are often loaded under: there memory was read beyond its end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, dtype=torch.float32, generator=generator, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float32, generator=generator, requires_grad=True)

    def computed() -> tuple[Tensor, ...]:
        y = function(x, weight)
        return y, *torch.autograd.grad(y.square().sum(), (x, weight))

    found = computed()
    torch.set_default_dtype(torch.float32)
    for ours, expected in zip(found, computed(), strict=True):
        assert torch.equal(ours, expected)


def test_device() -> None:
    """In a process of its own: C that is given a pointer into another device ends it."""
    program = """
import torch, ascend_ops
x = torch.randn(32, 8, requires_grad=True)
weight, angles = torch.randn(8, requires_grad=True), torch.randn(4)
slopes = ascend_ops.alibi_slopes(4)
torch.set_default_device("meta")
assert ascend_ops.backend_of("swiglu", x) in ("cpu", "eager")
y = ascend_ops.swiglu(x, limit=0.5).sum()
y = y + ascend_ops.rms_norm(x).square().sum() + ascend_ops.rms_norm(x, weight).square().sum()
y = y + ascend_ops.rotary(x, angles.cos(), angles.sin()).sum()
heads = x.view(1, 4, 8, 8)
y = y + ascend_ops.alibi_attention(heads, heads, heads, slopes).sum()
y.backward()
assert x.grad.device.type == weight.grad.device.type == "cpu" and x.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
