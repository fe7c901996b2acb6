"""What the suite reads off a real model of megatron-core: its shape, and what it trains with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_recompute.config import RecomputeLayersConfig
from ascend_suite import ModelShape, Plan, apply, estimate
from ascend_suite._shape_reading import SeenTokens, read_shape
from ascend_suite.finding import IncompatiblePlanError
from tests_integration.megatron_cpu import (
    BATCH,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    gpt,
    loss_of,
    tokens,
)

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None"),
]

SHAPE = {
    "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "head_size": HIDDEN // HEADS,
    "ffn": INNER, "seq": SEQUENCE, "vocab": VOCABULARY, "micro_batch": BATCH,
    "positions": "rotary", "tied": False, "dropout": True, "flash": False,
}  # fmt: skip
CLASSIC = {"kv_heads": HEADS, "activation": "gelu", "norm": "layer", "biases": "all"}
LLAMA = {"kv_heads": 2, "activation": "swiglu", "norm": "rms", "biases": "none"}
AS_LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "num_query_groups": 2, "add_bias_linear": False
}  # fmt: skip


def read(model: nn.Module, plan: Plan | None = None) -> Any:
    seen = SeenTokens(model)
    loss_of(model, tokens())
    seen.remove()
    return read_shape(model, optim.AdamW(model.parameters()), plan or Plan(), seen)


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, CLASSIC), (AS_LLAMA, LLAMA)], ids=["GPT-3", "Llama"]
)
def test_the_shape_of_megatron_cores_model_is_read_off(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model = gpt(**options)
    found = read(model)
    assert found == ModelShape(**SHAPE, **wanted)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert estimate(found, device="cpu").parameters == elements


def test_what_wraps_it_hides_nothing() -> None:
    model = gpt()
    assert read(nn.parallel.DistributedDataParallel(model)) == read(model)


def test_ranks_are_those_of_its_config_where_the_plan_says_nothing() -> None:
    model = gpt(context_parallel_size=1)
    model.config.tensor_model_parallel_size = 2
    model.config.context_parallel_size = 2
    model.config.sequence_parallel = True
    seen = SeenTokens(model)
    seen.batch, seen.seq = BATCH, SEQUENCE
    found: Any = read_shape(model, None, Plan(), seen)
    assert (found.tp, found.cp, found.sequence_parallel) == (2, 2, True)
    assert found.seq == 2 * SEQUENCE  # of which this rank sees a half
    training = {"tensor_model_parallel_size": 4, "world_size": 24}
    found = read_shape(model, None, Plan(training=training), seen)
    assert (found.tp, found.cp, found.dp) == (4, 2, 3)


def test_the_type_is_that_of_most_elements() -> None:
    model = gpt().bfloat16()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.to(torch.float32)
    seen = SeenTokens(model)
    seen.batch, seen.seq = BATCH, SEQUENCE
    found: Any = read_shape(model, None, Plan(), seen)
    assert found.dtype == "bfloat16"


LAYERS_AGAIN = RecomputeLayersConfig(num_layers=1)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            "layers twice",
        ),
        ({"cuda_graph_impl": "local"}, "captured graphs"),
        ({"gradient_accumulation_fusion": True}, "fused gradient accumulation"),
    ],
    ids=["recompute", "graph", "fusion"],
)
def test_what_the_models_config_says_is_checked_with_the_plan(
    options: dict[str, Any], rule: str
) -> None:
    model = gpt()
    for name, value in options.items():
        setattr(model.config, name, value)
    with pytest.raises(IncompatiblePlanError, match=rule):
        apply(Plan({"recompute-layers": LAYERS_AGAIN}), model)


def test_the_plan_counts_more_than_the_models_config() -> None:
    """A script's arguments do not say all as the config does that is made of them."""
    model = gpt()
    training = {"num_query_groups": 1, "recompute_granularity": None}
    with apply(Plan({"recompute-layers": LAYERS_AGAIN}, training=training), model) as session:
        assert session.plan.training["num_query_groups"] == 1
        assert session.plan.training["num_attention_heads"] == HEADS
        assert not session.findings
