"""What a rank owns of the parameters of one model chunk: the pieces that its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from ascend_core.layout import Layout
from ascend_ddp._gather import ChunkWeights
from ascend_ddp._reducer import Reducer
from ascend_ddp._shards import Piece, pieces_of

__all__ = ["Chunk", "Owned", "flattened", "owned_of"]


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
        self.weights = ChunkWeights(reducer, seconds)
        self.rank, self.ranks = self.weights.ranks.number, self.weights.ranks.size
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
        if not reducer.sums.are_held:
            return
        for piece, whole, part in self.owned.values():
            if not reducer.sums.used[piece.parameter] or part.grad is not None:
                continue
            if not reducer.sums.are_shown:
                shard = reducer.buckets[piece.bucket].shard
                assert shard is not None
                part.grad = shard[piece.begin : piece.end].to(part.dtype)
            elif whole.grad is not None:
                part.grad = flattened(whole.grad)[piece.start : piece.stop].to(part.dtype)

    def drop_gradients(self) -> None:
        """Be done with the sums, wherever they show."""
        for _, _, part in self.owned.values():
            part.grad = None
        if self.reducer.sums.are_shown:
            for parameter in self.parameters:
                parameter.grad = None
        self.reducer.sums.are_held = False

    def send_weights(self, stepped: set[int]) -> None:
        """Gather the buckets of which a parameter was stepped, by the parameters' ids."""
        reducer = self.reducer
        used = {
            number
            for number, bucket in enumerate(reducer.buckets)
            for index in bucket.indices
            if reducer.sums.used[index] and id(reducer.parameters[index]) in stepped
        }
        self.weights.send(used)


def owned_of(chunks: Iterable[Chunk]) -> dict[int, Owned]:
    """What this rank owns of a whole model, by the id of the model's parameter."""
    return {key: owned for chunk in chunks for key, owned in chunk.owned.items()}


def flattened(tensor: Tensor) -> Tensor:
    """The elements in the order of memory: [numel]; a view, where it has no gaps."""
    layout = Layout.of(tensor)
    return layout.flatten(tensor) if layout.is_dense else tensor.detach().reshape(-1)
