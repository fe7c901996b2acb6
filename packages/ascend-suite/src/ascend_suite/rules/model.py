"""What megatron-core's configs refuse whatever features are on. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import training

__all__ = ["MODEL_RULES"]

_TENSOR = training("tensor_model_parallel_size")
_GROUPS = training("num_query_groups")
_CONFIG = "megatron-core, TransformerConfig"

_PRECISION = (
    Rule(
        id="megatron/one-precision",
        subject="bf16",
        relation="conflicts",
        fires_when=All(training("bf16").equals(True), training("fp16").equals(True)),
        what="bf16 and fp16 cannot be used together.",
        because="the model's weights have one of the two dtypes.",
        instead="leave one of them off.",
        source=_CONFIG,
        scope="megatron-core",
    ),
    Rule(
        id="megatron/fp4-and-fp8",
        subject="fp4",
        relation="conflicts",
        fires_when=All(training("fp4").differs(None), training("fp8").differs(None)),
        what="fp4 and fp8 cannot be used together.",
        because="a matrix product has one format.",
        instead="leave one of them out.",
        source=_CONFIG,
        scope="megatron-core",
    ),
    Rule(
        id="megatron/fp8-param-needs-fp8",
        subject="fp8_param",
        relation="requires",
        fires_when=All(training("fp8_param").equals(True), training("fp8").equals(None)),
        what="fp8_param needs fp8.",
        because="weights that are kept in FP8 are multiplied in FP8.",
        instead="set fp8 too, or leave fp8_param off.",
        source=_CONFIG,
        scope="megatron-core",
    ),
)

_PARALLEL = (
    Rule(
        id="megatron/heads-by-ranks",
        subject="num_attention_heads",
        relation="value",
        fires_when=training("num_attention_heads").indivisible_by(_TENSOR),
        what="num_attention_heads is no multiple of tensor_model_parallel_size.",
        because="each rank of tensor parallelism has as many whole heads as the others.",
        instead="choose a tensor_model_parallel_size that divides the heads.",
        source=_CONFIG,
        scope="megatron-core",
    ),
    Rule(
        id="megatron/groups-by-ranks",
        subject="num_query_groups",
        relation="value",
        fires_when=All(_GROUPS.indivisible_by(_TENSOR), _TENSOR.indivisible_by(_GROUPS)),
        what="num_query_groups is neither a multiple nor a divisor of tensor_model_parallel_size.",
        because="each rank has as many whole groups as the others, or ranks share a group evenly.",
        instead="choose a tensor_model_parallel_size that divides the groups, or a multiple.",
        source=_CONFIG,
        scope="megatron-core",
    ),
    Rule(
        id="megatron/sequences-need-tensors",
        subject="sequence_parallel",
        relation="requires",
        fires_when=All(training("sequence_parallel").equals(True), _TENSOR.equals(1)),
        what="sequence_parallel does nothing without tensor parallelism.",
        because="sequences are cut over the ranks of tensor parallelism. megatron's own scripts "
        "turn it off; a TransformerConfig made by hand is refused.",
        instead="set tensor_model_parallel_size, or leave sequence_parallel off.",
        source="megatron-core, ModelParallelConfig",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="megatron/expert-ranks-need-experts",
        subject="expert_model_parallel_size",
        relation="requires",
        fires_when=All(
            training("expert_model_parallel_size").more_than(1),
            training("num_moe_experts").equals(None),
        ),
        what="expert_model_parallel_size needs num_moe_experts.",
        because="without experts there is nothing that its ranks could share.",
        instead="set num_moe_experts (--num-experts), or leave expert_model_parallel_size at 1.",
        source=_CONFIG,
        scope="megatron-core",
    ),
)

MODEL_RULES: tuple[Rule, ...] = (*_PRECISION, *_PARALLEL)
