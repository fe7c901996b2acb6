"""ALiBi attention's kernels of Triton where they run; see `test_triton.py`, which starts this."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_ops
from ascend_ops import _backends, reference
from ascend_ops._kernels.triton import alibi_attention
from ascend_ops._kernels.triton.alibi_attention import Blocks, TritonAlibi
from ascend_ops._operators.alibi_attention import AlibiCall

pytestmark = pytest.mark.usefixtures("triton_device")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


@pytest.fixture(scope="module")
def kernel(triton_device: torch.device) -> TritonAlibi:
    """The one that the operator uses: it takes the interpreter some seconds to try it."""
    kernel: TritonAlibi = _backends._load("alibi_attention", "triton")
    assert kernel.trial.failure(triton_device) is None
    return kernel


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which the interpreter visits several in a moment, and of two sizes."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(alibi_attention, "blocks_of", lambda *_: Blocks(16, 32, 4, 1))


def call_of(
    q_shape: tuple[int, ...],
    keys: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    shared: int | None = None,
    v_width: int | None = None,
    of_items: bool = False,
    mask: Tensor | None = None,
    **options: Any,
) -> AlibiCall:
    """A call with random tensors, and slopes of each head, or of each of each item."""
    generator = torch.Generator().manual_seed(keys)
    batch, heads, rows, width = q_shape
    shared = heads if shared is None else shared

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = random(batch, heads, rows, width), random(batch, shared, keys, width)
    v = random(batch, shared, keys, width if v_width is None else v_width)
    slopes = random(*((batch, heads) if of_items else (heads,))).abs() / 4
    tensors = [x.to(device, dtype) for x in (q, k, v)]
    given: dict[str, Any] = {"causal": True, "window": None, "scale": max(width, 1) ** -0.5}
    given |= {"q_start": keys - rows, "kv_start": 0, **options}
    mask = None if mask is None else mask.to(device)
    return AlibiCall(*tensors, slopes.to(device), mask, **given)


def in_fp64(call: AlibiCall) -> tuple[list[Tensor], Tensor, Tensor]:
    """The leaves of a call in FP64, and the reference's result and lse."""
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v, call.slopes)]
    options: dict[str, Any] = {
        name: getattr(call, name)
        for name in ("causal", "window", "scale", "mask", "q_start", "kv_start")
    }
    out = reference.alibi_attention(*leaves, **options)
    return leaves, out, reference.alibi_lse(*leaves[:2], leaves[3], **options)


def assert_as_reference(kernel: TritonAlibi, call: AlibiCall, grad: Tensor | None = None) -> None:
    """To the reference in FP64, as near as the dtype has it."""
    leaves, expected, expected_lse = in_fp64(call)
    out, lse = kernel.forward(call)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        grad = grad.to(out.device, out.dtype)
    before = [x.clone() for x in (call.q, call.k, call.v, grad, out)]
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    ours = kernel.backward(call, grad, out, lse, True)
    assert lse.dtype == torch.float32 and out.dtype == call.q.dtype
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    inputs = (call.q, call.k, call.v, call.slopes)
    for one, other, like in zip((out, *ours), (expected, *wanted), (out, *inputs), strict=True):
        assert one.is_contiguous() and one.dtype == like.dtype and one.shape == like.shape
        tolerance = TOLERANCES[call.q.dtype]
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)
    assert all(map(torch.equal, (call.q, call.k, call.v, grad, out), before))


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("keys", [1, 37, 70])
def test_causal(
    rows: int, keys: int, dtype: torch.dtype, kernel: TritonAlibi, triton_device: torch.device
) -> None:
    """Bottom-right aligned; where there are more rows than keys, the first see none."""
    assert_as_reference(kernel, call_of((1, 1, rows, 24), keys, triton_device, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_both_directions(
    dtype: torch.dtype, kernel: TritonAlibi, triton_device: torch.device
) -> None:
    """AB-05, AB-13: absolute distances, and slopes of each item."""
    call = call_of(
        (2, 1, 37, 24), 45, triton_device, dtype=dtype, causal=False, q_start=3, of_items=True
    )
    assert_as_reference(kernel, call)


@pytest.mark.parametrize("width", [1, 16, 40, 64, 100, 256])
def test_head_sizes(width: int, kernel: TritonAlibi, triton_device: torch.device) -> None:
    assert_as_reference(kernel, call_of((1, 1, 17, width), 33, triton_device))
    assert_as_reference(kernel, call_of((1, 1, 17, 8), 33, triton_device, v_width=width))


@pytest.mark.parametrize("heads", [(6, 2), (3, 1)])
def test_heads_that_share_keys(
    heads: tuple[int, int], kernel: TritonAlibi, triton_device: torch.device
) -> None:
    q_shape = (2, heads[0], 20, 16)
    call = call_of(q_shape, 40, triton_device, shared=heads[1], of_items=True)
    assert_as_reference(kernel, call)


@pytest.mark.parametrize("window", [1, 17, 40, 1 << 40])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(
    window: int, causal: bool, kernel: TritonAlibi, triton_device: torch.device
) -> None:
    call = call_of((1, 1, 50, 16), 55, triton_device, causal=causal, window=window)
    assert_as_reference(kernel, call)


def test_only_blocks_that_are_seen_are_visited(
    kernel: TritonAlibi, triton_device: torch.device
) -> None:
    """What no row of a program sees is not read: it may be NaN."""
    call = call_of((1, 1, 64, 16), 128, triton_device, window=20, q_start=32)
    for x in (call.k, call.v):  # rows at 32 to 95 see keys 13 to 95
        x[:, :, :13], x[:, :, 96:] = float("nan"), float("nan")
    out, lse = kernel.forward(call)
    grads = kernel.backward(call, torch.ones_like(out), out, lse, True)
    assert out.isfinite().all() and grads[0].isfinite().all() and grads[3].isfinite().all()
    assert not grads[1][:, :, 96:].any() and not grads[2][:, :, 96:].any()
    assert not grads[2][:, :, :13].any() and grads[2][:, :, 13:96].all()


@pytest.mark.parametrize("causal", [True, False])
def test_masks(causal: bool, kernel: TritonAlibi, triton_device: torch.device) -> None:
    """AB-15: padding on the left, on the right, keys in between, and all of an item."""
    mask = torch.ones(4, 40, dtype=torch.bool)
    mask[0, :9], mask[1, 35:], mask[2, 3:36:2], mask[3] = False, False, False, False
    mask = mask if causal else mask.t().contiguous().t()
    call = call_of((4, 1, 20, 16), 40, triton_device, causal=causal, mask=mask)
    assert_as_reference(kernel, call)
    out, lse = kernel.forward(call)
    assert not out[3].any() and lse[3].eq(float("-inf")).all()


@pytest.mark.parametrize("q_start", [-100, 20, 500])
def test_chunks_of_queries_and_keys(
    q_start: int, kernel: TritonAlibi, triton_device: torch.device
) -> None:
    """AB-10: with a key that no query sees, or queries far behind all keys."""
    for causal in (True, False):
        options = {"q_start": q_start, "kv_start": 10, "causal": causal}
        assert_as_reference(kernel, call_of((1, 1, 20, 16), 40, triton_device, **options))


def test_any_strides(kernel: TritonAlibi, triton_device: torch.device) -> None:
    call = call_of((2, 2, 20, 48), 20, triton_device, dtype=torch.bfloat16)
    qkv = torch.stack((call.q, call.k, call.v)).permute(1, 3, 0, 2, 4).contiguous()
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each of [B, S, 3, H, D]
    slopes = call.slopes.repeat_interleave(2)[::2]
    number = torch.ones((), dtype=q.dtype, device=triton_device)
    layouts = [
        (q, k, v, number.expand(v.shape)),
        (q[..., ::2], k[..., 1::2], v, v),
        (q, k[:1].expand_as(k), v[..., ::3], v[..., :16]),
    ]
    for one, two, three, grad in layouts:
        other = dataclasses.replace(call, q=one, k=two, v=three, slopes=slopes)
        assert_as_reference(kernel, other, grad)


def test_frozen_slopes_cost_no_sum_and_each_run_is_the_same(
    kernel: TritonAlibi, triton_device: torch.device
) -> None:
    call = call_of((1, 4, 20, 16), 40, triton_device, shared=2)
    out, lse = kernel.forward(call)
    first, second, frozen = (
        kernel.backward(call, out, out, lse, wanted) for wanted in (True, True, False)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first[:3], frozen[:3])) and frozen[3].shape == (0,)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)])
def test_nothing(shape: tuple[int, ...], kernel: TritonAlibi, triton_device: torch.device) -> None:
    call = call_of(shape, 5, triton_device, shared=2, scale=0.5, v_width=8)
    assert_as_reference(kernel, call)
    assert_as_reference(kernel, call_of(shape, 0, triton_device, shared=2, scale=0.5))
    none = dataclasses.replace(call, q=call.q[:, :0], slopes=call.slopes[:0])
    assert kernel.forward(none)[0].shape == (*shape[:1], 0, shape[2], 8)


def test_extreme_scores(kernel: TritonAlibi, triton_device: torch.device) -> None:
    call = call_of((1, 2, 37, 16), 40, triton_device)
    for factor in (0.0, 100.0, 1e4):
        large = dataclasses.replace(call, q=call.q * factor)
        out, lse = kernel.forward(large)
        _, expected, expected_lse = in_fp64(large)
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    infinite = dataclasses.replace(call, slopes=torch.full_like(call.slopes, float("inf")))
    assert kernel.forward(infinite)[0].isnan().all()  # 0 * inf, as in the reference
    steep = dataclasses.replace(call, slopes=torch.full_like(call.slopes, 1e30))
    out, _ = kernel.forward(steep)
    assert torch.equal(out, call.v[:, :, 3:])  # each sees the key at its own position alone


def test_items_that_are_2_to_the_31_elements_apart(
    kernel: TritonAlibi, triton_device: torch.device
) -> None:
    """SG-03. Of the memory only what is written is really taken, where it is the host's."""
    call = call_of((2, 2, 2, 4), 2, triton_device, dtype=torch.bfloat16)
    apart = (1 << 31) + 6
    memory = torch.empty(apart + 64, dtype=torch.bfloat16, device=triton_device)
    for dimension in range(3):
        strides = [32, 16, 4, 1]
        strides[dimension] = apart
        k = memory.as_strided((2, 2, 2, 4), tuple(strides))
        k.copy_(call.k)
        assert_as_reference(kernel, dataclasses.replace(call, q=k, k=k, v=k))


def test_the_operator_is_computed_by_it(kernel: TritonAlibi, triton_device: torch.device) -> None:
    call = call_of((1, 2, 6, 8), 6, triton_device)
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v, call.slopes)]
    y = ascend_ops.alibi_attention(*leaves, backend="triton")
    expected = reference.alibi_attention(*leaves)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y.sum(), leaves)
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
    assert ascend_ops.backend_of("alibi_attention", *leaves, backend="triton") == "triton"


def test_what_is_refused(kernel: TritonAlibi, triton_device: torch.device) -> None:
    call = call_of((1, 1, 2, 8), 2, triton_device)
    assert kernel.refusal(call) is None
    assert "FP64" in str(kernel.refusal(dataclasses.replace(call, q=call.q.double())))
    wide = torch.ones(1, 1, 2, 257, device=triton_device)
    assert "256" in str(kernel.refusal(dataclasses.replace(call, v=wide)))
    assert "256" in str(kernel.refusal(dataclasses.replace(call, q=wide, k=wide)))
    assert "32 bits" in str(kernel.refusal(dataclasses.replace(call, q_start=1 << 30)))
