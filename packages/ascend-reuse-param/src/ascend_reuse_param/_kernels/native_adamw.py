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
import itertools
from collections.abc import Iterator

import torch
from torch.optim.adam import adam

from ascend_core.errors import UnavailableError
from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._kernels.native import Library, NativeCodec, Split

__all__ = ["AdamWOptions", "Moments", "NativeAdamW", "torchs_step"]

_VML_MODE = 0x140102  # as torch calls it: high accuracy, denormals kept, errors ignored
_PROBES = (1, 7, 63, BLOCK + 37, 64, 65, 2 * BLOCK + 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """What a step computes with, in Python's floats.

    Attributes:
        lr: Learning rate.
        betas: As in torch.
        eps: As in torch.
        weight_decay: As in torch.
        decoupled: Decay the weight (AdamW) rather than the gradient (Adam).
        maximize: Step up rather than down.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True
    maximize: bool = False


@dataclasses.dataclass(frozen=True)
class Moments:
    """The state of a step, FP32 [n] each; `max_exp_avg_sq` with amsgrad only."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None

    @classmethod
    def zeros(cls, numel: int, device: torch.device, *, amsgrad: bool) -> Moments:
        """The state before the first step."""
        kinds = range(3 if amsgrad else 2)
        return cls(*(torch.zeros(numel, dtype=torch.float32, device=device) for _ in kinds))

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        every = (self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq)
        return [tensor for tensor in every if tensor is not None]


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
        """Step a weight and its parts in place, and the moments.

        A block of the weight that somebody else wrote is taken as it is, as by `Codec.join`.

        Args:
            weight: BF16 [n].
            parts: Its parts.
            gradient: BF16 or FP32 [n].
            moments: Of n elements.
            step: The number of this step; the first is 1.
            options: Of this step.
            gradient_factor: What the gradient is multiplied with first, in FP32.
        """
        assert (parts.bitmap is not None) == (self.rounding == "nearest-even")
        assert gradient.dtype in (torch.bfloat16, torch.float32)
        tensors = (gradient, moments.exp_avg, moments.exp_avg_sq, moments.max_exp_avg_sq)
        for tensor in tensors:
            assert tensor is None or (tensor.is_cpu and tensor.is_contiguous())
            assert tensor is None or tensor.numel() == weight.numel()
        assert all(tensor.dtype == torch.float32 for tensor in moments.tensors())
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
        for arithmetic in _arithmetics():
            self._arithmetic = arithmetic
            if all(self._equals_torch(numel, number) for number, numel in enumerate(_PROBES)):
                return arithmetic
        raise UnavailableError(
            "the native step of AdamW is not used: on this machine it would not equal torch's.",
            why="torch rounds as none of the ways that are known to it.",
            instead="nothing need be done: joining, stepping and splitting one after the other "
            "gives the same results, more slowly.",
        )

    def _equals_torch(self, numel: int, seed: int) -> bool:
        """Step some elements twice by both, and compare their bits."""
        cpu = torch.device("cpu")
        generator = torch.Generator(cpu).manual_seed(seed)

        def drawn() -> torch.Tensor:
            return torch.randn(numel, generator=generator, dtype=torch.float32, device=cpu)

        # Steps are larger than weights, so that a root's last bit is not lost in a sum.
        master = drawn() / 1024
        weight = torch.empty(numel, dtype=torch.bfloat16, device=cpu)
        parts = Parts.empty(numel, weight.device, self.rounding)
        codec, scratch = NativeCodec(self.rounding, library=self._library), Arena(0, weight.device)
        codec.split(master, weight, parts, scratch)
        moments, theirs = (Moments.zeros(numel, cpu, amsgrad=seed % 2 == 1) for _ in range(2))
        options = AdamWOptions(lr=1.0, weight_decay=0.1, decoupled=seed % 4 < 2)
        for step in (1, 2):
            gradient = drawn()
            self.step(weight, parts, gradient, moments, step=step, options=options)
            torchs_step(master, gradient, theirs, step=step, options=options)
        joined = torch.empty_like(master)
        codec.join(weight, parts, joined, scratch)
        pairs = [(joined, master), *zip(moments.tensors(), theirs.tensors(), strict=True)]
        return all(torch.equal(left, right) for left, right in pairs)


def torchs_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    *,
    step: float,
    options: AdamWOptions,
    foreach: bool = False,
) -> None:
    """Step an FP32 master as torch's for-loop does, or its foreach."""
    largest = moments.max_exp_avg_sq
    adam(
        [master],
        [gradient],
        [moments.exp_avg],
        [moments.exp_avg_sq],
        [] if largest is None else [largest],
        [torch.tensor(step - 1.0, dtype=torch.float32, device="cpu")],
        foreach=foreach,
        fused=False,
        amsgrad=largest is not None,
        beta1=options.betas[0],
        beta2=options.betas[1],
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=options.maximize,
        decoupled_weight_decay=options.decoupled,
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
