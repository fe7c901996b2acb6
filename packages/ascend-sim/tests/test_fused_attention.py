"""npu_fusion_attention against plain torch on the CPU: layouts, masks, encodings, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of values up to 5. In fp32 the operator and its reference multiply, add and divide in another
# order: some units in the last place, of 5e-7 each. In bf16 and fp16 the operator also rounds the
# probabilities, and what it returns: a unit in the last place of values above 4 is 3e-2 and 4e-3.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
B, N, S, T, D = 2, 4, 12, 12, 8
SCALE = 1 / math.sqrt(D)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(device: Tensor | None, expected: Tensor | None) -> None:
    assert device is not None
    assert expected is not None
    tolerance = TOLERANCE[device.dtype]
    mine, theirs = device.detach().cpu().float(), expected.detach()
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def compressed() -> Tensor:
    """The mask that modes 2, 3 and 4 take."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def to_layout(x_BNSD: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x_BNSD
    if layout == "BSND":
        return x_BNSD.transpose(1, 2)
    if layout == "BSH":
        return x_BNSD.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x_BNSD.permute(2, 0, 1, 3).flatten(2)
    return x_BNSD.transpose(1, 2).flatten(0, 1)  # TND


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | float = 0, masked: Tensor | None = None
) -> Tensor:
    """Attention of [B, N, S, D], in fp32. `bias` is added after the scale."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE + bias
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def inputs(kv_heads: int = N, s: int = S, t: int = T) -> list[Tensor]:
    return [torch.randn(B, heads, n, D) for heads, n in ((N, s), (kv_heads, t), (kv_heads, t))]


def compare(
    tensors: list[Tensor],
    layout: str = "BNSD",
    dtype: torch.dtype = torch.float32,
    *,
    bias: Tensor | float = 0,
    masked: Tensor | None = None,
    operator: Any = None,
    **options: Any,
) -> None:
    """Compare the output and the three gradients."""
    fused = operator or torch_npu.npu_fusion_attention
    mine = [to_layout(x, layout).to(dtype).npu().requires_grad_() for x in tensors]
    theirs = [x.to(dtype).float().requires_grad_() for x in tensors]
    moved = {k: v.npu() if isinstance(v, Tensor) else v for k, v in options.items()}
    output = fused(*mine, N, layout, scale=SCALE, **moved)[0]
    expected = reference(*theirs, bias=bias, masked=masked)
    assert output.dtype == dtype
    grad = torch.randn(expected.shape).to(dtype)
    output.backward(to_layout(grad, layout).npu())
    expected.backward(grad.float())
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(mine, theirs, strict=True))]
    for device, host in pairs:
        close(device, to_layout(host, layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("kv_heads", [N, 2, 1])
def test_layouts_and_grouped_heads(kv_heads: int, layout: str, dtype: torch.dtype) -> None:
    compare(inputs(kv_heads, t=9), layout, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("kv_heads", [N, 2])
@pytest.mark.parametrize("size", [4, 16])
def test_values_may_have_a_head_size_of_their_own(
    size: int, kv_heads: int, layout: str, dtype: torch.dtype
) -> None:
    q, k, _ = inputs(kv_heads, t=9)
    compare([q, k, torch.randn(B, kv_heads, 9, size)], layout, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_full_mask(dtype: torch.dtype) -> None:
    masked = torch.rand(B, 1, S, T) > 0.6
    masked[..., 0] = False
    for mode in (0, 1):
        compare(inputs(), dtype=dtype, masked=masked, atten_mask=masked, sparse_mode=mode)


@pytest.mark.parametrize("shape", [(B, N, S, T), (B, 1, S, T), (1, 1, S, T), (S, T)])
def test_shapes_of_a_mask(shape: tuple[int, ...]) -> None:
    masked = torch.rand(shape) > 0.5
    masked[..., 1] = False
    compare(inputs(), masked=masked, atten_mask=masked.to(torch.uint8), sparse_mode=1)


@pytest.mark.parametrize(("s", "t"), [(12, 12), (7, 12), (12, 7)])
@pytest.mark.parametrize("mode", [2, 3])
def test_causal_modes_begin_at_their_corner(mode: int, s: int, t: int) -> None:
    diagonal = 1 if mode == 2 else 1 + t - s
    masked = torch.ones(s, t, dtype=torch.bool).triu(diagonal)
    compare(
        inputs(s=s, t=t), masked=masked, atten_mask=compressed(), sparse_mode=mode, next_tockens=0
    )


@pytest.mark.parametrize(("pre", "following"), [(3, 2), (4, 0), (0, 5)])
def test_a_band_begins_at_the_lower_right_corner(pre: int, following: int) -> None:
    s, t = 8, 12
    distance = torch.arange(t) - torch.arange(s).unsqueeze(1) - (t - s)
    masked = (distance > following) | (distance < -pre)
    compare(
        inputs(s=s, t=t),
        masked=masked,
        atten_mask=compressed(),
        sparse_mode=4,
        pre_tockens=pre,
        next_tockens=following,
    )


def test_without_a_mask_every_mode_computes_everything() -> None:
    compare(inputs(), sparse_mode=3, next_tockens=0)


def test_a_compressed_mask_is_read_and_not_assumed() -> None:
    everything = torch.zeros(2048, 2048, dtype=torch.bool)
    compare(inputs(), atten_mask=everything, sparse_mode=2)


def test_a_row_that_is_masked_whole_gives_zero() -> None:
    masked = torch.zeros(S, T, dtype=torch.bool)
    masked[3] = True
    q, k, v = (x.npu() for x in inputs())
    output = torch_npu.npu_fusion_attention(
        q, k, v, N, "BNSD", scale=SCALE, atten_mask=masked.npu()
    )
    assert output[0][:, :, 3].eq(0).all()
    assert not output[0].isnan().any()


@pytest.mark.parametrize("layout", ["BNSD", "SBH"])
def test_softmax_maximum_and_sum(layout: str) -> None:
    tensors = inputs()
    moved = [to_layout(x, layout).npu() for x in tensors]
    _, maximum, total, *_ = torch_npu.npu_fusion_attention(*moved, N, layout, scale=SCALE)
    scores = tensors[0] @ tensors[1].transpose(-1, -2) * SCALE
    expected = scores.amax(-1, keepdim=True)
    assert maximum.shape == (B, N, S, 8)
    assert torch.equal(maximum.cpu(), expected.expand(-1, -1, -1, 8))
    exps = (scores - expected).exp().sum(-1, keepdim=True)
    assert torch.equal(total.cpu(), exps.expand(-1, -1, -1, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(B, N, S, T), (1, N, S, T), (B, N, 1, T)])
def test_an_encoding_is_added_before_the_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pse = torch.randn(shape).to(dtype)
    compare(inputs(), dtype=dtype, bias=pse.float() * SCALE, pse=pse)


@pytest.mark.parametrize("pse_type", [0, 1])
def test_an_encoding_has_a_gradient(pse_type: int) -> None:
    tensors = inputs()
    pse = torch.randn(1, N, S, T)
    factor = SCALE if pse_type else 1.0
    expected = pse.clone().requires_grad_()
    output = reference(*tensors, bias=expected * factor)
    grad = torch.randn_like(output)
    output.backward(grad)
    q, k, v = (x.npu() for x in tensors)
    dpse = torch.ops.npu.npu_fusion_attention_grad_v2(
        *(q, k, v, grad.npu(), N, "BNSD"), pse=pse.npu(), scale_value=SCALE, pse_type=pse_type
    )[3]
    close(dpse, expected.grad)


@pytest.mark.parametrize("starts", [None, (3, 0), (0, 2)])
@pytest.mark.parametrize("pse_type", [2, 3])
@pytest.mark.parametrize("shape", [(N,), (B, N)])
def test_slopes_make_alibi(shape: tuple[int, ...], pse_type: int, starts: Any) -> None:
    slopes = torch.rand(shape)
    q_start, kv_start = starts or (0, 0)
    rows = torch.arange(S).unsqueeze(1) + q_start
    distance = (rows - torch.arange(T) - kv_start).abs().float()
    if pse_type == 3:
        distance = distance.sqrt()
    options = {"q_start_idx": [q_start], "kv_start_idx": [kv_start]} if starts else {}
    compare(
        inputs(),
        bias=-slopes.reshape(*shape, 1, 1) * distance,
        operator=torch.ops.npu.npu_fusion_attention_v2,
        pse=slopes,
        pse_type=pse_type,
        **options,
    )


def test_a_compressed_encoding_holds_the_last_1024_rows() -> None:
    s = 1028
    q, k, v = (torch.randn(1, 1, s, D) for _ in range(3))
    distance = torch.arange(s) - torch.arange(s).unsqueeze(1)
    alibi = (distance * 0.25).view(1, 1, s, s)
    masked = torch.ones(s, s, dtype=torch.bool).triu(1)
    output = torch_npu.npu_fusion_attention(
        *(x.npu() for x in (q, k, v)),
        *(1, "BNSD"),
        pse=alibi[:, :, -1024:].npu(),
        scale=SCALE,
        atten_mask=compressed().npu(),
        sparse_mode=2,
    )[0]
    expected = reference(q, k, v, bias=alibi * SCALE, masked=masked)
    close(output, expected)


LENGTHS = ([5, 0, 9], [5, 0, 9])


def varlen(
    tensors: list[Tensor],
    lengths: tuple[list[int], list[int]],
    masks: Any = None,
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """The reference for TND: each sequence by itself. `biases` are added after the scale."""
    q, k, v = tensors
    parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    outputs = []
    for number, part in enumerate(parts):
        sequence = [t.transpose(0, 1).unsqueeze(0) for t in part]
        masked = masks(part[0].shape[0], part[1].shape[0]) if masks else None
        bias = biases[number] if biases else 0
        output = reference(*sequence, bias=bias, masked=masked)
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [N, 2])
def test_sequences_of_different_lengths(kv_heads: int, causal: bool, dtype: torch.dtype) -> None:
    tokens = sum(LENGTHS[0])
    tensors = [torch.randn(tokens, heads, D).to(dtype) for heads in (N, kv_heads, kv_heads)]
    mine = [x.npu().requires_grad_() for x in tensors]
    theirs = [x.float().requires_grad_() for x in tensors]
    ends = torch.tensor(LENGTHS[0]).cumsum(0).tolist()
    options = {"atten_mask": compressed().npu(), "sparse_mode": 3} if causal else {}
    output = torch_npu.npu_fusion_attention(
        *mine, N, "TND", scale=SCALE, actual_seq_qlen=ends, actual_seq_kvlen=ends, **options
    )[0]

    def triangle(s: int, t: int) -> Tensor:
        return torch.ones(s, t, dtype=torch.bool).triu(1 + t - s)

    expected = varlen(theirs, LENGTHS, triangle if causal else None)
    grad = torch.randn_like(expected).to(dtype)
    output.backward(grad.npu())
    expected.backward(grad.float())
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(mine, theirs, strict=True))]
    for device, host in pairs:
        close(device, host)


ENCODED = ([5, 3], [4, 6])


def compare_encoded(
    pse: Tensor, biases: Sequence[Tensor], dtype: torch.dtype, pse_type: int
) -> Tensor:
    """Compare TND with an encoding in all outputs, and return the gradient of `pse`."""
    tensors = [
        torch.randn(sum(lengths), heads, D).to(dtype)
        for lengths, heads in ((ENCODED[0], N), (ENCODED[1], 2), (ENCODED[1], 2))
    ]
    ends = [torch.tensor(lengths).cumsum(0).tolist() for lengths in ENCODED]
    theirs = [x.float().requires_grad_() for x in tensors]
    mine = [x.npu() for x in tensors]
    options = {"pse": pse.npu(), "pse_type": pse_type}
    options |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    fused = torch.ops.npu.npu_fusion_attention_v2
    output = fused(*mine, N, "TND", scale=SCALE, **options)[0]
    expected = varlen(theirs, ENCODED, biases=biases)
    close(output, expected)
    grad = torch.randn_like(expected).to(dtype)
    expected.backward(grad.float())
    fused_grad = torch.ops.npu.npu_fusion_attention_grad_v2
    *grads, pse_grad = fused_grad(*mine, grad.npu(), N, "TND", scale_value=SCALE, **options)[:4]
    for device, host in zip(grads, theirs, strict=True):
        close(device, host.grad)
    return pse_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pse_type", [0, 1])
@pytest.mark.parametrize("one_row", [False, True])
def test_encodings_of_sequences_lie_one_after_the_other(
    one_row: bool, pse_type: int, dtype: torch.dtype
) -> None:
    factor = SCALE if pse_type else 1.0
    lengths = zip(*ENCODED, strict=True)
    parts = [torch.randn(N, 1 if one_row else s, t).to(dtype) for s, t in lengths]
    learnt = [part.float().requires_grad_() for part in parts]
    pse = torch.cat([part.flatten() for part in parts])
    pse_grad = compare_encoded(pse, [part * factor for part in learnt], dtype, pse_type)
    close(pse_grad, torch.cat([part.grad.flatten() for part in learnt]))


@pytest.mark.parametrize("pse_type", [2, 3])
@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_slopes_of_sequences(shape: tuple[int, ...], pse_type: int) -> None:
    slopes = torch.rand(shape)
    biases = []
    for number, (s, t) in enumerate(zip(*ENCODED, strict=True)):
        distance = (torch.arange(s).unsqueeze(1) - torch.arange(t)).abs().float()
        own = slopes if slopes.dim() == 1 else slopes[number]
        biases.append(-own.view(N, 1, 1) * (distance.sqrt() if pse_type == 3 else distance))
    compare_encoded(slopes, biases, torch.float32, pse_type)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_compressed_encoding_of_sequences(batch: int) -> None:
    lengths = [1030, 7]
    ends, longest = [1030, 1037], max(lengths)
    q, k, v = (torch.randn(ends[-1], 1, D) for _ in range(3))
    slopes = torch.tensor([0.25, 0.5])[:batch]
    distance = torch.arange(longest) - torch.arange(longest).unsqueeze(1)
    alibi = slopes.view(batch, 1, 1, 1) * distance
    output = torch_npu.npu_fusion_attention(
        *(x.npu() for x in (q, k, v)),
        *(1, "TND"),
        pse=alibi[:, :, -1024:].npu(),
        scale=SCALE,
        atten_mask=compressed().npu(),
        sparse_mode=2,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]
    biases = [alibi[min(i, batch - 1), :, :n, :n] * SCALE for i, n in enumerate(lengths)]

    def triangle(s: int, t: int) -> Tensor:
        return torch.ones(s, t, dtype=torch.bool).triu(1)

    close(output, varlen([q, k, v], (lengths, lengths), triangle, biases))


def test_sequences_at_the_end_may_take_no_part() -> None:
    q, k, v = (torch.randn(9, N, D).npu() for _ in range(3))
    output, *_ = torch_npu.npu_fusion_attention(
        q, k, v, N, "TND", scale=SCALE, actual_seq_qlen=[2, 5, 0], actual_seq_kvlen=[2, 5, 0]
    )
    expected = varlen([x[:5].cpu() for x in (q, k, v)], ([2, 3], [2, 3]))
    close(output[:5], expected)
    assert output[5:].eq(0).all()


def test_statistics_of_sequences_are_laid_out_as_torch_npu_does() -> None:
    q, k, v = (torch.randn(7, N, D).npu() for _ in range(3))
    call = dict(scale=SCALE, actual_seq_qlen=[3, 7], actual_seq_kvlen=[3, 7])
    blocks = torch_npu.npu_fusion_attention(q, k, v, N, "TND", **call)[1]
    rows = torch_npu.npu_fusion_attention(q, k, v, N, "TND", softmax_layout="TND", **call)[1]
    assert blocks.shape == rows.shape == (7, N, 8)
    parts = blocks.view(-1, 8).split([3 * N, 4 * N])
    turned = [part.view(N, -1, 8).transpose(0, 1) for part in parts]
    assert torch.equal(torch.cat(turned), rows)


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_dropout_keeps_the_expectation_and_repeats_with_the_seed(layout: str) -> None:
    q = torch.zeros(B, N, S, D)
    v = torch.ones(B, N, T, D)
    options: dict[str, Any] = {"scale": SCALE, "keep_prob": 0.8}
    if layout == "TND":
        options |= dict(actual_seq_qlen=[S, 2 * S], actual_seq_kvlen=[T, 2 * T])
    moved = [to_layout(x, layout).npu() for x in (q, q, v)]

    def run() -> Tensor:
        return torch_npu.npu_fusion_attention(*moved, N, layout, **options)[0]

    torch.npu.manual_seed(1)
    first, second = run(), run()
    torch.npu.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)
    # Each of 1152 places stays with 0.8: the mean's standard deviation is 0.015.
    assert first.mean().item() == pytest.approx(1, abs=0.1)


def test_the_backward_of_dropout_uses_the_mask_of_the_forward() -> None:
    """With value the identity, the output is the dropped probabilities themselves."""
    q, k = (torch.randn(1, 1, D, D) for _ in range(2))
    q_npu, k_npu = (x.npu().requires_grad_() for x in (q, k))
    v_npu = torch.eye(D).view(1, 1, D, D).npu().requires_grad_()
    dropped = torch_npu.npu_fusion_attention(
        q_npu, k_npu, v_npu, 1, "BNSD", scale=SCALE, keep_prob=0.5
    )[0]
    grad = torch.randn(1, 1, D, D)
    dropped.backward(grad.npu())
    keep = dropped.detach().cpu().ne(0).float() / 0.5
    host = [x.clone().requires_grad_() for x in (q, k)]
    p = (host[0] @ host[1].transpose(-1, -2) * SCALE).softmax(-1)
    (p * keep).backward(grad)
    for device, expected in ((q_npu, host[0]), (k_npu, host[1])):
        close(device.grad, expected.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
def test_torchs_attention_has_the_bits_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in inputs()]
    mask = torch.rand(B, 1, S, T) > 0.3
    mask[..., 0] = True
    results = []
    for device in ("cpu", "npu"):
        q, k, v = (x.detach().to(device).requires_grad_() for x in tensors)
        masked = mask.to(device) if kind == "masked" else None
        output = F.scaled_dot_product_attention(q, k, v, masked, is_causal=kind == "causal")
        output.backward(torch.ones_like(output))
        results.append([output.detach().cpu(), *(x.grad.cpu() for x in (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_wrong_is_refused() -> None:
    q, k, v = (x.npu() for x in inputs())
    attention = torch_npu.npu_fusion_attention
    small = torch.ones(S, T, dtype=torch.bool).triu(1).npu()
    with pytest.raises(RuntimeError, match="input_layout should be"):
        attention(q, k, v, N, "NBSD")
    with pytest.raises(RuntimeError, match=r"keep_prob value must be in range"):
        attention(q, k, v, N, "BNSD", keep_prob=0.0)
    with pytest.raises(RuntimeError, match=r"takes the compressed atten_mask"):
        attention(q, k, v, N, "BNSD", atten_mask=small, sparse_mode=2)
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        attention(q[0], k[0], v[0], S, "TND")
    with pytest.raises(RuntimeError, match="one dtype"):
        attention(q, k, v.half(), N, "BNSD")


def test_what_is_not_simulated_is_named() -> None:
    q, k, v = (x.npu() for x in inputs())
    with pytest.raises(NotImplementedError, match="sparse_mode 6 is not simulated"):
        torch_npu.npu_fusion_attention(q, k, v, N, "BNSD", sparse_mode=6, prefix=[3, 3])
    with pytest.raises(NotImplementedError, match="sink is not simulated"):
        torch_npu.npu_fusion_attention(q, k, v, N, "BNSD", sink=torch.ones(N).npu())


def test_a_mask_that_contradicts_the_band_is_an_error() -> None:
    """A real NPU would compute some of what is outside, block by block."""
    q, k, v = (x.npu() for x in inputs())
    nothing = torch.zeros(S, T, dtype=torch.bool).npu()
    with pytest.raises(RuntimeError, match="atten_mask lets positions through"):
        torch_npu.npu_fusion_attention(q, k, v, N, "BNSD", atten_mask=nothing, next_tockens=0)
        torch.npu.synchronize()
