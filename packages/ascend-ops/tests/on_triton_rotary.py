"""The kernel of the rotary embedding in Triton where it runs; `test_triton.py` starts this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_ops import _backends, reference
from ascend_ops._kernels.triton.rotary import TritonRotary

pytestmark = pytest.mark.usefixtures("triton_device")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


@pytest.fixture(scope="module")
def kernel(triton_device: torch.device) -> TritonRotary:
    """The one that the operator uses: tried once."""
    kernel: TritonRotary = _backends._load("rotary", "triton")
    assert kernel.trial.failure(triton_device) is None
    return kernel


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_as_reference(
    kernel: TritonRotary, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> None:
    """The same bits."""
    before = x.clone()
    for inverse in (False, True):
        y = kernel.forward(x, cos, sin, interleaved, inverse)
        expected = reference.rotary(x, cos, -sin if inverse else sin, interleaved=interleaved)
        assert y.is_contiguous() and y.dtype == x.dtype
        assert torch.equal(y, expected)
    assert torch.equal(x, before)  # RO-04


@both_pairings
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("of_angles", FLOATS, ids=str)
def test_dtypes(
    dtype: torch.dtype,
    of_angles: torch.dtype,
    interleaved: bool,
    kernel: TritonRotary,
    triton_device: torch.device,
) -> None:
    """RO-08."""
    x = random(2, 9, 3, 26, device=triton_device, dtype=dtype)
    cos, sin = random(2, 9, 1, 11, device=triton_device, dtype=of_angles).chunk(2)
    assert_as_reference(kernel, x, cos, sin, interleaved)


@both_pairings
@pytest.mark.parametrize("width", [2, 3, 10, 64, 431, 2600])
@pytest.mark.parametrize("share", [1, 2, 9])
def test_odd_sizes_and_elements_left_over(
    width: int, share: int, interleaved: bool, kernel: TritonRotary, triton_device: torch.device
) -> None:
    pairs = width // 2 // share
    if pairs:
        x = random(5, width, device=triton_device)
        cos, sin = random(2, 5, pairs, device=triton_device)
        assert_as_reference(kernel, x, cos, sin, interleaved)
        assert_as_reference(kernel, x[0], cos[0], sin[0], interleaved)
        assert_as_reference(kernel, x[:0], cos[:0], sin[:0], interleaved)


@both_pairings
def test_no_pair_is_turned(
    interleaved: bool, kernel: TritonRotary, triton_device: torch.device
) -> None:
    x = random(5, 6, device=triton_device)
    assert_as_reference(kernel, x, x[:, :0], x[:, :0], interleaved)


@both_pairings
def test_any_strides(interleaved: bool, kernel: TritonRotary, triton_device: torch.device) -> None:
    """RO-02."""
    qkv = random(2, 7, 3, 3, 16, device=triton_device, dtype=torch.bfloat16)
    of_batch = random(2, 2, 1, 7, 8, device=triton_device)
    for which in range(3):
        x = qkv[:, :, which].transpose(1, 2)  # [B, H, S, D]
        assert_as_reference(kernel, x, *of_batch, interleaved)
        assert_as_reference(kernel, x, *of_batch[:, 0], interleaved)
        assert_as_reference(kernel, x, *of_batch[:, 0, 0, :, :3], interleaved)
        assert_as_reference(kernel, x[..., ::2], *of_batch[..., ::2], interleaved)
        assert_as_reference(kernel, x, of_batch[0], of_batch[1].clone(), interleaved)
    grad = qkv[:1, :1, :1, :1, :1].expand(2, 7, 3, 3, 16)[:, :, 0].transpose(1, 2)
    assert_as_reference(kernel, grad, *of_batch, interleaved)


def test_more_dimensions_than_a_kernel_has(
    kernel: TritonRotary, triton_device: torch.device
) -> None:
    x = random(2, 3, 2, 3, 2, 8, device=triton_device).transpose(0, 1).transpose(3, 4)
    cos, sin = random(2, 3, 1, 2, 1, 3, 4, device=triton_device)
    assert_as_reference(kernel, x, cos, sin, False)


def test_rows_that_are_2_to_the_31_elements_apart(
    kernel: TritonRotary, triton_device: torch.device
) -> None:
    """SG-03. Of the memory only what is written is really taken, where it is the host's."""
    apart = (1 << 31) + 6
    memory = torch.empty(apart + 8, dtype=torch.bfloat16, device=triton_device)
    x = memory.as_strided((2, 8), (apart, 1))
    x.copy_(random(2, 8, device=triton_device))
    assert_as_reference(kernel, x, *random(2, 2, 4, device=triton_device), False)


def test_the_operator_is_computed_by_it(triton_device: torch.device) -> None:
    x = random(3, 8, device=triton_device).requires_grad_()
    cos, sin = random(2, 3, 4, device=triton_device)
    y = ascend_ops.rotary(x, cos, sin, backend="triton")
    expected = reference.rotary(x, cos, sin)
    assert torch.equal(y, expected)
    grad = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])
    assert ascend_ops.backend_of("rotary", x, cos, sin, backend="triton") == "triton"


def test_fp64_is_refused(kernel: TritonRotary, triton_device: torch.device) -> None:
    x = torch.ones(2, 4, device=triton_device)
    cos = x[:, :2]
    assert "FP64" in str(kernel.refusal(x.double(), cos, cos, False, False))
    assert "FP64" in str(kernel.refusal(x, cos.double(), cos.double(), False, False))
    assert kernel.refusal(x, cos, cos, False, False) is None
