"""ALiBi attention as a module: its slopes, wherever the module goes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops.nn import AlibiAttention


def qkv(
    heads: int, kv_heads: int | None = None, *, queries: int = 5, keys: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    kv_heads = kv_heads or heads
    shapes = ((2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


def test_it_is_the_operator_with_the_slopes_of_its_heads() -> None:
    q, k, v = qkv(12, 3)
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    module = AlibiAttention(12, 3, causal=False, window=3, scale=0.5, backend="eager")
    options = {"causal": False, "window": 3, "scale": 0.5, "backend": "eager"}
    expected = ascend_ops.alibi_attention(
        q, k, v, ascend_ops.alibi_slopes(12), mask=mask, **options
    )
    assert torch.equal(module(q, k, v, mask), expected)


@pytest.mark.parametrize(("heads", "size"), [(8, 2), (12, 4)])
def test_a_rank_has_the_slopes_of_its_heads(heads: int, size: int) -> None:
    """AB-04."""
    q, k, v = qkv(heads)
    whole = AlibiAttention(heads)(q, k, v)
    ranks = [AlibiAttention(heads, tp_rank=rank, tp_size=size) for rank in range(size)]
    assert torch.equal(torch.cat([rank.slopes for rank in ranks]), ascend_ops.alibi_slopes(heads))
    parts = [
        rank(*(x.chunk(size, 1)[n].contiguous() for x in (q, k, v))) for n, rank in enumerate(ranks)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_ranks_that_share_a_head_of_keys() -> None:
    q, k, v = qkv(4, 1)
    whole = AlibiAttention(4, 1)(q, k, v)
    parts = [AlibiAttention(4, 1, tp_rank=n, tp_size=2)(q.chunk(2, 1)[n], k, v) for n in range(2)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_chunk_of_the_queries_says_where_it_begins() -> None:
    """AB-10."""
    q, k, v = qkv(4)
    module = AlibiAttention(4)
    chunk = module(q[:, :, 1:3], k, v, q_start=1)
    torch.testing.assert_close(chunk, module(q, k, v)[:, :, 1:3])
    moved = module(q[:, :, 1:3], k, v, q_start=8, kv_start=7)
    torch.testing.assert_close(moved, chunk)


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
def test_a_cast_of_the_model_leaves_the_slopes_in_fp32(
    cast: Callable[[nn.Module], nn.Module], learnable: bool
) -> None:
    """AB-08."""
    model = nn.ModuleList((AlibiAttention(12, learnable=learnable), nn.Linear(2, 2)))
    slopes = model[0].slopes
    slopes.grad = torch.ones(12) if learnable else None
    cast(model)
    assert model[1].weight.dtype != torch.float32
    assert model[0].slopes.dtype == torch.float32
    assert torch.equal(model[0].slopes, ascend_ops.alibi_slopes(12))
    assert isinstance(model[0].slopes, nn.Parameter) is learnable
    if learnable:
        assert model[0].slopes is slopes and slopes.grad.dtype == torch.float32
    q, k, v = (x.bfloat16() for x in qkv(12))
    assert model[0](q, k, v).dtype == torch.bfloat16


def test_slopes_are_saved_where_they_are_learned_alone() -> None:
    """AB-12."""
    assert list(AlibiAttention(4).state_dict()) == []
    assert list(AlibiAttention(4, learnable=True).state_dict()) == ["slopes"]


def test_learned_slopes_get_a_gradient() -> None:
    module = AlibiAttention(4, learnable=True)
    module(*qkv(4)).square().sum().backward()
    assert module.slopes.grad is not None and (module.slopes.grad != 0).all()
    nn.init.ones_(module.slopes)
    module.reset_parameters()
    assert torch.equal(module.slopes, ascend_ops.alibi_slopes(4))
    assert isinstance(module.slopes, nn.Parameter) and module.slopes.requires_grad


@pytest.mark.parametrize("learnable", [False, True])
def test_made_on_meta(learnable: bool) -> None:
    with torch.device("meta"):
        module = AlibiAttention(4, learnable=learnable)
    assert module.slopes.is_meta
    module.to_empty(device="cpu")
    if learnable:
        module.reset_parameters()
    assert torch.equal(module.slopes, ascend_ops.alibi_slopes(4))


def test_instances_lengths_and_copies_do_not_meet() -> None:
    """AB-12."""
    one, other = AlibiAttention(4), AlibiAttention(6)
    short, long = qkv(4, queries=4, keys=4), qkv(4, queries=6, keys=6)
    first = one(*short)
    one(*long)
    other(*qkv(6))
    assert torch.equal(one(*short), first)
    copied = copy.deepcopy(one)
    assert copied.slopes is not one.slopes and torch.equal(copied(*short), first)


@pytest.mark.parametrize("learnable", [False, True])
def test_whole_graph_is_compiled(learnable: bool) -> None:
    module = AlibiAttention(4, 2, learnable=learnable)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    given = qkv(4, 2)
    assert torch.equal(compiled(*given), module(*given))


def test_repr_says_what_matters() -> None:
    shown = "AlibiAttention(8, kv_heads=2, causal=True, tp_rank=1, tp_size=2, learnable=True)"
    assert repr(AlibiAttention(8, 2, tp_rank=1, tp_size=2, learnable=True)) == shown


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads 4"),
        ({"heads": 6, "tp_size": 4}, "shared by 4 ranks"),
        ({"heads": 12, "kv_heads": 6, "tp_size": 4}, "shared by 4 ranks"),
        ({"heads": 4, "tp_rank": 2, "tp_size": 2}, "tp_rank is 2"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(options: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        AlibiAttention(**options)  # type: ignore[arg-type]


def test_heads_of_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="given 4 heads of q and 4 of k"):
        AlibiAttention(4, tp_size=2)(*qkv(4))
