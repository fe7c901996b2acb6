"""Why two things do or do not go together."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from ascend_core.errors import ConfigError
from ascend_suite.check import check
from ascend_suite.explain import Kind, explain, pairs
from ascend_suite.finding import Severity
from ascend_suite.rules import RULES

sys.path.insert(0, str(Path(__file__).parent))
from rule_examples import CONFIGS, plan


def test_every_pair_of_features_has_a_verdict() -> None:
    table = pairs()
    assert set(table) == {frozenset(pair) for pair in itertools.combinations(CONFIGS, 2)}
    for pair, verdict in table.items():
        assert {verdict.first, verdict.second} == set(verdict.order) == pair


def test_a_verdict_is_the_checks() -> None:
    for pair, verdict in pairs().items():
        alone = {finding.rule for name in pair for finding in check(plan(name))}
        found = [finding for finding in check(plan(*pair)) if finding.rule not in alone]
        assert {finding.rule for finding in found} <= {rule.id for rule in verdict.rules}
        refused = any(finding.severity is Severity.ERROR for finding in found)
        if verdict.kind is Kind.TOGETHER:
            assert not refused
        if verdict.kind in (Kind.REFUSED, Kind.ALLOWED):
            assert refused


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("swap-optimizer", "reuse-fp32-param", Kind.REFUSED),
        ("recompute-activation", "recompute-norm", Kind.TOGETHER),
        ("recompute-activation", "recompute-layers", Kind.NEEDS),
        ("shard-optimizer", "reduce-gradients", Kind.NEEDS),
        ("swap-attention", "lora", Kind.ALLOWED),
        ("swap-optimizer", "capturable", Kind.REFUSED),
        ("reuse-fp32-param", "bf16", Kind.NEEDS),
        ("recompute-norm", "seq_length", Kind.TOGETHER),
    ],
)
def test_verdicts(first: str, second: str, kind: Kind) -> None:
    assert explain(first, second).kind is kind
    assert explain(second, first).kind is kind
    assert explain(second, first).rules == explain(first, second).rules


def test_the_text_has_all_that_there_is_to_say() -> None:
    text = str(explain("swap-attention", "lora"))
    rule = next(rule for rule in RULES if rule.id == "swap-attention/lora")
    for part in (rule.id, rule.what, rule.because, rule.instead, str(rule.proof)):
        assert part in text
    assert str(explain("swap-attention", "swap-optimizer")).startswith("swap-attention and")


def test_a_rule_for_where_one_of_the_two_is_off_is_not_about_both() -> None:
    ids = {rule.id for rule in explain("swap-optimizer", "shard-optimizer").rules}
    assert ids == {"swap-optimizer/offload-gradients-of-parts"}


def test_it_says_in_which_order_they_are_turned_on() -> None:
    assert explain("recompute-activation", "recompute-layers").order == (
        "recompute-layers",
        "recompute-activation",
    )
    assert explain("swap-attention", "lora").order == ("swap-attention",)


def test_names_may_be_written_as_flags() -> None:
    for name in ("--swap-attention", "swap_attention"):
        assert explain(name, "--use-flash-attn").first == "swap-attention"
    assert explain("swap-attention", "training.use_flash_attn").second == "use_flash_attn"


@pytest.mark.parametrize("name", ["swap-atention", "capturabel"])
def test_a_name_that_is_misspelt_suggests_the_right_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean (swap-attention|capturable)"):
        explain(name, "swap-optimizer")


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("--swiglu", "gated_linear_unit"),
        ("--num-experts", "num_moe_experts"),
        ("num_experts", "num_moe_experts"),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
        ("--fp8-format", "fp8"),
        ("--disable-bias-linear", "add_bias_linear"),
        ("--used-fused-swiglu", "fused-ops"),
        ("--use-fused-rmsnorm", "fused-ops"),
        ("--recompute-norm-num-layers", "recompute-norm"),
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
        ("Recompute-Norm", "recompute-norm"),
    ],
)
def test_each_flag_is_known_by_what_it_gives(name: str, second: str) -> None:
    assert explain("swap-attention", name).second == second


def test_one_thing_is_not_explained_beside_itself() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        explain("swap-optimizer", "--swap-optimizer")


def test_what_cannot_be_explained() -> None:
    with pytest.raises(ConfigError, match="neither bf16 nor fp16 is a feature"):
        explain("bf16", "fp16")
    with pytest.raises(ConfigError, match="features are"):
        explain("zzzzzz", "swap-optimizer")


def test_json() -> None:
    told = json.loads(json.dumps(explain("swap-optimizer", "reuse-fp32-param").as_json()))
    assert told["kind"] == "refused"
    assert told["rules"][0]["id"] == "swap-optimizer/reuse-fp32-param"
    assert told["rules"][0]["proof"] is None
    assert told["rules"][0]["fires_when"] == "swap-optimizer is on and reuse-fp32-param is on"
