"""What users of other libraries took for right and was wrong, or the reverse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ascend_core.errors import ConfigError
from ascend_ddp.config import DDPConfig
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_suite.check import check
from ascend_suite.finding import Finding, Severity
from ascend_suite.plan import Plan
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

sys.path.insert(0, str(Path(__file__).parent))
from rule_examples import BLOCK, FULL, SELECTIVE, plan

GIB = 2**30


def of(rule: str, given: Plan) -> Finding:
    """What one rule says of a plan."""
    (finding,) = (finding for finding in check(given) if finding.rule == rule)
    return finding


def errors(given: Plan) -> list[str | None]:
    return [finding.rule for finding in check(given) if finding.severity is Severity.ERROR]


def test_cc_01_an_option_without_its_prerequisite_names_both() -> None:
    found = of(
        "megatron/param-gather-needs-grad-reduce",
        plan(overlap_param_gather=True, overlap_grad_reduce=False),
    )
    assert found.severity is Severity.ERROR
    assert {"overlap_param_gather", "overlap_grad_reduce"} <= set(found.what[:-1].split())
    assert errors(plan("shard-optimizer")) == ["shard-optimizer/reduction"]


@pytest.mark.parametrize(
    ("training", "rule"),
    [
        ({"fine_grained_activation_offloading": True, "offload_modules": None}, "offload-needs-"),
        ({"distribute_saved_activations": True, "recompute_granularity": "selective"}, "need-full"),
        ({"distribute_saved_activations": True, "tensor_model_parallel_size": 1}, "need-full"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "has-no-number"),
        (
            {"optimizer_cpu_offload": True, "fp8_param": True, "fp8_recipe": "mxfp8"},
            "cpu-offload-needs-",
        ),
        (
            {"overlap_param_gather_with_optimizer_step": True, "ckpt_format": "torch_dist"},
            "param-gather-with-step",
        ),
        ({"delay_wgrad_compute": True, "transformer_impl": "inference_optimized"}, "delayed-"),
        ({"optimizer": "dist_muon", "use_megatron_fsdp": True}, "megatron/muon"),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, "megatron/muon"),
    ],
)
def test_cc_01_what_megatron_core_asserts_later_is_told_at_once(
    training: dict[str, object], rule: str
) -> None:
    (found,) = errors(plan(**training))
    assert rule in str(found)


@pytest.mark.parametrize("granularity", [None, "full"])
def test_cc_01_numbers_of_layers_without_full_recompute(granularity: str | None) -> None:
    rule = "megatron/method-without-full"
    given = plan(recompute_granularity=granularity, recompute_num_layers=2)
    assert (rule in {one.rule for one in check(given)}) is (granularity is None)
    swap = SwapAttentionConfig(recompute_num_layers=2)
    given = plan(swap, recompute_granularity=None, recompute_num_layers=2)
    assert rule not in {one.rule for one in check(given)}


def test_cc_01_layer_wise_muon_gathers_weights() -> None:
    muon = {"optimizer": "muon", "overlap_param_gather": True, "use_distributed_optimizer": False}
    assert len(errors(plan(**muon))) == 2
    assert errors(plan(**muon, use_layer_wise_distributed_optimizer=True)) == []


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (plan(RecomputeActivationConfig(layers=(1,)), BLOCK), "recompute-activation/same-layers"),
        (plan(RecomputeNormConfig(layers=(5, 0)), BLOCK), "recompute-norm/same-layers"),
        (plan(RecomputeNormConfig(layers=(2,)), BLOCK), None),
        (
            plan(
                SwapAttentionConfig(recompute_num_layers=2), RecomputeActivationConfig(layers=(1,))
            ),
            "swap-attention/mlp-recomputed-twice",
        ),
        (
            plan(RecomputeNormConfig(layers=(1,)), **FULL, recompute_num_layers=2),
            "recompute-norm/behind-full-layers",
        ),
        (plan(RecomputeNormConfig(layers=(2,)), **FULL, recompute_num_layers=2), None),
    ],
)
def test_a_layer_by_its_place_is_not_recomputed_twice(given: Plan, rule: str | None) -> None:
    assert errors(given) == ([] if rule is None else [rule])


@pytest.mark.parametrize(
    "config", [RecomputeActivationConfig, RecomputeNormConfig, RecomputeLayersConfig]
)
def test_a_layer_by_its_place_is_one_of_the_model(config: Any) -> None:
    wrong, right = (plan(config(layers=(0, place)), num_layers=4) for place in (4, 3))
    [error] = errors(wrong)
    assert error is not None and error.endswith("/num-layers")
    assert not errors(right)


@pytest.mark.parametrize("module", ["mlp", "moe", "moe_act", "shared_experts"])
def test_what_covers_the_same_values_takes_no_leave(module: str) -> None:
    """The proof of the rule that can be allowed is one of attention's recompute alone."""
    selective = plan("recompute-activation", **SELECTIVE, recompute_modules=("core_attn", module))
    rule = "recompute-activation/selective"
    assert errors(selective) == ["recompute-activation/same-values"]
    allowed = Plan(selective.features, selective.training, allow=(rule,))
    assert errors(allowed) == ["recompute-activation/same-values"]


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (plan(recompute_granularity="selective", recompute_modules=("typo",)), "core_attn"),
        (plan(fine_grained_activation_offloading=True, offload_modules=("typo",)), "qkv_linear"),
    ],
)
def test_cc_03_an_unknown_module_lists_the_valid_ones(given: Plan, valid: str) -> None:
    (found,) = check(given)
    assert found.severity is Severity.ERROR
    assert valid in str(found.why)


def test_cc_03_a_module_where_no_module_is_taken() -> None:
    full = plan(recompute_granularity="full", recompute_modules=("layernorm",))
    found = of("megatron/recompute-modules-without-selective", full)
    assert found.severity is Severity.ERROR
    assert "mla_up_proj" in str(found.why)
    default = plan(recompute_granularity=None, recompute_modules=("core_attn",))
    assert errors(default) == []  # as megatron-core's config has it by itself
    with pytest.raises(ConfigError, match="swiglu and rms_norm"):
        FusedOpsConfig(operators=("typo",))


def test_cc_04_offload_with_accumulation_is_supported() -> None:
    given = plan(SwapOptimizerConfig(offload_gradients=True), num_microbatches=4)
    assert errors(given) == []
    assert "bit for bit" in str(of("swap-optimizer/accumulation", given).why)


def test_cc_05_alibi_with_context_parallelism_is_refused_at_the_start() -> None:
    given = plan(position_embedding_type="alibi", context_parallel_size=2)
    assert errors(given) == ["alibi/context-parallel"]


def test_cc_06_slow_but_legal_takes_leave() -> None:
    slow = plan("swap-optimizer", optimizer_form="for-loop", device="npu")
    assert errors(slow) == ["swap-optimizer/for-loop"]
    allowed = Plan(slow.features, slow.training, allow=("swap-optimizer/for-loop",))
    assert errors(allowed) == []


def test_cc_07_two_planners_of_one_host() -> None:
    features = (
        SwapAttentionConfig(host_budget=40 * GIB),
        SwapOptimizerConfig(host_budget_bytes=40 * GIB),
    )
    assert errors(plan(*features, pinned_limit_bytes=64 * GIB)) == [
        "swap-attention/swap-optimizer-host-budget"
    ]
    assert errors(plan(*features, pinned_limit_bytes=80 * GIB)) == []
    for option in ("cpu_offloading", "fine_grained_activation_offloading", "smart_swap"):
        assert errors(plan("swap-attention", **{option: True}))
    for option in ("optimizer_cpu_offload", "smart_swap"):
        assert errors(plan("swap-optimizer", **{option: True}))
    for other, option in (
        ("swap-optimizer", "cpu_offloading"),
        ("swap-optimizer", "fine_grained_activation_offloading"),
        ("swap-attention", "optimizer_cpu_offload"),
    ):
        (found,) = check(plan(other, **{option: True}, offload_modules=("core_attn",)))
        assert (found.severity, found.rule[: len(other)]) == (Severity.WARNING, other)


def test_cc_09_a_default_that_differs_from_the_one_before_is_told() -> None:
    given = plan("swap-optimizer", framework="pytorch", bf16=True)
    assert of("swap-optimizer/no-masters", given).severity is Severity.WARNING


@pytest.mark.parametrize(
    "feature", ["reuse-fp32-param", SwapOptimizerConfig(master_weights=True)], ids=str
)
def test_cc_10_a_run_that_cannot_resume_is_refused_when_it_starts(feature: object) -> None:
    assert any(
        str(rule).endswith("masters-not-saved")
        for rule in errors(plan(feature, no_save_optim=True))
    )
    assert errors(plan(feature, no_save_optim=False)) == []


def test_cc_10_a_format_that_loses_step_counts() -> None:
    given = plan(
        "swap-optimizer",
        framework="megatron-core",
        ckpt_format="torch",
        use_distributed_optimizer=True,
    )
    assert errors(given) == ["swap-optimizer/cannot-resume"]


def test_the_way_out_of_a_schedule_is_one() -> None:
    """It is to set overlap of reduce-gradients to False."""
    schedule = {"moe_fb_overlap": True, "overlap_grad_reduce": False}
    assert errors(plan("reduce-gradients", **schedule)) == ["reduce-gradients/schedules"]
    assert errors(plan(DDPConfig(overlap=False), **schedule)) == []


def test_cc_12_reentrant_replay_beside_reduction_is_right() -> None:
    given = plan("reduce-gradients", reentrant_checkpoint=True, shared_parameters=True)
    found = of("reduce-gradients/reentrant-shared", given)
    assert found.severity is Severity.NOTE
    assert errors(given) == []
