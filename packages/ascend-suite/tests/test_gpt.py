from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.testing import saved_storages
from ascend_suite.demo.gpt import GPT, GatedMLP, GeluMLP, GPTConfig

SHAPES: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"norm": "layer"},
    {"heads": 1, "hidden": 24, "layers": 1},
    {"vocabulary": 11, "expansion": 3},
]


def small(**changes: Any) -> GPTConfig:
    return GPTConfig(**{"layers": 2, "hidden": 32, "heads": 4, "seq": 12, **changes})


def tokens(config: GPTConfig, length: int = 12) -> torch.Tensor:
    return torch.randint(config.vocabulary, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 12])
def test_logits_have_one_value_for_every_token_of_the_vocabulary(
    changes: dict[str, Any], length: int
) -> None:
    config = small(**changes)
    logits = GPT(config)(tokens(config, length))
    assert logits.shape == (3, length, config.vocabulary)
    assert logits.isfinite().all()


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_no_position_sees_a_later_one(changes: dict[str, Any]) -> None:
    config = small(**changes)
    model = GPT(config).eval()
    read = tokens(config)
    changed = read.clone()
    changed[:, 6] = (changed[:, 6] + 1) % config.vocabulary
    with torch.no_grad():
        before, after = model(read), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(dim=-1).all(), "every later position sees it"


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_every_parameter_gets_a_gradient(changes: dict[str, Any]) -> None:
    config = small(**changes)
    model = GPT(config)
    model.loss(tokens(config), tokens(config)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_an_untrained_model_knows_nothing() -> None:
    config = small()
    loss = GPT(config).loss(tokens(config), tokens(config).flip(0))
    assert loss.item() == pytest.approx(math.log(config.vocabulary), rel=0.01)


def test_dropout_works_in_training_only() -> None:
    config = small(dropout=0.5)
    model, read = GPT(config), tokens(small())
    assert not torch.equal(model(read), model(read))
    model.eval()
    assert torch.equal(model(read), model(read))


def test_the_config_chooses_norm_and_feed_forward_layer() -> None:
    gated, classic = GPT(small()), GPT(small(activation="gelu", norm="layer"))
    assert isinstance(gated.blocks[0].mlp, GatedMLP)
    assert isinstance(gated.final_norm, nn.RMSNorm)
    assert isinstance(classic.blocks[0].mlp, GeluMLP)
    assert isinstance(classic.final_norm, nn.LayerNorm)


@pytest.mark.parametrize(("activation", "wide"), [("swiglu", 4), ("gelu", 2)])
def test_an_mlp_saves_as_many_wide_tensors_as_its_docstring_says(
    activation: Any, wide: int
) -> None:
    config = small(activation=activation)
    mlp = GPT(config).blocks[0].mlp
    x_BSD = torch.randn(3, 12, config.hidden, requires_grad=True)
    bytes_BSF = 3 * 12 * config.expansion * config.hidden * 4
    saved = saved_storages(mlp(x_BSD))
    assert sum(one.nbytes == bytes_BSF for one in saved if not one.is_leaf) == wide


def test_residual_projections_start_smaller_than_the_other_weights() -> None:
    torch.manual_seed(0)
    block = GPT(small(layers=8, hidden=128)).blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.self_attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden=30 cannot be split into heads=4"):
        small(hidden=30)
