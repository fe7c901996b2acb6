"""What is read off a model, an optimizer and the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from ascend_suite._facts import contradictions, found_facts


def facts(of: nn.Module, optimizer: optim.Optimizer | None = None) -> dict[str, object]:
    return found_facts([of], optimizer)


def test_of_a_plain_model() -> None:
    found = facts(nn.Linear(2, 2))
    assert found["torch_version"] == torch.__version__
    wanted = {
        "device": "cpu", "world_size": 1, "bf16": False, "fp16": False, "dtensor_parameters": False,
        "shared_parameters": False, "fsdp": None, "torch_ddp": False, "torch_npu_version": None,
    }  # fmt: skip
    if found["torch_npu_version"] is not None:
        del wanted["torch_npu_version"]
    assert {name: found[name] for name in wanted} == wanted


def test_what_only_a_sign_could_tell_is_not_denied() -> None:
    unsaid = {"torch_compile", "gradient_checkpointing", "lora", "framework", "autocast"}
    assert not unsaid & set(facts(nn.Linear(2, 2)))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_dtype_is_that_of_most_weights(dtype: torch.dtype, name: str) -> None:
    layers = nn.Sequential(nn.Linear(8, 8).to(dtype), nn.LayerNorm(8))
    found = facts(layers)
    assert {one: found[one] for one in ("bf16", "fp16")} == {
        "bf16": name == "bf16", "fp16": name == "fp16"
    }  # fmt: skip


def test_a_parameter_of_two_modules_is_shared() -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert facts(tied)["shared_parameters"] is True


class Checkpointed(nn.Linear):
    gradient_checkpointing = True


class SaysOfTheWhole(nn.Linear):
    is_gradient_checkpointing = True


class Asked(nn.Linear):
    def gradient_checkpointing(self) -> bool:
        return True


def test_signs_of_libraries() -> None:
    assert facts(Checkpointed(2, 2))["gradient_checkpointing"] is True
    assert facts(SaysOfTheWhole(2, 2))["gradient_checkpointing"] is True
    assert "gradient_checkpointing" not in facts(Asked(2, 2))
    adapted = nn.Module()
    adapted.lora_A = nn.Linear(2, 2)
    assert facts(adapted)["lora"] is True
    assert facts(torch.compile(nn.Linear(2, 2), backend="eager"))["torch_compile"] is True


def test_dtensors_and_fsdp(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    spread = distribute_module(nn.Linear(2, 2), mesh)
    found = facts(spread)
    assert (found["dtensor_parameters"], found["fsdp"]) == (True, None)
    found = facts(fully_shard(nn.Linear(2, 2), mesh=mesh))
    assert (found["dtensor_parameters"], found["fsdp"]) == (True, "fsdp2")
    whole = nn.Linear(2, 2)
    whole.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh, [Shard(0)]))
    assert facts(whole)["dtensor_parameters"] is True


def test_distributed_data_parallel(one_rank: None) -> None:
    assert facts(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))["torch_ddp"] is True


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        (optim.AdamW, {}, {"capturable": False, "amsgrad": False, "elementwise_optimizer": True}),
        (optim.AdamW, {"amsgrad": True}, {"amsgrad": True}),
        (optim.AdamW, {"capturable": True}, {"capturable": True}),
        (optim.LBFGS, {}, {"elementwise_optimizer": False, "capturable": False}),
    ],
)
def test_of_an_optimizer(kind: Any, options: dict[str, Any], wanted: dict[str, object]) -> None:
    model = nn.Linear(2, 2)
    found = facts(model, kind(model.parameters(), **options))
    assert {name: found[name] for name in wanted} == wanted


def test_only_what_is_said_and_not_so_is_a_contradiction() -> None:
    stated = {"bf16": True, "fp16": False, "num_layers": 3}
    [finding] = contradictions(stated, {"bf16": False, "fp16": False, "world_size": 2})
    assert finding.subject == "training.bf16"
    assert finding.why and finding.instead
