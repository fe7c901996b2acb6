"""Gloo ranks: results, failures, time-outs, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time

import pytest
import torch
from torch import distributed

from ascend_core.errors import ConfigError
from ascend_core.testing import RanksFailedError, run_ranks


def add_ranks(rank: int, start: float) -> torch.Tensor:
    total = torch.tensor([start + rank])
    distributed.all_reduce(total)
    return total


def fail_on_rank_one(rank: int) -> int:
    if rank == 1:
        raise KeyError("on purpose")
    distributed.barrier()
    return rank


def fail_everywhere(rank: int) -> None:
    raise ValueError(f"rank {rank} on purpose")


def die(rank: int) -> None:
    os._exit(7)


def hang(rank: int) -> None:
    time.sleep(600)


def return_unpicklable(rank: int) -> object:
    return lambda: rank


def test_each_rank_returns_its_value_in_order() -> None:
    results = run_ranks(add_ranks, 2, 10.0)
    assert torch.equal(torch.stack(results), torch.tensor([[21.0], [21.0]]))
    assert not multiprocessing.active_children()


def test_every_failure_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fail_everywhere, 2)
    assert caught.value.failures.keys() == {0, 1}
    for rank in (0, 1):
        assert f"ValueError: rank {rank} on purpose" in str(caught.value)
        assert "in fail_everywhere" in caught.value.failures[rank]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_one_failing_rank_does_not_keep_the_others_waiting() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="on purpose") as caught:
        run_ranks(fail_on_rank_one, 2, timeout_s=500)
    assert time.monotonic() - started < 400
    assert "KeyError" in caught.value.failures[1]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("fn", "message"),
    [(die, "exit code 7"), (return_unpicklable, "Can't (get|pickle) local object|cannot pickle")],
)
def test_a_rank_without_a_result_says_why(fn: object, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(fn, 1)  # type: ignore[arg-type]


def test_ranks_that_hang_are_killed_at_the_time_out() -> None:
    with pytest.raises(RanksFailedError, match="did not end in time"):
        run_ranks(hang, 1, timeout_s=1)
    assert not multiprocessing.active_children()


def test_no_ranks_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 ranks"):
        run_ranks(add_ranks, 0, 1.0)
