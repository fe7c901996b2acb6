"""Works wherever the wheel is installed, without torch_npu: the refusal is the expected answer."""

from __future__ import annotations

import ascend_sim
from ascend_sim import _machine

if _machine.installed("torch-npu") is None:
    try:
        ascend_sim.start(hbm="64M")
    except ascend_sim.RefusedError as error:
        assert "torch-npu" in str(error)
    else:
        raise AssertionError("it started without torch_npu")
assert (_machine.folder_of("ascend_sim") / "native/runtime/control.h").is_file()
