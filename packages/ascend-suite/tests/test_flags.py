"""Plans from the flags and the parsed arguments of training scripts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from ascend_core.errors import ConfigError
from ascend_core.feature import discover
from ascend_ddp import DDPConfig
from ascend_ops import FusedOpsConfig
from ascend_recompute import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param import ReuseParamConfig
from ascend_suite import IncompatiblePlanError, Plan, Severity
from ascend_suite._kinds import hints_of
from ascend_suite._reading import PACKAGES
from ascend_suite._reading_flags import read_flags, read_namespace
from ascend_suite.check import check
from ascend_suite.flags import FEATURE_FLAGS
from ascend_suite.integrations.megatron import add_arguments
from ascend_suite.vocabulary import VOCABULARY
from ascend_swap import SwapAttentionConfig, SwapOptimizerConfig

ALL = (
    "torchrun --nproc 8 pretrain_gpt.py --bf16 --swap-optimizer --swap-optimizer-times 8 "
    "--used-fused-swiglu --use-fused-rmsnorm --recompute-norm --recompute-norm-num-layers=2 "
    "--recompute-activation-function --recompute-activation-function-num-layers 3 "
    "--swap-attention --swap-modules self_attention,mlp --recompute-num-layers 2 "
    "--reuse-fp32-param --position-embedding-type alibi --overlap-grad-reduce "
    "--overlap-param-gather --use-distributed-optimizer --swiglu --lr 1e-4 --adam-beta1 0.9 "
    "--data-path 'my data' --no-gradient-accumulation-fusion "
    "--num-layers-per-virtual-pipeline-stage 2"
)


def subjects(argv: str) -> dict[str, tuple[Severity, str]]:
    _, found = read_flags(argv)
    assert len({one.subject for one in found}) == len(found)
    return {one.subject: (one.severity, one.instead or "") for one in found}


# Flags -------------------------------------------------------------------------------------------


def test_the_flags_of_all_features_are_read() -> None:
    plan = Plan.from_flags(ALL)
    assert plan.features == {
        "swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=8, master_weights=True),
        "fused-ops": FusedOpsConfig(operators=("swiglu", "rms_norm")),
        "recompute-norm": RecomputeNormConfig(num_layers=2),
        "recompute-activation": RecomputeActivationConfig(num_layers=3),
        "swap-attention": SwapAttentionConfig(
            swap_modules="self_attention,mlp", recompute_num_layers=2
        ),
        "reuse-fp32-param": ReuseParamConfig(),
    }
    expected = {
        "framework": "megatron-core",
        "bf16": True,
        "position_embedding_type": "alibi",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
        "gated_linear_unit": True,
        "gradient_accumulation_fusion": False,
        "num_layers_per_virtual_pipeline_stage": 2,
    }
    assert {name: plan.training[name] for name in expected} == expected


def test_a_command_line_may_be_a_list_of_words() -> None:
    assert Plan.from_flags(["--swap-optimizer", "--save", "a b"]).training["save"] == "a b"


def test_what_is_not_given_has_its_default() -> None:
    training = Plan.from_flags("--swap-optimizer").training
    assert training["use_distributed_optimizer"] is False
    assert training["recompute_granularity"] is None
    assert training["gradient_accumulation_fusion"] is True  # in scripts, not in the config
    assert training["quant_grads"] is False
    assert "num_layers" not in training  # a script must be told
    assert "context_parallel_algo" not in training  # where there is no MindSpeed, there is none
    assert "torch_version" not in training


def test_in_plain_pytorch_what_is_not_given_is_not_known() -> None:
    plan = Plan.from_flags("--swap-optimizer --bf16", framework="pytorch")
    assert plan.training == {"framework": "pytorch", "bf16": True}


@pytest.mark.parametrize("spelling", ["--use-fused-swiglu", "--used-fused-swiglu"])
def test_both_spellings_of_fused_swiglu_are_read(spelling: str) -> None:
    expected = {"fused-ops": FusedOpsConfig(operators=("swiglu",))}
    assert Plan.from_flags(spelling).features == expected


def test_mindspeeds_defaults_say_nothing() -> None:
    argv = "--swap-attention --swap-modules input_norm,self_attention,post_attention_norm"
    assert Plan.from_flags(argv).features == {"swap-attention": SwapAttentionConfig()}
    assert Plan.from_flags("--swap-optimizer-times 16").features == {}


def test_full_recompute_has_the_number_of_layers_for_itself() -> None:
    argv = "--swap-attention --recompute-granularity full --recompute-method block "
    plan = Plan.from_flags(argv + "--recompute-num-layers 2")
    assert plan.features == {"swap-attention": SwapAttentionConfig()}
    assert plan.training["recompute_num_layers"] == 2


def test_no_layers_are_none() -> None:
    argv = "--recompute-norm --recompute-norm-num-layers 0"
    assert Plan.from_flags(argv).features == {}
    assert Plan.from_flags("--recompute-norm-num-layers 0").features == {}


def test_in_plain_pytorch_our_features_do_it() -> None:
    argv = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3 "
    plan = Plan.from_flags(argv + "--overlap-grad-reduce", framework="pytorch")
    assert plan.features == {
        "recompute-layers": RecomputeLayersConfig(method="uniform", num_layers=3),
        "reduce-gradients": DDPConfig(),
    }
    assert "recompute_granularity" not in plan.training
    argv = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    plan, found = read_flags(argv, framework="pytorch")
    assert plan.features["reduce-gradients"] == DDPConfig(mode="reduce-scatter")
    if "shard-optimizer" in discover():
        assert not found
        assert plan.features["shard-optimizer"].overlap_param_gather
    else:
        assert [one.what for one in found] == ["shard-optimizer is not installed."]


@pytest.mark.parametrize(
    ("argv", "subject", "instead"),
    [
        ("--swap-atention", "--swap-atention", "did you mean --swap-attention?"),
        ("--swap_optimizer", "--swap_optimizer", "did you mean --swap-optimizer?"),
        ("--used-fused-rmsnorm", "--used-fused-rmsnorm", "did you mean --use-fused-rmsnorm?"),
        ("--bf16 true", "--bf16", "write --bf16 alone"),
        ("--bf16=true", "--bf16", "write --bf16 alone"),
        ("--swap-optimizer --swap-optimizer-times", "--swap-optimizer-times", "one value"),
        ("--swap-optimizer-times 8", "swap-optimizer.swap_optimizer_times", "--swap-optimizer"),
        ("--recompute-norm-num-layers 8", "recompute-norm.num_layers", "give --recompute-norm"),
        ("--num-layers eight", "--num-layers", "write a whole number."),
        ("--num-layers 8 9", "--num-layers", "one value"),
        ("--recompute-granularity ful", "--recompute-granularity", "did you mean 'full'?"),
        ("--recompute-granularity none", "--recompute-granularity", "'full', 'selective'"),
        ("--recompute-modules mlp mpl", "training.recompute_modules", "did you mean mlp?"),
        (
            "--swap-optimizer --swap-optimizer-times 0",
            "swap-optimizer.swap_optimizer_times",
            "a whole number above 0",
        ),
    ],
)
def test_a_wrong_flag_is_told_with_what_to_do_instead(
    argv: str, subject: str, instead: str
) -> None:
    found = subjects(argv)
    assert set(found) == {subject}
    assert found[subject][0] is Severity.ERROR
    assert instead in found[subject][1]


def test_all_wrong_flags_are_told_together() -> None:
    with pytest.raises(IncompatiblePlanError) as caught:
        Plan.from_flags("--swap-atention --num-layers x --recompute-norm-num-layers 8")
    assert len(caught.value.findings) == 3


def test_what_is_likely_not_meant_is_a_warning() -> None:
    argv = "--use-torch-fdsp2 --num-layers 2 --num-layers 3 --swap-optimizer"
    assert subjects(argv) == {
        "--use-torch-fdsp2": (Severity.WARNING, "did you mean --use-torch-fsdp2?"),
        "--num-layers": (Severity.WARNING, "leave one of them out."),
    }
    assert Plan.from_flags(argv).training["num_layers"] == 3


def test_a_command_line_may_go_on_in_further_lines() -> None:
    argv = "--bf16 \\\n  --num-layers 2 \\\r\n  --swap-optimizer\n"
    plan, found = read_flags(argv)
    assert not found
    assert plan.training["num_layers"] == 2
    assert plan.features.keys() == {"swap-optimizer"}


def test_a_quotation_that_does_not_end_is_a_finding() -> None:
    plan, [found] = read_flags("--bf16 --save 'my runs --swap-optimizer")
    assert not plan.features
    assert "quotation" in found.what


def test_a_word_that_stands_for_flags_is_told_of() -> None:
    plan, found = read_flags("torchrun $DISTRIBUTED @more.txt pretrain_gpt.py --save $SAVE --bf16")
    assert [finding.severity for finding in found] == [Severity.WARNING] * 2
    assert "$DISTRIBUTED" in found[0].what and "@more.txt" in found[1].what
    assert plan.training["bf16"] is True
    assert read_flags("$ALL")[1]


def test_a_dict_is_no_namespace() -> None:
    with pytest.raises(ConfigError, match=r"(?s)was given a dict.*argparse\.Namespace\("):
        Plan.from_namespace({"bf16": True})  # type: ignore[arg-type]


def test_a_short_flag_of_a_script_is_no_value_of_the_flag_before() -> None:
    plan, found = read_flags("-a resnet --bf16 -b 256 --clip-grad 1.5", framework="pytorch")
    assert not found
    assert plan.training == {"framework": "pytorch", "bf16": True, "clip_grad": 1.5}


def test_a_number_that_is_none_is_a_finding() -> None:
    assert set(subjects("--loss-scale nan --clip-grad -1")) == {
        "training.loss_scale",
        "training.clip_grad",
    }


def test_a_framework_that_is_none_is_a_finding() -> None:
    """No rule of a framework would be asked."""
    framework: Any = "jax"
    for _, found in (
        read_flags("--bf16", framework=framework),
        read_namespace(namespace(), framework=framework),
    ):
        assert [one.subject for one in found] == ["training.framework"]


@pytest.mark.parametrize(
    ("flag", "severity", "instead"),
    [
        ("--swap-optim", Severity.ERROR, "did you mean --swap-optimizer?"),
        ("--recompute-act", Severity.ERROR, "did you mean --recompute-activation-function?"),
        ("-swap-optimizer", Severity.ERROR, "did you mean --swap-optimizer?"),
        ("--no-swap-optimizer", Severity.ERROR, "leave --swap-optimizer out: it is off without."),
        ("--rope-fusion", Severity.WARNING, "so without --no-rope-fusion."),
        ("--enable-gloo-process-groups", Severity.WARNING, "--disable-gloo-process-groups."),
        ("--gated-linear-unit", Severity.WARNING, "did you mean --swiglu?"),
        ("--virtual-pipeline-model-parallel-size", Severity.WARNING, "--num-virtual-stages-per"),
    ],
)
def test_what_is_suggested_means_what_was_meant(
    flag: str, severity: Severity, instead: str
) -> None:
    [found] = read_flags(flag)[1]
    assert found.severity is severity
    assert instead in str(found.instead)


OTHERS = """
    --recompute-activations --overlap-param-gather-with-optimizer-step --lr --train-samples
    --no-load-rng --no-save-rng --save-interval --use-checkpoint-args
    --overlap-p2p-communication-warmup-flush --tp-comm-overlap --use-fused-weighted-squared-relu
    --use-flash-attn --use-cpu-initialization --use-mcore-models --sequence-parallel
    --grad-reduce-in-bf16 --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw
    --no-align-grad-reduce --no-align-param-gather --swap-delay --use-fused-mlp
    --use-fused-ring-attention-update --use-fused-moe-token-permute-and-unpermute
    --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --mtp-loss-scaling-factor
    --encoder-num-layers --decoder-num-layers --use-torch-optimizer-for-cpu-offload
    -m -b --swap --recompute
    --attention-backend --distributed-backend --wgrad-deferral-limit --moe-layer-recompute
"""


@pytest.mark.parametrize("flag", OTHERS.split())
def test_a_flag_that_is_somebody_elses_is_left_alone(flag: str) -> None:
    assert all(found.subject != flag for found in read_flags(flag)[1])


# Parsed arguments --------------------------------------------------------------------------------


def namespace(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"bf16": True, "lr": 1e-4, "swap_optimizer": True, **changes})


def test_parsed_arguments_are_read_and_what_they_lack_is_not_known() -> None:
    args = namespace(use_distributed_optimizer=True, num_experts=None, deterministic_mode=None)
    plan = Plan.from_namespace(args)
    assert plan.features == {"swap-optimizer": SwapOptimizerConfig(master_weights=True)}
    assert plan.training == {
        "framework": "megatron-core",
        "bf16": True,
        "use_distributed_optimizer": True,
        "num_moe_experts": None,
    }


def test_what_megatron_core_makes_of_arguments_is_known() -> None:
    args = namespace(
        world_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=1,
        micro_batch_size=2,
        global_batch_size=32,
        recompute_activations=True,
        recompute_granularity=None,
        swiglu=True,
        bias_swiglu_fusion=False,
        bias_gelu_fusion=True,
    )
    training = Plan.from_namespace(args).training
    assert training["data_parallel_size"] == 4
    assert training["num_microbatches"] == 4
    assert training["recompute_granularity"] == "selective"
    assert training["bias_activation_fusion"] is False


def test_gradients_of_bf16_are_added_up_in_fp32() -> None:
    """As megatron-core's scripts have it unless they are told otherwise."""
    assert Plan.from_flags("--bf16").training["grad_reduce_in_fp32"] is True
    argv = "--bf16 --grad-reduce-in-bf16"
    assert Plan.from_flags(argv).training["grad_reduce_in_fp32"] is False
    assert Plan.from_flags("--fp16").training["grad_reduce_in_fp32"] is False
    rule = "reuse-fp32-param/clip-grad"
    plans = map(Plan.from_flags, ("--reuse-fp32-param --bf16", f"--reuse-fp32-param {argv}"))
    assert [rule in {one.rule for one in check(plan)} for plan in plans] == [False, True]


def test_a_number_of_layers_turns_transformer_engines_offload_on() -> None:
    assert Plan.from_flags("--cpu-offloading-num-layers 2").training["cpu_offloading"] is True
    assert Plan.from_flags("--cpu-offloading-num-layers 0").training["cpu_offloading"] is False


def test_full_and_selective_recompute_are_not_given_together() -> None:
    argv = "--recompute-activations --recompute-granularity full --recompute-method uniform "
    found = {one.rule for one in check(Plan.from_flags(argv + "--recompute-num-layers 1"))}
    assert "megatron/selective-wins" in found


def test_in_plain_pytorch_weights_are_gathered_where_the_optimizer_is_divided() -> None:
    _, [found] = read_flags("--overlap-param-gather --overlap-grad-reduce", framework="pytorch")
    assert found.severity is Severity.ERROR
    assert "--use-distributed-optimizer" in found.what


def test_a_fusion_of_what_is_not_there_is_not_known() -> None:
    assert Plan.from_flags("--position-embedding-type rope").training["apply_rope_fusion"] is True
    alibi = Plan.from_flags("--position-embedding-type alibi").training
    assert "apply_rope_fusion" not in alibi


def test_numbers_that_do_not_divide_say_nothing() -> None:
    args = namespace(micro_batch_size=3, global_batch_size=32, data_parallel_size=1)
    assert "num_microbatches" not in Plan.from_namespace(args).training


def test_a_wrong_argument_is_a_finding() -> None:
    _, found = read_namespace(namespace(num_layers="x", swap_attention="yes"))
    assert [one.subject for one in found] == ["training.num_layers", "swap-attention"]


# A parser of megatron-core's ---------------------------------------------------------------------


def test_arguments_of_a_script_make_the_plan_that_its_flags_make() -> None:
    argv = "--swap-optimizer --swap-optimizer-times 8 --used-fused-swiglu --recompute-norm"
    args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(argv.split())
    assert Plan.from_namespace(args).features == Plan.from_flags(argv).features
    plain = add_arguments(argparse.ArgumentParser()).parse_args([])
    assert Plan.from_namespace(plain).features == {}


def test_what_a_parser_has_is_left_as_it_is() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--swap-optimizer-times", type=int, default=16)
    parser.add_argument("--use-fused-swiglu", action="store_true")
    parser.add_argument("--position-embedding-type", choices=["rope", "none"])
    assert add_arguments(add_arguments(parser)) is parser
    args = parser.parse_args(["--used-fused-swiglu", "--position-embedding-type", "alibi"])
    assert args.swap_optimizer_times == 16
    assert args.use_fused_swiglu
    assert args.position_embedding_type == "alibi"


def test_no_flag_of_megatron_cores_own_is_added() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    theirs = {option.flag for option in VOCABULARY.values()} | {"--recompute-num-layers"}
    assert not theirs & set(parser._option_string_actions)


# The table ---------------------------------------------------------------------------------------


def test_each_row_gives_an_option_of_its_feature() -> None:
    features = discover()
    for row in FEATURE_FLAGS:
        assert row.feature in PACKAGES
        if row.feature not in features:
            continue
        hints = hints_of(features[row.feature].config)
        assert row.option is None or row.option in hints
        assert row.implies is None or row.implies[0] in hints
        assert row.is_switch or row.option is not None


def test_a_flag_of_ours_is_no_option_of_training() -> None:
    ours = {row.attribute for row in FEATURE_FLAGS if row.framework is None}
    assert not ours & {option.attribute for option in VOCABULARY.values()}
    theirs = {row.attribute for row in FEATURE_FLAGS if row.framework is not None}
    assert theirs <= VOCABULARY.keys()


def test_every_flag_of_the_page_for_users_of_mindspeed_is_read() -> None:
    page = Path(__file__).parents[3] / "docs" / "migrating-from-mindspeed.md"
    flags = set(re.findall(r"`(--[a-z0-9-]+)", page.read_text(encoding="utf-8")))
    known = {name for row in FEATURE_FLAGS for name in (row.flag, *row.aliases)}
    known |= {option.flag for option in VOCABULARY.values() if option.flag is not None}
    assert len(flags) > 15
    assert flags <= known
