"""Which operators are cheap enough to run again.

A `Policy` names functions as a model's code calls them. What is not in the policy is never run
again; matrix products and attention are in none of the groups.

    from ascend_recompute import policy
    mine = policy.DEFAULT.extended(torch.ops.my_library.fused_gelu)

A function of PyTorch or a custom operator may be added when it computes its single output from
its arguments alone, writes to none of them, and gives the same bits each time. Operators that
draw random numbers are named in `random`; they are replayed with the random state of the forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_recompute.fused import run_fused

__all__ = ["ACTIVATIONS", "ARITHMETIC", "CASTS", "DEFAULT", "DROPOUT", "NORMS", "Policy"]

Operator = Callable[..., Any]

ACTIVATIONS: frozenset[Operator] = frozenset({
    F.gelu, F.silu, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.mish, F.softplus,
    F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.hardtanh, F.hardswish, F.hardsigmoid,
    F.logsigmoid, F.glu, F.prelu,
    torch.relu, torch.selu, torch.celu, torch.prelu, torch.sigmoid, torch.tanh,
    torch.nn.functional.threshold,
    Tensor.relu, Tensor.sigmoid, Tensor.tanh, run_fused,
})  # fmt: skip
"""Activation functions, gated linear units and those in a `FusedActivation` among them."""

ARITHMETIC: frozenset[Operator] = frozenset({
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.square, torch.pow, torch.exp,
    torch.sqrt, torch.rsqrt, torch.reciprocal, torch.abs, torch.erf, torch.clamp, torch.where,
    torch.maximum, torch.minimum, torch.addcmul, torch.log, torch.log1p, torch.expm1,
    torch.multiply, torch.divide, torch.subtract, torch.true_divide, torch.rsub,
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.neg, Tensor.square, Tensor.pow,
    Tensor.exp, Tensor.sqrt, Tensor.rsqrt, Tensor.reciprocal, Tensor.abs, Tensor.erf,
    Tensor.clamp, Tensor.where, Tensor.maximum, Tensor.minimum, Tensor.addcmul, Tensor.log,
    Tensor.log1p, Tensor.expm1, Tensor.masked_fill,
    Tensor.multiply, Tensor.divide, Tensor.subtract, Tensor.true_divide,
    Tensor.__rsub__, Tensor.__mul__,
    Tensor.__rmul__, Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__rpow__,
    Tensor.__neg__,
})  # fmt: skip
"""Elementwise arithmetic."""

CASTS: frozenset[Operator] = frozenset({
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type_as,
    Tensor.type, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.reshape, torch.reshape,
})  # fmt: skip
"""Casts and copies; where they return a view or their input, nothing is recorded."""

DROPOUT: frozenset[Operator] = frozenset({F.dropout, torch.dropout})
"""Dropout; its mask stays saved or its random state is replayed, so that the mask is the same."""

NORMS: frozenset[Operator] = frozenset({
    F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm,
})  # fmt: skip
"""Normalisation over the last dimensions."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The operators that may be run again.

    Attributes:
        operators: Those whose output depends on their arguments alone.
        random: Those that draw random numbers.
        max_operators: The most operators that rebuilding one saved tensor may run; where more
            would be needed the tensor is kept, as in the plain run.
        min_bytes: Saved tensors of fewer bytes are kept: the record of a rebuild costs more.
    """

    operators: frozenset[Operator]
    random: frozenset[Operator] = frozenset()
    max_operators: int = 16
    min_bytes: int = 4096

    def extended(self, *operators: Operator, random: Iterable[Operator] = ()) -> Policy:
        """The same policy with more operators.

        Args:
            *operators: Functions of PyTorch, `torch.ops.library.name`, or what
                `torch.library.custom_op` returns.
            random: Those that draw random numbers.
        """
        return dataclasses.replace(
            self,
            operators=self.operators | set(map(_as_called, operators)),
            random=self.random | set(map(_as_called, random)),
        )

    def covers(self, function: Operator) -> bool:
        """Whether results of `function` may be rebuilt."""
        return function in self.operators or function in self.random


def _as_called(operator: Operator) -> Operator:
    """The function that a call of `operator` shows as, which is not itself for a `custom_op`."""
    return getattr(operator, "_opoverload", operator)


DEFAULT = Policy(operators=ACTIVATIONS | ARITHMETIC | CASTS, random=DROPOUT)
"""Activation functions with their products, sums, casts and dropout: what makes up an MLP."""
