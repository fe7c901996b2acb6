r"""What hooks and bookkeeping cost for each gradient: a model of many tiny layers, on one rank.

Prints, in microseconds of the processor's clock, what a backward takes for each gradient above one
that nobody reduces, with `reduce_gradients` and with torch's DistributedDataParallel: the smallest
of many rounds, since whatever else the machine does makes a round longer and none shorter.

    python -m benchmarks.ddp_hooks
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ascend_ddp import reduce_gradients

LAYERS, WIDTH, ROWS = 400, 16, 32
ROUNDS = 100


def ours(model: nn.Module) -> nn.Module:
    """Turn on the feature."""
    reduce_gradients(model)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "no reduction": lambda model: model,
    "DistributedDataParallel": lambda model: DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
    "reduce_gradients": ours,
}


def seconds(called: nn.Module, x: torch.Tensor) -> float:
    """What one backward takes."""
    called.zero_grad()
    loss = called(x).sum()
    began = time.process_time()
    loss.backward()
    return time.process_time() - began


def main() -> int:
    """Measure and report."""
    torch.set_num_threads(1)
    x = torch.randn(ROWS, WIDTH)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        called = {way: turn_on(nn.Sequential(*_layers())) for way, turn_on in WAYS.items()}
        best = dict.fromkeys(WAYS, float("inf"))
        for _ in range(ROUNDS):
            for way, model in called.items():
                best[way] = min(best[way], seconds(model, x))
        distributed.destroy_process_group()
    plain = best["no reduction"]
    for way, taken in best.items():
        above = (taken - plain) / LAYERS * 1e6
        sys.stdout.write(f"{way:24} {taken / LAYERS * 1e6:6.1f} us, {above:5.1f} above none\n")
    return 0


def _layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]


if __name__ == "__main__":
    sys.exit(main())
