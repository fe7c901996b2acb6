"""The package as a user imports it."""

from __future__ import annotations

import subprocess
import sys

import torch

import ascend_swap
from ascend_core import Handle, get_feature


def test_import_loads_no_torch() -> None:
    code = "import sys, ascend_swap; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there() -> None:
    for name in ascend_swap.__all__:
        assert getattr(ascend_swap, name) is not None


def test_swap_attention_is_found_and_applies() -> None:
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(4, 2, batch_first=True),
        num_layers=2,
        enable_nested_tensor=False,
    )
    handle = get_feature("swap-attention").apply(model)
    assert isinstance(handle, Handle)
    assert handle.report()["modules"] == ["layers.0.self_attn", "layers.1.self_attn"]
    handle.remove()


def test_swap_optimizer_is_found_and_applies() -> None:
    feature = get_feature("swap-optimizer")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0, momentum=0.9)
    handle = feature.apply(optimizer)
    assert isinstance(handle, Handle)
    assert handle.report()["windows"] == 1
    handle.remove()
