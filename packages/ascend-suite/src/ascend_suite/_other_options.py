"""Options of training that are no fields of megatron-core's configs. Data; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ascend_suite._training_option import TrainingOption

__all__ = ["FACTS", "MINDSPEED_OPTIONS", "SCRIPT_OPTIONS"]


def _script(
    name: str,
    kind: object,
    default: object,
    meaning: str,
    *,
    argument: str | None = None,
    off: str | None = None,
    required: bool = False,
) -> TrainingOption:
    return TrainingOption(
        name=name,
        type=kind,
        meaning=meaning,
        origin="megatron-training",
        default=default,
        argument=argument,
        off=off,
        required=required,
    )


def _mindspeed(name: str, kind: object, default: object, meaning: str) -> TrainingOption:
    return TrainingOption(
        name=name, type=kind, meaning=meaning, origin="mindspeed", default=default
    )


def _fact(name: str, kind: object, meaning: str) -> TrainingOption:
    return TrainingOption(name=name, type=kind, meaning=meaning, origin="fact")


SCRIPT_OPTIONS = (
    _script("num_layers_per_virtual_pipeline_stage", int | None, None, "Layers of a model chunk."),
    _script(
        "position_embedding_type",
        Literal["learned_absolute", "rope", "mrope", "relative", "none", "alibi"],
        "learned_absolute",
        "What tells positions apart; alibi is ours.",
    ),
    _script(
        "recompute_activations",
        bool,
        False,
        'The former way to ask for recompute_granularity="selective".',
    ),
    _script(
        "grad_reduce_in_bf16",
        bool,
        False,
        "With bf16 gradients are added up in BF16; grad_reduce_in_fp32 is on without it.",
    ),
    _script(
        "bias_gelu_fusion",
        bool,
        True,
        "bias_activation_fusion where MLPs are not gated.",
        off="--no-bias-gelu-fusion",
    ),
    _script(
        "bias_swiglu_fusion",
        bool,
        True,
        "bias_activation_fusion where MLPs are gated.",
        off="--no-bias-swiglu-fusion",
    ),
    _script("use_rotary_position_embeddings", bool, False, "The former way to ask for rope."),
    _script("group_query_attention", bool, False, "Queries share heads of keys and values."),
    _script("seq_length", int | None, None, "Tokens of a sequence.", required=True),
    _script("micro_batch_size", int | None, None, "Sequences of a micro-batch.", required=True),
    _script(
        "global_batch_size", int | None, None, "Sequences of a step, over all ranks.", required=True
    ),
    _script("train_iters", int | None, None, "Steps of the run.", required=True),
    _script(
        "untie_embeddings_and_output_weights",
        bool,
        False,
        "The output layer has a weight of its own.",
    ),
    _script("use_flash_attn", bool, False, "Attention keeps no matrix of scores."),
    _script("use_legacy_models", bool, False, "The model is not of megatron-core."),
    _script("use_torch_fsdp2", bool, False, "Parameters are torch's FSDP2's."),
    _script("reset_attention_mask", bool, False, "Attention ends at the end of a document."),
    _script(
        "ckpt_format",
        Literal["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"],
        "torch_dist",
        "The form of checkpoints.",
    ),
    _script("save", str | None, None, "Where checkpoints are saved; none are without it."),
    _script("load", str | None, None, "The checkpoint to go on from."),
    _script("no_save_optim", bool | None, None, "Checkpoints hold no optimizer."),
    _script("no_load_optim", bool | None, None, "The optimizer starts anew."),
    _script(
        "enable_gloo_process_groups",
        bool,
        True,
        "There are gloo groups beside those of the device.",
        off="--disable-gloo-process-groups",
    ),
    _script("inprocess_restart", bool, False, "A failed run starts again in its process."),
)

MINDSPEED_OPTIONS = (
    _mindspeed(
        "optimizer_selection",
        Literal["fused_torch_adamw", "fused_adamw", "fused_ema_adamw"],
        "fused_adamw",
        "The optimizer's kernel.",
    ),
    _mindspeed(
        "use_layer_wise_distributed_optimizer", bool, False, "Ranks own whole layers' optimizer."
    ),
    _mindspeed("quant_states", str | None, None, "Optimizer states are quantised."),
    _mindspeed("quant_grads", bool, False, "Gradients are quantised."),
    _mindspeed("virtual_optimizer", str | None, None, "Optimizer states are in swapped memory."),
    _mindspeed("compress_optimizer", bool, False, "Optimizer states are compressed."),
    _mindspeed("compress_dense", str | None, None, "Activations of dense MLPs are compressed."),
    _mindspeed("compress_activation", str | None, None, "Activations are compressed."),
    _mindspeed("disable_gloo_group", bool, False, "No gloo groups are made."),
    _mindspeed("enable_zero3", bool, False, "Parameters are divided by ZeRO-3."),
    _mindspeed("param_and_grad_buffer_pad", int | None, None, "What buffers are padded to."),
    _mindspeed("reset_bucket_group_order", bool, False, "Buckets are gathered in another order."),
    _mindspeed("adaptive_recompute_enable", bool, False, "Recompute is chosen by profiling."),
    _mindspeed("adaptive_recompute_device_swap", bool, False, "Swap is chosen by profiling, too."),
    _mindspeed(
        "adaptive_memory_optimization", bool, False, "Recompute and swap are chosen by profiling."
    ),
    _mindspeed("smart_swap", bool, False, "The allocator swaps what is not used."),
    _mindspeed("memory_fragmentation", bool, False, "The allocator keeps long lives apart."),
    _mindspeed("recompute_in_bubble", bool, False, "Recompute runs in the pipeline's bubbles."),
    _mindspeed("recompute_in_advance", bool, False, "Recompute runs ahead of backward."),
    _mindspeed("moe_zero_memory", str | None, None, "Activations of experts are recomputed."),
    _mindspeed("moe_fb_overlap", bool, False, "Forward and backward of experts overlap."),
    _mindspeed("schedules_method", str | None, None, 'The schedule of the pipeline: "dualpipev".'),
    _mindspeed("automated_pipeline", bool, False, "Layers are divided by a planner."),
    _mindspeed("alibi_fusion_attn_type", int | None, None, "How ALiBi is given to the kernel."),
    _mindspeed("use_fusion_attn_v2", bool, False, "Attention is the kernel's second version."),
    _mindspeed(
        "context_parallel_algo",
        Literal[
            "ulysses_cp_algo",
            "megatron_cp_algo",
            "hybrid_cp_algo",
            "adaptive_cp_algo",
            "hybrid_adaptive_cp_algo",
            "kvallgather_cp_algo",
        ],
        "ulysses_cp_algo",
        "How context parallelism divides attention.",
    ),
    _mindspeed("attention_mask_type", str, "causal", "What attention may look at."),
    _mindspeed("sparse_mode", int, 0, "The kernel's name for that."),
    _mindspeed("use_fused_rotary_pos_emb", bool, False, "Rotary embedding is one operator."),
    _mindspeed("use_ascend_mc2", bool, False, "Products and communication are one kernel."),
    _mindspeed("use_ascend_coc", bool, False, "Products and communication overlap in pieces."),
    _mindspeed("tp_2d", bool, False, "Tensor parallelism has two dimensions."),
    _mindspeed("unaligned_linear", bool, False, "Ranks have parts of unequal size."),
    _mindspeed("use_nd_matmul", bool, False, "Products are divided in more dimensions."),
    _mindspeed("use_nanopipe", bool, False, "Weight gradients are computed in bubbles."),
    _mindspeed("use_pipe_experts", bool, False, "Experts compute while tokens travel."),
    _mindspeed("ampipe_degree", int, 1, "Into how many attention and MLP are pipelined."),
    _mindspeed(
        "lora_target_modules", Sequence[str] | None, None, "The modules that have LoRA adapters."
    ),
)

FACTS = (
    _fact("framework", Literal["pytorch", "megatron-core"], "Whose training loop it is."),
    _fact("device", Literal["npu", "cuda", "cpu"], "The kind of device."),
    _fact("torch_version", str, "The version of torch."),
    _fact("torch_npu_version", str | None, "That of torch_npu; None where it is not installed."),
    _fact("cann_version", str | None, "That of CANN; None where it is not installed."),
    _fact(
        "megatron_core_version",
        str | None,
        "That of megatron-core; None where it is not installed.",
    ),
    _fact("transformer_engine_version", str | None, "That of Transformer Engine; None without it."),
    _fact("npu_operators", Sequence[str], "The operators of torch.ops.npu that there are."),
    _fact("data_parallel_size", int, "Ranks that have the same weights."),
    _fact("world_size", int, "Processes of the run."),
    _fact("num_microbatches", int, "Micro-batches of a step on one rank."),
    _fact("fsdp", Literal["fsdp1", "fsdp2"] | None, "torch's FSDP that holds the parameters."),
    _fact("dtensor_parameters", bool, "Parameters are DTensors."),
    _fact("torch_ddp", bool, "The model is in torch's DistributedDataParallel."),
    _fact("deepspeed_zero_stage", int, "The stage of DeepSpeed's ZeRO; 0 without it."),
    _fact("gradient_checkpointing", bool, "Hugging Face's gradient checkpointing is on."),
    _fact("reentrant_checkpoint", bool, "torch's checkpoint is used with use_reentrant=True."),
    _fact("shared_parameters", bool, "A parameter is used by more than one module."),
    _fact("graph_capture", bool, "Steps are captured as CUDA or NPU graphs."),
    _fact("torch_compile", bool, "The model is compiled."),
    _fact("capturable", bool, "The optimizer has capturable=True."),
    _fact("amsgrad", bool, "The optimizer has amsgrad=True."),
    _fact("elementwise_optimizer", bool, "Its step treats every element by itself."),
    _fact("gradient_hook_optimizer", bool, "It steps in gradient hooks, during backward."),
    _fact(
        "optimizer_form",
        Literal["fused", "foreach", "for-loop"],
        "Which form of torch's step is taken.",
    ),
    _fact("grad_scaler", bool, "The loss is scaled by torch's GradScaler."),
    _fact("autocast", bool, "Forward runs under torch's autocast."),
    _fact("ema", bool, "An average of the weights is kept."),
    _fact("lora", bool, "Only adapters are trained."),
    _fact("variable_shapes", bool, "Shapes differ from step to step."),
    _fact("dataloader_workers", int, "Processes that load data."),
    _fact(
        "dataloader_start_method",
        Literal["fork", "spawn", "forkserver"],
        "How they are started.",
    ),
    _fact("pinned_limit_bytes", int | None, "Host memory that may be pinned; None without limit."),
)
