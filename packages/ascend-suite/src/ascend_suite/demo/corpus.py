"""The demo's text: the topics of Python's own `help()`, which every Python carries."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics

import torch
from torch import Tensor

from ascend_core.errors import ConfigError

__all__ = ["Batch", "corpus", "draw_batches"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of one training step; see `demo.gpt` for the shapes.

    Attributes:
        tokens: BS, what the model reads: byte values, int64.
        targets: BS, the byte that follows each of them, int64.
    """

    tokens: Tensor
    targets: Tensor


def corpus() -> Tensor:
    """Read the text.

    Returns:
        About 460 000 bytes of English and Python, as a one-dimensional uint8 tensor on the CPU.
    """
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def draw_batches(
    text: Tensor, *, count: int, batch: int, seq: int, seed: int, device: torch.device
) -> list[Batch]:
    """Draw random stretches of the text.

    The draw has a generator of its own, so the ambient random state does not move.

    Args:
        text: One-dimensional uint8 tensor on the CPU.
        count: Number of batches.
        batch: Sequences in a batch, B.
        seq: Tokens in a sequence, S.
        seed: Decides the draw.
        device: Where the batches are put.

    Returns:
        `count` batches on `device`.

    Raises:
        ConfigError: When the text is not longer than a sequence.
    """
    if seq >= text.numel():
        raise ConfigError(
            f"the text is too short for sequences of {seq} tokens.",
            why=f"it has {text.numel()} bytes, and each sequence needs one more than its length.",
            instead=f"choose a sequence length below {text.numel()}.",
        )
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(text.numel() - seq, (count, batch), generator=generator)
    windows = text.unfold(0, seq + 1, 1)[starts].to(device, torch.int64)
    return [Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]
