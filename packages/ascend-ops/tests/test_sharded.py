"""fused-ops on a model that is sharded: one rank, but the real classes and tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ascend_ops import apply_fused_ops

WIDTH, INNER = 16, 24


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]


@pytest.mark.parametrize("first", [True, False], ids=["applied first", "sharded first"])
def test_fully_sharded(mesh: DeviceMesh, first: bool) -> None:
    plain = nn.Sequential(nn.RMSNorm(WIDTH), MLP())
    x = torch.randn(3, WIDTH)
    model, alone = copy.deepcopy(plain), copy.deepcopy(plain)
    handle = apply_fused_ops(model) if first else None
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    handle = handle or apply_fused_ops(model)
    assert handle.report()["operators"] == {"rms_norm": 1, "swiglu_pair": 1}
    apply_fused_ops(alone)
    assert all(map(torch.equal, gradients(model, x), gradients(alone, x)))
    handle.remove()
    model.zero_grad()
    assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))


@pytest.mark.parametrize("local", [True, False], ids=["local outputs", "DTensor outputs"])
def test_tensor_parallel(mesh: DeviceMesh, local: bool) -> None:
    """Between layers that return DTensors, for which the operators have no rules, torch's run."""
    mlp, x = MLP(), torch.randn(3, WIDTH)
    expected = gradients(copy.deepcopy(mlp), x)
    split = ColwiseParallel(use_local_output=local)
    plan = {"gate": split, "up": split, "down": RowwiseParallel()}
    parallelize_module(mlp, mesh, plan)
    apply_fused_ops(mlp)
    for ours, theirs in zip(gradients(mlp, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_sharded_norm_weight_is_the_modules_own_affair(mesh: DeviceMesh) -> None:
    norm, x = nn.RMSNorm(WIDTH), torch.randn(3, WIDTH)
    plain = copy.deepcopy(norm)(x)
    weight = torch.distributed.tensor.distribute_tensor(norm.weight.detach(), mesh)
    norm.weight = nn.Parameter(weight)
    apply_fused_ops(norm)
    given = torch.distributed.tensor.distribute_tensor(x, mesh)
    assert torch.equal(norm(given).full_tensor(), plain)
