"""RMSNorm's kernels of Triton where they run; see `test_triton.py`, which starts this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_ops import _backends, reference
from ascend_ops._kernels.triton import rms_norm
from ascend_ops._kernels.triton.rms_norm import TritonRmsNorm

pytestmark = pytest.mark.usefixtures("triton_device")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def kernel(triton_device: torch.device) -> TritonRmsNorm:
    """The one that the operator uses: tried once."""
    kernel: TritonRmsNorm = _backends._load("rms_norm", "triton")
    assert kernel.trial.failure(triton_device) is None
    return kernel


@pytest.fixture(params=["short", "long"])
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that stay in registers, or the same as rows that do not."""
    if request.param == "long":
        monkeypatch.setattr(rms_norm, "LONGEST", 64)
        monkeypatch.setattr(rms_norm, "TILE", 32)
        monkeypatch.setattr(rms_norm, "PROGRAMS", 3)


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_as_reference(
    kernel: TritonRmsNorm,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> None:
    """To the reference in FP64, each within its own rounding."""
    wide_x = x.double().requires_grad_()
    wide_weight = None if weight is None else weight.double().requires_grad_()
    expected = reference.rms_norm(wide_x, wide_weight, eps, unit_offset=unit_offset)
    leaves = [leaf for leaf in (wide_x, wide_weight) if leaf is not None]
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    before = grad.clone(), x.clone()
    y = kernel.forward(x, weight, eps, unit_offset)
    ours = kernel.backward(grad, x, weight, eps, unit_offset, True)
    assert (ours[1] is None) == (weight is None)
    for one, other in zip((y, *ours), (expected, *wanted), strict=False):
        assert one is not None and one.is_contiguous()
        tolerance = ROUNDINGS[one.dtype]
        scale = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=max(1e-6, scale * tolerance / 4)
        )
    assert torch.equal(grad, before[0]) and torch.equal(x, before[1])  # RN-03


@pytest.mark.usefixtures("length")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (5, 64), (2, 3, 65), (1, 431), (0, 4), (3, 0)])
def test_rows_of_odd_sizes(
    shape: tuple[int, ...], dtype: torch.dtype, kernel: TritonRmsNorm, triton_device: torch.device
) -> None:
    x = random(*shape, device=triton_device, dtype=dtype)
    grad = random(*shape[::-1], device=triton_device, dtype=dtype).reshape(shape)
    weight = random(shape[-1], device=triton_device)  # RN-05, RN-09: of another dtype
    assert_as_reference(kernel, grad, x, weight.to(dtype))
    assert_as_reference(kernel, grad, x, weight, unit_offset=True)
    assert_as_reference(kernel, grad, x, None, eps=1e-2)


@pytest.mark.usefixtures("length")
def test_any_strides(kernel: TritonRmsNorm, triton_device: torch.device) -> None:
    """RN-01, RN-02."""
    whole = random(2, 2, 140, device=triton_device, dtype=torch.bfloat16)
    weight = random(280, device=triton_device)[::2]
    for x in (whole, whole[..., ::2], whole.transpose(0, 1), whole.transpose(1, 2), whole[::2]):
        one = torch.ones((), dtype=x.dtype, device=triton_device)
        for grad in (one.expand(x.shape), x[:1, :, :1].expand(x.shape)):
            assert_as_reference(kernel, grad, x, weight[: x.shape[-1]])


@pytest.mark.usefixtures("length")
def test_many_rows_are_summed_in_one_order(
    kernel: TritonRmsNorm, triton_device: torch.device
) -> None:
    rows, width = (4099, 3) if rms_norm.PROGRAMS > 3 else (7, 70)
    x, weight = random(rows, width, device=triton_device), random(width, device=triton_device)
    grad = x.flip(0)
    assert_as_reference(kernel, grad, x, weight)
    first, second = (kernel.backward(grad, x, weight, 0.0, False, True)[1] for _ in "12")
    assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.usefixtures("length")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_rows(
    dtype: torch.dtype, kernel: TritonRmsNorm, triton_device: torch.device
) -> None:
    """RN-10."""
    large = 300.0 if dtype == torch.float16 else 1e20
    x = torch.zeros(4, 96, dtype=dtype, device=triton_device)
    x[1] = large
    x[2, 5] = float("nan")
    x[3] = torch.finfo(dtype).tiny
    y = kernel.forward(x, None, 1e-6, False)
    expected = torch.nn.functional.rms_norm(x.float(), (96,), eps=1e-6).to(dtype)
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_rows_that_are_2_to_the_31_elements_apart(
    kernel: TritonRmsNorm, triton_device: torch.device
) -> None:
    """SG-03. Of the memory only what is written is really taken, where it is the host's."""
    apart = (1 << 31) + 6
    memory = torch.empty(apart + 8, dtype=torch.bfloat16, device=triton_device)
    x = memory.as_strided((2, 8), (apart, 1))
    x.copy_(random(2, 8, device=triton_device))
    assert_as_reference(kernel, x, x, None)


def test_the_operator_is_computed_by_it(triton_device: torch.device) -> None:
    x = random(3, 8, device=triton_device).requires_grad_()
    weight = random(8, device=triton_device).requires_grad_()
    y = ascend_ops.rms_norm(x, weight, backend="triton")
    expected = reference.rms_norm(x, weight)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y.sum(), (x, weight))
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), (x, weight)), strict=True):
        torch.testing.assert_close(one, other)
    assert ascend_ops.backend_of("rms_norm", x, weight, backend="triton") == "triton"


def test_a_frozen_weight_costs_no_sum(kernel: TritonRmsNorm, triton_device: torch.device) -> None:
    x = random(3, 8, device=triton_device)
    with_sum = kernel.backward(x, x, x[0], 1e-6, False, True)
    without = kernel.backward(x, x, x[0], 1e-6, False, False)
    assert torch.equal(with_sum[0], without[0]) and without[1] is None


def test_fp64_is_refused(kernel: TritonRmsNorm, triton_device: torch.device) -> None:
    x = torch.ones(2, 4, device=triton_device)
    assert "FP64" in str(kernel.refusal(x.double(), None, 1e-6, False))
    assert "FP64" in str(kernel.refusal(x, x[0].double(), 1e-6, False))
    assert kernel.refusal(x, x[0], 1e-6, False) is None
