"""What tests change in megatron-core: a wait that it lacks, waits that go, and its optimizer.

Each change is undone when its context closes. Those that take a synchronisation away must be
noticed: a test of synchronisation that cannot fail proves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

Replacement = tuple[Any, str, Callable[..., Any]]


@contextlib.contextmanager
def changed(name: str | None) -> Iterator[None]:
    """Change megatron-core as `CHANGES[name]` says, or not at all."""
    with contextlib.ExitStack() as stack:
        for change in CHANGES[name] if name is not None else ():
            place, attribute, stand_in = change()
            stack.enter_context(mock.patch.object(place, attribute, stand_in))
        yield


def _wait_in_tensor_pop() -> Replacement:
    """The wait that `ChunkOffloadHandler.tensor_pop` lacks.

    `bulk_reload_group` waits for the copy to the host before it copies back. A tensor that backward
    wants before its group was reloaded takes another path: `tensor_pop` copies it back itself, on
    the compute stream, and does not wait.
    """
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    original = ChunkOffloadHandler.tensor_pop

    def tensor_pop(self: Any, tag: tuple[int, int]) -> torch.Tensor:
        group = self.offload_groups[tag[0] - 1]
        if isinstance(group._tensors[tag], tuple):  # it is on the host
            group.wait_offload_event(torch.cuda.current_stream())
        tensor: torch.Tensor = original(self, tag)
        return tensor

    return ChunkOffloadHandler, "tensor_pop", tensor_pop


def _no_wait_offload_event() -> Replacement:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import OffloadTensorGroup

    return OffloadTensorGroup, "wait_offload_event", _nothing


def _no_wait_reload_event() -> Replacement:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import OffloadTensorGroup

    return OffloadTensorGroup, "wait_reload_event", _nothing


def _no_wait_before_copy_to_host() -> Replacement:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    def on_group_commit_forward(self: Any, released: list[torch.Tensor]) -> None:
        if self.do_offload:
            self.bulk_offload(released)

    return ChunkOffloadHandler, "on_group_commit_forward", on_group_commit_forward


def _no_wait_before_copy_to_device() -> Replacement:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    def on_group_start_backward(self: Any) -> None:
        if self.do_offload:
            self.bulk_reload()

    return ChunkOffloadHandler, "on_group_start_backward", on_group_start_backward


def _no_record_stream() -> Replacement:
    return torch.Tensor, "record_stream", _nothing


def _no_wait_for(finish: str, handle: str) -> Replacement:
    """Let `finish` of a group of buckets believe that the communication of `handle` is over."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    original = getattr(_ParamAndGradBucketGroup, finish)
    kept: list[Any] = []  # the communication itself goes on: only the wait is missing

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self, handle)
        if work is not None:
            kept.append(work)
            setattr(self, handle, mock.Mock(spec=["wait"]))
        return original(self, *args, **kwargs)

    return _ParamAndGradBucketGroup, finish, without


def _no_wait_for_gradients() -> Replacement:
    return _no_wait_for("finish_grad_sync", "grad_reduce_handle")


def _no_wait_for_parameters() -> Replacement:
    return _no_wait_for("finish_param_sync", "param_gather_handle")


def _nothing(self: Any, *_: Any) -> None:
    """Stands for a synchronisation that is taken away."""


def _swap_optimizer() -> Replacement:
    """The optimizer that megatron-core shards, with its state on the host.

    A training script builds `DistributedOptimizer` with what `swap_optimizer` returns; here it is
    `get_megatron_optimizer` that builds it.
    """
    from megatron.core import optimizer as place

    from ascend_swap import SwapOptimizerConfig, swap_optimizer

    original = place.DistributedOptimizer

    def make(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        swapped = swap_optimizer(optimizer, SwapOptimizerConfig(swap_optimizer_times=5))
        return original(swapped, *args, **kwargs)

    return place, "DistributedOptimizer", make


CHANGES: dict[str, tuple[Callable[[], Replacement], ...]] = {
    "wait in tensor_pop": (_wait_in_tensor_pop,),
    "no wait_offload_event": (_wait_in_tensor_pop, _no_wait_offload_event),
    "no wait_reload_event": (_wait_in_tensor_pop, _no_wait_reload_event),
    "no wait before the copy to the host": (_wait_in_tensor_pop, _no_wait_before_copy_to_host),
    "no wait before the copy to the device": (_wait_in_tensor_pop, _no_wait_before_copy_to_device),
    "no record_stream": (_wait_in_tensor_pop, _no_record_stream),
    "no wait for gradients": (_no_wait_for_gradients,),
    "no wait for parameters": (_no_wait_for_parameters,),
    "swap-optimizer": (_swap_optimizer,),
}
