"""RMSNorm: the operator, whatever backend computes it."""

from __future__ import annotations

import pytest
import torch

import ascend_ops
from ascend_ops import reference


@pytest.mark.parametrize("unit_offset", [False, True])
def test_gradients_are_right_in_fp64(unit_offset: bool) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ascend_ops.rms_norm(x, weight, unit_offset=unit_offset)

    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight))


def test_opcheck() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    operator = torch.ops.ascend_ops.rms_norm.default
    torch.library.opcheck(operator, (x, weight, 1e-6, True, None))
    torch.library.opcheck(operator, (x.detach().t(), None, 1e-6, False, None))


def test_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    ascend_ops.rms_norm(x, weight).sum().backward()
    expected = torch.autograd.grad(reference.rms_norm(x, weight).sum(), x)[0]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert weight.grad is None


@pytest.mark.parametrize("row", [0.0, 1e20])
def test_extreme_rows_are_as_torchs(row: float) -> None:
    """RN-10."""
    x = torch.full((2, 64), row)
    expected = torch.nn.functional.rms_norm(x, (64,), eps=1e-6)
    assert torch.equal(ascend_ops.rms_norm(x), expected)


def test_large_fp16_does_not_overflow() -> None:
    """RN-10."""
    x = torch.full((2, 64), 300.0, dtype=torch.float16)
    assert torch.equal(ascend_ops.rms_norm(x), torch.ones_like(x))


def test_the_offset_is_added_in_fp32() -> None:
    """RN-04: 1 + 2 ** -8 is no BF16 number."""
    x = torch.ones(1, 64)
    weight = torch.full((64,), 2.0**-8, dtype=torch.bfloat16)
    y = ascend_ops.rms_norm(x, weight, eps=0.0, unit_offset=True)
    assert torch.equal(y, torch.full_like(y, 1 + 2.0**-8))


def test_result_is_of_the_dtype_of_x() -> None:
    """RN-05."""
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    y = ascend_ops.rms_norm(x, weight)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_saves_its_inputs_alone() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ascend_ops.rms_norm(x, weight)
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), weight.data_ptr()]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4), (0,)])
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_nothing_has_a_gradient(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1], requires_grad=True)
    y = ascend_ops.rms_norm(x, weight, backend=backend)
    of_x, of_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert of_x.shape == x.shape
    assert torch.equal(of_weight, torch.zeros(shape[-1]))
