"""Doubles of modules, on which a forward can be run without a trace; see `ascend_ops._fusing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ascend_ops.reference import wide

__all__ = ["DTYPES", "StandIn", "agree", "double_of", "numbers", "run"]

# In what a forward is compared with a formula.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The sizes of rows: where squares are far above, about and below the epsilons of norms, and where
# gates are open and shut.
_SCALES = (1.0, 1e-3, 30.0)


class StandIn(nn.Module):
    """Stands for a linear layer.

    Args:
        result: What it returns.

    Attributes:
        given: What it was given, by call.
    """

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Note `x`."""
        self.given.append(x)
        return self.result


def double_of(
    module: nn.Module,
    *,
    training: bool,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """Make a double of a module: of its class and with its attributes, but without its hooks.

    Args:
        module: The module.
        training: Whether the double is training, and all in it.
        parameters: Tensors in the place of parameters, by name. Others it shares.
        children: Modules in the place of children, by name. Of others it has doubles.
    """
    double: nn.Module = object.__new__(type(module))
    state = vars(double)
    state.update(vars(module))
    for name, value in vars(nn.Module()).items():
        if "hooks" in name:
            state[name] = type(value)() if value is not None else None
    state["training"] = training
    state["_parameters"] = {**module._parameters, **(parameters or {})}
    state["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    replaced = children or {}
    state["_modules"] = {
        name: None if child is None else replaced.get(name) or double_of(child, training=training)
        for name, child in module._modules.items()
    }
    return double


def run(double: nn.Module, x: Tensor) -> Any:
    """Run the forward of a double's class: `__call__` would run hooks that are set for all."""
    return type(double).forward(double, x)


def numbers(*shape: int, like: Tensor | None, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, the same for every call, that move no generator but their own.

    Args:
        shape: The first dimension has as many rows as there are sizes of numbers.
        like: Says on which device; on the CPU where it is on none.
        dtype: Of the result.
        seed: Other seeds, other numbers.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
    if len(shape) > 1:
        scales = torch.tensor(_SCALES, device="cpu").view(-1, *[1] * (len(shape) - 1))
        drawn = drawn * scales
    device = torch.device("cpu") if like is None or like.is_meta else like.device
    return drawn.to(device, dtype)


def agree(theirs: Any, formula: Tensor) -> bool:
    """Whether a result is what a formula gives, as closely as its rounding lets one see.

    Args:
        theirs: What a forward returned.
        formula: What the formula gives, in the dtype of the module.
    """
    if not isinstance(theirs, Tensor):
        return False
    if theirs.dtype != formula.dtype or theirs.shape != formula.shape:
        return False
    info = torch.finfo(formula.dtype)
    # Four roundings in the dtype; sums and exponentials in FP32.
    relative = 4 * info.eps + 16 * torch.finfo(wide(formula).dtype).eps
    return torch.allclose(wide(theirs), wide(formula), rtol=relative, atol=info.tiny)
