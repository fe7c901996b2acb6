"""ALiBi attention as torch's operator: gradients, torch.compile, what is kept."""

from typing import Any

import pytest
import torch

import ascend_ops
from ascend_ops import reference
from ascend_ops._operators.alibi_attention import alibi_attention as operator


def inputs(
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (7, 7),
    *,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """q, k and v, which require gradients."""
    shapes = [(2, heads[i], lengths[i], size) for i in (0, 1, 1)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


CALLS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"causal": False},
    {"causal": False, "window": 2, "scale": 0.7},
    {"mask": torch.tensor([[False, False, True, True, True], [True, False, True, False, True]])},
    {"q_start": 2, "kv_start": 4},
]


@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("per_item", [False, True])
def test_gradients_are_right_in_fp64(options: dict[str, Any], per_item: bool) -> None:
    slopes = torch.rand((2, 2) if per_item else (2,), dtype=torch.float64, requires_grad=True)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return ascend_ops.alibi_attention(*tensors, **options)

    given = (*inputs((2, 1), (3, 5), size=2), slopes)
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("learned", [False, True])
def test_opcheck(learned: bool) -> None:
    q, k, v = inputs((4, 2), (5, 7), dtype=torch.float32)
    slopes = ascend_ops.alibi_slopes(4).requires_grad_(learned)
    mask = torch.tensor([[False] + [True] * 6] * 2)
    torch.library.opcheck(operator, (q, k, v, slopes, mask, True, 3, 0.3, 2, 0, None))
    torch.library.opcheck(operator, (q, k, v, slopes, None, False, None, 0.3, 0, 1, "eager"))


@pytest.mark.filterwarnings(r"ignore:`torch.jit.script\w*` is deprecated")  # inductor's own import
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_whole_graph_is_compiled(backend: str) -> None:
    q, k, v = inputs(dtype=torch.float32)
    slopes = ascend_ops.alibi_slopes(4)

    def run(q: torch.Tensor) -> torch.Tensor:
        return ascend_ops.alibi_attention(q * 2, k, v, slopes, window=5).sum()

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    grad = torch.autograd.grad(compiled(q), (q, k, v))
    expected = torch.autograd.grad(run(q), (q, k, v))
    assert all(torch.equal(one, other) for one, other in zip(grad, expected, strict=True))


def test_kept_for_backward_are_the_inputs_the_result_and_lse() -> None:
    q, k, v = inputs(lengths=(48, 64), dtype=torch.float32)
    slopes, mask = ascend_ops.alibi_slopes(4), torch.ones(2, 64, dtype=torch.bool)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ascend_ops.alibi_attention(q, k, v, slopes, mask=mask)
    found = sum(tensor.nbytes for tensor in kept)
    assert found == 4 * (2 * q.numel() + 2 * k.numel() + 2 * 4 * 48 + 4) + 2 * 64


def test_lse_has_no_gradient() -> None:
    q, k, v = inputs()
    slopes = ascend_ops.alibi_slopes(4)
    lse = ascend_ops.alibi_attention(q, k, v, slopes, return_lse=True)[1]
    assert not lse.requires_grad
    assert torch.allclose(lse, reference.alibi_lse(q, k, slopes), atol=1e-6)
