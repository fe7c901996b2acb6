"""What reduced gradients and sharded optimizers need of training. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, On, Option, Unless
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import MEGATRON_FSDP, ON_MEGATRON, training

__all__ = ["GRADIENT_RULES"]

_LAYER_WISE = training("use_layer_wise_distributed_optimizer").equals(True)
_OTHER_FSDP = AnyOf(MEGATRON_FSDP, training("use_torch_fsdp2").equals(True))


def _not_for_megatron(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/megatron-core",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), ON_MEGATRON),
        what=f"{feature} is not for megatron-core.",
        because="its DistributedDataParallel and DistributedOptimizer do the same with buffers of "
        "their own: gradients would be averaged twice.",
        instead=f"leave {feature} off, and set overlap_grad_reduce, use_distributed_optimizer and "
        "overlap_param_gather.",
        source="constraints 65, 69; features/reduce-gradients",
        scope="megatron-core",
    )


_REDUCE = (
    *map(_not_for_megatron, ("reduce-gradients", "shard-optimizer")),
    Rule(
        id="reduce-gradients/torch-ddp",
        subject="reduce-gradients",
        relation="conflicts",
        fires_when=All(On("reduce-gradients"), training("torch_ddp").equals(True)),
        what="reduce-gradients and DistributedDataParallel cannot be used together.",
        because="both average the gradients of all ranks.",
        instead="leave the model unwrapped, or reduce-gradients off.",
        source="features/reduce-gradients",
        scope="pytorch",
    ),
    Rule(
        id="reduce-gradients/sharded-parameters",
        subject="reduce-gradients",
        relation="conflicts",
        fires_when=All(
            On("reduce-gradients"),
            AnyOf(
                training("dtensor_parameters").equals(True),
                training("fsdp").differs(None),
                _OTHER_FSDP,
                training("deepspeed_zero_stage").more_than(0),
                training("enable_zero3").equals(True),
            ),
        ),
        what="reduce-gradients and parameters that another library shards cannot be used together.",
        because="what shards them (fully_shard, ZeRO) reduces their gradients already.",
        instead="leave reduce-gradients off, or the other library.",
        source="constraints 7, 115; features/reduce-gradients",
    ),
    Rule(
        id="reduce-gradients/one-rank",
        subject="reduce-gradients",
        relation="requires",
        fires_when=All(
            On("reduce-gradients"),
            AnyOf(training("data_parallel_size").equals(1), training("world_size").equals(1)),
        ),
        what="reduce-gradients has no other rank to average with.",
        because="it saves the time of waiting for other ranks, and shard-optimizer divides by "
        "their number.",
        instead="leave them off, or train with more data-parallel ranks.",
        source="constraints 65",
        severity=Severity.WARNING,
    ),
    Rule(
        id="reduce-gradients/schedules",
        subject="reduce-gradients",
        relation="conflicts",
        fires_when=All(
            AnyOf(
                Option("reduce-gradients.overlap").equals(True),
                training("overlap_grad_reduce").equals(True),
            ),
            AnyOf(
                training("moe_fb_overlap").equals(True),
                training("schedules_method").equals("dualpipev"),
            ),
        ),
        what="gradients that travel during backward cannot be used with schedules that compute "
        "weight gradients later.",
        because="with moe_fb_overlap and dualpipev a bucket would leave before its gradients are "
        "there.",
        instead="set overlap_grad_reduce (and overlap of reduce-gradients) to False, or leave the "
        "schedule.",
        source="constraints 66, 67",
        scope="megatron-core",
    ),
    Rule(
        id="reduce-gradients/reentrant-shared",
        subject="reduce-gradients",
        relation="order",
        fires_when=All(
            On("reduce-gradients"),
            Option("reduce-gradients.overlap").equals(True),
            training("reentrant_checkpoint").equals(True),
            training("shared_parameters").equals(True),
        ),
        what="gradients of parameters that several reentrant segments use come in parts.",
        because="each segment has a backward of its own: in the first step the parts are averaged "
        "one by one, which is right to rounding; more parts later are an error.",
        instead="use use_reentrant=False, or overlap=False.",
        source="CC-12; features/reduce-gradients",
        severity=Severity.NOTE,
    ),
    Rule(
        id="reduce-gradients/step-in-backward",
        subject="reduce-gradients",
        relation="conflicts",
        fires_when=All(On("reduce-gradients"), training("gradient_hook_optimizer").equals(True)),
        what="reduce-gradients and an optimizer that steps in gradient hooks cannot be used "
        "together.",
        because="a parameter would be stepped with this rank's gradient, before its bucket left.",
        instead="step after backward.",
        source="refused until proven",
    ),
    Rule(
        id="shard-optimizer/grad-scaler",
        subject="shard-optimizer",
        relation="requires",
        fires_when=All(
            On("shard-optimizer"),
            training("grad_scaler").equals(True),
            Option("shard-optimizer.grad_scaler").equals(False),
        ),
        what="a gradient scaler sees no gradient of a sharded optimizer.",
        because="gradients are nowhere whole, and p.grad is None.",
        instead="set grad_scaler=True in shard-optimizer.",
        source="ascend_ddp.config",
    ),
)

# What users of megatron-core meet with its own options.
_MEGATRON = (
    Rule(
        id="megatron/param-gather-needs-grad-reduce",
        subject="overlap_param_gather",
        relation="requires",
        fires_when=All(
            training("overlap_param_gather").equals(True),
            training("overlap_grad_reduce").equals(False),
        ),
        what="overlap_param_gather needs overlap_grad_reduce.",
        because="weights are gathered by the buckets in which gradients left.",
        instead="set overlap_grad_reduce too, or leave overlap_param_gather off.",
        source="constraints 69; CC-01",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/param-gather-needs-distributed-optimizer",
        subject="overlap_param_gather",
        relation="requires",
        fires_when=All(
            training("overlap_param_gather").equals(True),
            training("use_distributed_optimizer").equals(False),
            Unless(_OTHER_FSDP),
            Unless(training("optimizer").equals("dist_muon")),
            Unless(_LAYER_WISE),
        ),
        what="overlap_param_gather needs use_distributed_optimizer.",
        because="with a whole optimizer on each rank there is nothing to gather.",
        instead="set use_distributed_optimizer too, or leave overlap_param_gather off.",
        source="constraints 69; CC-01",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/param-gather-with-step",
        subject="overlap_param_gather_with_optimizer_step",
        relation="requires",
        fires_when=All(
            training("overlap_param_gather_with_optimizer_step").equals(True),
            AnyOf(
                training("use_distributed_optimizer").equals(False),
                training("overlap_param_gather").equals(False),
                All(
                    training("virtual_pipeline_model_parallel_size").equals(None),
                    Unless(training("num_layers_per_virtual_pipeline_stage").differs(None)),
                ),
                training("ckpt_format").within(("torch_dist", "zarr", "torch_dcp", "fsdp_dtensor")),
            ),
        ),
        what="overlap_param_gather_with_optimizer_step needs use_distributed_optimizer, "
        "overlap_param_gather, virtual pipeline chunks and ckpt_format='torch'.",
        because="the weights of the first chunk are gathered while those of others are stepped; "
        "megatron-core's distributed checkpoints do not know of it.",
        instead="set all of them, or leave overlap_param_gather_with_optimizer_step off.",
        source="constraints 70",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/param-gather-muon",
        subject="overlap_param_gather",
        relation="conflicts",
        fires_when=All(
            training("overlap_param_gather").equals(True),
            training("optimizer").equals("muon"),
            Unless(_LAYER_WISE),
        ),
        what="overlap_param_gather and optimizer='muon' cannot be used together.",
        because="Muon needs whole matrices, so that ranks own layers and not parts of buckets.",
        instead="use optimizer='dist_muon' (MindSpeed: use_layer_wise_distributed_optimizer), with "
        "overlap_grad_reduce.",
        source="constraints 71",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/muon",
        subject="optimizer",
        relation="conflicts",
        fires_when=All(
            training("optimizer").within(("muon", "dist_muon")),
            AnyOf(
                training("fp16").equals(True),
                training("use_distributed_optimizer").equals(True),
                _OTHER_FSDP,
            ),
        ),
        what="Muon cannot be used with fp16, use_distributed_optimizer and FSDP.",
        because="it needs whole matrices, and steps gradients that no scaler has scaled.",
        instead="use bf16, and optimizer='dist_muon' to divide the optimizer by layers.",
        source="constraints 74",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/precision-aware",
        subject="use_precision_aware_optimizer",
        relation="requires",
        fires_when=All(
            training("use_precision_aware_optimizer").equals(True),
            AnyOf(
                training("use_distributed_optimizer").equals(False),
                training("optimizer").differs("adam"),
                All(
                    training("device").equals("npu"),
                    Unless(training("optimizer_cpu_offload").equals(True)),
                ),
            ),
        ),
        what="use_precision_aware_optimizer needs use_distributed_optimizer, optimizer='adam' and "
        "Transformer Engine's FusedAdam.",
        because="that kernel keeps masters and moments in dtypes of their own; on an NPU there is "
        "none.",
        instead="leave it off: reuse-fp32-param saves the lower half of the masters with torch's "
        "AdamW, and swap-optimizer moves them.",
        source="constraints 121",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/cpu-offload-needs-precision-aware",
        subject="optimizer_cpu_offload",
        relation="requires",
        fires_when=All(
            training("optimizer_cpu_offload").equals(True),
            AnyOf(
                training("use_precision_aware_optimizer").equals(False),
                All(
                    training("fp8_param").equals(True),
                    training("fp8_recipe").differs("delayed"),
                ),
            ),
        ),
        what="optimizer_cpu_offload needs use_precision_aware_optimizer, and with fp8_param "
        "fp8_recipe='delayed'.",
        because="megatron-core's hybrid optimizer is built on it.",
        instead="set them too, or leave optimizer_cpu_offload off: swap-optimizer needs neither.",
        source="constraints 120",
        scope="megatron-core",
    ),
)

GRADIENT_RULES = (*_REDUCE, *_MEGATRON)
