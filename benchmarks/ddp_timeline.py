r"""A training step on two ranks whose gradients are averaged, on the modelled clock.

Prints what a step takes with and without overlap, and with torch's DistributedDataParallel, and
draws a figure into the working directory where a name is given. Nothing is measured: the schedule
`timed` of two simulated NPUs computes all times from the rates in `ddp_timeline.toml`:

    ascend-sim run --devices 2 --schedule timed --profile benchmarks/ddp_timeline.toml \
        -m benchmarks.ddp_timeline NAME
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ascend_ddp import DDPConfig, reduce_gradients
from ascend_sim import Timeline, current
from benchmarks.ddp_figure import draw, parted

RANKS, LAYERS, ROWS, WIDTH = 2, 16, 128, 256
STEPS = 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)

TurnOn = Callable[[nn.Module], nn.Module]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step took, in microseconds of the modelled clock.

    Attributes:
        makespan: From its beginning to its last completion.
        backward: Kernels of backward.
        collectives: All of them, all ranks being there.
        exposed: In which the compute stream waited for nothing but collectives.
        hidden: The share of communication beside which something is computed.
    """

    makespan: float
    backward: float
    collectives: float
    exposed: float
    hidden: float


def ours(*, overlap: bool) -> TurnOn:
    """Turn on the feature, a bucket for each layer."""
    config = DDPConfig(bucket_bytes=LAYER_BYTES, overlap=overlap)

    def turn_on(model: nn.Module) -> nn.Module:
        reduce_gradients(model, config)
        return model

    return turn_on


def torchs(model: nn.Module) -> nn.Module:
    """Turn on torch's, with buckets as large as ours from the second step on."""
    return DistributedDataParallel(
        model, bucket_cap_mb=LAYER_BYTES / 2**20, gradient_as_bucket_view=True
    )


# What is compared, with its title in the figure.
WAYS: dict[str, tuple[TurnOn, str]] = {
    "no overlap": (ours(overlap=False), "reduce_gradients, overlap=False"),
    "overlap": (ours(overlap=True), "reduce_gradients"),
    "torch": (torchs, "torch's DistributedDataParallel"),
}


def steps(turn_on: TurnOn) -> list[tuple[Step, Timeline]]:
    """Train a new model for some steps. Each begins when the device has nothing to do."""
    simulator = current()
    assert simulator is not None
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to("npu")
    called = turn_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH, device="npu")
    found = []
    for _ in range(STEPS):
        torch.npu.synchronize()
        with simulator.timeline() as timeline:
            called(x).sum().backward()
            optimizer.step()
            torch.npu.synchronize()
        optimizer.zero_grad()
        found.append((summed_up(timeline), timeline))
    return found


def summed_up(timeline: Timeline) -> Step:
    """One step."""
    taken: dict[str, float] = {}
    for part, span in parted(timeline):
        taken[part] = taken.get(part, 0) + (span.end_ns - span.begin_ns) / 1000
    report = timeline.report()
    return Step(
        makespan=report.makespan_us,
        backward=taken["backward"],
        collectives=taken["collective"],
        exposed=report.exposed_collective_us,
        hidden=1 - report.exposed_collective_us / taken["collective"],
    )


def rank_main(rank: int, folder: Path, names: Sequence[str]) -> int:
    """Be a rank; the first writes what was found."""
    torch.npu.set_device(rank)
    distributed.init_process_group(
        "hccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    taken = {way: steps(turn_on) for way, (turn_on, _) in WAYS.items()}
    if rank == 0:
        found: dict[str, list[dict[str, Any]]] = {
            way: [dataclasses.asdict(step) for step, _ in ones] for way, ones in taken.items()
        }
        (folder / "found.json").write_text(json.dumps(found))
        panels = [(title, *taken[way][-1]) for way, (_, title) in WAYS.items()]
        for name in names:
            Path(f"{name}.svg").write_text(draw(panels))
    distributed.destroy_process_group()
    return 0


def main(names: Sequence[str] = ()) -> int:
    """Report, and draw where a name is given. Returns 1 where a rank failed."""
    processes = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                try:
                    os._exit(rank_main(rank, Path(folder), names))
                except Exception:
                    traceback.print_exc()
                    os._exit(1)
            processes.append(process)
        failed = [os.waitpid(process, 0)[1] for process in processes]
        if any(failed):
            return 1
        sys.stdout.write((Path(folder) / "found.json").read_text() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
