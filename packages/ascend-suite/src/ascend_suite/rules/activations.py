"""What features that change saved tensors need of training. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, On, Option, Product
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import (
    FULL_RECOMPUTE,
    GRAPHS,
    MEGATRON_FSDP,
    MOVING,
    OPTIMIZER_FEATURES,
    SAVED_TENSOR_FEATURES,
    training,
)

__all__ = ["ACTIVATION_RULES"]

_MODULES = (
    *("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear"),
)
_MUST_KEEP_STORAGES = ("recompute-activation", "recompute-norm", "recompute-layers")


def _graphs(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/graph-capture",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), GRAPHS),
        what=f"{feature} and captured graphs cannot be used together.",
        because="a graph repeats kernels at fixed addresses, and the host's part of the feature is "
        "not in it; it was not tested.",
        instead=f"leave the capture off, or {feature}.",
        source="refused until proven",
    )


def _fused_accumulation(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/gradient-accumulation-fusion",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), training("gradient_accumulation_fusion").equals(True)),
        what=f"{feature} was not tested with megatron-core's fused gradient accumulation.",
        because="that kernel reads main_grad from a weight that autograd saved; such attributes "
        "are kept here, which a stand-in for the kernel has shown, and not the kernel.",
        instead="set gradient_accumulation_fusion to False (--no-gradient-accumulation-fusion).",
        source="refused until proven; adr/0006",
        scope="megatron-core",
        proof="packages/ascend-core/tests/test_saved.py::"
        "test_sa_15_attributes_of_a_saved_parameter_are_there_in_backward",
    )


def _later_gradients(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/later-weight-gradients",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            AnyOf(
                training("defer_embedding_wgrad_compute").equals(True),
                training("delay_wgrad_compute").equals(True),
            ),
        ),
        what=f"{feature} and weight gradients that are computed later cannot be used together.",
        because="the library keeps what it unpacked in backward until then: what was moved or "
        "dropped is on the device twice as long, and it was not tested.",
        instead="leave defer_embedding_wgrad_compute and delay_wgrad_compute off.",
        source="constraints 111, 122; refused until proven",
        scope="megatron-core",
    )


def _sharded(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/sharded-parameters",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            AnyOf(
                training("dtensor_parameters").equals(True),
                training("fsdp").differs(None),
                training("use_torch_fsdp2").equals(True),
                MEGATRON_FSDP,
                training("deepspeed_zero_stage").at_least(3),
                training("enable_zero3").equals(True),
            ),
        ),
        what=f"{feature} was not tested with sharded parameters (FSDP, DTensor, ZeRO-3).",
        because="weights are gathered and let go around each layer: what is rebuilt would read "
        "them when they are gone.",
        instead="leave one of them off; swap-attention works beside fully_shard.",
        source="constraints 55, 115; refused until proven",
    )


def _host_only(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/host-only",
        subject=feature,
        relation="requires",
        fires_when=All(On(feature), training("device").equals("cpu")),
        what=f"on a CPU {feature} saves nothing.",
        because="it moves memory to the host, which is where it is.",
        instead="it is right for trying it out; on npu and cuda it saves.",
        source="ascend_core.feature: moves_to_host",
        severity=Severity.NOTE,
    )


def _fork(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/fork-after-pinning",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            training("dataloader_workers").more_than(0),
            training("dataloader_start_method").equals("fork"),
            training("device").within(("npu", "cuda")),
        ),
        what=f"with {feature} processes that load data are forked from one that holds page-locked "
        "memory.",
        because="what a driver has pinned is not to be touched in a forked child, and pages that "
        "the parent writes to are copied.",
        instead="use dataloader_start_method='spawn' or 'forkserver', or start the workers before "
        "the feature is turned on.",
        source="refused until proven",
        severity=Severity.WARNING,
    )


_FOR_EACH = tuple(
    make(feature)
    for make in (_graphs, _fused_accumulation, _later_gradients)
    for feature in SAVED_TENSOR_FEATURES
)

_SWAP = (
    Rule(
        id="swap-attention/unfused-attention",
        subject="swap-attention",
        relation="requires",
        fires_when=All(On("swap-attention"), training("use_flash_attn").equals(False)),
        what="swap-attention moves the scores of an attention that keeps them.",
        because="a matrix of scores grows with the square of the sequence: its copies take longer "
        "than a layer computes, and any attention works, but slowly.",
        instead="use an attention that keeps no scores (use_flash_attn, "
        "scaled_dot_product_attention).",
        source="constraints 31; CC-06",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-attention/planned-by-mindspeed",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("adaptive_recompute_enable").equals(True),
                training("adaptive_recompute_device_swap").equals(True),
                training("adaptive_memory_optimization").equals(True),
                training("smart_swap").equals(True),
            ),
        ),
        what="swap-attention and MindSpeed's planners of swap cannot be used together.",
        because="they choose by profiling what moves, and each plans with the whole host.",
        instead="leave the planner off, or swap-attention.",
        source="constraints 32, 33, 43, 45; CC-07",
        scope="megatron-core",
    ),
    Rule(
        id="swap-attention/lora",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("lora").equals(True),
                All(
                    training("lora_target_modules").differs(None),
                    training("lora_target_modules").differs(()),
                ),
            ),
        ),
        what="swap-attention and LoRA are refused together.",
        because="MindSpeed refuses the pair: there weights of adapters could be moved.",
        instead="leave one of them off.",
        source="constraints 34",
        proof="tests_integration/test_swap_hugging_face.py::test_adapters_on_frozen_weights",
    ),
    Rule(
        id="swap-attention/schedules",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("recompute_in_bubble").equals(True),
                training("recompute_in_advance").equals(True),
                training("moe_fb_overlap").equals(True),
                training("overlap_moe_expert_parallel_comm").equals(True),
                training("schedules_method").equals("dualpipev"),
            ),
        ),
        what="swap-attention cannot be used with schedules that interleave forward and backward "
        "of one layer.",
        because="what is fetched ahead of backward is learnt from whole layers, and the order "
        "within them was not tested.",
        instead="leave recompute_in_bubble, recompute_in_advance, moe_fb_overlap, "
        "overlap_moe_expert_parallel_comm and dualpipev off.",
        source="constraints 35, 36, 37",
        scope="megatron-core",
    ),
    Rule(
        id="swap-attention/num-layers",
        subject="swap-attention",
        relation="value",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                Option("swap-attention.recompute_num_layers").more_than(training("num_layers")),
                Product(
                    Option("swap-attention.recompute_num_layers"),
                    training("pipeline_model_parallel_size"),
                ).more_than(training("num_layers")),
            ),
        ),
        what="swap-attention's recompute_num_layers is above the number of layers.",
        because="it counts the layers of one pipeline stage.",
        instead="lower recompute_num_layers.",
        source="constraints 38",
    ),
    Rule(
        id="swap-attention/full-recompute",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(On("swap-attention"), FULL_RECOMPUTE),
        what="swap-attention and recompute_granularity='full' are refused together.",
        because="MindSpeed refuses the pair, and in a layer that runs again nothing moves.",
        instead="leave recompute_granularity out, or give recompute_method='block' with fewer "
        "layers than there are, and allow the pair.",
        source="constraints 39",
        scope="megatron-core",
        proof="tests_integration/test_swap_megatron.py::test_every_rank_trains_as_without",
    ),
    Rule(
        id="swap-attention/cpu-offloading",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("cpu_offloading").equals(True),
                training("fine_grained_activation_offloading").equals(True),
            ),
        ),
        what="swap-attention and megatron-core's own offload cannot be used together.",
        because="both move the same activations, and each plans with the whole host.",
        instead="leave cpu_offloading and fine_grained_activation_offloading off, or "
        "swap-attention.",
        source="constraints 118, 119; CC-07",
        scope="megatron-core",
    ),
    Rule(
        id="swap-attention/sharded-parameters",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                MEGATRON_FSDP,
                training("deepspeed_zero_stage").at_least(3),
                training("enable_zero3").equals(True),
            ),
        ),
        what="swap-attention was not tested with Megatron-FSDP and ZeRO-3.",
        because="weights are gathered and let go around each layer, in buffers of their own: what "
        "is a weight, and what an activation, is not known there.",
        instead="leave one of them off, or use torch's fully_shard, beside which it works.",
        source="constraints 55, 115; refused until proven",
    ),
    Rule(
        id="swap-attention/optimizer-on-the-host",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("optimizer_cpu_offload").equals(True),
                training("virtual_optimizer").differs(None),
            ),
        ),
        what="swap-attention and another library's optimizer on the host share its memory, and "
        "neither knows of the other.",
        because="each takes what it can get, as if the other were not there.",
        instead="use swap-optimizer, whose budget is checked together with swap-attention's; or "
        "give host_budget what the other one leaves.",
        source="CC-07",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-attention/gradient-checkpointing",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(On("swap-attention"), training("gradient_checkpointing").equals(True)),
        what="swap-attention is wasted where gradient_checkpointing is on.",
        because="every layer runs again as a whole in backward, and what it saves then is needed "
        "at once.",
        instead="leave gradient_checkpointing off.",
        source="tests_integration/test_swap_hugging_face.py",
        proof="tests_integration/test_swap_hugging_face.py::test_five_steps",
    ),
    Rule(
        id="swap-attention/compiled",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(On("swap-attention"), training("torch_compile").equals(True)),
        what="swap-attention moves nothing in a model that is compiled as a whole.",
        because="a compiler decides itself what is saved; modules that it traces are left alone.",
        instead="compile parts of the model, and leave the modules that move as they are.",
        source="features/swap-attention",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-attention/untested-parallelism",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(
            On("swap-attention"),
            AnyOf(
                training("context_parallel_size").more_than(1),
                training("num_moe_experts").more_than(0),
                training("transformer_impl").equals("transformer_engine"),
            ),
        ),
        what="swap-attention was not tested with context parallelism, experts or Transformer "
        "Engine.",
        because="its tests run megatron-core's local layers, with tensor, sequence, pipeline and "
        "data parallelism.",
        instead="compare the first losses with a run without it.",
        source="features/megatron",
        scope="megatron-core",
        severity=Severity.NOTE,
    ),
)

_MEGATRON = (
    Rule(
        id="megatron/cpu-offloading-pipeline",
        subject="cpu_offloading",
        relation="conflicts",
        fires_when=All(
            training("cpu_offloading").equals(True),
            training("pipeline_model_parallel_size").more_than(1),
        ),
        what="cpu_offloading and pipeline parallelism cannot be used together.",
        because="Transformer Engine's offload knows one forward before its backward.",
        instead="leave cpu_offloading off: swap-attention works in every stage of a pipeline.",
        source="constraints 118",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/cpu-offloading-recompute",
        subject="cpu_offloading",
        relation="conflicts",
        fires_when=All(
            training("cpu_offloading").equals(True),
            training("recompute_granularity").differs(None),
        ),
        what="cpu_offloading and recompute_granularity cannot be used together.",
        because="what is recomputed is not there to be moved.",
        instead="leave one of them off: swap-attention works beside the recompute features.",
        source="constraints 118",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/two-offloads",
        subject="fine_grained_activation_offloading",
        relation="conflicts",
        fires_when=All(
            training("fine_grained_activation_offloading").equals(True),
            training("cpu_offloading").equals(True),
        ),
        what="fine_grained_activation_offloading and cpu_offloading cannot be used together.",
        because="both move activations, and each plans with the whole host.",
        instead="leave one of them off.",
        source="constraints 119; CC-07",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/offload-modules",
        subject="offload_modules",
        relation="value",
        fires_when=All(
            training("fine_grained_activation_offloading").equals(True),
            training("offload_modules").differs(None),
            training("offload_modules").outside(_MODULES),
        ),
        what="offload_modules names a module that megatron-core cannot offload.",
        because=f"it knows {', '.join(_MODULES)}.",
        instead="use those names.",
        source="constraints 119; CC-03",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/offload-needs-modules",
        subject="fine_grained_activation_offloading",
        relation="requires",
        fires_when=All(
            training("fine_grained_activation_offloading").equals(True),
            AnyOf(training("offload_modules").equals(None), training("offload_modules").equals(())),
        ),
        what="fine_grained_activation_offloading needs offload_modules.",
        because=f"it moves what they name: {', '.join(_MODULES)}.",
        instead="name modules, or leave fine_grained_activation_offloading off.",
        source="constraints 119; CC-01",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/offload-modules-without-offload",
        subject="offload_modules",
        relation="requires",
        fires_when=All(
            training("offload_modules").differs(None),
            training("offload_modules").differs(()),
            training("fine_grained_activation_offloading").equals(False),
        ),
        what="offload_modules does nothing without fine_grained_activation_offloading.",
        because=f"modules ({', '.join(_MODULES)}) are what that moves.",
        instead="set fine_grained_activation_offloading, or leave offload_modules out.",
        source="constraints 119; CC-03",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/offload-projection",
        subject="offload_modules",
        relation="requires",
        fires_when=All(
            training("fine_grained_activation_offloading").equals(True),
            training("offload_modules").holding("attn_proj"),
            training("offload_modules").lacking("core_attn"),
        ),
        what="'attn_proj' in offload_modules needs 'core_attn'.",
        because="the projection's input is core attention's output, which the backward of that "
        "needs, too.",
        instead="add 'core_attn', or take 'attn_proj' out.",
        source="constraints 119",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/offload-recomputed-experts",
        subject="offload_modules",
        relation="conflicts",
        fires_when=All(
            training("fine_grained_activation_offloading").equals(True),
            training("recompute_modules").holding("moe"),
            AnyOf(
                training("offload_modules").holding("moe_act"),
                training("offload_modules").holding("expert_fc1"),
            ),
        ),
        what="'moe' in recompute_modules and parts of experts in offload_modules cannot be used "
        "together.",
        because="experts that run again save nothing that could be moved.",
        instead="take 'moe_act' and 'expert_fc1' out of offload_modules, or 'moe' out of "
        "recompute_modules.",
        source="constraints 119",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/delayed-weight-gradients",
        subject="delay_wgrad_compute",
        relation="requires",
        fires_when=All(
            training("delay_wgrad_compute").equals(True),
            AnyOf(
                training("transformer_impl").differs("transformer_engine"),
                All(
                    training("overlap_grad_reduce").equals(True),
                    training("transformer_engine_version").older_than("2.8.0"),
                ),
            ),
        ),
        what="delay_wgrad_compute needs Transformer Engine, and 2.8 of it with "
        "overlap_grad_reduce.",
        because="only its layers can compute weight gradients later.",
        instead="leave delay_wgrad_compute off.",
        source="constraints 122",
        scope="megatron-core",
    ),
)

ACTIVATION_RULES = (
    *_SWAP,
    *(make(feature) for make in (_host_only, _fork) for feature in MOVING),
    *_FOR_EACH,
    *(_graphs(feature) for feature in (*OPTIMIZER_FEATURES, "reduce-gradients")),
    *(_sharded(feature) for feature in _MUST_KEEP_STORAGES),
    *_MEGATRON,
)
