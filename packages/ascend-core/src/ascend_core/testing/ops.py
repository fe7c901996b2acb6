"""Counts the operators that run, in forward and in backward, and the FLOPs of matmuls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ascend_core.saved import backward_runs

__all__ = ["OpCounts", "count_ops"]


class OpCounts:
    """Calls by name, e.g. `"aten.gelu"`, overloads taken together; filled while operators run.

    Attributes:
        forward: Calls outside of any backward pass.
        backward: Calls while a backward pass runs, those of a recomputation included.
        forward_flops: FLOPs of the matmuls, convolutions and attentions outside of a backward.
        backward_flops: The same within a backward pass.
    """

    def __init__(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.forward_flops = 0
        self.backward_flops = 0

    @property
    def total(self) -> Counter[str]:
        """All calls."""
        return self.forward + self.backward

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.forward_flops + self.backward_flops

    def extra_in_backward(self, plain: OpCounts) -> Counter[str]:
        """The calls that this backward made beyond those of `plain`'s: what was rebuilt."""
        return self.backward - plain.backward

    def _note(self, name: str, flops: int) -> None:
        if backward_runs():
            self.backward[name] += 1
            self.backward_flops += flops
        else:
            self.forward[name] += 1
            self.forward_flops += flops


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: OpCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        formula: Callable[..., int] | None = flop_registry.get(packet)
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        self._counts._note(str(packet), flops)
        return result


@contextmanager
def count_ops() -> Iterator[OpCounts]:
    """Count the operators that a block runs, below autograd, views and casts included.

    A backward pass runs on the calling thread on CPU, and on autograd's threads for other
    devices; autograd hands its threads the caller's dispatch modes, so both are seen. Operators
    that other Python threads run are not, nor is what happens inside a compiled or fused kernel.
    `torch.utils.flop_counter` has the formulas for FLOPs; activations and norms count as 0 there,
    so prove their recomputation by the calls.

        with count_ops() as ops:
            model(x).sum().backward()
        assert ops.backward["aten.gelu_backward"] == 1

    Yields:
        The counts, which go on while the block runs.
    """
    counts = OpCounts()
    with _Counting(counts):
        yield counts
