"""torch.compile on the device: what works, and how the rest fails.

A backend that generates no code for the device runs the operators that run without it. Of the
others, inductor needs triton-ascend, which is not installed, `npu` the graph engine of CANN, and
the two that capture graphs a runtime that can.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

STEPS = 3

Run = Callable[..., str]


def train(backend: str | None) -> list[Tensor]:
    """The last loss, the parameters and their gradients after some steps, on the host."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 3)]
    model = nn.Sequential(*layers).npu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    x = torch.randn(4, 8).npu()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.detach().cpu() for tensor in (loss, *model.parameters(), *gradients)]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_generates_no_code_trains_to_the_same_bits(backend: str) -> None:
    for compiled, plain in zip(train(backend), train(None), strict=True):
        assert torch.equal(compiled, plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_new_shapes_and_values_go_through_the_same_function(backend: str) -> None:
    def gated(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x * torch.sigmoid(y), -1)

    compiled = torch.compile(gated, backend=backend)
    for rows in (2, 5, 7):
        x, y = torch.randn(rows, 6).npu(), torch.randn(rows, 6).npu()
        assert torch.equal(compiled(x, y), gated(x, y))


COMPILE = """
import ascend_sim; ascend_sim.start()
import torch
torch.compile(lambda x: torch.relu(x) + 1, backend={backend!r})(torch.ones(4).npu())
"""


# In processes of their own, since a failed attempt leaves its traces in torch.
@pytest.mark.schedules("eager")
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("inductor", "Device npu not supported"),
        ("npu", "An error occurred when import `torchair`"),
        ("npugraphs", "Failed to find function aclmdlRICaptureBegin"),
        ("npugraph_ex", "Failed to find function aclmdlRICaptureBegin"),
    ],
)
def test_a_backend_that_generates_code_fails_with_an_error(
    python: Run, backend: str, message: str
) -> None:
    assert message in python(COMPILE.format(backend=backend), fails=True)
