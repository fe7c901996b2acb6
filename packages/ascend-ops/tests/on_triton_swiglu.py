"""SwiGLU's kernels of Triton where they run; see `test_triton.py`, which starts this."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_ops import _backends, reference
from ascend_ops._kernels.eager.swiglu import EagerSwiglu
from ascend_ops._kernels.triton.swiglu import TritonSwiglu

pytestmark = pytest.mark.usefixtures("triton_device")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LAST_BITS = 0 if os.environ.get("TRITON_INTERPRET") == "1" else 64  # of 65536; not measured on cuda


@pytest.fixture(scope="module")
def kernel(triton_device: torch.device) -> TritonSwiglu:
    """The one that the operator uses: tried once."""
    kernel: TritonSwiglu = _backends._load("swiglu", "triton")
    assert kernel.trial.failure(triton_device) is None
    return kernel


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (3 * torch.randn(*shape, generator=generator)).to(device, dtype)


def assert_as_eager(kernel: TritonSwiglu, grad: Tensor, *call: Any) -> None:
    """FP32 within a few roundings; in half precision, 1 element of 1000 may be a rounding off."""
    before = [one.clone() for one in (grad, *call[0])]
    eager = EagerSwiglu()
    pairs = [(kernel.forward(*call), eager.forward(*call))]
    pairs += zip(kernel.backward(grad, *call), eager.backward(grad, *call), strict=True)
    for ours, theirs in pairs:
        assert ours.is_contiguous() and ours.dtype == theirs.dtype
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=2e-6)
            continue
        assert (ours != theirs).sum() <= ours.numel() / 1000
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6)
    assert all(map(torch.equal, (grad, *call[0]), before))  # SG-01


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 2), (7, 42), (2, 3, 862), (2, 4100), (0, 4), (3, 0)])
def test_halves_of_odd_sizes(
    shape: tuple[int, ...], dtype: torch.dtype, kernel: TritonSwiglu, triton_device: torch.device
) -> None:
    x = random(*shape, device=triton_device, dtype=dtype)
    grad = random(*shape[:-1], shape[-1] // 2, device=triton_device, dtype=dtype)
    bias = random(shape[-1], device=triton_device)
    assert_as_eager(kernel, grad, (x,), -1, None, None)
    assert_as_eager(kernel, grad, (x,), x.dim() - 1, bias, 1.7)  # SG-06


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dimension_of_any_strides(
    dim: int, kernel: TritonSwiglu, triton_device: torch.device
) -> None:
    """SG-09."""
    whole = random(4, 6, 2 * 10, device=triton_device, dtype=torch.bfloat16)
    bias = random(64, device=triton_device)
    for x in (whole, whole[..., ::2], whole.transpose(0, 1), whole.permute(2, 0, 1), whole[::2]):
        result = reference.swiglu(x, dim)
        for grad in (torch.ones_like(result), result[:1, :1, :1].expand_as(result)):
            assert_as_eager(kernel, grad, (x,), dim, None, None)
            assert_as_eager(kernel, grad, (x,), dim, bias[: x.shape[dim]], 0.7)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_tensors(dtype: torch.dtype, kernel: TritonSwiglu, triton_device: torch.device) -> None:
    whole = random(3, 5, 2 * 70, device=triton_device, dtype=dtype)
    pairs: list[tuple[Tensor, ...]] = [
        whole.chunk(2, -1),
        (whole[..., ::2], whole[..., 1::2].contiguous()),
        (whole.transpose(0, 1), whole.transpose(0, 1).contiguous()),
        (whole, whole),  # SG-01
        (whole[0, 0, 0], whole[0, 0, 1]),
    ]
    for gate, up in pairs:
        one = torch.ones((), device=triton_device, dtype=dtype)
        for grad in (one.expand(gate.shape), gate.contiguous(), gate):
            assert_as_eager(kernel, grad, (gate, up), -1, None, None)
            assert_as_eager(kernel, grad, (gate, up), -1, None, 2.5)


def test_every_bf16_gate_is_as_torchs(kernel: TritonSwiglu, triton_device: torch.device) -> None:
    """SG-08: the same bits, and so -0 where torch has it; NaN where torch has it alone."""
    bits = torch.arange(-(1 << 15), 1 << 15, device=triton_device).to(torch.int16)
    gate = bits.view(torch.bfloat16)
    up, grad = torch.full_like(gate, 1.2345), torch.full_like(gate, -0.789)  # whose product rounds
    eager = EagerSwiglu()
    for limit in (None, 7.0):
        call: Any = ((gate, up), -1, None, limit)
        pairs = [(kernel.forward(*call), eager.forward(*call))]
        pairs += zip(kernel.backward(grad, *call), eager.backward(grad, *call), strict=True)
        for ours, theirs in pairs:
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num().signbit(), theirs.nan_to_num().signbit())
            # but where the last bit of the exponential is another one
            off = (ours != theirs) & ~theirs.isnan()
            assert off.sum() <= LAST_BITS
            steps = ours.view(torch.int16).int() - theirs.view(torch.int16)
            assert steps[off].abs().le(1).all()


def test_rows_that_are_2_to_the_31_elements_apart(
    kernel: TritonSwiglu, triton_device: torch.device
) -> None:
    """SG-03. Of the memory only what is written is really taken, where it is the host's."""
    apart = (1 << 31) + 6
    memory = torch.empty(apart + 8, dtype=torch.bfloat16, device=triton_device)
    x = memory.as_strided((2, 8), (apart, 1))
    x.copy_(random(2, 8, device=triton_device))
    assert_as_eager(kernel, x[:, :4], (x,), -1, None, None)


def test_the_operator_is_computed_by_it(triton_device: torch.device) -> None:
    x = random(3, 8, device=triton_device).requires_grad_()
    bias = random(8, device=triton_device).requires_grad_()
    y = ascend_ops.swiglu(x, bias=bias, limit=2.0, backend="triton")
    expected = reference.swiglu(x, bias=bias, limit=2.0)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y.sum(), (x, bias))  # SG-05, and a gradient of stride 0
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), (x, bias)), strict=True):
        torch.testing.assert_close(one, other)
    assert ascend_ops.backend_of("swiglu", x, backend="triton") == "triton"


def test_fp64_is_refused(kernel: TritonSwiglu, triton_device: torch.device) -> None:
    x = torch.ones(2, 4, dtype=torch.float64, device=triton_device)
    assert "FP64" in str(kernel.refusal((x,), -1, None, None))
    assert "FP64" in str(kernel.refusal((x.float(),), -1, x[0], None))
    assert kernel.refusal((x.float(),), -1, None, None) is None
