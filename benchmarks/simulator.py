"""What the simulated NPU costs, against the CPU: per operator and per training step.

No benchmark of the harness, since it needs an environment of its own, in which a device runs:

    ascend-sim run --schedule lazy -m benchmarks.simulator

An operator is timed on tensors so small that next to nothing is computed. What is timed ends with
a synchronisation, so that under every schedule all of it has run. Torch computes on one thread; a
figure is the time spent by all threads of the process, in the fastest round: whatever else the
machine does only adds to one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from ascend_suite.demo.corpus import corpus, draw_batches
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.training import Training

ROUNDS = 20
CALLS = 500

Work = Callable[[], object]


def operators(device: torch.device) -> dict[str, Work]:
    """Calls of one operator each, by name."""
    a, b, weight = (torch.ones(8, 8, device=device) for _ in range(3))
    return {
        "a.add_(b)": lambda: a.add_(b),
        "a + b": lambda: a + b,
        "mm": lambda: torch.mm(a, b),
        "linear": lambda: F.linear(a, weight),
        "softmax": lambda: torch.softmax(b, -1),
        "layer_norm": lambda: F.layer_norm(b, (8,)),
    }


def training_step(device: torch.device) -> Work:
    """A step of the demo's model: 4 layers, width 128, 8 x 256 bytes; ends by reading the loss."""
    settings = DemoSettings()
    [batch] = draw_batches(
        corpus(), count=1, batch=settings.batch, seq=settings.seq, seed=0, device=device
    )
    training = Training(settings, device)
    return lambda: training.step(batch)


def seconds(work: Work, calls: int, device: torch.device) -> float:
    """Time that a call spends."""
    begin = time.process_time()
    for _ in range(calls):
        work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.process_time() - begin) / calls


def compare(works: Sequence[tuple[torch.device, Work]], calls: int) -> list[float]:
    """Times of the same work on several devices, which take turns."""
    for device, work in works:
        seconds(work, max(1, calls // 10), device)
    rounds = [[seconds(work, calls, device) for device, work in works] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def row(name: str, times: Sequence[float], factor: float, unit: str) -> str:
    """A line of the table."""
    cpu, npu = (factor * time for time in times)
    cells = (f"{value:>7.1f} {unit}" for value in (cpu, npu, npu - cpu))
    return f"{name:<14} {' '.join(cells)} {npu / cpu:>6.2f}\n"


def main() -> None:
    """Write a table."""
    torch.set_num_threads(1)
    devices = [torch.device("cpu"), torch.device("npu")]
    sys.stdout.write(f"{'':<14} {'cpu':>10} {'npu':>10} {'more':>10} {'ratio':>6}\n")
    on = [operators(device) for device in devices]
    with torch.no_grad():
        for name in on[0]:
            works = [work[name] for work in on]
            times = compare(list(zip(devices, works, strict=True)), CALLS)
            sys.stdout.write(row(name, times, 1e6, "us"))
    times = compare([(device, training_step(device)) for device in devices], 1)
    sys.stdout.write(row("training step", times, 1e3, "ms"))


if __name__ == "__main__":
    main()
