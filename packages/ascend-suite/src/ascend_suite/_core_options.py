"""Options of training that are fields of megatron-core's configs. Data; imports no torch.

A test compares names, types and defaults with megatron-core's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ascend_suite._training_option import Holder, TrainingOption

__all__ = ["CORE_OPTIONS"]

Text = str | None
Count = int | None
Names = Sequence[str] | None


def _of(
    holder: Holder,
    name: str,
    kind: object,
    default: object,
    meaning: str,
    *,
    argument: str | None = None,
    flag: str | None = None,
    off: str | None = None,
    required: bool = False,
    items: tuple[str, ...] = (),
) -> TrainingOption:
    return TrainingOption(
        name=name,
        type=kind,
        meaning=meaning,
        origin="megatron-core",
        default=default,
        holder=holder,
        argument=argument,
        spelt=flag,
        off=off,
        required=required,
        items=items,
    )


_MP: Holder = "ModelParallelConfig"
_TC: Holder = "TransformerConfig"
_DDP: Holder = "DistributedDataParallelConfig"
_OPT: Holder = "OptimizerConfig"

_PARALLEL = (
    _of(_MP, "tensor_model_parallel_size", int, 1, "Ranks of tensor parallelism."),
    _of(_MP, "pipeline_model_parallel_size", int, 1, "Stages of the pipeline."),
    _of(
        _MP,
        "virtual_pipeline_model_parallel_size",
        Count,
        None,
        "Model chunks on each stage.",
        argument="num_virtual_stages_per_pipeline_rank",
    ),
    _of(_MP, "sequence_parallel", bool, False, "Activations between layers are cut by sequence."),
    _of(_MP, "context_parallel_size", int, 1, "Ranks that share a sequence."),
    _of(_MP, "expert_model_parallel_size", int, 1, "Ranks that share the experts."),
    _of(_MP, "expert_tensor_parallel_size", Count, None, "Ranks that share one expert."),
    _of(_MP, "variable_seq_lengths", bool, False, "Micro-batches differ in length."),
    _of(
        _MP,
        "overlap_p2p_comm",
        bool,
        False,
        "Stages send while they compute.",
        off="--no-overlap-p2p-communication",
    ),
    _of(
        _MP,
        "defer_embedding_wgrad_compute",
        bool,
        False,
        "The output layer's weight gradient is computed when the pipeline drains.",
    ),
    _of(
        _MP,
        "delay_wgrad_compute",
        bool,
        False,
        "Weight gradients are computed later.",
    ),
    _of(
        _MP,
        "overlap_moe_expert_parallel_comm",
        bool,
        False,
        "Experts communicate beside another micro-batch's computation.",
    ),
)

_NUMBERS = (
    _of(_MP, "fp16", bool, False, "Weights and activations are FP16."),
    _of(_MP, "bf16", bool, False, "Weights and activations are BF16."),
    _of(_MP, "enable_autocast", bool, False, "Layers run under autocast."),
    _of(_MP, "deterministic_mode", bool, False, "Only deterministic kernels are used."),
    _of(
        _MP,
        "gradient_accumulation_fusion",
        bool,
        False,
        "Weight gradients are added to `main_grad` by the matrix product's kernel.",
        off="--no-gradient-accumulation-fusion",
    ),
    _of(
        _TC,
        "fp8",
        Literal["e4m3", "hybrid"] | None,
        None,
        "Format of FP8 products.",
        flag="--fp8-format",
    ),
    _of(
        _TC,
        "fp8_recipe",
        Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] | None,
        "delayed",
        "How FP8 products are scaled.",
    ),
    _of(_TC, "fp8_param", bool, False, "Weights are kept in FP8.", argument="fp8_param_gather"),
    _of(_TC, "fp4", Literal["e2m1"] | None, None, "Format of FP4 products.", flag="--fp4-format"),
)

_MODEL = (
    _of(_TC, "num_layers", int, 0, "Layers of the whole model.", required=True),
    _of(_TC, "hidden_size", int, 0, "Width of the model.", required=True),
    _of(_TC, "ffn_hidden_size", Count, None, "Width inside an MLP; four times the model's."),
    _of(_TC, "num_attention_heads", int, 0, "Heads of attention.", required=True),
    _of(
        _TC,
        "num_query_groups",
        Count,
        None,
        "Heads of keys and values; as many as of queries.",
    ),
    _of(_TC, "kv_channels", Count, None, "Width of a head."),
    _of(_TC, "hidden_dropout", float, 0.1, "Dropout of hidden states."),
    _of(_TC, "attention_dropout", float, 0.1, "Dropout of attention."),
    _of(_TC, "normalization", Literal["LayerNorm", "RMSNorm"], "LayerNorm", "The kind of norm."),
    _of(
        _TC,
        "gated_linear_unit",
        bool,
        False,
        "MLPs are gated, as SwiGLU's are.",
        argument="swiglu",
    ),
    _of(
        _TC,
        "add_bias_linear",
        bool,
        True,
        "Linear layers have a bias.",
        off="--disable-bias-linear",
    ),
    _of(_TC, "multi_latent_attention", bool, False, "Attention is multi-latent (MLA)."),
    _of(_TC, "mtp_num_layers", Count, None, "Layers that predict further tokens."),
    _of(_TC, "num_moe_experts", Count, None, "Experts of a layer.", argument="num_experts"),
    _of(
        _TC,
        "moe_token_dispatcher_type",
        Literal["allgather", "alltoall", "flex"],
        "allgather",
        "How tokens reach their experts.",
    ),
    _of(_TC, "moe_grouped_gemm", bool, False, "Experts are computed by one grouped product."),
    _of(_TC, "moe_permute_fusion", bool, False, "Tokens are permuted by one operator."),
    _of(
        _TC,
        "moe_shared_expert_overlap",
        bool,
        False,
        "Shared experts compute while tokens travel.",
    ),
    _of(
        _TC,
        "num_layers_in_first_pipeline_stage",
        Count,
        None,
        "Layers of the first stage.",
        argument="decoder_first_pipeline_num_layers",
    ),
    _of(
        _TC,
        "num_layers_in_last_pipeline_stage",
        Count,
        None,
        "Layers of the last stage.",
        argument="decoder_last_pipeline_num_layers",
    ),
)

_KERNELS = (
    _of(
        _TC,
        "transformer_impl",
        Literal["local", "transformer_engine", "inference_optimized"],
        "transformer_engine",
        "Whose layers the model is made of.",
    ),
    _of(
        _TC,
        "bias_activation_fusion",
        bool,
        False,
        "Bias and activation function are one opaque function.",
    ),
    _of(
        _TC,
        "bias_dropout_fusion",
        bool,
        False,
        "Bias and dropout are one function.",
        off="--no-bias-dropout-fusion",
    ),
    _of(
        _TC,
        "masked_softmax_fusion",
        bool,
        False,
        "Mask and softmax are one kernel.",
        off="--no-masked-softmax-fusion",
    ),
    _of(
        _TC,
        "apply_rope_fusion",
        bool,
        False,
        "Rotary embedding is one kernel.",
        off="--no-rope-fusion",
    ),
    _of(
        _TC,
        "cp_comm_type",
        str | Sequence[str] | None,
        None,
        'How context parallelism communicates: "p2p", "all_gather", "a2a" or "a2a+p2p".',
    ),
    _of(
        _TC,
        "cuda_graph_impl",
        Literal["none", "local", "transformer_engine"],
        "none",
        "Who captures CUDA graphs.",
    ),
    _of(_TC, "enable_cuda_graph", bool, False, "Layers are captured as CUDA graphs."),
    _of(_TC, "external_cuda_graph", bool, False, "The script captures CUDA graphs itself."),
)

_MEMORY = (
    _of(
        _TC,
        "recompute_granularity",
        Literal["full", "selective"] | None,
        None,
        "Whether whole layers are recomputed, or selected modules.",
    ),
    _of(
        _TC,
        "recompute_method",
        Literal["uniform", "block"] | None,
        None,
        "Which layers full recompute takes: groups of all, or the first ones.",
    ),
    _of(
        _TC,
        "recompute_num_layers",
        Count,
        None,
        "Layers of a group (uniform), or of each stage (block).",
    ),
    _of(
        _TC,
        "recompute_modules",
        Names,
        None,
        "What selective recompute takes.",
        items=(
            "core_attn",
            "layernorm",
            "mla_up_proj",
            "mlp",
            "moe",
            "moe_act",
            "shared_experts",
        ),
    ),
    _of(
        _TC,
        "distribute_saved_activations",
        bool | None,
        False,
        "Saved activations are divided among the ranks of tensor parallelism.",
    ),
    _of(_MP, "cpu_offloading", bool, False, "Transformer Engine moves activations to the host."),
    _of(_MP, "cpu_offloading_num_layers", int, 0, "Layers whose activations it moves."),
    _of(
        _TC,
        "fine_grained_activation_offloading",
        bool,
        False,
        "megatron-core moves the activations of selected modules to the host.",
    ),
    _of(
        _TC,
        "offload_modules",
        Names,
        (),
        "The modules whose activations it moves.",
        items=(
            "attn_norm",
            "attn_proj",
            "core_attn",
            "expert_fc1",
            "mlp_norm",
            "moe_act",
            "qkv_linear",
        ),
    ),
)

_GRADIENTS = (
    _of(
        _DDP,
        "grad_reduce_in_fp32",
        bool,
        False,
        "Gradients are added up in FP32.",
        argument="accumulate_allreduce_grads_in_fp32",
    ),
    _of(
        _DDP,
        "overlap_grad_reduce",
        bool,
        False,
        "Gradients travel while backward runs.",
    ),
    _of(_DDP, "overlap_param_gather", bool, False, "Weights are gathered while forward runs."),
    _of(
        _DDP,
        "use_distributed_optimizer",
        bool,
        False,
        "The optimizer is divided among the data-parallel ranks.",
    ),
    _of(_DDP, "bucket_size", Count, None, "Elements of a bucket.", argument="ddp_bucket_size"),
    _of(
        _DDP,
        "num_distributed_optimizer_instances",
        int,
        1,
        "Into how many the distributed optimizer is replicated.",
    ),
    _of(
        _DDP,
        "check_for_nan_in_grad",
        bool,
        False,
        "A NaN in a gradient ends the run.",
        argument="check_for_nan_in_loss_and_grad",
        off="--no-check-for-nan-in-loss-and-grad",
    ),
    _of(
        _DDP,
        "average_in_collective",
        bool,
        False,
        "The collective averages.",
        argument="ddp_average_in_collective",
    ),
    _of(_DDP, "use_megatron_fsdp", bool, False, "Parameters are Megatron-FSDP's."),
    _of(_DDP, "use_custom_fsdp", bool, False, "The former name of use_megatron_fsdp."),
    _of(
        _DDP,
        "data_parallel_sharding_strategy",
        str,
        "no_shard",
        'What Megatron-FSDP divides: "no_shard", "optim", "optim_grads" or "optim_grads_params".',
    ),
)

_OPTIMIZER = (
    _of(
        _OPT,
        "optimizer",
        str,
        "adam",
        'megatron-core\'s name ("adam", "sgd", "muon") or the class in plain PyTorch ("AdamW").',
    ),
    _of(
        _OPT,
        "use_precision_aware_optimizer",
        bool,
        False,
        "Masters and moments have dtypes of their own.",
    ),
    _of(
        _OPT,
        "store_param_remainders",
        bool,
        True,
        "With it, a master is kept as 16 bits beside its BF16 weight.",
    ),
    _of(
        _OPT,
        "optimizer_cpu_offload",
        bool,
        False,
        "megatron-core keeps and steps the optimizer on the host.",
    ),
    _of(
        _OPT,
        "overlap_param_gather_with_optimizer_step",
        bool,
        False,
        "Weights are gathered while other buckets are stepped.",
    ),
    _of(_OPT, "loss_scale", float | None, None, "A fixed scale of the loss."),
    _of(_OPT, "clip_grad", float, 1.0, "The norm that gradients are clipped to."),
    _of(
        _OPT,
        "decoupled_weight_decay",
        bool,
        True,
        "AdamW rather than Adam.",
    ),
)

CORE_OPTIONS = (
    *_PARALLEL,
    *_NUMBERS,
    *_MODEL,
    *_KERNELS,
    *_MEMORY,
    *_GRADIENTS,
    *_OPTIMIZER,
)
