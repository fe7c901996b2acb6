r"""A training step whose attention's activations move, on the modelled clock.

Prints what each way to spend less memory takes, step by step, and draws a figure of swap-attention
into the working directory. Nothing is measured: a simulated NPU's schedule `timed` computes all
times from rates. Those of compute are in `attention_timeline.toml`; those of copies are options,
and choose the ratio of the two:

    ascend-sim run --schedule timed --profile benchmarks/attention_timeline.toml \
        --h2d-gbps 1.5 --d2h-gbps 1.5 -m benchmarks.attention_timeline NAME
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascend_core.scope import around_forward
from ascend_recompute import recompute_layers
from ascend_sim import Timeline, current
from ascend_sim.spans import Kind
from ascend_swap import SwapAttentionConfig, swap_attention
from benchmarks.attention_figure import draw
from benchmarks.attention_model import Model
from benchmarks.torchtune_offload import offload_activations

LAYERS, BATCH, SEQUENCE, WIDTH, HEADS = 8, 2, 128, 128, 4
STEPS = 6
SMALLEST = 64 << 10  # bytes of the smallest storage that moves

# The forwards and backwards of a step. A middle stage of a pipeline, in 1F1B order, is one.
ONE, PIPELINE, ACCUMULATION = "f0 b0", "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4", "f0 b0 f1 b1"

Report = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step took, in microseconds of the modelled clock.

    Attributes:
        makespan: From its beginning to its last completion.
        kernels: All kernels.
        h2d: All copies to the device.
        d2h: All copies to the host.
        exposed: What the simulator calls exposed transfer.
        reported: What the feature's own report calls so.
        kept: Bytes of the feature's modules that stayed on the device.
        hit_rate: Of the feature's prefetch, in this step.
    """

    makespan: float
    kernels: float
    h2d: float
    d2h: float
    exposed: float
    reported: float
    kept: int
    hit_rate: float | None


def steps(
    turn_on: Callable[[Model], Report], count: int = STEPS, schedule: str = ONE
) -> list[tuple[Step, Timeline]]:
    """Train a new model for some steps. Each begins when the device has nothing to do.

    Args:
        turn_on: Turns a feature on, and returns its report.
        count: How many steps.
        schedule: The forwards and backwards of a step, each with the number of its micro-batch.
    """
    simulator = current()
    assert simulator is not None
    torch.manual_seed(0)
    model = Model(LAYERS, WIDTH, HEADS).to("npu")
    report = turn_on(model)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, device="npu", requires_grad=True)
    found = []
    for _ in range(count):
        before = report()
        losses: dict[str, Tensor] = {}
        with simulator.timeline() as timeline:
            for call in schedule.split():
                if call.startswith("f"):
                    losses[call[1:]] = model(x).sum()
                else:
                    losses.pop(call[1:]).backward()
            torch.npu.synchronize()
        model.zero_grad()
        found.append((summed_up(timeline, before, report()), timeline))
    return found


def summed_up(timeline: Timeline, before: dict[str, Any], after: dict[str, Any]) -> Step:
    """One step."""

    def total(kind: Kind) -> float:
        return sum(s.end_ns - s.begin_ns for s in timeline.spans if s.kind is kind) / 1000

    def more(name: str) -> float:
        return float(after.get(name, 0) - before.get(name, 0))

    whole = timeline.report()
    hits, misses = more("prefetch_hits"), more("prefetch_misses")
    return Step(
        makespan=whole.makespan_us,
        kernels=total(Kind.KERNEL),
        h2d=total(Kind.H2D),
        d2h=total(Kind.D2H),
        exposed=whole.exposed_transfer_us,
        reported=1000 * more("exposed_ms"),
        kept=after.get("kept_bytes", 0),
        hit_rate=hits / (hits + misses) if hits + misses else None,
    )


def nothing(model: Model) -> Report:
    """Leave it as it is."""
    return dict


def swapped(**options: Any) -> Callable[[Model], Report]:
    """Swap the activations of attention."""
    options = {"swap_modules": "self_attention", "min_bytes": SMALLEST, **options}
    return lambda model: swap_attention(model, SwapAttentionConfig(**options)).report


def recomputed(model: Model) -> Report:
    """Recompute all layers."""
    recompute_layers(model)
    return dict


def on_cpu(model: Model) -> Report:
    """Save what attention saves on the CPU, by torch's own means."""
    for layer in model.layers:
        around_forward(
            layer.self_attention, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
        )
    return dict


def torchtunes(model: Model, kind: Any) -> Report:
    """Offload what attention saves by torchtune's means."""
    offload = kind(min_offload_size=SMALLEST)
    for layer in model.layers:
        around_forward(layer.self_attention, lambda: offload)
    return dict


# What is compared: how it is turned on, the steps that are taken, and the schedule of each.
WAYS: dict[str, tuple[Callable[[Model], Report], int, str]] = {
    "plain": (nothing, 2, ONE),
    "swap": (swapped(), STEPS, ONE),
    "swap, keep_last=1": (swapped(keep_last=1), 2, ONE),
    "swap, recompute_num_layers": (swapped(recompute_num_layers=LAYERS // 2), STEPS, ONE),
    "recompute": (recomputed, 2, ONE),
    "save_on_cpu": (on_cpu, 2, ONE),
    "plain, pipeline": (nothing, 1, PIPELINE),
    "swap, pipeline": (swapped(), 3, PIPELINE),
    "plain, accumulation": (nothing, 1, ACCUMULATION),
    "swap, accumulation": (swapped(), STEPS, ACCUMULATION),
}


def main(arguments: Sequence[str] = ()) -> None:
    """Report, and draw where a name is given."""
    taken = {name: steps(*way) for name, way in WAYS.items()}
    found = {name: [dataclasses.asdict(step) for step, _ in steps] for name, steps in taken.items()}
    if (kind := offload_activations()) is not None:  # last, since it redirects all of CUDA
        tune = steps(lambda model: torchtunes(model, kind), 2)
        found["OffloadActivations"] = [dataclasses.asdict(step) for step, _ in tune]
    sys.stdout.write(json.dumps(found) + "\n")
    for name in arguments:
        shown = [("plain", "plain"), ("swap", "swap_attention")]
        if taken["swap, keep_last=1"][-1][0].exposed:
            shown.append(("swap, keep_last=1", "swap_attention, keep_last=1"))
        shown.append(("recompute", "all layers recomputed"))
        panels = [(title, *taken[way][-1]) for way, title in shown]
        Path(f"swap-attention-timeline-{name}.svg").write_text(draw(panels))


if __name__ == "__main__":
    main(sys.argv[1:])
