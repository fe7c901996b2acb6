"""SwiGLU as a module."""

from __future__ import annotations

from torch import Tensor, nn

from ascend_ops.functional import swiglu

__all__ = ["SwiGLU"]


class SwiGLU(nn.Module):
    """Gates one half of its input by the other: `silu(gate) * up`; see `ascend_ops.swiglu`.

    Backward needs the input alone. There are no parameters.

    Args:
        dim: The dimension that holds gate and up, gate first.
        limit: See `ascend_ops.swiglu`.
        backend: See `ascend_ops.swiglu`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 2 * 256), SwiGLU(), nn.Linear(256, 64))
    """

    def __init__(
        self, dim: int = -1, limit: float | None = None, backend: str | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.limit = limit
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Gate `x` of shape [..., 2 N, ...], in FP32, BF16, FP16 or FP64.

        Returns:
            A contiguous tensor of shape [..., N, ...], in x's dtype.

        Raises:
            ConfigError: When the size of `dim` is odd, or `backend` refuses the call.
            UnavailableError: When `backend` cannot be used on this machine.
        """
        return swiglu(x, self.dim, limit=self.limit, backend=self.backend)

    def extra_repr(self) -> str:
        """The arguments that were given."""
        given = [f"dim={self.dim}"]
        given += [
            f"{name}={value!r}"
            for name, value in (("limit", self.limit), ("backend", self.backend))
            if value is not None
        ]
        return ", ".join(given)
