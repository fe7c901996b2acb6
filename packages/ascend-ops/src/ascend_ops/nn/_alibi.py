"""ALiBi attention as a module: between the projections, and in place of a position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_ops.functional import alibi_attention, alibi_slopes

__all__ = ["AlibiAttention"]


class AlibiAttention(nn.Module):
    """Attends with a bias that falls with distance; see `ascend_ops.alibi_attention`.

    Its slopes are FP32 and stay so, whatever dtype the model is cast to. Where they are not learned
    they are made anew wherever the module is moved, also from the meta device, and are in no state
    dict. Nothing of the size of the sequence is kept.

    Args:
        heads: Heads of queries in the whole model, on all ranks.
        kv_heads: Heads of keys and values in the whole model, of which `heads` is a multiple; as
            many as `heads` when left out.
        learnable: Whether the slopes are a parameter, `slopes`, which starts as ALiBi's.
        tp_rank: Of this process among those that share the heads (tensor parallelism): it has the
            slopes of heads `tp_rank * heads / tp_size` on.
        tp_size: How many those are.
        causal: See no key after the query.
        window: See `ascend_ops.alibi_attention`.
        scale: See `ascend_ops.alibi_attention`.
        backend: See `ascend_ops.alibi_attention`.
        device: Of the slopes.

    Attributes:
        slopes: [heads / tp_size], FP32.

    Raises:
        ConfigError: When the heads cannot be shared in that way.

    Example:
        >>> attention = AlibiAttention(heads=32, kv_heads=8)
        >>> y = attention(q, k, v)  # q [B, 32, S, D], k and v [B, 8, S, D]
    """

    slopes: Tensor

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        learnable: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        backend: str | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        _check_heads(self.heads, self.kv_heads, tp_rank, tp_size)
        self.learnable = learnable
        self.causal = causal
        self.window = window
        self.scale = scale
        self.backend = backend
        slopes = self._made(device)
        if learnable:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def reset_parameters(self) -> None:
        """Let the slopes be ALiBi's, also where they are learned."""
        self.slopes.data = self._made(self.slopes.device)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        q_start: int | None = None,
        kv_start: int = 0,
    ) -> Tensor:
        """Attend.

        Args:
            q: [B, heads / tp_size, Sq, D]; FP32, BF16, FP16 or FP64.
            k: [B, kv_heads / tp_size, Skv, D], in the dtype of q; one head where there are fewer
                than ranks.
            v: [B, kv_heads / tp_size, Skv, Dv], in the dtype of q.
            mask: [B, Skv], bool, True for a key that counts.
            q_start: The global position of the first query: of this rank's chunk, under context
                parallelism. When left out, the last query and the last key share a position.
            kv_start: The global position of the first key.

        Returns:
            [B, heads / tp_size, Sq, Dv], contiguous, in q's dtype.

        Raises:
            ConfigError: When the heads are not this rank's, shapes or dtypes do not fit, or
                `backend` refuses the call.
            UnavailableError: When `backend` cannot be used on this machine.
        """
        here = (self.heads // self.tp_size, max(1, self.kv_heads // self.tp_size))
        if q.dim() == k.dim() == 4 and (q.shape[1], k.shape[1]) != here:
            raise ConfigError(
                f"AlibiAttention was given {q.shape[1]} heads of q and {k.shape[1]} of k.",
                why=f"of {self.heads} and {self.kv_heads} heads on {self.tp_size} ranks, each rank "
                f"has {here[0]} and {here[1]}.",
                instead="give it [B, heads, S, D] of this rank alone; heads, kv_heads and tp_size "
                "count those of the whole model.",
            )
        return alibi_attention(
            q,
            k,
            v,
            self.slopes,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            mask=mask,
            q_start=q_start,
            kv_start=kv_start,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """The arguments that matter to the result."""
        shown = f"{self.heads}, kv_heads={self.kv_heads}, causal={self.causal}"
        if self.tp_size > 1:
            shown += f", tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        if self.window is not None:
            shown += f", window={self.window}"
        return f"{shown}, learnable=True" if self.learnable else shown

    def _made(self, device: Any) -> Tensor:
        local = self.heads // self.tp_size
        start = self.tp_rank * local
        return alibi_slopes(self.heads, start=start, stop=start + local, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow `to`, `cuda`, `to_empty` and their like to a device, but not to a dtype."""

        def moved(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        if not self.learnable and not self.slopes.is_meta:  # `to_empty` leaves anything in them
            self.slopes = self._made(self.slopes.device)
        return self


def _check_heads(heads: int, kv_heads: int, tp_rank: int, tp_size: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(
            f"AlibiAttention: tp_rank is {tp_rank} and tp_size {tp_size}.",
            instead="use ranks from 0 to tp_size - 1.",
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"AlibiAttention: heads is {heads} and kv_heads {kv_heads}.",
            why="each head of keys is read by one number of heads of queries.",
            instead="use a heads that is a multiple of kv_heads.",
        )
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise ConfigError(
            f"AlibiAttention: {heads} heads and {kv_heads} kv_heads are shared by {tp_size} ranks.",
            why="each rank has as many as any other.",
            instead="use a tp_size that divides heads, and divides kv_heads or is a multiple of "
            "it.",
        )
