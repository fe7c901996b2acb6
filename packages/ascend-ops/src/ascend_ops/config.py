"""The options of `apply_fused_ops`, as a frozen dataclass. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ascend_core.errors import ConfigError

__all__ = ["FusedOpsConfig"]

_OPERATORS = ("swiglu", "rms_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedOpsConfig:
    """Options of `apply_fused_ops`.

    Attributes:
        operators: Which operators are used: "swiglu" for gated MLPs, "rms_norm" for norms.
        backend: The backend of all of them: "eager", "cpu", "triton" or "npu". By default the best
            one for each call.
    """

    operators: Sequence[str] = _OPERATORS
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: When a value cannot be right whatever the model is.
        """
        wanted = self.operators
        if isinstance(wanted, str) or not isinstance(wanted, Sequence) or not wanted:
            raise ConfigError(
                f"operators is {wanted!r}.",
                why="a sequence of names is wanted, with one at least.",
                instead='write for example operators=("swiglu",), or leave it out for all.',
            )
        for name in wanted:
            if name not in _OPERATORS:
                raise ConfigError(
                    f"operators holds {name!r}.",
                    why=f"a model's modules can be computed by {' and '.join(_OPERATORS)}.",
                    instead="use those names; rotary embedding and ALiBi attention are no modules "
                    "of most models: call ascend_ops.rotary, or use the modules in ascend_ops.nn.",
                )
        if self.backend is not None and not isinstance(self.backend, str):
            raise ConfigError(
                f"backend is {self.backend!r}.",
                instead='name one, for example backend="eager", or leave it out.',
            )
