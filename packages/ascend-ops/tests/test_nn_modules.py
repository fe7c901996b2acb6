"""SwiGLU and RMSNorm as modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops.nn import RMSNorm, SwiGLU


def test_swiglu_is_the_operator() -> None:
    x = torch.randn(3, 8, 5, requires_grad=True)
    module = SwiGLU(dim=1, limit=0.5, backend="eager")
    y = module(x)
    assert torch.equal(y, ascend_ops.swiglu(x, 1, limit=0.5, backend="eager"))
    assert repr(module) == "SwiGLU(dim=1, limit=0.5, backend='eager')"
    assert repr(SwiGLU()) == "SwiGLU(dim=-1)"
    assert not module.state_dict()


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_of_torchs_norm_load_both_ways(affine: bool) -> None:
    theirs = nn.RMSNorm(8, eps=1e-6, elementwise_affine=affine)
    ours = RMSNorm(8, elementwise_affine=affine)
    if affine:
        nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert list(ours.state_dict()) == (["weight"] if affine else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_epsilon_is_torchs_epsilon(dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, dtype=dtype) * 1e-3
    ours, theirs = RMSNorm(64, eps=None, dtype=dtype), nn.RMSNorm(64, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def test_an_offset_starts_as_nothing_and_is_reset_to_it() -> None:
    module = RMSNorm(8, unit_offset=True)
    x = torch.randn(3, 8)
    assert torch.equal(module.weight, torch.zeros(8))
    assert torch.equal(module(x), RMSNorm(8)(x))
    nn.init.ones_(module.weight)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.zeros(8))
    expected = "RMSNorm((8,), eps=1e-06, elementwise_affine=True, unit_offset=True)"
    assert repr(module) == expected


def test_weight_is_made_where_it_is_asked_for() -> None:
    module = RMSNorm([8], device="meta", dtype=torch.bfloat16)
    assert module.weight.is_meta and module.weight.dtype == torch.bfloat16
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8, dtype=torch.bfloat16))


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="dimensions \\[2, 3\\] to normalise"):
        RMSNorm((2, 3))
    for affine in (True, False):
        with pytest.raises(ConfigError, match=r"weight has the shape|was made for"):
            RMSNorm(8, elementwise_affine=affine)(torch.randn(3, 4))


def test_modules_are_compiled_whole_and_copied() -> None:
    mlp = nn.Sequential(RMSNorm(8), nn.Linear(8, 24), SwiGLU(), nn.Linear(12, 8))
    x = torch.randn(3, 8)
    compiled = torch.compile(copy.deepcopy(mlp), fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    mlp(x).sum().backward()
    for ours, theirs in zip(compiled.parameters(), mlp.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_eager_swiglu_module_trains_as_plain_torch_bit_for_bit() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

    torch.manual_seed(0)
    first, last = nn.Linear(8, 24), nn.Linear(12, 8)
    x = torch.randn(5, 8)
    grads = []
    for module in (Plain(), SwiGLU(backend="eager")):
        loss = last(module(first(x))).square().sum()
        grads.append(torch.autograd.grad(loss, [*first.parameters(), *last.parameters()]))
    assert all(map(torch.equal, *grads))
