"""How near `estimate` comes: estimated and measured peaks, for shapes drawn from a seed.

No benchmark of the harness, since nothing is timed:

    python -m benchmarks.estimates --seed 2026 --count 20
    export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
    ascend-sim run --schedule eager -m benchmarks.estimates --device npu

On the CPU the peak is the profiler's, on other devices the allocator's `active_bytes`. Without
expandable segments the allocator hands out a block with up to 1 MiB more than was asked for, where
it has such a one; of trainings as small as these that is several per cent.
"""

from __future__ import annotations

import argparse
import platform
import sys
from typing import NamedTuple

import torch

from ascend_suite.estimation.estimate import estimate
from ascend_suite.shape import ModelShape
from benchmarks.estimate_cases import draw_shapes, measured_peak, plans_for

SEED = 2026_12_01


class Row(NamedTuple):
    """One line of the table."""

    shape: ModelShape
    plan: str
    where: str
    estimated: int
    measured: int

    @property
    def off(self) -> float:
        """By how much the estimate is above what was measured, as a part of it."""
        return self.estimated / self.measured - 1

    def __str__(self) -> str:
        mib = (f"{number / 2**20:>9.2f}" for number in (self.estimated, self.measured))
        return f"  {self.plan:<40}{' '.join(mib)} {100 * self.off:>+7.2f} %  {self.where}"


def named(shape: ModelShape) -> str:
    """What distinguishes a shape from others."""
    size = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads"
    batch = f"{shape.micro_batches} x {shape.micro_batch} x {shape.seq} tokens of {shape.vocab}"
    words = [shape.activation, shape.norm, shape.dtype]
    words += ["dropout"] * shape.dropout + ["masters"] * shape.masters
    return f"{size}, {batch}, {' '.join(words)}"


def main() -> int:
    """Print the table, and the worst line of it; 1 when that is more than 5 % off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "npu"))
    chosen = parser.parse_args()
    sys.stdout.write(f"torch {torch.__version__}, {platform.processor() or platform.machine()}\n")
    rows = []
    for number, shape in enumerate(draw_shapes(chosen.seed, chosen.count)):
        if number < chosen.first:
            continue
        sys.stdout.write(f"{number}: {named(shape)}\n")
        for name, plan in plans_for(shape, chosen.device).items():
            guess = estimate(shape, plan, device=chosen.device)
            peak = measured_peak(shape, plan, chosen.device)
            rows.append(Row(shape, name, guess.peak.name, guess.peak_bytes, peak))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    worst = max(rows, key=lambda row: abs(row.off))
    sys.stdout.write(f"{len(rows)} trainings; the worst: {named(worst.shape)}\n{worst}\n")
    return int(abs(worst.off) > 0.05)


if __name__ == "__main__":
    sys.exit(main())
