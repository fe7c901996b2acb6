"""Rotary embedding as a module: its angles."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops.nn import RotaryEmbedding


def llama_angles(dim: int, base: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As models of Llama compute them while they are in FP32."""
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    phase = positions.float()[..., None] * inverse
    return phase.cos(), phase.sin()


def true_angles(dim: int, base: float, position: int) -> Tensor:
    phases = [position * base ** (-2 * i / dim) for i in range(dim // 2)]
    return torch.tensor([math.cos(phase) for phase in phases], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_of_the_model_leaves_the_phase_in_fp32(dtype: torch.dtype) -> None:
    """RO-01."""
    model = nn.ModuleDict({"rotary": RotaryEmbedding(128), "other": nn.Linear(2, 2)})
    positions = torch.arange(4096)
    cos, sin = model.to(dtype)["rotary"].angles(positions)
    expected = llama_angles(128, 10000.0, positions)
    assert cos.dtype == torch.float32
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    assert (cos[4095].double() - true_angles(128, 10000.0, 4095)).abs().max() < 4095 * 2**-23


def test_rounded_frequencies_would_be_seen() -> None:
    """The test above can fail: with frequencies in BF16, cosines at position 4095 are anything."""
    inverse = (1.0 / 10000.0 ** (torch.arange(0, 128, 2).float() / 128)).bfloat16().float()
    wrong = (4095 * inverse).cos().double()
    assert (wrong - true_angles(128, 10000.0, 4095)).abs().max() > 1


@pytest.mark.parametrize("position", [4095, 2**20 + 1, 2**24 + 1, 2**30 + 1])
def test_fp64_is_right_at_any_position(position: int) -> None:
    cos, _ = RotaryEmbedding(64, phase_dtype=torch.float64).angles(torch.tensor([position]))
    expected = true_angles(64, 10000.0, position)
    assert cos.dtype == torch.float32
    assert (cos[0].double() - expected).abs().max() <= 2**-24


def test_queries_and_keys_in_either_layout() -> None:
    q, k = torch.randn(2, 6, 5, 16, dtype=torch.bfloat16), torch.randn(2, 3, 5, 16)
    positions = torch.stack((torch.arange(5), torch.arange(5) + 7))
    module = RotaryEmbedding(12, base=100.0, interleaved=True)  # 4 elements are not turned
    turned = module(q, k, positions)
    cos, sin = llama_angles(12, 100.0, positions)
    for x, y in zip((q, k), turned, strict=True):
        expected = ascend_ops.rotary(x, cos[:, None], sin[:, None], interleaved=True)
        assert torch.equal(y, expected) and y.dtype == x.dtype
        assert torch.equal(y[..., 12:], x[..., 12:])
    other = RotaryEmbedding(12, base=100.0, interleaved=True, heads_dim=-2)
    swapped = other(q.transpose(1, 2), k.transpose(1, 2), positions)
    for ours, theirs in zip(turned, swapped, strict=True):
        assert torch.equal(ours, theirs.transpose(1, 2))
    alike = module(q, k, torch.arange(5))
    assert torch.equal(alike[0][0], turned[0][0])


def test_scaling_interpolates_positions() -> None:
    scaled = RotaryEmbedding(16, scaling=4.0).angles(torch.arange(0, 32, 4))
    plain = RotaryEmbedding(16).angles(torch.arange(8))
    for ours, theirs in zip(scaled, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_there_is_nothing_to_save_to_move_or_to_round() -> None:
    with torch.device("meta"):
        module = RotaryEmbedding(16)
    assert not module.state_dict() and not list(module.buffers())
    moved = copy.deepcopy(module).to("cpu", torch.float16).to_empty(device="cpu")
    for one, other in ((module, moved), (module, RotaryEmbedding(16))):
        for a, b in zip(one.angles(torch.arange(9)), other.angles(torch.arange(9)), strict=True):
            assert torch.equal(a, b) and a.device.type == "cpu"


def test_instances_do_not_share_angles() -> None:
    """AB-12's kind of fault."""
    one, other = RotaryEmbedding(16), RotaryEmbedding(16, base=500000.0)
    first = one.angles(torch.arange(4))[0]
    other.angles(torch.arange(4))
    one.angles(torch.arange(6))
    assert torch.equal(one.angles(torch.arange(4))[0], first)
    assert not torch.equal(other.angles(torch.arange(4))[0], first)


def test_whole_graph_is_compiled() -> None:
    module = RotaryEmbedding(16).bfloat16()
    q, k = torch.randn(1, 2, 5, 16, requires_grad=True), torch.randn(1, 2, 5, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        compiled(q, k, torch.arange(5)), module(q, k, torch.arange(5)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_autocast_leaves_the_phase_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        cos, _ = RotaryEmbedding(128).angles(torch.arange(4096))
    assert torch.equal(cos, llama_angles(128, 10000.0, torch.arange(4096))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_positions_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="positions are torch"):
        RotaryEmbedding(16).angles(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (1, 1, 5)])
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ConfigError, match="positions are of shape"):
        RotaryEmbedding(8)(q, q, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim": 7}, "dim is 7"),
        ({"dim": 8, "base": 0.0}, "base is 0"),
        ({"dim": 8, "base": math.inf}, "base is inf"),
        ({"dim": 8, "scaling": -1.0}, "scaling is -1"),
        ({"dim": 8, "heads_dim": 1}, "heads_dim is 1"),
        ({"dim": 8, "phase_dtype": torch.bfloat16}, "phase_dtype is torch.bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        RotaryEmbedding(**options)  # type: ignore[arg-type]
