"""One rank: trains the configurations that it is told, one after the other.

    python -m tests_integration.megatron_npu.worker FOLDER RANK WORLD DEVICE NAME ...

DEVICE is `cpu`, or the schedule of a simulated NPU. Before a configuration its name goes to
FOLDER/RANK.jsonl, and after it what came of it. The first that fails ends the process: it may have
left the other ranks in the middle of something.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tests_integration.megatron_npu.configurations import BY_WORLD

TIMEOUT = datetime.timedelta(seconds=150)


def main(arguments: Sequence[str]) -> None:
    folder, rank, world, device, *names = arguments
    logging.disable(logging.WARNING)
    place = _on_cpu() if device == "cpu" else _on_npu(int(rank), int(world), device)
    warnings.simplefilter("ignore")  # torch_npu and megatron-core warn of themselves
    _the_same_on_every_processor()
    _without_transformer_engine()
    _form_groups(Path(folder), int(rank), int(world), place.type)
    with (Path(folder) / f"{rank}.jsonl").open("a") as out:
        for name in names:
            _train(name, int(world), place, out)


def _train(name: str, world: int, place: Any, out: IO[str]) -> None:
    from tests_integration.megatron_npu.changes import changed
    from tests_integration.megatron_npu.trainer import train

    _tell(out, {"name": name})
    configuration, began = BY_WORLD[world][name], time.monotonic()
    with changed(configuration.change):
        found = train(configuration, place)
    told = {
        "losses": [[loss.hex() for loss in step] for step in found["losses"]],
        "norms": [norm.hex() for norm in found["norms"]],
        "digest": found["digest"],
        "report": found["report"],
    }
    _tell(out, {"name": name, "seconds": round(time.monotonic() - began, 2), **told})


def _tell(out: IO[str], what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


# Devices -----------------------------------------------------------------------------------------


def _on_cpu() -> Any:
    """Stand in for what megatron-core asks of CUDA by name."""
    import torch

    from tests_integration.megatron_cpu import stand_ins

    _replace(
        *stand_ins(),
        (torch.cuda, "synchronize", _nothing),
        (torch.Tensor, "cuda", _as_it_is),
        (torch.Tensor, "type", type_of_cuda("torch.")),
    )
    return torch.device("cpu")


def _on_npu(rank: int, world: int, schedule: str) -> Any:
    """Start a simulated NPU, and let torch_npu stand in for CUDA, as it does on a real one."""
    import ascend_sim

    ascend_sim.start(schedule=schedule, devices=world)
    import torch
    from torch_npu.contrib import transfer_to_npu  # noqa: F401 (what it does, it does at import)

    _replace(
        (torch.Tensor, "type", type_of_cuda("torch.npu.")),
        (torch, "compile", _as_it_is),
        (torch.cuda.nvtx, "range_push", _nothing),
        (torch.cuda.nvtx, "range_pop", _nothing),
    )
    torch.cuda.set_device(rank)
    return torch.device("npu", rank)


def type_of_cuda(prefix: str) -> Callable[..., Any]:
    """`Tensor.type` for megatron-core's optimizers, which know a parameter by its type's name."""
    import torch

    original: Callable[..., Any] = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace(prefix, "torch.cuda.", 1) if isinstance(found, str) else found

    return type_


def _the_same_on_every_processor() -> None:
    """Leave out oneDNN, which rounds as the processor can. `launch.ENVIRONMENT` does the rest."""
    import torch

    _replace((torch.backends.mkldnn, "enabled", False))


def _without_transformer_engine() -> None:
    """Give the offload the switch of Transformer Engine's that it throws, and let none listen."""
    from megatron.core.extensions import transformer_engine

    if transformer_engine.cpu_offload is None:
        switch = types.SimpleNamespace(CPUOffloadEnabled=False)
        _replace((transformer_engine, "cpu_offload", switch))


def _form_groups(folder: Path, rank: int, world: int, device: str) -> None:
    from torch import distributed

    backend = "gloo" if device == "cpu" else "cpu:gloo,npu:hccl"
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )


def _replace(*stand_ins: tuple[Any, str, Any]) -> None:
    """Replace for good: the process is there for nothing else."""
    for place, name, stand_in in stand_ins:
        setattr(place, name, stand_in)


def _nothing(*_: Any) -> None:
    """Stands for a function of CUDA's that has nothing to do here."""


def _as_it_is(given: Any = None, *_: Any, **__: Any) -> Any:
    """Stands for `torch.compile`, which needs a compiler and takes long, and `Tensor.cuda`."""
    return given if given is not None else lambda decorated: decorated


if __name__ == "__main__":
    code = 0
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not the orderly way out: after a race, what is pending may wait for what never comes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
