"""What a rank owns of the parameters of one model chunk: the pieces that its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from ascend_core.layout import Layout
from ascend_ddp._gather import ChunkWeights
from ascend_ddp._reducer import Reducer
from ascend_ddp._shards import Piece, pieces_of

__all__ = ["Chunk", "Owned", "flattened", "show_sums"]


class Owned(NamedTuple):
    """A piece of a parameter.

    Attributes:
        piece: Which elements.
        whole: The model's parameter.
        part: [piece.numel]: a view of the weights of the piece, as a parameter.
    """

    piece: Piece
    whole: nn.Parameter
    part: nn.Parameter


class Chunk:
    """One model chunk, its weights, and what this rank owns of them.

    Args:
        reducer: Its gradients.
        seconds: That a gather may take.

    Attributes:
        rank: Of this process.
        owned: By the id of the model's parameter.
    """

    def __init__(self, reducer: Reducer, seconds: float | None) -> None:
        self.reducer = reducer
        self.rank = distributed.get_rank(reducer.group)
        self.ranks = distributed.get_world_size(reducer.group)
        self.weights = ChunkWeights(reducer, seconds)
        plans = [bucket.plan for bucket in reducer.buckets]
        self.owned: dict[int, Owned] = {}
        for piece in pieces_of(plans, self.rank, self.ranks):
            own = self.weights.buckets[piece.bucket].own
            whole = reducer.parameters[piece.parameter]
            part = nn.Parameter(own[piece.begin : piece.end])
            self.owned[id(whole)] = Owned(piece, whole, part)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that are reduced, in whole."""
        for bucket in self.reducer.buckets:
            for index in bucket.indices:
                yield self.reducer.parameters[index]

    def give_gradients(self) -> None:
        """Let each part have its piece of the sums: a view, or a copy of its own dtype."""
        reducer = self.reducer
        if not reducer.holds_sums:
            return
        for piece, whole, part in self.owned.values():
            if not reducer.used[piece.parameter] or part.grad is not None:
                continue
            if not reducer.shows_sums:
                shard = reducer.buckets[piece.bucket].shard
                assert shard is not None
                part.grad = shard[piece.begin : piece.end].to(part.dtype)
            elif whole.grad is not None:
                part.grad = flattened(whole.grad)[piece.start : piece.stop].to(part.dtype)

    def drop_gradients(self) -> None:
        """Be done with the sums, wherever they show."""
        for _, _, part in self.owned.values():
            part.grad = None
        if self.reducer.shows_sums:
            for parameter in self.parameters:
                parameter.grad = None
        self.reducer.holds_sums = False

    def send_weights(self, stepped: set[int]) -> None:
        """Gather the buckets of which a parameter was stepped, by the parameters' ids."""
        reducer = self.reducer
        used = {
            number
            for number, bucket in enumerate(reducer.buckets)
            for index in bucket.indices
            if reducer.used[index] and id(reducer.parameters[index]) in stepped
        }
        self.weights.send(used)


def show_sums(reducer: Reducer) -> None:
    """Show the sums in `p.grad`: this rank's part of them, and elsewhere a NaN or zeros.

    A NaN where one rank has an inf or a NaN: a gradient scaler finds one on every rank or on none.
    """
    rank = distributed.get_rank(reducer.group)
    others = torch.zeros((), dtype=torch.float32, device=reducer.parameters[0].device)
    for bucket in reducer.buckets:
        assert bucket.shard is not None
        others += (bucket.shard * 0).sum(dtype=torch.float32)  # inf * 0 is NaN
    distributed.all_reduce(others, group=reducer.group)
    reducer.shown = {}
    for bucket in reducer.buckets:
        bucket.show(rank, others)
        for index in bucket.indices:
            if reducer.used[index]:
                bucket.give_back(index)
                reducer.shown[index] = reducer.parameters[index].grad


def flattened(tensor: Tensor) -> Tensor:
    """The elements in the order of memory: [numel]; a view, where it has no gaps."""
    layout = Layout.of(tensor)
    return layout.flatten(tensor) if layout.is_dense else tensor.detach().reshape(-1)
