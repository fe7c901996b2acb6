"""What the tests of reuse-param share: training with FP32 masters, kept in three ways."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.optim import windowed
from ascend_core.testing import bitwise_equal
from ascend_reuse_param import ReuseParamConfig, reuse_param

SHAPES: tuple[tuple[int, ...], ...] = ((1,), (7,), (), (0,), (3, 5), (63,), (4097,), (100, 64))


class Beside:
    """BF16 parameters and plain torch on FP32 masters beside them, as one writes it by hand."""

    def __init__(
        self, weights: Sequence[nn.Parameter], kind: type[optim.Optimizer], options: Any
    ) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        self.optimizer = kind(self.masters, **options)

    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master.grad is not None:
                    weight.copy_(master)


class Run:
    """BF16 parameters that are trained with FP32 masters.

    Args:
        how: "beside" (plain torch by hand), "windowed" (masters that core keeps) or "reuse".
        shapes: Of the parameters.
        kind: Which optimizer.
        config: Of reuse-param.
        device: Where.
        weights: Parameters to train instead of new ones.
        options: Of the optimizer.
    """

    def __init__(
        self,
        how: str = "reuse",
        shapes: Iterable[tuple[int, ...]] = SHAPES,
        kind: type[optim.Optimizer] = optim.AdamW,
        *,
        config: ReuseParamConfig | None = None,
        device: torch.device | str = "cpu",
        weights: Sequence[nn.Parameter] | None = None,
        **options: Any,
    ) -> None:
        seeded = torch.Generator().manual_seed(0)
        options = {"lr": 1e-2, **options}
        self.weights = list(weights) if weights is not None else []
        for shape in shapes if weights is None else ():
            drawn = torch.randn(shape, generator=seeded).bfloat16()
            self.weights.append(nn.Parameter(drawn.to(device)))
        make: Any = kind
        self.optimizer: Any
        if how == "beside":
            self.optimizer = Beside(self.weights, kind, options)
        elif how == "windowed":
            self.optimizer = windowed(make(self.weights, **options), master_weights=True)
        else:
            self.optimizer = reuse_param(make(self.weights, **options), config)

    def backward(self, number: int, missing: Sequence[int] = ()) -> None:
        """Give the parameters their gradients of a step."""
        seeded = torch.Generator().manual_seed(100 + number)
        for place, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape, generator=seeded).bfloat16().to(weight.device)
            weight.grad = None
            if place not in missing:
                weight.grad = torch.empty_like(weight).copy_(gradient)

    def train(self, steps: int, first: int = 0, missing: Sequence[int] = ()) -> Run:
        """Train several steps; `missing` parameters have no gradient in the first two of all."""
        for number in range(first, first + steps):
            self.backward(number, missing if number < 2 else ())
            self.optimizer.step()
        return self

    def masters(self) -> list[torch.Tensor]:
        """The masters of the parameters that were stepped, on the CPU."""
        if isinstance(self.optimizer, Beside):
            return [master.detach().cpu() for master in self.optimizer.masters]
        state = self.optimizer.state
        return [state[weight]["master_param"].cpu() for weight in self.weights if weight in state]

    def same_as(self, other: Run) -> bool:
        """Whether weights and masters are equal to the bit."""
        mine = [*self.weights, *self.masters()]
        others = [*other.weights, *other.masters()]
        return len(mine) == len(others) and all(map(bitwise_equal, mine, others))


@pytest.fixture
def run() -> type[Run]:
    """The class, since test modules do not import one another."""
    return Run


@pytest.fixture
def free() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which a simulated NPU has only so many bytes left."""
    total = torch.npu.get_device_properties(0).total_memory
    if total > 1 << 29:
        pytest.skip("a larger device takes long to fill: run with ASCENDSIM_HBM=384M")

    @contextlib.contextmanager
    def leave(nbytes: int) -> Iterator[None]:
        torch.npu.synchronize()
        gc.collect()
        torch.npu.empty_cache()
        left, _ = torch.npu.mem_get_info()
        filling = torch.empty((left - nbytes) >> 21 << 21, dtype=torch.uint8, device="npu")
        yield
        del filling
        torch.npu.empty_cache()

    return leave
