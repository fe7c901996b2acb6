"""torchtune's `OffloadActivations`, unmodified, without the rest of torchtune.

Its file imports psutil, and torchao and torchtune for two classes that it compares types with.
While it is loaded, stand-ins take the place of all three: none of their code would run. It is
written for CUDA; on an NPU torch_npu's own `transfer_to_npu` redirects it, and on the CPU it cannot
be made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["offload_activations"]


def offload_activations() -> Any:
    """The class; None where torchtune is not installed or there is no accelerator."""
    spec = importlib.util.find_spec("torchtune")
    accelerator = torch.accelerator.current_accelerator()
    if spec is None or not spec.submodule_search_locations or accelerator is None:
        return None
    if accelerator.type == "npu":
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    file = Path(spec.submodule_search_locations[0], "training", "_activation_offloading.py")
    loaded = importlib.util.spec_from_file_location("offloading", file)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    with _stand_ins():
        loaded.loader.exec_module(module)
    return module.OffloadActivations


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    wanted: dict[str, dict[str, Any]] = {
        "psutil": {"virtual_memory": lambda: types.SimpleNamespace(percent=0.0)},
        "torchao": {"__version__": "0"},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": lambda level: None},
    }
    before = {name: sys.modules.get(name) for name in wanted}
    for name, attributes in wanted.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(attributes)
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
