"""AdamW on split parameters in one pass of C: read once, stepped, written once.

[Note: whose rounding] The step equals a join, `torch.optim.AdamW(foreach=False, fused=False)` on
FP32 and a split, in every bit. How torch rounds is no promise of torch's: on a processor with FMA
its `lerp_`, `addcmul_` and `add` round a product and a sum once, on one without twice; where it was
built with MKL its `sqrt` is MKL's, which on one processor is wrong in the last bit for 7 of 1000
numbers, and on another for none. So the step knows each of these, and `NativeAdamW` looks on the
spot which of them torch does here: it steps some thousand elements by both. Where none is equal,
the native step is not to be had.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from ascend_core.errors import UnavailableError
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._kernels.adamw import (
    AdamWOptions,
    Moments,
    check_operands,
    equals,
    torchs_step,
)
from ascend_reuse_param._kernels.native import Library, NativeCodec, Split

__all__ = ["NativeAdamW"]

_VML_MODE = 0x140102  # as torch calls it: high accuracy, denormals kept, errors ignored
_PROBES = (1, 7, 63, BLOCK + 37, 64, 65, 2 * BLOCK + 3)


class _Step(ctypes.Structure):
    """`Step` of split.c."""

    _fields_ = (
        ("gradient", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("max_exp_avg_sq", ctypes.c_void_p),
        ("roots", ctypes.c_void_p),
        ("roots_mode", ctypes.c_int64),
        ("gradient_factor", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coupled_decay", ctypes.c_float),
        ("average", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("square", ctypes.c_float),
        ("correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
        ("gradient_is_bf16", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
        ("fused", ctypes.c_int32),
    )


@dataclasses.dataclass(frozen=True)
class _Arithmetic:
    """How torch rounds.

    Attributes:
        fused: A product and a sum are rounded once.
        roots: The address of the function that takes roots; None for correct rounding.
    """

    fused: bool
    roots: int | None


class NativeAdamW:
    """AdamW and Adam on a weight and its parts, equal to torch's for-loop in every bit.

    Args:
        rounding: See `_bits`.
        library: What calls it.

    Raises:
        UnavailableError: When there is no compiler here, or torch rounds as none of the ways that
            are known here.
    """

    def __init__(
        self, rounding: Rounding = "nearest-even", *, library: Library | None = None
    ) -> None:
        self.rounding: Rounding = rounding
        self._library = library or Library()
        function = self._library.functions.ascend_adamw
        function.argtypes = (ctypes.POINTER(Split), ctypes.POINTER(_Step))
        function.restype = None
        self._arithmetic = self._proven()

    def step(
        self,
        weight: torch.Tensor,
        parts: Parts,
        gradient: torch.Tensor,
        moments: Moments,
        *,
        step: float,
        options: AdamWOptions,
        gradient_factor: float = 1.0,
    ) -> None:
        """See `AdamWStep.step`.

        Args:
            weight: See there, as for all up to `options`.
            parts: See there.
            gradient: See there.
            moments: See there.
            step: See there.
            options: See there.
            gradient_factor: What the gradient is multiplied with first, in FP32.
        """
        assert (parts.bitmap is not None) == (self.rounding == "nearest-even")
        check_operands(weight, gradient, moments)
        tensors = (gradient, moments.exp_avg, moments.exp_avg_sq, moments.max_exp_avg_sq)
        assert all(tensor is None or tensor.is_cpu for tensor in tensors)
        beta1, beta2 = options.betas
        decay = options.weight_decay
        what = _Step(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            self._arithmetic.roots,
            _VML_MODE,
            gradient_factor,
            1 - options.lr * decay if options.decoupled else 1.0,
            0.0 if options.decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**step) ** 0.5,
            options.eps,
            -(options.lr / (1 - beta1**step)),
            gradient.dtype == torch.bfloat16,
            options.maximize,
            self._arithmetic.fused,
        )
        place = self._library.describe(weight, parts)
        self._library.functions.ascend_adamw(ctypes.byref(place), ctypes.byref(what))

    def _proven(self) -> _Arithmetic:
        codec = NativeCodec(self.rounding, library=self._library)
        probed = functools.partial(equals, self, codec, torchs_step, device=torch.device("cpu"))
        for arithmetic in _arithmetics():
            self._arithmetic = arithmetic
            if all(probed(numel=numel, seed=seed) for seed, numel in enumerate(_PROBES)):
                return arithmetic
        raise UnavailableError(
            "the native step of AdamW is not used: on this machine it would not equal torch's.",
            why="torch rounds as none of the ways that are known to it.",
            instead="nothing need be done: joining, stepping and splitting one after the other "
            "gives the same results, more slowly.",
        )


def _arithmetics() -> Iterator[_Arithmetic]:
    """The ways to round, the likeliest first."""
    for fused, roots in itertools.product((True, False), (_torchs_roots(), None)):
        yield _Arithmetic(fused, roots)


def _torchs_roots() -> int | None:
    """The address of MKL's function for roots, where it is part of torch."""
    try:
        function = ctypes.CDLL("libtorch_cpu.so").vmsSqrt
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
