"""The rules about megatron-core's own options, against the config that refuses them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ascend_suite.plan import Plan
from ascend_suite.rules.model import MODEL_RULES

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/ascend-suite/tests"))
from rule_examples import EXAMPLES

SHAPE = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 24}
REFUSALS = {
    "megatron/one-precision": "Only one of self.fp16",
    "megatron/fp4-and-fp8": "fp4 and fp8 cannot be used",
    "megatron/fp8-param-needs-fp8": "fp8_param must be used together",
    "megatron/heads-by-ranks": "num_attention_heads .12. must be a multiple",
    "megatron/groups-by-ranks": "num_query_groups .4. must be a multiple or divisor",
    "megatron/sequences-need-tensors": "sequence parallelism without tensor parallelism",
    "megatron/expert-ranks-need-experts": "num_moe_experts must be non None",
}


def build(plan: Plan) -> None:
    from megatron.core.transformer import TransformerConfig

    TransformerConfig(**{**SHAPE, **plan.training})


def test_each_rule_is_compared() -> None:
    assert [rule.id for rule in MODEL_RULES] == list(REFUSALS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # megatron-core's, of its own defaults
@pytest.mark.parametrize("rule", REFUSALS)
def test_megatron_core_refuses_what_a_rule_speaks_of_and_nothing_else(
    rule: str, megatron: None
) -> None:
    speaking, silent = EXAMPLES[rule]
    with pytest.raises(ValueError, match=REFUSALS[rule]):
        build(speaking)
    build(silent)
