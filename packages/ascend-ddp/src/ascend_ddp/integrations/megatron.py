"""reduce_gradients under the schedules of megatron-core. Importing it imports megatron-core.

[Note: when megatron-core lets gradients travel]
A schedule holds all chunks of a stage in `config.no_sync_func`, leaves it for the backward of the
last micro-batch of a chunk, and enters it again before the next backward. With
`config.grad_sync_func` it stays in there, and asks for the gradients of a chunk by that. When all
backwards have run it calls `config.finalize_model_grads_func`, which asks each chunk to finish, and
then adds gradients up over the groups of tensors and of pipelines. Only there are gradients waited
for: what a chunk has sent travels beside the backwards of the other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_core.feature import chosen_config
from ascend_ddp._reducer import Reducer
from ascend_ddp.config import DDPConfig
from ascend_ddp.reduce import GradientReduction, reduce_gradients

__all__ = ["ReducedChunk", "ScheduledReduction", "with_reduced_gradients"]

# Options of megatron-core by which gradients of weights come around autograd.
_AROUND_AUTOGRAD = (
    "gradient_accumulation_fusion",
    "delay_wgrad_compute",
    "defer_embedding_wgrad_compute",
)


class ReducedChunk(_BaseDataParallel):  # type: ignore[misc]
    """A model chunk as megatron-core's schedules, `finalize_model_grads` and optimizers take it.

    What they read is `p.grad`, since there is no `p.main_grad`. State dicts are the chunk's.

    Args:
        config: Megatron-core's, of the chunk.
        module: The chunk.
        reducer: Of its gradients.

    Attributes:
        ddp_config: What megatron-core's optimizers ask for: nothing of theirs is sharded.
    """

    def __init__(self, config: Any, module: nn.Module, reducer: Reducer) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        self._reducer = reducer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate in backwards that run in this context, and send nothing."""
        with self._reducer.no_sync():
            yield

    def start_grad_sync(self, *unused: object) -> None:
        """Send what is accumulated."""
        self._reducer.send()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Wait for what travels: the current stream does, on an accelerator.

        Raises:
            CommunicationError: When a rank has ended, or does not come in time.
        """
        self._reducer.wait()

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients, in place."""
        for parameter in self._reducer.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Let each `p.grad` be None."""
        for parameter in self._reducer.parameters:
            parameter.grad = None

    def broadcast_params(self) -> None:
        """Do nothing: `DDPConfig.sync_parameters` has done it."""


class ScheduledReduction:
    """The handle of `with_reduced_gradients`.

    Args:
        reduction: That of the chunks.
        config: Megatron-core's, which the schedules read.
        functions: What they are to call, by the name of the option.

    Attributes:
        reduction: That of the chunks: `report()`, `events(chunk)`.
    """

    def __init__(
        self,
        reduction: GradientReduction,
        config: Any,
        functions: dict[str, Callable[..., Any] | list[Callable[..., Any]]],
    ) -> None:
        self.reduction = reduction
        self._config = config
        self._functions = functions
        for name, function in functions.items():
            setattr(config, name, function)

    def report(self) -> dict[str, Any]:
        """What the feature did; see `GradientReduction.report`."""
        return self.reduction.report()

    def remove(self) -> None:
        """Leave gradients where they are found, and the options as they were."""
        for name, function in self._functions.items():
            if getattr(self._config, name) is function:
                setattr(self._config, name, None)
        self._functions = {}
        self.reduction.remove()


def with_reduced_gradients(
    chunks: nn.Module | Sequence[nn.Module],
    config: DDPConfig | None = None,
    *,
    align_grad_reduce: bool = False,
) -> tuple[list[ReducedChunk], ScheduledReduction]:
    """Average the gradients of a pipeline stage under megatron-core's schedules.

    Instead of megatron-core's `DistributedDataParallel`. Sets `no_sync_func` of the chunks' config,
    and `finalize_model_grads_func` where it is not set. Gradients are averaged over megatron-core's
    data parallel group, that of context parallelism included. They are whole when the schedule
    returns.

    Args:
        chunks: The model, or all model chunks of this pipeline stage.
        config: The options of `reduce_gradients`; the defaults when left out.
        align_grad_reduce: Set `grad_sync_func` too, by which all stages send at the same time.

    Returns:
        The chunks, wrapped, for `forward_backward_func` and `get_megatron_optimizer`; and a handle.

    Raises:
        ConfigError: When another reduces the gradients, they are not in `p.grad`, some belong to
            another group, or as `reduce_gradients`.

    Example:
        >>> chunks, handle = with_reduced_gradients(chunks, DDPConfig(bucket_bytes=40 * 2**20))
        >>> forward_backward_func(model=chunks, ...); optimizer.step()
    """
    config = chosen_config("with_reduced_gradients", DDPConfig, config)
    bare = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    own: Any = get_model_config(bare[0]) if bare else None
    for chunk in bare:
        _check_parameters(chunk)
    _check_options(own, config)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    reduction = reduce_gradients(bare, config, group=group)
    wrapped = []
    for chunk, reducer in zip(bare, reduction.reducers, strict=True):
        reducer.waits_at_end = False
        wrapped.append(ReducedChunk(get_model_config(chunk), chunk, reducer))
    functions: dict[str, Any] = {"no_sync_func": _per_chunk([one.no_sync for one in wrapped])}
    if align_grad_reduce:
        functions["grad_sync_func"] = _per_chunk([one.start_grad_sync for one in wrapped])
    if own.finalize_model_grads_func is None:
        functions["finalize_model_grads_func"] = finalize_model_grads
    return wrapped, ScheduledReduction(reduction, own, functions)


def _per_chunk(functions: list[Callable[..., Any]]) -> Any:
    """As megatron-core takes them: a list where there are several chunks."""
    return functions if len(functions) > 1 else functions[0]


def _check_parameters(chunk: nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        if hasattr(parameter, "main_grad"):
            raise ConfigError(
                f"{name} has a main_grad.",
                why="megatron-core's DistributedDataParallel wraps the model chunk: it takes the "
                "gradient away and reduces it.",
                instead="pass the chunk that it wraps, before it does.",
            )
        if not getattr(parameter, "allreduce", True):
            raise ConfigError(
                f"{name} belongs to an expert.",
                why="its gradient is averaged over another group than those of other parameters.",
                instead="use megatron-core's DistributedDataParallel with expert parallelism.",
            )


def _check_options(own: Any, config: DDPConfig) -> None:
    """Refuse what would leave gradients wrong."""
    for name in _AROUND_AUTOGRAD:
        if getattr(own, name, False):
            raise ConfigError(
                f"with_reduced_gradients and {name} cannot be used together.",
                why="gradients of weights do not come by autograd into p.grad then.",
                instead=f"turn {name} off.",
            )
    for name in ("no_sync_func", "grad_sync_func"):
        if getattr(own, name, None) is not None:
            raise ConfigError(
                f"{name} of the chunks' config is set already.",
                why="another handle, or megatron-core's DistributedDataParallel, reduces there.",
                instead="remove() that handle, or leave the option None.",
            )
    if config.mode != "all-reduce":
        raise ConfigError(
            f"with_reduced_gradients was given mode={config.mode!r}.",
            why="megatron-core adds gradients up over the groups of tensors and of pipelines when "
            "the schedule ends, and they are nowhere whole then.",
            instead="use mode='all-reduce', or megatron-core's distributed optimizer.",
        )
    if getattr(own, "calculate_per_token_loss", False) and config.average:
        raise ConfigError(
            "calculate_per_token_loss and average=True cannot be used together.",
            why="megatron-core divides the sum of the gradients by the number of tokens of all "
            "ranks.",
            instead="use DDPConfig(average=False).",
        )
