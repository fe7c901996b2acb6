"""What the tests of the windowed optimizer, and those of swap-attention, share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from ascend_core.optim import windowed
from ascend_swap import SwapOptimizerConfig, swap_optimizer


class Training:
    """Parameters with gradients that are made beforehand, and the optimizer that steps them.

    Args:
        numels: Of the parameters.
        times: Into how many windows they are cut; None for the plain optimizer.
        device: Where they are.
        dtype: Theirs.
        master_weights: Step FP32 masters.
        resident: Keep the state of a windowed optimizer on the device.
        release_grads: Drop gradients as they are stepped.
        offload_gradients: Keep gradients on the host.
        held_gradients: How many sets of gradients are made.
        options: Of AdamW.
    """

    def __init__(
        self,
        numels: Sequence[int],
        times: int | None = None,
        *,
        device: str = "npu",
        dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        resident: bool = False,
        release_grads: bool = False,
        offload_gradients: bool = False,
        held_gradients: int = 2,
        **options: Any,
    ) -> None:
        seeded = torch.Generator().manual_seed(0)

        def drawn() -> list[torch.Tensor]:
            made = [torch.randn(n, generator=seeded) for n in numels]
            return [tensor.to(dtype).to(device) for tensor in made]

        self.parameters = [nn.Parameter(tensor) for tensor in drawn()]
        self._gradients = [drawn() for _ in range(held_gradients)]
        self.seen: list[torch.Tensor] = []
        plain = optim.AdamW(self.parameters, lr=1e-2, **options)
        self.optimizer: Any = plain
        if resident:
            self.optimizer = windowed(plain, times=times, master_weights=master_weights)
        elif times is not None:
            config = SwapOptimizerConfig(
                times,
                master_weights=master_weights,
                release_grads=release_grads,
                offload_gradients=offload_gradients,
            )
            self.optimizer = swap_optimizer(plain, config)
        self._scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def backward(self, number: int) -> None:
        """Give each parameter its gradient of a step; it grows, so that clipping takes hold."""
        for parameter, gradient in zip(
            self.parameters, self._gradients[number % len(self._gradients)], strict=True
        ):
            parameter.grad = gradient * (1 + number)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def use_gradients(self, number: int) -> None:
        """Give each parameter a gradient that is held ready, without a copy."""
        for parameter, gradient in zip(self.parameters, self._gradients[number], strict=True):
            parameter.grad = gradient

    def step(self, number: int) -> None:
        """Train one step. Nothing waits for the device."""
        self.backward(number)
        self.optimizer.step()
        self._scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, first: int = 0) -> list[torch.Tensor]:
        """Train several steps, and return what came of it; see `outcome`."""
        for number in range(first, first + steps):
            self.step(number)
        return self.outcome()

    def outcome(self) -> list[torch.Tensor]:
        """All weights, then all state, on the CPU. The weights are read first, without a wait."""
        weights = [parameter.detach().cpu() for parameter in self.parameters]
        state = self.optimizer.state_dict()["state"]
        kept = [one[name] for _, one in sorted(state.items()) for name in sorted(one)]
        return [*weights, *(tensor.to("cpu", copy=True) for tensor in kept)]


@pytest.fixture
def training() -> type[Training]:
    """The class, since test modules do not import one another."""
    return Training


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two outcomes are equal to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(name="same")
def same_() -> Any:
    """The function."""
    return same


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


class Attention(nn.Module):
    """Self-attention, whose queries, keys and values are views of one storage."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x_BSD).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out_BSD: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return out_BSD


class Block(nn.Module):
    """One layer: attention and an MLP, each behind a norm."""

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden)
        self.self_attention = Attention(hidden, heads, causal=causal)
        self.post_attention_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attention(self.input_norm(x_BSD))
        x_BSD = x_BSD + self.mlp(self.post_attention_norm(x_BSD))
        return x_BSD


class Decoder(nn.Module):
    """Layers of a transformer between two linear ones, whose activations never move.

    Args:
        layers: How many.
        hidden: The width.
        heads: Of attention.
        causal: Whether it is; torch_npu saves a mask of 4 MiB for it.
    """

    def __init__(
        self, layers: int = 3, hidden: int = 32, heads: int = 2, *, causal: bool = False
    ) -> None:
        super().__init__()
        self.entry = nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, causal=causal) for _ in range(layers))
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.entry(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        out_BSD: Tensor = self.head(x_BSD)
        return out_BSD


@pytest.fixture
def decoder() -> type[Decoder]:
    """The class."""
    return Decoder
