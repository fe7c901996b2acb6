"""For every rule a plan for which it speaks, and one that differs little, for which it does not."""

from __future__ import annotations

from typing import Any

from ascend_core.feature import discover
from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite.plan import Plan
from ascend_suite.rules.conditions import MOVING, OPTIMIZER_FEATURES, SAVED_TENSOR_FEATURES
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

__all__ = ["CONFIGS", "EXAMPLES", "plan"]

CONFIGS: dict[str, type[Any]] = {
    **{name: feature.config for name, feature in discover().items()},
    "shard-optimizer": ShardedConfig,
}
_NAMES = {config: name for name, config in CONFIGS.items()}
Pair = tuple[Plan, Plan]


def plan(*features: object, **training: object) -> Plan:
    """A plan of features, by name or by config, and of options of training."""
    named = {}
    for feature in features:
        name = feature if isinstance(feature, str) else _NAMES[type(feature)]
        named[name] = CONFIGS[name]() if isinstance(feature, str) else feature
    return Plan(named, training)


def differ(*features: object, is_on: dict[str, object], but: dict[str, object]) -> Pair:
    """Two plans of the same features that differ in what is known of training."""
    return plan(*features, **is_on), plan(*features, **{**is_on, **but})


SHARDED = (DDPConfig(mode="reduce-scatter"), "shard-optimizer")
MEGATRON: dict[str, object] = {"framework": "megatron-core"}
PYTORCH: dict[str, object] = {"framework": "pytorch"}
OFFLOAD = SwapOptimizerConfig(offload_gradients=True)
RELEASE = SwapOptimizerConfig(release_grads=True)
MASTERS = SwapOptimizerConfig(master_weights=True)
BLOCK = RecomputeLayersConfig(num_layers=2)
LORA: dict[str, object] = {"lora_target_modules": ("q_proj",)}
PIPELINE = {"num_layers": 8, "pipeline_model_parallel_size": 4}

OF_SOFTWARE: dict[str, Pair] = {
    "software/torch": (plan(torch_version="2.12.1"), plan(torch_version="2.13.0+cu130")),
    "software/megatron-core": differ(
        is_on=MEGATRON | {"megatron_core_version": "0.17.0"},
        but={"megatron_core_version": "0.16.1"},
    ),
    "software/no-megatron-core": differ(
        is_on=MEGATRON | {"megatron_core_version": None}, but={"megatron_core_version": "0.16.1"}
    ),
    "software/no-torch-npu": differ(
        is_on={"device": "npu", "torch_npu_version": None}, but={"device": "cuda"}
    ),
    "software/torch-npu": differ(
        is_on={"torch_npu_version": "2.7.1.post2"}, but={"torch_npu_version": "2.13.0"}
    ),
    "software/no-cann": differ(
        is_on={"device": "npu", "cann_version": None}, but={"cann_version": "8.3.RC1"}
    ),
    "software/cann": (plan(cann_version="8.3.RC1"), plan(cann_version="8.5.0")),
}

OF_PAIRS: dict[str, Pair] = {
    "swap-optimizer/reuse-fp32-param": (
        plan("swap-optimizer", "reuse-fp32-param"),
        plan("swap-optimizer", "swap-attention"),
    ),
    "swap-optimizer/offload-gradients-of-buckets": (
        plan(OFFLOAD, "reduce-gradients"),
        plan(OFFLOAD, *SHARDED),
    ),
    "swap-optimizer/release-gradients-of-buckets": (
        plan(RELEASE, "reduce-gradients"),
        plan(RELEASE, *SHARDED),
    ),
    "swap-optimizer/offload-gradients-of-parts": (plan(OFFLOAD, *SHARDED), plan(RELEASE, *SHARDED)),
    "shard-optimizer/reduction": (plan("shard-optimizer"), plan(*SHARDED)),
    "shard-optimizer/mode": (plan("shard-optimizer", "reduce-gradients"), plan(*SHARDED)),
    "reduce-gradients/parts-without-owner": (plan(SHARDED[0]), plan("reduce-gradients")),
    "swap-attention/all-layers-recomputed": (
        plan("swap-attention", "recompute-layers"),
        plan("swap-attention", BLOCK),
    ),
    "swap-attention/mlp-recomputed-twice": (
        plan(SwapAttentionConfig(recompute_num_layers=2), "recompute-activation"),
        plan(
            SwapAttentionConfig(recompute_num_layers=2),
            RecomputeActivationConfig(layers=range(2, 4)),
        ),
    ),
    "swap-attention/swap-optimizer-host-budget": (
        plan(
            SwapAttentionConfig(host_budget=6),
            SwapOptimizerConfig(host_budget_bytes=6),
            pinned_limit_bytes=10,
        ),
        plan(
            SwapAttentionConfig(host_budget=4),
            SwapOptimizerConfig(host_budget_bytes=6),
            pinned_limit_bytes=10,
        ),
    ),
    "swap-attention/swap-optimizer-no-budget": differ(
        "swap-attention",
        "swap-optimizer",
        is_on={"pinned_limit_bytes": 10},
        but={"pinned_limit_bytes": None},
    ),
    "fused-ops/recompute-activation-policy": (
        plan("fused-ops", "recompute-activation"),
        plan(FusedOpsConfig(operators=("rms_norm",)), "recompute-activation"),
    ),
    "fused-ops/recompute-norm-policy": (
        plan("fused-ops", "recompute-norm"),
        plan(FusedOpsConfig(operators=("swiglu",)), "recompute-norm"),
    ),
}

OF_OPTIMIZERS: dict[str, Pair] = {
    "swap-optimizer/mindspeed-adamw": differ(
        "swap-optimizer",
        is_on={"optimizer_selection": "fused_adamw"},
        but={"optimizer_selection": "fused_torch_adamw"},
    ),
    "swap-optimizer/distributed-optimizer": differ(
        "swap-optimizer",
        is_on={"use_distributed_optimizer": False},
        but={"use_distributed_optimizer": True},
    ),
    "swap-optimizer/optimizer-cpu-offload": differ(
        "swap-optimizer",
        is_on={"optimizer_cpu_offload": True},
        but={"optimizer_cpu_offload": False},
    ),
    "swap-optimizer/activations-on-the-host": differ(
        "swap-optimizer", is_on={"cpu_offloading": True}, but={"cpu_offloading": False}
    ),
    "swap-optimizer/precision-aware": differ(
        "swap-optimizer",
        is_on={"use_precision_aware_optimizer": True},
        but={"use_precision_aware_optimizer": False},
    ),
    "swap-optimizer/cannot-resume": differ(
        "swap-optimizer",
        is_on={"ckpt_format": "torch", "use_distributed_optimizer": True},
        but={"ckpt_format": "torch_dist"},
    ),
    "swap-optimizer/sharded-checkpoint": differ(
        "swap-optimizer",
        is_on=MEGATRON | {"ckpt_format": "torch_dist", "save": "run"},
        but={"save": None},
    ),
    "swap-optimizer/masters-not-saved": (
        plan(MASTERS, no_save_optim=True),
        plan("swap-optimizer", no_save_optim=True),
    ),
    "swap-optimizer/masters-not-loaded": differ(
        MASTERS, is_on={"load": "run", "no_load_optim": True}, but={"load": None}
    ),
    "swap-optimizer/no-masters": (
        plan("swap-optimizer", bf16=True),
        plan(MASTERS, bf16=True),
    ),
    "swap-optimizer/accumulation": differ(
        OFFLOAD, is_on={"num_microbatches": 2}, but={"num_microbatches": 1}
    ),
    "swap-optimizer/main-grad": differ(OFFLOAD, is_on=MEGATRON, but=PYTORCH),
    "swap-optimizer/offload-gradients-scaler": differ(
        OFFLOAD, is_on={"grad_scaler": True}, but={"grad_scaler": False}
    ),
    "swap-optimizer/for-loop": differ(
        "swap-optimizer",
        is_on={"optimizer_form": "for-loop", "device": "npu"},
        but={"optimizer_form": "fused"},
    ),
    "swap-optimizer/disk": differ(
        SwapOptimizerConfig(disk="/ssd"), is_on={"device": "cuda"}, but={"device": "cpu"}
    ),
    "reuse-fp32-param/bf16": differ("reuse-fp32-param", is_on={"bf16": False}, but={"bf16": True}),
    "reuse-fp32-param/distributed-optimizer": differ(
        "reuse-fp32-param",
        is_on={"use_distributed_optimizer": True},
        but={"use_distributed_optimizer": False},
    ),
    "reuse-fp32-param/fp32-optimizer": differ(
        "reuse-fp32-param",
        is_on=MEGATRON | {"bf16": True, "use_distributed_optimizer": False},
        but={"bf16": False},
    ),
    "reuse-fp32-param/clip-grad": differ(
        "reuse-fp32-param",
        is_on=MEGATRON | {"grad_reduce_in_fp32": False, "clip_grad": 1.0},
        but={"clip_grad": 0.0},
    ),
    "reuse-fp32-param/split": differ(
        "reuse-fp32-param",
        is_on=MEGATRON | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
        but={"tensor_model_parallel_size": 1},
    ),
    "reuse-fp32-param/sharded-checkpoint": differ(
        "reuse-fp32-param",
        is_on=MEGATRON | {"ckpt_format": "torch_dist", "save": "run"},
        but={"ckpt_format": "torch"},
    ),
    "reuse-fp32-param/masters-not-saved": differ(
        "reuse-fp32-param", is_on={"no_save_optim": True}, but={"no_save_optim": False}
    ),
    "reuse-fp32-param/masters-not-loaded": differ(
        "reuse-fp32-param",
        is_on={"load": "run", "no_load_optim": True},
        but={"no_load_optim": None},
    ),
    "reuse-fp32-param/remainders": differ(
        "reuse-fp32-param",
        is_on={"use_precision_aware_optimizer": True},
        but={"use_precision_aware_optimizer": False},
    ),
    "reuse-fp32-param/eager-kernels": differ(
        ReuseParamConfig(kernels="eager"), is_on={"device": "cuda"}, but={"device": "npu"}
    ),
}
for feature in OPTIMIZER_FEATURES:
    OF_OPTIMIZERS |= {
        f"{feature}/elementwise": differ(
            feature, is_on={"optimizer": "SOAP"}, but={"optimizer": "AdamW"}
        ),
        f"{feature}/capturable": differ(
            feature, is_on={"capturable": True}, but={"capturable": False}
        ),
        f"{feature}/dtensor": differ(feature, is_on={"fsdp": "fsdp2"}, but={"fsdp": None}),
        f"{feature}/zero": differ(
            feature, is_on={"deepspeed_zero_stage": 1}, but={"deepspeed_zero_stage": 0}
        ),
        f"{feature}/step-in-backward": differ(
            feature, is_on={"gradient_hook_optimizer": True}, but={"gradient_hook_optimizer": False}
        ),
        f"{feature}/mindspeed-step": differ(
            feature, is_on={"quant_states": "q8"}, but={"quant_states": None}
        ),
    }

OF_ACTIVATIONS: dict[str, Pair] = {
    "swap-attention/unfused-attention": differ(
        "swap-attention", is_on={"use_flash_attn": False}, but={"use_flash_attn": True}
    ),
    "swap-attention/planned-by-mindspeed": differ(
        "swap-attention", is_on={"smart_swap": True}, but={"smart_swap": False}
    ),
    "swap-attention/lora": differ("swap-attention", is_on=LORA, but={"lora_target_modules": ()}),
    "swap-attention/schedules": differ(
        "swap-attention", is_on={"schedules_method": "dualpipev"}, but={"schedules_method": None}
    ),
    "swap-attention/num-layers": (
        plan(SwapAttentionConfig(recompute_num_layers=3), **PIPELINE),
        plan(SwapAttentionConfig(recompute_num_layers=2), **PIPELINE),
    ),
    "swap-attention/full-recompute": differ(
        "swap-attention",
        is_on={"recompute_granularity": "full"},
        but={"recompute_granularity": "selective"},
    ),
    "swap-attention/cpu-offloading": differ(
        "swap-attention", is_on={"cpu_offloading": True}, but={"cpu_offloading": False}
    ),
    "swap-attention/sharded-parameters": differ(
        "swap-attention", is_on={"use_megatron_fsdp": True}, but={"use_megatron_fsdp": False}
    ),
    "swap-attention/optimizer-on-the-host": differ(
        "swap-attention",
        is_on={"optimizer_cpu_offload": True},
        but={"optimizer_cpu_offload": False},
    ),
    "swap-attention/gradient-checkpointing": differ(
        "swap-attention",
        is_on={"gradient_checkpointing": True},
        but={"gradient_checkpointing": False},
    ),
    "swap-attention/compiled": differ(
        "swap-attention", is_on={"torch_compile": True}, but={"torch_compile": False}
    ),
    "swap-attention/untested-parallelism": differ(
        "swap-attention", is_on={"context_parallel_size": 2}, but={"context_parallel_size": 1}
    ),
    "megatron/cpu-offloading-pipeline": differ(
        is_on={"cpu_offloading": True, "pipeline_model_parallel_size": 2},
        but={"pipeline_model_parallel_size": 1},
    ),
    "megatron/cpu-offloading-recompute": differ(
        is_on={"cpu_offloading": True, "recompute_granularity": "full"},
        but={"recompute_granularity": None},
    ),
    "megatron/two-offloads": differ(
        is_on={"fine_grained_activation_offloading": True, "cpu_offloading": True},
        but={"cpu_offloading": False},
    ),
    "megatron/offload-modules": differ(
        is_on={"fine_grained_activation_offloading": True, "offload_modules": ("typo",)},
        but={"offload_modules": ("core_attn", "mlp_norm")},
    ),
    "megatron/offload-needs-modules": differ(
        is_on={"fine_grained_activation_offloading": True, "offload_modules": ()},
        but={"offload_modules": ("core_attn",)},
    ),
    "megatron/offload-modules-without-offload": differ(
        is_on={"fine_grained_activation_offloading": False, "offload_modules": ("core_attn",)},
        but={"offload_modules": ()},
    ),
    "megatron/offload-projection": differ(
        is_on={"fine_grained_activation_offloading": True, "offload_modules": ("attn_proj",)},
        but={"offload_modules": ("attn_proj", "core_attn")},
    ),
    "megatron/offload-recomputed-experts": differ(
        is_on={
            "fine_grained_activation_offloading": True,
            "offload_modules": ("moe_act",),
            "recompute_modules": ("moe",),
        },
        but={"recompute_modules": ("core_attn",)},
    ),
    "megatron/delayed-weight-gradients": differ(
        is_on={"delay_wgrad_compute": True, "transformer_impl": "local"},
        but={"transformer_impl": "transformer_engine", "overlap_grad_reduce": False},
    ),
}
for feature in SAVED_TENSOR_FEATURES:
    OF_ACTIVATIONS |= {
        f"{feature}/gradient-accumulation-fusion": differ(
            feature,
            is_on={"gradient_accumulation_fusion": True},
            but={"gradient_accumulation_fusion": False},
        ),
        f"{feature}/later-weight-gradients": differ(
            feature,
            is_on={"delay_wgrad_compute": True},
            but={"delay_wgrad_compute": False, "defer_embedding_wgrad_compute": False},
        ),
    }
for feature in (*SAVED_TENSOR_FEATURES, *OPTIMIZER_FEATURES, "reduce-gradients"):
    OF_ACTIVATIONS[f"{feature}/graph-capture"] = differ(
        feature, is_on={"cuda_graph_impl": "local"}, but={"cuda_graph_impl": "none"}
    )
for feature in MOVING:
    OF_ACTIVATIONS[f"{feature}/host-only"] = differ(
        feature, is_on={"device": "cpu"}, but={"device": "npu"}
    )
    OF_ACTIVATIONS[f"{feature}/fork-after-pinning"] = differ(
        feature,
        is_on={"dataloader_workers": 2, "dataloader_start_method": "fork", "device": "npu"},
        but={"dataloader_start_method": "spawn"},
    )

OF_RECOMPUTE: dict[str, Pair] = {
    "recompute-layers/twice": differ(
        "recompute-layers",
        is_on={"recompute_granularity": "full"},
        but={"recompute_granularity": None},
    ),
    "recompute-layers/num-layers": (
        plan(RecomputeLayersConfig(num_layers=3), **PIPELINE),
        plan(BLOCK, **PIPELINE),
    ),
    "recompute-layers/compiled": differ(
        "recompute-layers", is_on={"torch_compile": True}, but={"torch_compile": False}
    ),
    "recompute-layers/verify": (plan(RecomputeLayersConfig(verify=True)), plan("recompute-layers")),
    "recompute-activation/compressed": differ(
        "recompute-activation", is_on={"compress_dense": "level0"}, but={"compress_dense": None}
    ),
    "recompute-activation/fused-activation": differ(
        "recompute-activation",
        is_on={"bias_activation_fusion": True},
        but={"bias_activation_fusion": False},
    ),
    "recompute-norm/transformer-engine": differ(
        "recompute-norm",
        is_on={"transformer_impl": "transformer_engine"},
        but={"transformer_impl": "local"},
    ),
}
for feature in ("recompute-activation", "recompute-norm", "recompute-layers"):
    OF_RECOMPUTE |= {
        f"{feature}/gradient-checkpointing": differ(
            feature, is_on={"gradient_checkpointing": True}, but={"gradient_checkpointing": False}
        ),
        f"{feature}/distributed-activations": differ(
            feature,
            is_on={"distribute_saved_activations": True},
            but={"distribute_saved_activations": False},
        ),
        f"{feature}/sharded-parameters": differ(
            feature, is_on={"use_megatron_fsdp": True}, but={"use_megatron_fsdp": False}
        ),
    }
FULL: dict[str, object] = {"recompute_granularity": "full", "recompute_method": "block"}
SELECTIVE: dict[str, object] = {"recompute_granularity": "selective"}
BY_CONFIG = (RecomputeActivationConfig, "mlp"), (RecomputeNormConfig, "layernorm")
for config, module in BY_CONFIG:
    feature = _NAMES[config]
    OF_PAIRS |= {
        f"{feature}/all-layers-recomputed": (
            plan(feature, "recompute-layers"),
            plan(feature, BLOCK),
        ),
        f"{feature}/same-layers": (
            plan(config(layers=(1, 2)), RecomputeLayersConfig(layers=(0, 1))),
            plan(config(layers=(2, 3)), RecomputeLayersConfig(layers=(0, 1))),
        ),
        f"{feature}/more-layers-than-left": (
            plan(config(num_layers=1), BLOCK, **PIPELINE),
            plan(config(num_layers=2), BLOCK, num_layers=8, pipeline_model_parallel_size=2),
        ),
    }
    OF_RECOMPUTE |= {
        f"{feature}/verify": (plan(config(verify=True)), plan(feature)),
        f"{feature}/uniform": differ(
            feature, is_on=FULL | {"recompute_method": "uniform"}, but={"recompute_method": "block"}
        ),
        f"{feature}/same-values": differ(
            feature,
            is_on=SELECTIVE | {"recompute_modules": (module, "core_attn")},
            but={"recompute_modules": ("core_attn",)},
        ),
        f"{feature}/selective": differ(
            feature,
            is_on=SELECTIVE,
            but={"recompute_modules": (module,)},
        ),
        f"{feature}/num-layers": (
            plan(config(num_layers=3), **PIPELINE),
            plan(config(num_layers=2), **PIPELINE),
        ),
        f"{feature}/behind-full-layers": differ(
            config(num_layers=1),
            is_on=FULL | PIPELINE | {"recompute_num_layers": 2},
            but={"recompute_num_layers": 1},
        ),
        f"{feature}/planned-by-mindspeed": differ(
            feature,
            is_on={"adaptive_memory_optimization": True},
            but={
                "adaptive_memory_optimization": False,
                "adaptive_recompute_enable": False,
                "adaptive_recompute_device_swap": False,
                "automated_pipeline": False,
            },
        ),
    }

FP8: dict[str, object] = {"recompute_modules": ("moe_act",), "fp8": "hybrid"}
OF_MEGATRON: dict[str, Pair] = {
    "megatron/full-needs-a-method": differ(
        is_on=FULL | {"recompute_method": None}, but={"recompute_method": "uniform"}
    ),
    "megatron/full-needs-a-number": differ(
        is_on=FULL | {"recompute_num_layers": None}, but={"recompute_num_layers": 1}
    ),
    "megatron/selective-has-no-number": differ(
        is_on=SELECTIVE | {"recompute_num_layers": 1}, but={"recompute_num_layers": None}
    ),
    "megatron/selective-wins": differ(
        is_on=FULL | {"recompute_activations": True}, but={"recompute_activations": False}
    ),
    "megatron/method-without-full": differ(
        is_on={"recompute_granularity": None, "recompute_method": "block"}, but=FULL
    ),
    "pytorch/granularity": differ(is_on=PYTORCH | FULL, but=MEGATRON),
    "megatron/distributed-activations-need-full": differ(
        is_on={"distribute_saved_activations": True, "recompute_granularity": None},
        but={"recompute_granularity": "full"},
    ),
    "megatron/distributed-activations-and-sequences": differ(
        is_on={"distribute_saved_activations": True, "sequence_parallel": True},
        but={"sequence_parallel": False},
    ),
    "megatron/recompute-modules": differ(
        is_on=SELECTIVE | {"recompute_modules": ("mlp", "typo")},
        but={"recompute_modules": ("mlp",)},
    ),
    "megatron/recompute-modules-without-selective": differ(
        is_on=FULL | {"recompute_modules": ("mlp",)}, but={"recompute_modules": ("core_attn",)}
    ),
    "megatron/recompute-moe-act": differ(
        is_on=SELECTIVE | {"recompute_modules": ("moe_act",), "moe_grouped_gemm": False},
        but={"moe_grouped_gemm": True},
    ),
    "megatron/recompute-mla": differ(
        is_on=SELECTIVE | {"recompute_modules": ("mla_up_proj",), "multi_latent_attention": False},
        but={"multi_latent_attention": True},
    ),
    "megatron/recompute-shared-experts": differ(
        is_on=SELECTIVE
        | {"recompute_modules": ("shared_experts",), "moe_shared_expert_overlap": True},
        but={"moe_shared_expert_overlap": False},
    ),
    "megatron/recompute-fp8": differ(
        is_on=SELECTIVE | FP8 | {"transformer_engine_version": "2.5.0"},
        but={"transformer_engine_version": "2.6.0"},
    ),
    "megatron/param-gather-needs-grad-reduce": differ(
        is_on={"overlap_param_gather": True, "overlap_grad_reduce": False},
        but={"overlap_grad_reduce": True},
    ),
    "megatron/param-gather-needs-distributed-optimizer": differ(
        is_on={"overlap_param_gather": True, "use_distributed_optimizer": False},
        but={"use_megatron_fsdp": True},
    ),
    "megatron/param-gather-with-step": differ(
        is_on={"overlap_param_gather_with_optimizer_step": True, "overlap_param_gather": False},
        but={"overlap_param_gather": True},
    ),
    "megatron/param-gather-muon": differ(
        is_on={"overlap_param_gather": True, "optimizer": "muon"}, but={"optimizer": "dist_muon"}
    ),
    "megatron/muon": differ(is_on={"optimizer": "muon", "fp16": True}, but={"fp16": False}),
    "megatron/precision-aware": differ(
        is_on={"use_precision_aware_optimizer": True, "optimizer": "sgd"}, but={"optimizer": "adam"}
    ),
    "megatron/cpu-offload-needs-precision-aware": differ(
        is_on={"optimizer_cpu_offload": True, "use_precision_aware_optimizer": False},
        but={"use_precision_aware_optimizer": True},
    ),
}

ALIBI: dict[str, object] = {"position_embedding_type": "alibi"}
NO_SWIGLU: dict[str, object] = {"npu_operators": ("npu_rms_norm",), "device": "npu"}
OF_OPERATORS: dict[str, Pair] = {
    "fused-ops/swiglu": differ(
        "fused-ops", is_on={"gated_linear_unit": False}, but={"gated_linear_unit": True}
    ),
    "fused-ops/rms-norm": differ(
        "fused-ops", is_on={"normalization": "LayerNorm"}, but={"normalization": "RMSNorm"}
    ),
    "fused-ops/norms-of-two-dimensions": differ(
        "fused-ops", is_on={"tp_2d": True}, but={"tp_2d": False}
    ),
    "fused-ops/transformer-engine": differ(
        "fused-ops",
        is_on={"transformer_impl": "transformer_engine"},
        but={"transformer_impl": "local"},
    ),
    "fused-ops/rotary-flag": differ(
        is_on={"use_fused_rotary_pos_emb": True}, but={"use_fused_rotary_pos_emb": False}
    ),
    "fused-ops/no-torch-npu": differ(
        "fused-ops",
        is_on={"device": "npu", "torch_npu_version": None},
        but={"torch_npu_version": "2.13.0"},
    ),
    "fused-ops/backend-npu": differ(
        FusedOpsConfig(backend="npu"), is_on={"device": "cuda"}, but={"device": "npu"}
    ),
    "fused-ops/backend-triton": differ(
        FusedOpsConfig(backend="triton"), is_on={"device": "npu"}, but={"device": "cuda"}
    ),
    "fused-ops/backend-cpu": differ(
        FusedOpsConfig(backend="cpu"), is_on={"device": "npu"}, but={"device": "cpu"}
    ),
    "fused-ops/npu-swiglu": differ(
        "fused-ops", is_on=NO_SWIGLU, but={"npu_operators": ("npu_swiglu",)}
    ),
    "fused-ops/npu-rms-norm": differ(
        "fused-ops", is_on=NO_SWIGLU | {"npu_operators": ("npu_swiglu",)}, but=NO_SWIGLU
    ),
    "alibi/context-parallel": differ(
        is_on=ALIBI | {"context_parallel_size": 2}, but={"context_parallel_size": 1}
    ),
    "alibi/dropout": differ(
        is_on=ALIBI | {"attention_dropout": 0.1}, but={"attention_dropout": 0.0}
    ),
    "alibi/rotary": differ(
        is_on=ALIBI | {"use_rotary_position_embeddings": True},
        but={"use_rotary_position_embeddings": False},
    ),
    "alibi/documents": differ(
        is_on=ALIBI | {"reset_attention_mask": True}, but={"reset_attention_mask": False}
    ),
    "alibi/type": differ(
        is_on=ALIBI | {"alibi_fusion_attn_type": 2}, but={"alibi_fusion_attn_type": None}
    ),
    "alibi/unknown-type": differ(
        is_on={"alibi_fusion_attn_type": 3}, but={"alibi_fusion_attn_type": 2}
    ),
    "alibi/npu-operator": differ(
        is_on=ALIBI | NO_SWIGLU, but={"npu_operators": ("npu_fusion_attention_v2",)}
    ),
}

OF_MODELS: dict[str, Pair] = {
    "megatron/one-precision": differ(is_on={"bf16": True, "fp16": True}, but={"fp16": False}),
    "megatron/fp4-and-fp8": differ(is_on={"fp4": "e2m1", "fp8": "hybrid"}, but={"fp4": None}),
    "megatron/fp8-param-needs-fp8": differ(
        is_on={"fp8_param": True, "fp8": None}, but={"fp8": "hybrid"}
    ),
    "megatron/heads-by-ranks": differ(
        is_on={"num_attention_heads": 12, "tensor_model_parallel_size": 8},
        but={"tensor_model_parallel_size": 4},
    ),
    "megatron/groups-by-ranks": differ(
        is_on={"num_query_groups": 4, "tensor_model_parallel_size": 6},
        but={"tensor_model_parallel_size": 8},
    ),
    "megatron/sequences-need-tensors": differ(
        is_on={"sequence_parallel": True, "tensor_model_parallel_size": 1},
        but={"tensor_model_parallel_size": 2},
    ),
    "megatron/expert-ranks-need-experts": differ(
        is_on={"expert_model_parallel_size": 2, "num_moe_experts": None},
        but={"num_moe_experts": 8},
    ),
}
OF_GRADIENTS: dict[str, Pair] = {
    "reduce-gradients/megatron-core": differ("reduce-gradients", is_on=MEGATRON, but=PYTORCH),
    "shard-optimizer/megatron-core": differ(*SHARDED, is_on=MEGATRON, but=PYTORCH),
    "reduce-gradients/torch-ddp": differ(
        "reduce-gradients", is_on={"torch_ddp": True}, but={"torch_ddp": False}
    ),
    "reduce-gradients/sharded-parameters": differ(
        "reduce-gradients", is_on={"dtensor_parameters": True}, but={"dtensor_parameters": False}
    ),
    "reduce-gradients/one-rank": differ(
        "reduce-gradients", is_on={"data_parallel_size": 1}, but={"data_parallel_size": 2}
    ),
    "reduce-gradients/schedules": differ(
        is_on={"overlap_grad_reduce": True, "moe_fb_overlap": True}, but={"moe_fb_overlap": False}
    ),
    "reduce-gradients/reentrant-shared": differ(
        "reduce-gradients",
        is_on={"reentrant_checkpoint": True, "shared_parameters": True},
        but={"shared_parameters": False},
    ),
    "reduce-gradients/step-in-backward": differ(
        "reduce-gradients",
        is_on={"gradient_hook_optimizer": True},
        but={"gradient_hook_optimizer": False},
    ),
    "shard-optimizer/grad-scaler": (
        plan(*SHARDED, grad_scaler=True),
        plan(SHARDED[0], ShardedConfig(grad_scaler=True), grad_scaler=True),
    ),
}

EXAMPLES: dict[str, Pair] = {
    **OF_SOFTWARE,
    **OF_PAIRS,
    **OF_OPTIMIZERS,
    **OF_ACTIVATIONS,
    **OF_RECOMPUTE,
    **OF_MEGATRON,
    **OF_OPERATORS,
    **OF_MODELS,
    **OF_GRADIENTS,
}
