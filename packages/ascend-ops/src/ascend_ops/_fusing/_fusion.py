"""What was found out about a module."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ascend_core.scope import Call, Compute
from ascend_ops._checks import has_tangent
from ascend_ops._fusing._settings import Settings

__all__ = ["Fusion", "is_plain"]


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How an operator computes a module.

    Attributes:
        operator: The function of `ascend_ops`.
        form: The formula, with the names that the module has for things, for the report.
        backend: What computes a small call of it.
        compute: The module's forward by it, for `ascend_core.scope.instead_of_forward`.
        settings: What it was found out with.
    """

    operator: str
    form: str
    backend: str
    compute: Compute
    settings: Settings

    def run(
        self, module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the module by the operator, or by its own forward where that has changed."""
        if self.settings.change(module) is not None:
            return own(*args, **kwargs)
        return self.compute(module, own, args, kwargs)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the operators can be given these tensors: nothing wraps them.

    Others (a DTensor, what a transform of `torch.func` or forward-mode AD made) have rules for
    torch's operators alone.
    """
    if torch.compiler.is_compiling():
        return True
    return not (
        torch._C._are_functorch_transforms_active()
        or any(map(is_traceable_wrapper_subclass, tensors))
        or any(tensor is not None and has_tangent(tensor) for tensor in tensors)
    )
