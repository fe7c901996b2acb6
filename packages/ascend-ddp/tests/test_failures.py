"""A rank that dies, or never comes: the others are told who waited for what, and in time."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor, distributed, nn

from ascend_core.errors import CommunicationError
from ascend_core.testing import RanksFailedError, run_ranks
from ascend_ddp import DDPConfig, reduce_gradients

TIMEOUT_S = 2.0
LONG_S = 100.0  # far longer than a busy machine needs to notice an end
VICTIM = 1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def step(net: nn.Module) -> None:
    net(torch.ones(4, 16)).sum().backward()


def dies_between_steps(rank: int, overlap: bool) -> None:
    """The victim ends before its second backward."""
    net = model()
    handle = reduce_gradients(net, DDPConfig(bucket_bytes=800, overlap=overlap, timeout_s=LONG_S))
    step(net)
    if rank == VICTIM:
        os._exit(3)
    survive(net, handle)


def dies_in_backward(rank: int) -> None:
    """The victim ends with half of its buckets sent."""
    net = model()
    handle = reduce_gradients(net, DDPConfig(bucket_bytes=800, timeout_s=LONG_S))
    step(net)
    if rank == VICTIM:

        def end(grad: Tensor) -> None:
            os._exit(3)

        net[1].weight.register_hook(end)
    survive(net, handle)


def never_comes(rank: int) -> None:
    """The victim goes on, elsewhere."""
    net = model()
    handle = reduce_gradients(net, DDPConfig(bucket_bytes=800, timeout_s=TIMEOUT_S))
    step(net)
    if rank == VICTIM:
        time.sleep(LONG_S)
        return
    try:
        survive(net, handle)
    finally:
        distributed.destroy_process_group()  # waits for the group's threads, which must have ended


def survive(net: nn.Module, handle: object) -> None:
    began = time.monotonic()
    try:
        step(net)
    except CommunicationError as error:
        took = time.monotonic() - began
        assert all(p.grad is None for p in net.parameters())
        handle.remove()  # type: ignore[attr-defined]
        net(torch.ones(4, 16)).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        raise AssertionError(f"told in {took:.1f} s: {error}") from None


def said(program: object, *arguments: object) -> dict[int, str]:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(program, 3, *arguments)  # type: ignore[arg-type]
    failures = caught.value.failures.items()
    return {rank: text.partition("AssertionError: ")[2] for rank, text in failures}


def check(told: dict[int, str]) -> None:
    for rank in (0, 2):
        text = told[rank]
        assert f"rank {rank} of 3 waited in vain for bucket " in text, told
        assert "it holds the gradients of " in text and any(
            part in text for part in (".bias", ".weight")
        )
        assert float(text.split()[2]) < LONG_S / 2, text


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_that_has_died_is_an_error_on_the_others(overlap: bool) -> None:
    check(said(dies_between_steps, overlap))


def test_a_rank_that_dies_within_backward_is_an_error_on_the_others() -> None:
    check(said(dies_in_backward))


def test_a_rank_that_never_comes_is_an_error_in_time() -> None:
    told = said(never_comes)
    check(told)
    assert all(float(told[rank].split()[2]) >= TIMEOUT_S - 0.1 for rank in (0, 2))
