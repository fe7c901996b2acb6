"""Norms that are RMSNorm."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ascend_core.scope import Call
from ascend_ops import reference
from ascend_ops._fusing._double import DTYPES, agree, double_of, numbers, run
from ascend_ops._fusing._fusion import Fusion, is_plain
from ascend_ops._fusing._settings import Settings
from ascend_ops.functional import backend_of, rms_norm
from ascend_ops.nn import RMSNorm
from ascend_ops.nn._rms_norm import epsilon_of

__all__ = ["fuse_norm", "looks_like_rms_norm"]

# Attributes that hold what is added to the mean of squares, and what it is where there is none.
_EPSILONS = ("eps", "variance_epsilon", "epsilon")
_USUAL = (1e-6, 1e-5)


def looks_like_rms_norm(module: nn.Module) -> bool:
    """Whether it is a norm by its name, of one weight for the last dimension and nothing else."""
    if isinstance(module, RMSNorm) or "norm" not in type(module).__name__.lower():
        return False
    if module._modules or module._buffers:
        return False
    weights = [weight for weight in module._parameters.values() if weight is not None]
    if not weights:
        return isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1
    return weights == [module._parameters.get("weight")] and weights[0].dim() == 1


class _Found(NamedTuple):
    """What a norm proved to compute.

    Attributes:
        eps: What it adds to the mean of squares; None for the epsilon of what it computes in.
        unit_offset: Whether it multiplies by `1 + weight`.
        dtypes: In which dtypes of its input and weight it does.
    """

    eps: float | None
    unit_offset: bool
    dtypes: frozenset[torch.dtype]


def fuse_norm(module: nn.Module, backend: str | None) -> Fusion | str:
    """How `rms_norm` computes a norm, or why it does not."""
    try:
        found = _found(module)
    except Exception as error:  # whatever the forward of somebody else's class may raise
        return f"it does not run on a tensor alone: {type(error).__name__}: {error}"
    if found is None:
        return "it computes something else than RMSNorm over its last dimension"
    own = module._parameters.get("weight")
    x = numbers(3, _hidden(module), like=own, dtype=_dtype(module), seed=0)
    weight = None if own is None else x[0]
    return Fusion(
        "rms_norm",
        "norm(x)"
        if own is None
        else f"norm(x) * {'(1 + weight)' if found.unit_offset else 'weight'}",
        backend_of("rms_norm", x, weight, unit_offset=found.unit_offset, backend=backend),
        functools.partial(_compute, found=found, backend=backend),
        Settings(module, {}),
    )


def _compute(
    module: nn.Module,
    own: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    found: _Found,
    backend: str | None,
) -> Any:
    """Compute the norm by the operator where that returns what the module would.

    Mixed dtypes and autocast may make another dtype of it: there the module computes it itself.
    """
    x: Any = args[0] if len(args) == 1 and not kwargs else None
    weight: Any = module.weight
    if (
        not isinstance(x, Tensor)
        or x.dtype not in found.dtypes
        or (weight is not None and (weight.dtype != x.dtype or weight.device != x.device))
        or (x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type))
        or x.shape[-1:] != (_hidden(module),)
        or not is_plain(x, weight)
    ):
        return own(*args, **kwargs)
    eps = epsilon_of(found.eps, x.dtype)
    return rms_norm(x, weight, eps, unit_offset=found.unit_offset, backend=backend)


def _found(module: nn.Module) -> _Found | None:
    for unit_offset in (False, True):
        for eps in _epsilons(module):
            dtypes = _dtypes(module, eps, unit_offset)
            if _dtype(module) in dtypes:
                return _Found(eps, unit_offset, dtypes)
    return None


def _dtype(module: nn.Module) -> torch.dtype:
    weight = module._parameters.get("weight")
    return torch.float32 if weight is None else weight.dtype


def _hidden(module: nn.Module) -> int:
    weight: Any = module.weight
    if weight is not None:
        return int(weight.numel())
    sizes: Any = module.normalized_shape
    return int(sizes[0])


def _epsilons(module: nn.Module) -> tuple[float | None, ...]:
    for name in _EPSILONS:
        value = vars(module).get(name)
        if isinstance(value, float | int | Tensor):
            return (float(value),)
    return (None,) if isinstance(module, nn.RMSNorm) else _USUAL


def _dtypes(module: nn.Module, eps: float | None, unit_offset: bool) -> frozenset[torch.dtype]:
    """The dtypes of input and weight in which the module's forward agrees with the formula."""
    own, hidden = module._parameters.get("weight"), _hidden(module)
    found = set()
    for dtype in {*DTYPES, _dtype(module)}:
        x = numbers(3, hidden, like=own, dtype=dtype, seed=0)
        weight = None if own is None else numbers(hidden, like=own, dtype=dtype, seed=1)
        formula = reference.rms_norm(x, weight, epsilon_of(eps, dtype), unit_offset=unit_offset)
        parameters = {} if weight is None else {"weight": weight}
        doubles = (double_of(module, training=t, parameters=parameters) for t in (True, False))
        if all(agree(run(double, x), formula) for double in doubles):
            found.add(dtype)
    return frozenset(found)
