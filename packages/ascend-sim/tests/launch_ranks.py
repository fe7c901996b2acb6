"""Runs functions in several processes, the ranks of a process group on a simulated NPU.

Usage: python launch_ranks.py MODULE FUNCTION,... WORLD_SIZE BACKEND FOLDER

torch is imported and the simulation started once, and every rank is forked from there, before any
device is used. Each calls FUNCTION(rank, world_size) for each of them, and leaves what they have
returned in FOLDER/RANK.json, by name, and its error in FOLDER/RANK.error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import ascend_sim

TIMEOUT = timedelta(seconds=200)


def main(module: str, names: list[str], world_size: int, backend: str, folder: Path) -> int:
    """Run the ranks, and return how many failed."""
    ascend_sim.start()
    functions = importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # which each rank would import for itself
    ranks = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            os._exit(run(functions, names, rank, world_size, backend, folder))
        ranks.append(process)
    return sum(os.waitpid(process, 0)[1] != 0 for process in ranks)


def run(
    functions: ModuleType, names: list[str], rank: int, world_size: int, backend: str, folder: Path
) -> int:
    """Be a rank, and return the exit status."""
    import torch
    from torch import distributed

    try:
        torch.set_num_threads(1)
        torch.npu.set_device(rank)
        distributed.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        results = {}
        for name in names:
            results[name] = getattr(functions, name)(rank, world_size)
            (folder / f"{rank}.json").write_text(json.dumps(results))
        distributed.destroy_process_group()
    except Exception:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    module, names, world_size, backend, folder = sys.argv[1:]
    sys.exit(main(module, names.split(","), int(world_size), backend, Path(folder)))
