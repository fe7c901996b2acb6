"""The verb and its handle: gradients are averaged over ranks while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ascend_core.errors import ConfigError, UnavailableError
from ascend_core.feature import chosen_config
from ascend_ddp._first import check_buffers, copy_from_first
from ascend_ddp._reducer import Reducer
from ascend_ddp._steps import BeforeStep
from ascend_ddp._taking import refuse_taken
from ascend_ddp.config import DDPConfig

__all__ = ["GradientReduction", "reduce_gradients"]


class GradientReduction:
    """The handle of `reduce_gradients`.

    Args:
        chunks: One reducer for each model chunk.
        config: The options.
    """

    def __init__(self, chunks: Sequence[Reducer], config: DDPConfig) -> None:
        self.config = config
        self._chunks = tuple(chunks)
        self._before_step = BeforeStep(chunks)

    @property
    def reducers(self) -> Sequence[Reducer]:
        """One for each model chunk; none when the feature was removed."""
        return self._chunks

    @contextmanager
    def no_sync(self, chunk: int | None = None) -> Iterator[None]:
        """Accumulate gradients in the backwards that run in this context, and send nothing.

        What counts is where *backward* runs: a forward may be inside or outside.

        Args:
            chunk: The number of a model chunk, to leave the others as they are.

        Raises:
            ConfigError: When there is no such chunk.
        """
        with ExitStack() as stack:
            for reducer in self._chosen(chunk):
                stack.enter_context(reducer.no_sync())
            yield

    def set_is_last_microbatch(self, is_last: bool, chunk: int | None = None) -> None:
        """Say whether the backwards from now on send gradients: True, to begin with.

        Args:
            is_last: Whether they do.
            chunk: The number of a model chunk, to leave the others as they are.

        Raises:
            ConfigError: When there is no such chunk.
        """
        for reducer in self._chosen(chunk):
            reducer.is_last_microbatch = is_last

    def skip_backward(self) -> None:
        """Take part in the others' reduction where this rank has no data, in place of a backward.

        Sends what was accumulated in `no_sync()`, or zeros; `p.grad` is the average afterwards, to
        be clipped and stepped as after a backward. An optimizer's step does it by itself where it
        was not done, which is too late for what reads gradients before it. Does nothing where
        gradients are not sent.

        Raises:
            ConfigError: Within a backward.
            CommunicationError: When a rank has ended, or does not come in time.
        """
        for reducer in self._chunks:
            reducer.send()

    def wait(self) -> None:
        """Send what a backward left unsent, and wait for what travels: gradients are whole then.

        It is done at the end of a backward, and before the step of an optimizer that has one of the
        parameters. On an accelerator the current stream waits, and the host goes on.

        Raises:
            ConfigError: Within a backward, of which gradients are still to come.
            CommunicationError: When a rank has ended, or does not come in time.
        """
        for reducer in self._chunks:
            reducer.wait()

    def send_before(self, optimizer: optim.Optimizer) -> None:
        """Do what is done before its step: gradients are whole then, also without a backward."""
        self._before_step.send(optimizer)

    def admit(self, *optimizers: optim.Optimizer) -> None:
        """Let these optimizers, and no others, step parameters whose gradients are scattered."""
        self._before_step.admitted.clear()
        self._before_step.admitted.update(optimizers)

    def report(self) -> dict[str, Any]:
        """What the feature did.

        Returns:
            `buckets`: their number. `bucket_bytes`: of all of them. `largest_bucket_bytes`.
            `parameters`: how many take part. `collectives`: how many buckets were sent so far.
            `backwards`: in how many backwards. `sent_early`: of the buckets of the last backward
            that sent, the share that left before its last gradient was there, from 0 to 1.
        """
        buckets = [bucket for reducer in self._chunks for bucket in reducer.buckets]
        sizes = [bucket.flat.nbytes for bucket in buckets]
        events = [event for reducer in self._chunks for event in reducer.last.events]
        kinds = [kind for kind, _ in events]
        last = max((i for i, kind in enumerate(kinds) if kind == "gradient"), default=0)
        launches = kinds.count("launch")
        return {
            "buckets": len(buckets),
            "bucket_bytes": sum(sizes),
            "largest_bucket_bytes": max(sizes, default=0),
            "parameters": sum(len(bucket.indices) for bucket in buckets),
            "collectives": sum(reducer.collectives for reducer in self._chunks),
            "backwards": sum(reducer.rounds for reducer in self._chunks),
            "sent_early": kinds[:last].count("launch") / launches if launches else 0.0,
        }

    def events(self, chunk: int = 0) -> list[tuple[str, int]]:
        """What happened in the last backward that sent, in order.

        Returns:
            `("gradient", i)`: that of parameter `i` (in the order of `model.parameters()`) was
            accumulated. `("launch", n)`: bucket `n` was sent.
        """
        return list(self._chosen(chunk)[0].last.events)

    def remove(self) -> None:
        """Leave gradients where they are found. A second call does nothing.

        Raises:
            ConfigError: Within a backward; the feature stays on.
            CommunicationError: When a rank has ended, or does not come in time.
        """
        self.wait()  # which may fail, and leave the feature on
        self._before_step.remove()
        for reducer in self._chunks:
            reducer.remove()
        self._chunks = ()

    def _chosen(self, chunk: int | None) -> Sequence[Reducer]:
        if chunk is None:
            return self._chunks
        is_number = isinstance(chunk, int) and not isinstance(chunk, bool)
        if not is_number or not 0 <= chunk < len(self._chunks):
            raise ConfigError(
                f"there is no model chunk {chunk!r}.",
                why=f"reduce_gradients was given {len(self._chunks)}, counted from 0.",
                instead="name one of those, or leave the number out for all.",
            )
        return self._chunks[chunk : chunk + 1]


def reduce_gradients(
    model: nn.Module | Sequence[nn.Module],
    config: DDPConfig | None = None,
    *,
    group: distributed.ProcessGroup | None = None,
) -> GradientReduction:
    """Average the gradients of data-parallel ranks, bucket by bucket, while backward runs.

    After a backward each `p.grad` is the average over the ranks, a view of a flat bucket; that of a
    parameter that no rank used is None. Nothing wraps the model: call it as ever. The feature stays
    on until `remove()` is called or the model dies, also where the handle is not kept.

    Args:
        model: The model, or the list of model chunks of a pipeline stage. The same on all ranks.
        config: The options; the defaults when left out.
        group: Of the ranks that hold the same parameters; all when left out.

    Returns:
        A handle: `no_sync()` for gradient accumulation, `wait()`, `report()`, and `remove()`.

    Raises:
        ConfigError: When there is no parameter, one is no plain one, on the meta device, reduced
            already or its gradient taken by another feature, chunks share one, this rank is not in
            the group, or ranks differ in parameters or buffers.
        UnavailableError: When `torch.distributed` is not initialised.

    Example:
        >>> reduction = reduce_gradients(model)
        >>> loss = model(batch); loss.backward(); optimizer.step()
    """
    config = chosen_config("reduce_gradients", DDPConfig, config)
    chunks = _chunks_of(model)
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UnavailableError(
            "reduce_gradients needs a process group.",
            why="torch.distributed is not initialised.",
            instead="call torch.distributed.init_process_group() first.",
        )
    _check_group(group)
    _check_parameters(chunks, config)
    reducers: list[Reducer] = []
    try:
        for chunk in chunks:
            reducers.append(Reducer(chunk, config, group))  # compares ranks, and comes first
        if config.sync_parameters:
            for chunk, reducer in zip(chunks, reducers, strict=True):
                copy_from_first(chunk, reducer.ranks, reducer.buckets.device)
    except BaseException:
        for reducer in reducers:
            reducer.remove()
        raise
    return GradientReduction(reducers, config)


def _chunks_of(model: object) -> list[nn.Module]:
    """The model chunks that were given."""
    given = [model] if isinstance(model, nn.Module) or not isinstance(model, Iterable) else model
    chunks: list[nn.Module] = []
    for chunk in given:
        if not isinstance(chunk, nn.Module):
            raise ConfigError(
                f"reduce_gradients was given a {type(chunk).__name__} as a model.",
                why="its gradients are those of the parameters of modules.",
                instead="pass an nn.Module, or a list of them for the chunks of a pipeline stage.",
            )
        chunks.append(chunk)
    return chunks


def _check_group(group: object) -> None:
    # What new_group() returns on a rank that is not in the group is a number, and refused later.
    absent = distributed.GroupMember.NON_GROUP_MEMBER
    if group is None or group is absent or isinstance(group, distributed.ProcessGroup):
        return
    raise ConfigError(
        f"reduce_gradients was given a {type(group).__name__} as its group.",
        why="ranks talk in a process group.",
        instead="pass what torch.distributed.new_group() or mesh.get_group() returned, or leave it "
        "out for all ranks.",
    )


def _check_parameters(chunks: Sequence[nn.Module], config: DDPConfig) -> None:
    """Refuse what cannot be reduced."""
    seen: set[int] = set()
    empty = not chunks
    for chunk in chunks:
        _check_modules(chunk)
        if config.sync_parameters:
            check_buffers(chunk)
        parameters = dict(chunk.named_parameters())
        for name, parameter in parameters.items():
            if id(parameter) in seen:
                raise ConfigError(
                    f"{name} is in two of the model chunks.",
                    why="each chunk sends its gradients by itself, and this one would be sent "
                    "before the other chunk has added to it.",
                    instead="give the chunks as one nn.ModuleList.",
                )
            _check(name, parameter, config)
        seen.update(map(id, parameters.values()))
        empty = empty or not parameters
    if empty:
        raise ConfigError(
            "reduce_gradients was given a model without parameters.",
            instead="pass the model that is trained.",
        )


def _check_modules(chunk: nn.Module) -> None:
    for name, module in chunk.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is a DistributedDataParallel.",
                why="it reduces the same gradients, and writes its own sums over them.",
                instead="pass the module that it wraps, and use that.",
            )


def _check(name: str, parameter: nn.Parameter, config: DDPConfig) -> None:
    _check_kind(name, parameter)
    refuse_taken(name, parameter)
    if parameter.is_complex() and config.reduce_dtype is not None:
        raise ConfigError(
            f"{name} is complex, and reduce_dtype is {config.reduce_dtype!r}.",
            why="that has no imaginary part.",
            instead="leave reduce_dtype out: gradients are added up in their own dtype then.",
        )


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    if hasattr(parameter, "placements"):
        raise ConfigError(
            f"{name} is a DTensor.",
            why="what shards it (fully_shard, tensor parallelism by DTensor) reduces its gradient.",
            instead="leave the reduction to that, or build the model of plain tensors.",
        )
    if getattr(parameter, "_is_flat_param", False):
        raise ConfigError(
            f"{name} is a part of FullyShardedDataParallel.",
            why="each rank has another part of the parameters, and that module reduces them.",
            instead="leave the reduction to it.",
        )
    if isinstance(parameter, UninitializedParameter):
        raise ConfigError(
            f"{name} has no shape yet.",
            why="buckets are made of the shapes of parameters.",
            instead="run the lazy module once before reduce_gradients.",
        )
    if parameter.is_meta:
        raise ConfigError(
            f"{name} is on the meta device.",
            why="it has no values yet, and its gradient has nowhere to lie.",
            instead="call to_empty(device=...) on the model, initialise it, and then this.",
        )
    if parameter.layout != torch.strided:
        raise ConfigError(
            f"{name} is of layout {parameter.layout}.",
            why="gradients travel in flat, dense buckets.",
            instead="use a dense parameter.",
        )
    if type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"{name} is a {type(parameter).__name__}.",
            why="a subclass may be made of several tensors, and a bucket is of one.",
            instead="use torch.nn.Parameter.",
        )
