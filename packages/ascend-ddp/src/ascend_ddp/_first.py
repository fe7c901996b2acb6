"""Gives all ranks the parameters and buffers of the first one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn

from ascend_core.errors import ConfigError
from ascend_ddp._ranks import Ranks

__all__ = ["check_buffers", "copy_from_first"]

_SENT = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
"""What all backends broadcast."""


def check_buffers(chunk: nn.Module) -> None:
    """Refuse buffers that cannot be sent.

    Raises:
        ConfigError: Naming one.
    """
    for name, buffer in chunk.named_buffers():
        if buffer.is_meta or buffer.layout != torch.strided:
            what = "on the meta device" if buffer.is_meta else f"of layout {buffer.layout}"
            raise ConfigError(
                f"{name} is a buffer {what}.",
                why="sync_parameters gives every rank the buffers of the first one, and this one "
                "is no memory that could be sent.",
                instead="give it dense values first, or set sync_parameters=False and make the "
                "ranks equal yourself.",
            )


@torch.no_grad()
def copy_from_first(chunk: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Give parameters and buffers the values of the first rank, in place.

    Args:
        chunk: Whose parameters were compared already.
        ranks: That get them.
        device: On which ranks talk. What lies where their backend cannot reach is sent by way of
            it.

    Raises:
        ConfigError: When ranks have different buffers. None has been written to.
        CommunicationError: When a rank does not answer.
    """
    _compare_buffers(chunk, ranks, device)
    source = 0 if ranks.group is None else distributed.get_global_rank(ranks.group, 0)
    for name, tensor in _named(chunk):
        sent = tensor.detach().contiguous().to(ranks.within_reach(tensor.device, device))
        # As bytes, where backends do not know the dtype.
        told = sent if sent.dtype in _SENT else sent.reshape(-1).view(torch.uint8)
        with ranks.named("the values of the first rank", name):
            distributed.broadcast(told, source, group=ranks.group)
        if sent.data_ptr() != tensor.data_ptr() or sent.device != tensor.device:
            _once(tensor).copy_(_like_once(sent, tensor))


def _named(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    yield from chunk.named_buffers()


def _once(tensor: Tensor) -> Tensor:
    """A view in which no element is there twice: an expanded dimension is one element long."""
    return _like_once(tensor, tensor)


def _like_once(values: Tensor, tensor: Tensor) -> Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _compare_buffers(chunk: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Refuse ranks that would send something else: each would write what is not meant for it."""
    buffers = {
        name: (tuple(buffer.shape), str(buffer.dtype), tuple(_once(buffer).shape))
        for name, buffer in chunk.named_buffers()
    }
    what, names = "the buffers of the other ranks", f"{len(buffers)} buffers"
    other = ranks.first_other(repr(buffers), device, what, names)
    if other is None:
        return
    mine_are = ", ".join(f"{name} {list(shape)}" for name, (shape, *_) in buffers.items())
    raise ConfigError(
        f"the buffers of ranks 0 and {other} differ in name, shape or dtype.",
        why="sync_parameters gives every rank the buffers of the first one; this rank has "
        f"{mine_are or 'none'}.",
        instead="register the same buffers on every rank (one whose size depends on the data is "
        "better no buffer), or set sync_parameters=False and make the ranks equal yourself.",
    )
