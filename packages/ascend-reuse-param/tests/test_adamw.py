"""Which slices a step in one pass takes: those of torch's forms that it equals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascend_reuse_param._adamw import AdamWKernel

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def slot(device: torch.device, **group: Any) -> Any:
    numbers = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    options = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
    return SimpleNamespace(device=device, has_master=True, group={**numbers, **options, **group})


# As torch.optim.Adam.step and `adam` choose.
@pytest.mark.parametrize(
    ("device", "group", "form"),
    [
        (CPU, {}, "for-loop"),
        (CPU, {"foreach": True}, "foreach"),
        (CPU, {"foreach": False}, "for-loop"),
        (CUDA, {}, "foreach"),
        (CUDA, {"fused": False}, "for-loop"),
        (CUDA, {"foreach": False}, "for-loop"),
        (CUDA, {"foreach": True}, "foreach"),
        (CUDA, {"differentiable": True}, "for-loop"),
        (CUDA, {"fused": True}, None),
        (CUDA, {"foreach": True, "capturable": True}, None),
        (CUDA, {"lr": torch.tensor(1e-3)}, None),
    ],
)
def test_a_slice_is_taken_where_there_is_a_step_for_its_form(
    device: torch.device, group: dict[str, Any], form: str | None
) -> None:
    for one in ("for-loop", "foreach"):
        steps: Any = {one: None}
        kernel = AdamWKernel(steps, lambda held: pytest.fail("only asked"))
        assert kernel.takes(slot(device, **group), torch.bfloat16) is (one == form)
