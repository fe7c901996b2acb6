"""ALiBi attention on the backends that a CPU has, against the formula in FP64."""

from typing import Any

import pytest
import torch

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops import reference

# Inputs are normal numbers, results and gradients a few of them; FP32 is held to 1e-5. BF16 and
# FP16 round results of up to 5 to 2**-6 and 2**-9 at once, and in the kernels the weights too.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 7e-3, torch.float64: 1e-13}

backends = pytest.mark.parametrize("backend", ["eager", "cpu"])


def inputs(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    *,
    batch: int = 1,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k and v, which require gradients."""
    shapes = [(batch, heads[i], lengths[i], size) for i in (0, 1, 1)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def check(
    backend: str,
    given: list[torch.Tensor],
    slopes: torch.Tensor,
    *,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Hold result, lse and gradients to those of the formula in FP64."""
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = reference.alibi_attention(*exact, slopes, **options)
    grad = torch.randn_like(expected).to(given[0].dtype)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    expected_lse = reference.alibi_lse(*exact[:2], slopes, **options)
    out, lse = ascend_ops.alibi_attention(
        *given, slopes, return_lse=True, backend=backend, **options
    )
    grads = torch.autograd.grad(out, given, grad)
    tolerance = tolerance or TOLERANCE[given[0].dtype]
    for found, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert found.dtype == given[0].dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)
    assert lse.dtype == (torch.float64 if given[0].dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


# Lengths on both sides of the 512 rows of a block.
SHAPES: list[tuple[tuple[int, int], tuple[int, int]]] = [
    ((1, 1), (1, 1)),
    ((4, 4), (3, 3)),
    ((6, 2), (511, 511)),
    ((5, 1), (513, 600)),
    ((12, 4), (37, 1100)),
    ((2, 2), (600, 33)),
]


@backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("heads", "lengths"), SHAPES)
def test_agrees_with_the_formula(
    backend: str,
    causal: bool,
    window: int | None,
    heads: tuple[int, int],
    lengths: tuple[int, int],
) -> None:
    slopes = ascend_ops.alibi_slopes(heads[0])
    check(backend, inputs(heads, lengths), slopes, causal=causal, window=window)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_ab_09_results_follow_the_dtype_of_q(backend: str, dtype: torch.dtype) -> None:
    given = inputs((4, 2), (700, 700), size=64, dtype=dtype)
    check(backend, given, ascend_ops.alibi_slopes(4))


@backends
def test_ab_08_distant_keys_are_as_exact_as_near_ones(backend: str) -> None:
    check(backend, inputs((12, 12), (9, 8192), size=64), ascend_ops.alibi_slopes(12))


@backends
@pytest.mark.parametrize("factor", [3, 12])
def test_large_scores(backend: str, factor: float) -> None:
    """Errors are those of FP32 scores of up to 30 and 120: 2e-6 and 8e-6 of weights near 1."""
    q, k, v = inputs((2, 2), (900, 900), size=64)
    q = (q.detach() * factor).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    slopes = ascend_ops.alibi_slopes(8, start=3, stop=5)
    expected = reference.alibi_attention(*exact, slopes)
    grad = torch.randn(q.shape)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    out = ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for found, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        bound = 2e-5 * factor * float(right.detach().abs().max())
        torch.testing.assert_close(found.double(), right, rtol=0, atol=bound)


@backends
def test_a_row_that_is_no_number_leaves_the_others(backend: str) -> None:
    q, k, v = (x.detach() for x in inputs((1, 1), (600, 600)))
    slopes = torch.tensor([0.5])
    expected = ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)
    q[0, 0, 400, 1] = torch.nan
    out = ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)
    assert out[0, 0, 400].isnan().all()
    expected[0, 0, 400] = out[0, 0, 400] = 0
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@backends
def test_ab_05_a_constant_of_a_row_changes_nothing_under_a_causal_mask_alone(backend: str) -> None:
    q, k, v = inputs((2, 2), (40, 40), dtype=torch.float64)
    slopes = ascend_ops.alibi_slopes(2)
    compact = slopes.double()[:, None, None] * torch.arange(40)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    scores = q @ k.transpose(-1, -2) / 4 + compact
    causal = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    out = ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)
    assert torch.allclose(out, causal)
    both = ascend_ops.alibi_attention(q, k, v, slopes, causal=False, backend=backend)
    assert not torch.allclose(both, scores.softmax(-1) @ v, atol=0.1)


@backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_ab_13_slopes_of_each_item(backend: str, causal: bool, batch: int) -> None:
    slopes = torch.rand(batch, 4)
    check(backend, inputs((4, 2), (60, 60), batch=batch), slopes, causal=causal)


@backends
def test_slopes_of_any_sign(backend: str) -> None:
    """With a negative slope distant keys count most, and none is too far to count."""
    check(backend, inputs((3, 3), (600, 600)), torch.tensor([-0.01, 0, 0.3]))


@backends
@pytest.mark.parametrize("learned", [(4,), (2, 4)])
def test_learned_slopes_get_their_gradient(backend: str, learned: tuple[int, ...]) -> None:
    given = inputs((4, 2), (600, 600), batch=2)
    slopes = (torch.rand(learned) / 8).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*given, slopes)]
    grad = torch.randn(2, 4, 600, 16)
    out = ascend_ops.alibi_attention(*given, slopes, backend=backend)
    found = torch.autograd.grad(out, slopes, grad)[0]
    right = torch.autograd.grad(reference.alibi_attention(*exact), exact[3], grad.double())[0]
    # A sum over 2 x 600 x 600 weights, each times a distance.
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-3)


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_ab_10_chunks_of_a_sequence_merge_by_lse(backend: str, causal: bool) -> None:
    """Two ranks of context parallelism, each with half of the queries; keys come by halves."""
    slopes = ascend_ops.alibi_slopes(4)
    q, k, v = (x.detach() for x in inputs((4, 2), (140, 140), dtype=torch.float64))
    whole = ascend_ops.alibi_attention(q, k, v, slopes, causal=causal, backend=backend)
    for q_start in (0, 70):
        chunks = [
            ascend_ops.alibi_attention(
                q[:, :, q_start : q_start + 70],
                k[:, :, start : start + 70],
                v[:, :, start : start + 70],
                slopes,
                causal=causal,
                q_start=q_start,
                kv_start=start,
                return_lse=True,
                backend=backend,
            )
            for start in (0, 70)
        ]
        total = torch.logaddexp(chunks[0][1], chunks[1][1])
        merged = sum(out * (lse - total).exp()[..., None] for out, lse in chunks)
        assert torch.allclose(merged, whole[:, :, q_start : q_start + 70], rtol=0, atol=1e-12)


@backends
@pytest.mark.parametrize("start", [0, 600])
def test_ab_10_a_chunk_that_is_far_from_its_queries(backend: str, start: int) -> None:
    """Each key is 900 positions from the nearest query: a bias of -450, of which FP32 has 3e-5."""
    given = inputs((2, 2), (600, 600), dtype=torch.float64)
    slopes = ascend_ops.alibi_slopes(8, stop=2)
    exact = {"causal": False, "q_start": 1500 - start, "kv_start": start}
    check(backend, given, slopes, tolerance=1e-11, **exact)
    rounded = [x.detach().float().requires_grad_() for x in given]
    check(backend, rounded, slopes, tolerance=1e-3, **exact)


@backends
def test_ab_04_a_rank_of_tensor_parallelism_computes_its_heads(backend: str) -> None:
    q, k, v = inputs((12, 12), (50, 50), batch=2)
    whole = ascend_ops.alibi_attention(q, k, v, ascend_ops.alibi_slopes(12), backend=backend)
    for first in range(0, 12, 3):
        own = slice(first, first + 3)
        slopes = ascend_ops.alibi_slopes(12, start=first, stop=first + 3)
        given = (q[:, own], k[:, own], v[:, own])
        part = ascend_ops.alibi_attention(*given, slopes, backend=backend)
        torch.testing.assert_close(part, whole[:, own], rtol=1e-6, atol=1e-6)


@backends
def test_ab_12_nothing_is_kept_from_call_to_call(backend: str) -> None:
    for heads, length, dtype in (
        (2, 4, torch.float32),
        (2, 6, torch.float32),
        (3, 6, torch.float32),
        (3, 6, torch.float64),
        (2, 4, torch.float32),
    ):
        given = inputs((heads, heads), (length, length), dtype=dtype)
        check(backend, given, ascend_ops.alibi_slopes(heads))


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_ab_15_left_padding_changes_nothing(backend: str, causal: bool) -> None:
    slopes = ascend_ops.alibi_slopes(4)
    q, k, v = inputs((4, 2), (5, 5))
    mask = torch.tensor([[False, False, True, True, True]])
    out = ascend_ops.alibi_attention(q, k, v, slopes, causal=causal, mask=mask, backend=backend)
    real = [x[:, :, 2:] for x in (q, k, v)]
    alone = ascend_ops.alibi_attention(*real, slopes, causal=causal, backend=backend)
    torch.testing.assert_close(out[:, :, 2:], alone, rtol=1e-6, atol=1e-6)
    if causal:
        assert torch.equal(out[:, :, :2], torch.zeros(1, 4, 2, 16))


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_ab_15_rows_that_see_no_key_are_zero_with_their_gradients(
    backend: str, causal: bool
) -> None:
    mask = torch.ones(4, 600, dtype=torch.bool)
    mask[0, :530] = False  # left
    mask[1, 40:] = False  # right
    mask[2] = False  # all
    given = inputs((2, 1), (600, 600), batch=4)
    slopes = ascend_ops.alibi_slopes(8, start=5, stop=7)
    out, lse = ascend_ops.alibi_attention(
        *given, slopes, mask=mask, causal=causal, backend=backend, return_lse=True
    )
    grads = torch.autograd.grad(out, given, torch.randn_like(out))
    for x in (out, *grads):
        assert x.isfinite().all()
        assert torch.equal(x[2], torch.zeros_like(x[2]))
    assert torch.equal(lse[2], torch.full((2, 600), -torch.inf))
    check(backend, given, slopes, mask=mask, causal=causal, window=90)


def test_a_mask_with_gaps_is_computed_by_eager() -> None:
    given = inputs((2, 1), (5, 5))
    slopes, mask = ascend_ops.alibi_slopes(2), torch.tensor([[True, False, True, True, True]])
    check("eager", given, slopes, mask=mask)
    with pytest.raises(ConfigError, match="hides keys between keys that count"):
        ascend_ops.alibi_attention(*given, slopes, mask=mask, backend="cpu")
    with pytest.warns(UserWarning, match="hides keys between keys that count"):
        assert ascend_ops.backend_of("alibi_attention", *given, slopes, mask=mask) == "eager"
    assert ascend_ops.backend_of("alibi_attention", *given, slopes) == "cpu"


def test_another_head_size_of_v_is_computed_by_eager() -> None:
    q, k, _ = inputs((2, 1), (5, 7))
    v = torch.randn(1, 1, 7, 3, requires_grad=True)
    check("eager", [q, k, v], ascend_ops.alibi_slopes(2))
    with pytest.raises(ConfigError, match="v of the head size of q"):
        ascend_ops.alibi_attention(q, k, v, ascend_ops.alibi_slopes(2), backend="cpu")


@backends
@pytest.mark.parametrize(("batch", "lengths"), [(0, (5, 5)), (2, (0, 5)), (2, (5, 0))])
def test_nothing_to_compute(backend: str, batch: int, lengths: tuple[int, int]) -> None:
    given = inputs((4, 2), lengths, batch=batch)
    slopes = torch.rand(4, requires_grad=True)
    out = ascend_ops.alibi_attention(*given, slopes, backend=backend)
    grads = torch.autograd.grad(out, (*given, slopes), torch.ones_like(out))
    for x, of in zip((out, *grads), (given[0], *given, slopes), strict=True):
        assert torch.equal(x, torch.zeros_like(of))


@backends
def test_inputs_of_any_strides_are_read_and_not_written(backend: str) -> None:
    """q, k and v as a fused projection gives them, reversed in size; a gradient of stride 0."""
    packed = torch.randn(2, 70, 3, 16, 4)
    given = [x.permute(0, 3, 1, 2)[:, ::2] for x in packed.permute(2, 0, 1, 4, 3).unbind()]
    given = [x.transpose(1, 3).flip(1).transpose(1, 3).transpose(1, 2) for x in given]
    given = [x[:, :4, :60] for x in given]
    before = packed.clone()
    dense = [x.contiguous().requires_grad_() for x in given]
    views = [x.detach().requires_grad_() for x in given]
    slopes = torch.rand(2, given[0].shape[1] * 2)[:, ::2]
    out = ascend_ops.alibi_attention(*views, slopes, backend=backend)
    expected = ascend_ops.alibi_attention(*dense, slopes.contiguous(), backend=backend)
    assert torch.equal(out, expected)
    for found, right in zip(
        torch.autograd.grad(out.sum(), views),
        torch.autograd.grad(expected, dense, torch.ones_like(out)),
        strict=True,
    ):
        assert torch.equal(found, right)
    assert torch.equal(packed, before)


@backends
def test_autocast_leaves_the_scores_in_fp32(backend: str) -> None:
    given = inputs((4, 2), (70, 70))
    with torch.autocast("cpu", torch.bfloat16):
        check(backend, given, ascend_ops.alibi_slopes(4))


@pytest.mark.nightly
@pytest.mark.parametrize("heads", [4, 12])
def test_eight_thousand_tokens_of_training(heads: int) -> None:
    given = inputs((heads, heads), (8192, 8192), size=64)
    exact = [x.detach().double().requires_grad_() for x in given]
    slopes = ascend_ops.alibi_slopes(heads)
    grad = torch.randn_like(given[0])
    expected = ascend_ops.alibi_attention(*exact, slopes, backend="eager")
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    out = ascend_ops.alibi_attention(*given, slopes, backend="cpu")
    grads = torch.autograd.grad(out, given, grad)
    for found, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5)


def test_gradient_of_slopes_is_of_weights_not_of_the_rounded_result() -> None:
    """What BF16 takes from the result is small, and a distance of 1000 would make it large."""
    q, k, v, grad = torch.randn(4, 1, 4, 32, 16, dtype=torch.bfloat16).unbind()
    found = []
    for compute, dtype in (
        (ascend_ops.alibi_attention, torch.bfloat16),
        (reference.alibi_attention, torch.float64),
    ):
        slopes = ascend_ops.alibi_slopes(4).requires_grad_()
        wide = slopes.double() if dtype == torch.float64 else slopes
        out = compute(q.to(dtype), k.to(dtype), v.to(dtype), wide, causal=False, q_start=1000)
        found.append(torch.autograd.grad(out, slopes, grad.to(dtype))[0])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-2)
