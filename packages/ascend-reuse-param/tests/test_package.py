"""The package as a user imports it."""

from __future__ import annotations

import subprocess
import sys

import torch

import ascend_reuse_param
from ascend_core import Handle, get_feature


def test_import_loads_no_torch() -> None:
    code = "import sys, ascend_reuse_param; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there() -> None:
    for name in ascend_reuse_param.__all__:
        assert getattr(ascend_reuse_param, name) is not None


def test_the_feature_is_found_and_applies() -> None:
    feature = get_feature("reuse-fp32-param")
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    handle = feature.apply(torch.optim.AdamW([weight]))
    assert isinstance(handle, Handle)
    weight.grad = torch.ones_like(weight)
    handle.step()
    assert handle.report()["residual_bytes"] == 6
    handle.remove()
