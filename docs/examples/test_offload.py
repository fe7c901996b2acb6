"""An offload of saved tensors, trained on the CPU and on a simulated NPU.

python3 -m pytest --npu-sim=lazy test_offload.py
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Offload:
    """Lets what autograd saves wait on the host, and copies it there on a stream of its own."""

    def __init__(self, *, wait: bool = True) -> None:
        self.wait = wait
        self.stream = torch.npu.Stream()

    def pack(self, tensor: Tensor) -> tuple[Tensor, torch.npu.Event]:
        """Begin the copy to the host."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host, self.stream.record_event()

    def unpack(self, saved: tuple[Tensor, torch.npu.Event]) -> Tensor:
        """Copy back, on the stream of the computation, when the first copy has ended."""
        host, copied = saved
        if self.wait:
            torch.npu.current_stream().wait_event(copied)
        return host.to("npu", non_blocking=True)


def train(device: str, offload: Offload | None = None) -> list[str]:
    """Train three steps; return the losses, to the bit. Nothing waits for the device before."""
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(8, 32)
    model, x = model.to(device), x.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        hooks = saved_tensors_hooks(offload.pack, offload.unpack) if offload else None
        with hooks or contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item().hex() for loss in losses]


def test_losses_are_those_of_the_cpu() -> None:
    """What moves to the host and back is what was saved."""
    assert train("npu") == train("npu", Offload()) == train("cpu")


def test_without_the_wait_they_are_not() -> None:
    """The twin, which must fail to train: else the test above could not fail either."""
    assert train("npu", Offload(wait=False)) != train("cpu")
