"""Training on the device gives the CPU's bits: losses, gradients and parameters.

The wheel's own `scaled_dot_product_attention` runs: it calls npu_fusion_attention. Dropout masks
are recorded on the device and replayed on the CPU, whose generator is another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_sim import Simulator

STEPS = 10
VOCABULARY = 96


class TapedDropout(nn.Module):
    """Dropout of one half; records the masks on the device, replays them on the CPU."""

    def __init__(self, tape: list[Tensor]) -> None:
        super().__init__()
        self.tape = tape

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu:
            return x.mul(self.tape.pop(0).cpu()).mul(2)
        y, mask = torch.native_dropout(x, 0.5, True)
        self.tape.append(mask)
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, tape: list[Tensor]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = TapedDropout(tape)

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        qkv = self.qkv(self.norm1(x_BLD)).view(B, L, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.drop(self.out(attended.transpose(1, 2).reshape(B, L, D)))
        return x_BLD + self.drop(self.down(F.silu(self.up(self.norm2(x_BLD)))))


def mlp(tape: list[Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, VOCABULARY))


def language_model(tape: list[Tensor]) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 64),
        *(Block(64, 4, tape) for _ in range(2)),
        nn.RMSNorm(64),
        nn.Linear(64, VOCABULARY),
    )


Build = Callable[[list[Tensor]], nn.Module]


@dataclasses.dataclass
class Run:
    """What the steps left: a loss, gradients and parameters each."""

    losses: list[Tensor]
    gradients: list[list[Tensor]]
    parameters: list[list[Tensor]]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.losses
        for step in (*self.gradients, *self.parameters):
            yield from step


def train(
    build: Build, device: str, dtype: torch.dtype, tape: list[Tensor], steps: int = STEPS
) -> Run:
    """Train without reading anything back before the end."""
    torch.manual_seed(0)
    model = build(tape).to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    targets = torch.randint(VOCABULARY, (4, 17)).to(device)
    inputs = targets[:, :-1]
    if build is mlp:
        inputs = torch.randn(4, 16, 24).to(dtype).to(device)
    run = Run([], [], [])
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(inputs).reshape(-1, VOCABULARY)
        loss = F.cross_entropy(logits, targets[:, 1:].reshape(-1))
        loss.backward()
        run.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.detach())
        run.parameters.append([p.detach().clone() for p in model.parameters()])
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("build", [mlp, language_model])
def test_losses_gradients_and_parameters_are_the_cpus(build: Build, dtype: torch.dtype) -> None:
    tape: list[Tensor] = []
    device = train(build, "npu", dtype, tape)
    host = train(build, "cpu", dtype, tape)
    assert host.losses[-1] < host.losses[0]
    assert not tape
    for mine, expected in zip(device.tensors(), host.tensors(), strict=True):
        assert torch.equal(mine.cpu(), expected)


@pytest.mark.schedules("lazy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_waits_for_nothing(dtype: torch.dtype, npu_sim: Simulator) -> None:
    waits, tasks = [], []
    inline = npu_sim._kernels.calls().inline
    for steps in (1, 4):
        before = npu_sim.counters()
        train(language_model, "npu", dtype, [], steps)
        done = npu_sim.counters() - before
        waits.append(done.synchronisations)
        tasks.append(done.tasks_submitted)
    assert waits[0] == waits[1]  # those that moved the model to the device
    assert tasks[1] > 2 * tasks[0]
    assert npu_sim._kernels.calls().inline == inline


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp([]).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu", enabled=dtype == torch.float16)
    x, y = torch.randn(32, 24).npu(), torch.randint(VOCABULARY, (32,)).npu()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("npu", dtype=dtype):
            out = model(x)
        assert out.dtype == dtype
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_works_with_backends_that_generate_no_code(backend: str) -> None:
    """What inductor would generate, a simulated device cannot run."""
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).npu()
    x = torch.randn(4, 8).npu()
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(x), model(x))
