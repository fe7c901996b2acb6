"""ALiBi attention by npu_fusion_attention, on the simulated NPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_ops
import ascend_sim
from ascend_core.errors import ConfigError
from ascend_ops import _backends, reference
from ascend_ops._kernels.npu import alibi_attention as kernel
from ascend_ops.functional._alibi import call_of_alibi_attention

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Values up to 5. FP32: the same sums in another order, some units in the last place of 5e-7 each.
# BF16 and FP16: what is rounded once may round to the neighbour, 2**-8 and 2**-11 of a value apart,
# and a gradient that is added for several query heads may do so in each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
B, H, S, D = 2, 6, 11, 8
LEFT = torch.tensor([[False] * 3 + [True] * 8, [True] * 11])  # AB-15


def inputs(
    rows: int = S, keys: int = S, *, kv_heads: int = H, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k and v, on the CPU."""
    made = torch.Generator().manual_seed(0)
    shapes = [(B, H, rows, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D)]
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def compare(tensors: Sequence[Tensor], slopes: Tensor | None = None, **options: Any) -> None:
    """Compare the result, lse and the gradients of q, k and v with the reference on the CPU."""
    slopes = ascend_ops.alibi_slopes(H) if slopes is None else slopes
    learned = [slopes] if slopes.requires_grad else []
    ours = [x.detach().npu().requires_grad_() for x in (*tensors, *learned)]
    theirs = [x.detach().requires_grad_() for x in (*tensors, *learned)]
    moved = {k: v.npu() if isinstance(v, Tensor) else v for k, v in options.items()}
    of_device = ours[3] if learned else slopes.npu()
    out, lse = ascend_ops.alibi_attention(*ours[:3], of_device, return_lse=True, **moved)
    of_host = theirs[3] if learned else slopes
    expected = reference.alibi_attention(*theirs[:3], of_host, **options)
    sums = reference.alibi_lse(*theirs[:2], of_host, **options)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(expected.dtype)
    grads = torch.autograd.grad(out, ours, grad.npu())
    expected_grads = torch.autograd.grad(expected, theirs, grad)
    assert out.is_contiguous()
    assert all(one.is_contiguous() for one in grads)
    bound = TOLERANCE[expected.dtype]
    pairs = [(out, expected), (lse, sums), *zip(grads, expected_grads, strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_is_the_reference(dtype: torch.dtype, kv_heads: int, causal: bool) -> None:
    compare(inputs(kv_heads=kv_heads, dtype=dtype), causal=causal)


OPTIONS: list[dict[str, Any]] = [
    {"window": 3},
    {"window": 1},
    {"window": 3, "causal": False},
    {"window": 50},
    {"mask": LEFT},
    {"mask": LEFT, "causal": False},
    {"mask": LEFT, "window": 3},
    {"mask": torch.zeros(B, S, dtype=torch.bool)},
    {"scale": 0.7},
    # Chunks of a longer sequence: AB-10.
    {"q_start": 11},
    {"q_start": 11, "window": 4},
    {"q_start": 15, "kv_start": 9},
    {"q_start": 15, "kv_start": 9, "causal": False, "window": 9},
    {"q_start": 3, "kv_start": 8},  # the first rows see no key
    {"q_start": 3, "kv_start": 8, "causal": False},
    {"q_start": 22, "window": 14},  # the last rows see no key
    {"q_start": 0, "kv_start": 11},  # no row sees one
    {"q_start": 40, "causal": False, "window": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_hidden_and_where_chunks_begin(options: dict[str, Any]) -> None:
    compare(inputs(kv_heads=2), **options)


@pytest.mark.parametrize("rows", [1, 4, 15])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}, {"mask": LEFT}], ids=str)
def test_fewer_or_more_queries_than_keys(rows: int, options: dict[str, Any], called: Any) -> None:
    tensors = inputs(rows)
    compare(tensors, **options)
    device = [x.npu() for x in (*tensors, ascend_ops.alibi_slopes(H))]
    moved = {k: v.npu() if isinstance(v, Tensor) else v for k, v in options.items()}
    assert called(lambda: ascend_ops.alibi_attention(*device, **moved)) == ["fusion_attention_v2"]


def test_slopes_of_each_item() -> None:  # AB-13
    slopes = torch.rand(B, H, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"causal": False}, {"mask": LEFT}):
        compare(inputs(), slopes, **options)
    compare(inputs(4), slopes)


def test_learned_slopes_get_their_gradient() -> None:
    slopes = ascend_ops.alibi_slopes(H).requires_grad_()
    compare(inputs(kv_heads=2), slopes)
    compare(inputs(), slopes, causal=False, mask=LEFT)


def test_longer_than_the_mask_of_a_band() -> None:
    """The mask of 2048 x 2048 stands for any length, and slopes for any bias."""
    made = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 2100, 4, generator=made).unbind()
    slopes = ascend_ops.alibi_slopes(1)
    for options in ({}, {"window": 2090}):
        found = ascend_ops.alibi_attention(q.npu(), k.npu(), v.npu(), slopes.npu(), **options)
        expected = reference.alibi_attention(q, k, v, slopes, **options)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_operator_subtracts_the_distance_times_the_slope() -> None:
    """The sign of pse_type 2, without our functions: q is 0, so that the weights are the bias's."""
    q = torch.zeros(1, 1, 3, 8, device="npu")
    v = torch.eye(3, 8, device="npu")[None, None]
    slope = torch.tensor([0.5], device="npu")
    out = torch.ops.npu.npu_fusion_attention_v2(q, q, v, 1, "BNSD", pse=slope, pse_type=2)[0]
    distance = (torch.arange(3.0)[:, None] - torch.arange(3.0)).abs()
    torch.testing.assert_close(out[0, 0, :, :3].cpu(), (-0.5 * distance).softmax(-1))


def test_calls_the_operators_and_saves_what_the_shapes_say(called: Any, saved_bytes: Any) -> None:
    tensors = [x.npu().requires_grad_() for x in inputs(kv_heads=2, dtype=torch.bfloat16)]
    slopes = ascend_ops.alibi_slopes(H, device="npu")

    def step() -> None:
        ascend_ops.alibi_attention(*tensors, slopes).sum().backward()

    assert called(step) == ["fusion_attention_v2", "fusion_attention_grad_v2"]
    assert ascend_ops.backend_of("alibi_attention", *tensors, slopes) == "npu"
    q_and_out, k_and_v, lse = 2 * B * H * S * D * 2, 2 * B * 2 * S * D * 2, B * H * S * 4
    found = saved_bytes(lambda: ascend_ops.alibi_attention(*tensors, slopes))
    assert found == q_and_out + k_and_v + lse + H * 4
    with torch.no_grad():
        assert called(lambda: ascend_ops.alibi_attention(*tensors, slopes)) == [
            "fusion_attention_v2"
        ]
    full = [x.detach().float() for x in tensors]
    expected = ascend_ops.alibi_attention(*full, slopes)
    with torch.autocast("npu", torch.bfloat16):
        assert torch.equal(ascend_ops.alibi_attention(*full, slopes), expected)


def test_no_bias_is_made_where_slopes_are_taken() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    for options in ({}, {"causal": False}, {"window": 3}, {"q_start": 22}):
        _, call = call_of_alibi_attention(q, k, v, ascend_ops.alibi_slopes(H), **options)
        found, _ = kernel._options(call)
        assert found["pse_type"] == 2
        assert found["pse"].shape == (H,)
        mask = found.get("atten_mask")
        assert mask is None or mask.shape == (2048, 2048)


def test_strided_inputs() -> None:
    packed = torch.randn(S, B, 3 * H * D, generator=torch.Generator().manual_seed(3))
    ours, theirs = (
        [x.unflatten(-1, (H, D)).permute(1, 2, 0, 3) for x in whole.chunk(3, -1)]
        for whole in (packed.npu(), packed)
    )
    slopes = ascend_ops.alibi_slopes(H)
    found = ascend_ops.alibi_attention(*ours, slopes.npu())
    expected = reference.alibi_attention(*theirs, slopes)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the device whose elements are one."""
    return torch.zeros((), dtype=dtype, device="npu").expand(shape)


REFUSED = {
    "q, k or v is empty": [(1, 2, 0, 8), (1, 2, 3, 8), (1, 2, 3, 8)],
    "a head size of 8 and v of 9": [(1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 9)],
    "a head size of 776 and v of 8": [(1, 2, 3, 776), (1, 2, 3, 776), (1, 2, 3, 8)],
    "q has 257 heads": [(1, 257, 3, 8), (1, 257, 3, 8), (1, 257, 3, 8)],
    "not 1025 and 2048, and a bias would take 16 MiB": [
        (1, 2, 1025, 8),
        (1, 2, 2048, 8),
        (1, 2, 2048, 8),
    ],
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_is_left_to_torchs_operators(match: str) -> None:
    falls_to_eager(match, [meta(*shape) for shape in REFUSED[match]])


def test_other_lengths_in_bf16_are_left_to_torchs_operators() -> None:
    shapes = [(1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8)]
    falls_to_eager("would be rounded", [meta(*shape, dtype=torch.bfloat16) for shape in shapes])


def falls_to_eager(match: str, tensors: list[Tensor]) -> None:
    """Assert that a call is computed by torch's operators and says so once."""
    slopes = ascend_ops.alibi_slopes(tensors[0].shape[1], device="npu")
    _backends._say.cache_clear()
    with pytest.warns(UserWarning, match=match):
        ascend_ops.alibi_attention(*tensors, slopes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ascend_ops.backend_of("alibi_attention", *tensors, slopes) == "eager"
    with pytest.raises(ConfigError, match=match):
        ascend_ops.alibi_attention(*tensors, slopes, backend="npu")


def test_limits_that_no_test_has_memory_for() -> None:
    """Of shapes alone, without a call."""
    many = [meta(1, 1, (1 << 20) + 1, 8) for _ in range(3)]
    assert "takes 2097152 items and 1048576 queries or keys" in str(refusal(many))
    assert refusal([meta(1, 256, 1 << 20, 768) for _ in range(3)]) is None
    items = [meta((2 << 20) + 1, 1, 1, 8) for _ in range(3)]
    assert "items" in str(refusal(items))


def refusal(tensors: list[Tensor]) -> str | None:
    slopes = ascend_ops.alibi_slopes(tensors[0].shape[1], device="npu")
    _, call = call_of_alibi_attention(*tensors, slopes)
    return kernel.load().refusal(call)
