"""What npu_fusion_attention refuses at the call, since its task reads through addresses alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

B, N, M, S, T, D = 2, 4, 2, 6, 5, 8


def tensors(layout: str, **sizes: int) -> list[Tensor]:
    """Query, key and value; `sizes` such as k_batch=1 make one of them other than it must be."""

    def one(name: str, heads: int, length: int) -> Tensor:
        b, n, s, d = (
            sizes.get(f"{name}_{size}", value)
            for size, value in (("batch", B), ("heads", heads), ("length", length), ("size", D))
        )
        shape = {
            "BNSD": (b, n, s, d),
            "BSND": (b, s, n, d),
            "BSH": (b, s, n * d),
            "SBH": (s, b, n * d),
            "TND": (s, n, d),
        }
        return torch.randn(shape[layout]).npu()

    return [one("q", N, S), one("k", M, T), one("v", M, T)]


def attention(inputs: list[Tensor], layout: str, heads: int = N, **options: Any) -> Tensor:
    if layout == "TND":
        options = {"actual_seq_qlen": [S], "actual_seq_kvlen": [T], **options}
    return torch_npu.npu_fusion_attention(*inputs, heads, layout, **options)[0]


LAYOUTS = ["BNSD", "BSND", "BSH", "SBH", "TND"]
WRONG = [
    ({"k_batch": 1, "v_batch": 1}, "query and key must have the same batch, but have 2 and 1"),
    ({"v_batch": 1}, "key and value must have the same batch, but have 2 and 1"),
    ({"v_length": 3}, "key and value must have the same length, but have 5 and 3"),
    ({"v_heads": 1}, "key and value must have the same number of heads, but have 2 and 1"),
    ({"k_size": 4}, "query and key must have the same head size, but have 8 and 4"),
    (
        {"k_heads": 3, "v_heads": 3},
        r"heads of query \(4\) must be a multiple of those of key \(3\)",
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_fits_is_computed(layout: str) -> None:
    inputs = tensors(layout)
    assert attention(inputs, layout).shape == inputs[0].shape


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
@pytest.mark.parametrize(("sizes", "message"), WRONG)
def test_sizes_that_do_not_fit_are_an_error_at_the_call(
    sizes: dict[str, int], message: str, layout: str
) -> None:
    inputs = tensors(layout, **sizes)
    with pytest.raises(RuntimeError, match=message):
        attention(inputs, layout)


@pytest.mark.parametrize("layout", ["BSH", "SBH"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        *WRONG[:3],
        WRONG[5],
        ({"q_size": 9, "q_heads": 1}, r"last dimension of query \(9\) .* head_num \(4\)"),
        ({"k_heads": 1, "k_size": 9}, r"last dimension of key \(9\) .* head size \(8\)"),
        ({"v_heads": 1, "v_size": 9}, r"last dimension of value \(9\) .* heads of key \(2\)"),
    ],
)
def test_hidden_sizes_that_do_not_fit_are_an_error_at_the_call(
    sizes: dict[str, int], message: str, layout: str
) -> None:
    inputs = tensors(layout, **sizes)
    with pytest.raises(RuntimeError, match=message):
        attention(inputs, layout)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
def test_head_num_is_the_querys(layout: str) -> None:
    with pytest.raises(RuntimeError, match="head_num is 2, but query has 4 heads"):
        attention(tensors(layout), layout, heads=2)
    with pytest.raises(RuntimeError, match="head_num must be positive"):
        attention(tensors(layout), layout, heads=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actual_seq_qlen": [S + 1]}, "actual_seq_qlen .* at most 6 rows"),
        ({"actual_seq_kvlen": [T + 1]}, "actual_seq_kvlen .* at most 5 rows"),
        ({"actual_seq_qlen": [4, 2], "actual_seq_kvlen": [4, 5]}, "actual_seq_qlen .* cumulated"),
        ({"actual_seq_qlen": [-1]}, "actual_seq_qlen .* cumulated"),
        ({"actual_seq_qlen": [2, 6]}, "must be the same and cannot be empty"),
        ({"atten_mask": torch.zeros(S, T - 1).bool()}, r"atten_mask in layout TND .* \[6, 5\]"),
        ({"pse": torch.zeros(1, N, S, T)}, r"pse in layout TND .* \(120 or 20 elements\)"),
        ({"pse": torch.zeros(7)}, r"pse in layout TND .* \(120 or 20 elements\)"),
    ],
)
def test_sequences_that_do_not_fit_are_an_error_at_the_call(
    options: dict[str, Any], message: str
) -> None:
    moved = {k: v.npu() if isinstance(v, Tensor) else v for k, v in options.items()}
    with pytest.raises(RuntimeError, match=message):
        attention(tensors("TND"), "TND", **moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atten_mask": torch.zeros(T, S).bool()}, "atten_mask must have a shape of"),
        ({"atten_mask": torch.zeros(T).bool()}, "atten_mask must have a shape of"),
        ({"atten_mask": torch.zeros(1, N, S, T).bool()}, "atten_mask must have a shape of"),
        ({"atten_mask": torch.zeros(S, T)}, "atten_mask must be bool or uint8"),
        ({"pse": torch.zeros(B, N, S, T - 1)}, r"pse must have the shape .* 2, 4, 6, 5"),
        ({"pse": torch.zeros(3, N, S, T)}, r"pse must have the shape .* 2, 4, 6, 5"),
        ({"pse": torch.zeros(S, T)}, r"pse must have the shape .* 2, 4, 6, 5"),
        ({"pse": torch.zeros(B, N, S, T).half()}, "pse must have the dtype of query"),
    ],
)
def test_a_mask_or_an_encoding_that_does_not_fit_is_an_error_at_the_call(
    options: dict[str, Tensor], message: str
) -> None:
    moved = {name: t.npu() for name, t in options.items()}
    with pytest.raises(RuntimeError, match=message):
        attention(tensors("BNSD"), "BNSD", **moved)


def test_slopes_that_do_not_fit_are_an_error_at_the_call() -> None:
    attention_v2 = torch.ops.npu.npu_fusion_attention_v2
    for pse, message in ((torch.rand(N + 1), "shape"), (torch.rand(N).half(), "float32")):
        with pytest.raises(RuntimeError, match=f"pse of pse_type 2 and 3 must .*{message}"):
            attention_v2(*tensors("BNSD"), N, "BNSD", pse=pse.npu(), pse_type=2)


def test_what_is_empty_or_of_another_dtype_is_an_error_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="cannot be empty"):
        attention(tensors("BNSD", k_length=0, v_length=0), "BNSD")
    with pytest.raises(RuntimeError, match="query must be float16, bfloat16 or float32"):
        attention([t.to(torch.int32) for t in tensors("BNSD")], "BNSD")


@pytest.mark.parametrize("place", range(5))
def test_a_tensor_of_the_cpu_is_refused(place: int) -> None:
    mask, pse = torch.zeros(S, T).bool(), torch.zeros(B, N, S, T)
    given = [*tensors("BNSD"), mask.npu(), pse.npu()]
    given[place] = given[place].cpu()
    with pytest.raises(RuntimeError, match=r"on the same device.*npu_fusion_attention"):
        attention(given[:3], "BNSD", atten_mask=given[3], pse=given[4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dy: dy.cpu(), "on the same device"),
        (lambda dy: dy[:1], "dy must have the shape"),
        (lambda dy: dy.half(), "dy must have the shape"),
    ],
)
def test_a_gradient_that_does_not_fit_is_an_error_at_the_call(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    inputs = tensors("BNSD")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.npu.npu_fusion_attention_grad(
            *inputs, change(torch.zeros_like(inputs[0])), N, "BNSD"
        )
