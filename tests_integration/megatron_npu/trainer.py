"""Train a tiny GPT of the real megatron-core, as a configuration says.

The device is the caller's business: this file reads like any training script for CUDA. Between the
first step and the last nothing here waits for the device. megatron-core itself does, once in a
step, for the norm of the gradients.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from tests_integration.megatron_npu import fusing, swapping
from tests_integration.megatron_npu.configurations import (
    HEADS,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    SEQUENCES_PER_STEP,
    VOCABULARY,
    Configuration,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Batch = tuple[Tensor, Tensor, Tensor]


def train(configuration: Configuration, device: torch.device) -> dict[str, Any]:
    """Train in the groups of this process; all ranks call this together.

    Returns:
        "losses": of each step, those of its micro batches, empty where this rank has not the last
        layer. "norms": of each step, the norm of all gradients. "digest": of this rank's gradients
        and weights after the last step. "report": of swap-attention, where it is on.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(
        configuration.tensor, configuration.pipeline, configuration.virtual
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        chunks, swap = _chunks(configuration, device)
        optimizer = _optimizer(configuration, chunks)
        schedule = get_forward_backward_func()
        losses, norms = [], []
        for number in range(configuration.steps):
            if number == configuration.resume_after:
                chunks, optimizer, swap = _resumed(configuration, chunks, optimizer, device)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            mine = _my_sequences()
            reduced = schedule(
                forward_step_func=_forward_step,
                data_iterator=_per_chunk([_batches(mine, device) for _ in chunks]),
                model=_per_chunk(chunks),
                num_microbatches=len(mine),
                seq_length=SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
            _, norm, _ = optimizer.step()
            losses.append([found["loss"] for found in reduced])
            norms.append(float(norm))
        return {
            "losses": [[float(loss) for loss in step] for step in losses],
            "norms": norms,
            "digest": _digest(chunks),
            "report": {} if swap is None else swap.report(),
        }
    finally:
        _forget()


# The model ---------------------------------------------------------------------------------------


def _chunks(configuration: Configuration, device: torch.device) -> tuple[list[Any], Any]:
    """The chunks of this rank, wrapped for data parallelism, and the handle of swap-attention."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = _transformer_config(configuration)
    spec, swap = swapping.spec_of(configuration)
    if configuration.fused:
        spec = fusing.spec_of(configuration, config)
    chunks = []
    for stage in range(configuration.virtual or 1):
        chunk = _gpt(configuration, config, spec, stage if configuration.virtual else None)
        chunk.to(device)
        _set_weights(chunk, configuration)
        chunks.append(chunk if configuration.dtype == "fp32" else Float16Module(config, chunk))
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=configuration.distributed_optimizer,
        overlap_grad_reduce=configuration.overlap,
        overlap_param_gather=configuration.overlap and configuration.distributed_optimizer,
        bucket_size=configuration.bucket,
        grad_reduce_in_fp32=True,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _per_chunk([chunk.no_sync for chunk in wrapped])
    if ddp.overlap_param_gather:
        config.param_sync_func = _per_chunk([chunk.start_param_sync for chunk in wrapped])
    if configuration.fused:
        return wrapped, fusing.Watch(wrapped)
    return wrapped, swap or swapping.turn_on(configuration, wrapped)


def _transformer_config(configuration: Configuration) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[configuration.dtype]
    options: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "attention_dropout": configuration.dropout, "hidden_dropout": configuration.dropout,
        "tensor_model_parallel_size": configuration.tensor,
        "pipeline_model_parallel_size": configuration.pipeline,
        "virtual_pipeline_model_parallel_size": configuration.virtual,
        "params_dtype": dtype, "pipeline_dtype": dtype,
        "bf16": configuration.dtype == "bf16", "fp16": configuration.dtype == "fp16",
        "normalization": configuration.norm, "gated_linear_unit": configuration.swiglu,
        "add_bias_linear": not configuration.swiglu,
        "activation_func": F.silu if configuration.swiglu else F.gelu,
        "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "masked_softmax_fusion": False, **configuration.model,
    }  # fmt: skip
    if configuration.virtual:  # which megatron-core wants so with two ranks
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    config = TransformerConfig(**options)
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _gpt(configuration: Configuration, config: Any, spec: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel

    at = {"ignore_virtual": False, "vp_stage": stage}
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        position_embedding_type=configuration.positions,
        share_embeddings_and_output_weights=configuration.tied,
        vp_stage=stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def _set_weights(chunk: Any, configuration: Configuration) -> None:
    """Give each parameter values that depend on its name in the whole model, however it is cut."""
    from megatron.core import parallel_state

    ranks, rank = configuration.tensor, parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        whole_name = _whole_name(chunk, name)
        shape = list(parameter.shape)
        cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
        if cut >= 0:
            shape[cut] *= ranks
        seed = int(hashlib.md5(whole_name.encode()).hexdigest()[:8], 16)
        values = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if len(shape) == 1 and "norm" in whole_name and whole_name.endswith("weight"):
            values += 1.0
        if cut >= 0:
            # Of a gated layer, a rank has a part of the gate and a part of what it gates.
            halves = values.chunk(2) if configuration.swiglu and "linear_fc1" in name else (values,)
            values = torch.cat([half.chunk(ranks, cut)[rank] for half in halves])
        with torch.no_grad():
            parameter.copy_(values.to(parameter.dtype))


def _whole_name(chunk: Any, name: str) -> str:
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = f"G{chunk.decoder.layers[int(parts[2])].layer_number}"
    return ".".join(parts)


def _optimizer(configuration: Configuration, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options: dict[str, Any] = {
        "optimizer": "adam", "lr": 1e-2, "weight_decay": 0.01, "clip_grad": 1.0,
        "bf16": configuration.dtype == "bf16", "fp16": configuration.dtype == "fp16",
        "params_dtype": DTYPES[configuration.dtype],
        "use_distributed_optimizer": configuration.distributed_optimizer,
        "overlap_param_gather": chunks[0].ddp_config.overlap_param_gather,
        **configuration.optimizer,
    }  # fmt: skip
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


# The checkpoint ----------------------------------------------------------------------------------


def _resumed(
    configuration: Configuration, chunks: list[Any], optimizer: Any, device: torch.device
) -> tuple[list[Any], Any, Any]:
    """Save model and optimizer to a file of this rank, and go on from there in new ones.

    The parts are those of megatron-core's distributed checkpoint ("dp_reshardable"); only the file
    is torch's. Its own writer needs psutil, which these environments lack, and its older format
    does not load the step counts of torch's Adam.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        saved = {
            "model": [chunk.state_dict() for chunk in chunks],
            "optimizer": optimizer.state_dict(),
            "state": [_state_of(part) for part in optimizer.chained_optimizers],
        }
        torch.save(saved, path)
        chunks, swap = _chunks(configuration, device)
        optimizer = _optimizer(configuration, chunks)
        loaded = torch.load(path, weights_only=False)
    for chunk, state in zip(chunks, loaded["model"], strict=True):
        chunk.load_state_dict(state)
    optimizer.load_state_dict(loaded["optimizer"])
    with torch.no_grad():
        for part, state in zip(optimizer.chained_optimizers, loaded["state"], strict=True):
            part.load_parameter_state_from_dp_reshardable(state)
    return chunks, optimizer, swap


def _state_of(optimizer: Any) -> dict[Any, Any]:
    """The state of a distributed optimizer, each piece marked as no padding, as its loader asks."""
    state: dict[Any, Any] = optimizer.get_parameter_state_dp_reshardable()
    buffers = [found for key, found in state.items() if isinstance(key, int)]
    for buckets in (one for buffer in buffers for one in buffer.values()):
        for piece in (one for bucket in buckets for one in bucket):
            piece["padding"] = False
    return state


def _digest(chunks: list[Any]) -> str:
    """Of every gradient and weight, by name; the host waits for the device."""
    found = hashlib.sha256()
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found.update(f"{number} {name}".encode())
            for tensor in (parameter.main_grad, parameter.detach()):
                found.update(tensor.float().cpu().numpy().tobytes())
    return found.hexdigest()


# The data ----------------------------------------------------------------------------------------


def _my_sequences() -> Tensor:
    """The part of the batch that this rank's replica of the model trains on."""
    from megatron.core import parallel_state

    shape = SEQUENCES_PER_STEP, SEQUENCE + 1
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1000))
    replicas: int = parallel_state.get_data_parallel_world_size()
    replica: int = parallel_state.get_data_parallel_rank()
    return tokens.chunk(replicas)[replica]


def _batches(sequences: Tensor, device: torch.device) -> Iterator[Batch]:
    positions = torch.arange(SEQUENCE)[None]
    for sequence in sequences[:, None]:
        inputs, labels = sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
        yield inputs.to(device), labels.to(device), positions.to(device)


def _forward_step(
    batches: Iterator[Batch], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    inputs, labels, positions = next(batches)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=inputs.device).triu(1)
    return model(inputs, positions, mask, labels=labels), _loss


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _per_chunk(found: list[Any]) -> Any:
    return found if len(found) > 1 else found[0]


def leave_groups() -> None:
    """End megatron-core's groups, which it only forgets: each has threads that poll."""
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # that of all ranks
            distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _forget() -> None:
    """Take back what megatron-core keeps for the process."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )

    leave_groups()
    PipelineOffloadManager.OFFLOAD_MGR = None
