"""ALiBi attention by Triton: no bias in memory, nothing kept but lse, the same in every run.

Scores, weights and sums are FP32. In FP16 and BF16 products are of these dtypes, as in other flash
attentions, so that a weight is rounded before the product with v; FP32 products are not TF32's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.eager.alibi_attention import EagerAlibi
from ascend_ops._kernels.triton._rows import block, refusal_of_dtypes
from ascend_ops._kernels.triton._trial import Comparison, Trial, here, kernels_of, pattern
from ascend_ops._operators.alibi_attention import AlibiCall

__all__ = ["Blocks", "TritonAlibi", "blocks_of", "load"]

_WIDEST = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """How much a program has at once, and how it is compiled.

    Attributes:
        rows: Of q.
        keys: Of k and v.
        warps: Of 32 threads.
        stages: How many blocks are on their way at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """What a launch is given."""
        sizes = {"ROWS": self.rows, "KEYS": self.keys}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


# Of heads of at most so many elements. Shared memory stays below 99 KiB, and no register is spilled
# on sm_80 and sm_90, but in FP32 above 64 elements: tests/test_triton_compiled.py. Nothing here was
# chosen by time, as no GPU was at hand.
_HALF: Mapping[str, Mapping[int, Blocks]] = MappingProxyType(
    {
        "forward": {128: Blocks(128, 64, 8, 2), 256: Blocks(64, 32, 8, 2)},
        "backward_of_queries": {128: Blocks(64, 64, 8, 1), 256: Blocks(32, 32, 8, 1)},
        "backward_of_keys": {
            64: Blocks(64, 32, 4, 1),
            128: Blocks(64, 32, 8, 1),
            256: Blocks(32, 32, 8, 1),
        },
    }
)
_SINGLE: Mapping[str, Mapping[int, Blocks]] = MappingProxyType(
    {
        "forward": {128: Blocks(32, 32, 8, 1), 256: Blocks(16, 32, 8, 1)},
        "backward_of_queries": {64: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
        "backward_of_keys": {64: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)},
    }
)


def blocks_of(kernel: str, width: int, itemsize: int) -> Blocks:
    """The blocks of a kernel, for heads of `width` elements of `itemsize` bytes."""
    table = (_SINGLE if itemsize == 4 else _HALF)[kernel]
    return next(blocks for most, blocks in table.items() if width <= most)


class TritonAlibi:
    """See `ascend_ops._operators.alibi_attention.AlibiKernel`.

    Attributes:
        trial: Whether it is to be used.
    """

    def __init__(self) -> None:
        self._kernels = kernels_of("alibi_attention")
        self.trial = Trial(self._compare)

    def refusal(self, call: AlibiCall) -> str | None:
        """Refuses what the kernels have no numbers for, and devices the trial failed on."""
        if refused := refusal_of_dtypes(call.q, call.slopes):
            return refused
        if max(call.q.shape[3], call.v.shape[3]) > _WIDEST:
            return f"Triton's kernels have no registers for heads of more than {_WIDEST} elements."
        if 2 * _furthest(call) >= 1 << 31:
            return "Triton's kernels count positions in 32 bits."
        failure = self.trial.failure(call.q.device)
        return None if failure is None else str(failure)

    def forward(self, call: AlibiCall) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        given = _Given.of(call)
        out = call.q.new_empty((*call.q.shape[:3], call.v.shape[3]))
        lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
        blocks = given.blocks("forward")
        programs = math.prod(call.q.shape[:2]) * math.ceil(call.q.shape[2] / blocks.rows)
        self._launch(self._kernels.forward, programs, blocks, given, (out, lse))
        return out, lse

    def backward(
        self, call: AlibiCall, grad: Tensor, out: Tensor, lse: Tensor, slopes_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See the protocol."""
        given, grad = _Given.of(call), _with_rows(grad)
        q_grad, k_grad, v_grad = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
        delta = torch.empty_like(lse)
        blocks = given.blocks("backward_of_queries")
        number = math.ceil(call.q.shape[2] / blocks.rows)
        shape = (*call.q.shape[:2], number) if slopes_grad else (0,)
        partials = lse.new_empty(shape)
        self._launch(
            self._kernels.backward_of_queries,
            math.prod(call.q.shape[:2]) * number,
            blocks,
            given,
            (grad, out, lse, delta, q_grad, partials),
            grad.stride()[:3],
            SLOPES_GRAD=slopes_grad,
        )
        blocks = given.blocks("backward_of_keys")
        self._launch(
            self._kernels.backward_of_keys,
            math.prod(call.k.shape[:2]) * math.ceil(call.k.shape[2] / blocks.keys),
            blocks,
            given,
            (grad, lse, delta, k_grad, v_grad),
            grad.stride()[:3],
        )
        if not slopes_grad:
            return q_grad, k_grad, v_grad, call.slopes.new_empty(0)
        of_slopes = partials.sum(2)
        of_slopes = of_slopes if call.slopes.dim() == 2 else of_slopes.sum(0)
        return q_grad, k_grad, v_grad, of_slopes.to(call.slopes.dtype)

    def _launch(
        self,
        kernel: Any,
        programs: int,
        blocks: Blocks,
        given: _Given,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...] = (),
        **more: bool,
    ) -> None:
        if programs == 0:
            return
        with here(given.call.q.device):
            kernel[(programs,)](
                *given.tensors,
                *tensors,
                *given.sizes,
                *given.strides,
                *strides,
                *given.positions,
                **given.constants,
                **more,
                **blocks.options(),
            )

    def _compare(self, device: torch.device) -> Iterator[Comparison]:
        """Causal heads that share keys; all at once; both directions in FP32."""
        eager = EagerAlibi()
        for dtype, tolerance, shape, options in (
            (torch.bfloat16, 3e-2, (1, 2, 1, 150, 150, 64), (None, True, None, 0.125, 0, 0)),
            (torch.float16, 4e-3, (2, 2, 1, 65, 90, 40), (True, True, 60, 0.2, 30, 7)),
            (torch.float32, 2e-5, (1, 1, 1, 37, 45, 24), (None, False, None, 0.2, 8, 0)),
        ):
            batch, heads, shared, rows, keys, width = shape
            masked, *rest = options
            q = pattern(batch, heads, rows, width, device=device, dtype=dtype)
            k, v = (
                pattern(batch, shared, keys, width, device=device, dtype=dtype, turn=turn)
                for turn in (0.5, 1.0)
            )
            slopes = pattern(batch, heads, device=device).abs() / 8
            mask = pattern(batch, keys, device=device) > -1 if masked else None
            call = AlibiCall(q, k, v, slopes, mask, *rest)
            grad = pattern(batch, heads, rows, width, device=device, dtype=dtype, turn=2.0)
            out, lse = self.forward(call)
            wanted = eager.forward(call)
            yield out, wanted[0], tolerance
            yield lse, wanted[1], 1e-4
            ours = self.backward(call, grad, out, lse, True)
            for one, other in zip(ours, eager.backward(call, grad, *wanted, True), strict=True):
                scale = other.abs().amax().clamp(min=1).to(other.dtype)
                yield one / scale, other / scale, tolerance


@dataclass(frozen=True, slots=True)
class _Given:
    """A call as the kernels are given it, in the order of their arguments."""

    call: AlibiCall
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    positions: tuple[float, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, call: AlibiCall) -> _Given:
        q, k, v = (_with_rows(x) for x in (call.q, call.k, call.v))
        heads, shared = q.shape[1], k.shape[1]
        slopes = call.slopes.expand(q.shape[:2])
        mask = slopes if call.mask is None else call.mask.view(torch.uint8)
        window = 0 if call.window is None else min(call.window, _furthest(call))
        return cls(
            call,
            tensors=(q, k, v, slopes, mask),
            sizes=(heads, heads // shared, q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            strides=(
                *(stride for x in (q, k, v) for stride in x.stride()[:3]),
                *slopes.stride(),
                *mask.stride(),
            ),
            positions=(call.q_start - call.kv_start, window, call.scale),
            constants={
                "CAUSAL": call.causal,
                "HAS_WINDOW": call.window is not None,
                "HAS_MASK": call.mask is not None,
                "WIDTH": max(16, block(q.shape[3], _WIDEST)),
                "V_WIDTH": max(16, block(v.shape[3], _WIDEST)),
            },
        )

    def blocks(self, kernel: str) -> Blocks:
        width = max(self.constants["WIDTH"], self.constants["V_WIDTH"])
        return blocks_of(kernel, width, self.call.q.dtype.itemsize)


def _with_rows(x: Tensor) -> Tensor:
    """Return `x`, or a copy where its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _furthest(call: AlibiCall) -> int:
    """No key is as far as this from a query."""
    return abs(call.q_start - call.kv_start) + call.q.shape[2] + call.k.shape[2] + 1


def load() -> TritonAlibi:
    """Return the kernel.

    Raises:
        UnavailableError: When Triton is not here, does not work on the current device, or does not
            agree there with torch's operators.
    """
    kernel = TritonAlibi()
    kernel.trial.demand()
    return kernel
