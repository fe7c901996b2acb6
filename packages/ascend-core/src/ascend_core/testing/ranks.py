"""Runs a function on several gloo ranks of this machine, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from ascend_core.errors import AscendError, ConfigError

__all__ = ["RanksFailedError", "run_ranks"]

R = TypeVar("R")

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: their own errors are wanted too."""


class RanksFailedError(AscendError, RuntimeError):
    """One or more ranks raised, died or did not end in time.

    Attributes:
        failures: What happened to each failed rank: its traceback, or one line.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str | None = None,
        instead: str | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(what, why=why, instead=instead)
        self.failures = dict(failures or {})


class _Rank(NamedTuple):
    number: int
    process: SpawnProcess
    results: connection.Connection


def run_ranks(
    fn: Callable[..., R], world_size: int, *args: object, timeout_s: float = 300.0
) -> list[R]:
    """Run `fn(rank, *args)` in `world_size` fresh processes that form a gloo process group.

    Each rank has one thread, and meets the others through a file in a temporary folder, so no
    port is taken. Every process has ended when this returns or raises.

    Args:
        fn: A function of a module (it is pickled); `torch.distributed` is ready when it runs.
        world_size: Number of ranks.
        args: Passed on to `fn`.
        timeout_s: Seconds until the ranks that still run are killed; starting them takes some.

    Returns:
        What `fn` returned, by rank; it must be picklable.

    Raises:
        ConfigError: When `world_size` is below 1.
        RanksFailedError: When a rank raised, died or did not end in time, with the traceback of
            each one that failed.
    """
    if world_size < 1:
        raise ConfigError(f"{world_size} ranks cannot run.", instead="give 1 rank or more.")
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            _start(number, world_size, folder, payload, timeout_s) for number in range(world_size)
        ]
        try:
            outcomes = _gather(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.process.close()
                rank.results.close()
    failures = {number: text for number, (good, text) in outcomes.items() if not good}
    if failures:
        details = "\n".join(f"--- rank {number}\n{failures[number]}" for number in sorted(failures))
        raise RanksFailedError(
            f"{len(failures)} of {world_size} ranks failed.\n{details}", failures=failures
        )
    return [pickle.loads(outcomes[number][1]) for number in range(world_size)]


def _start(number: int, world_size: int, folder: str, payload: bytes, timeout_s: float) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main,
        args=(number, world_size, folder, payload, timeout_s, theirs),
        name=f"rank {number}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return _Rank(number, process, ours)


def _gather(ranks: list[_Rank], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """Collect `(True, pickled result)` or `(False, text)` of every rank."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = {rank.results: rank for rank in ranks}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for results in ready:
            rank = waiting.pop(results)  # type: ignore[call-overload]
            outcomes[rank.number] = _receive(rank)
            if not outcomes[rank.number][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        outcomes[rank.number] = (False, "did not end in time and was killed.")
    return outcomes


def _receive(rank: _Rank) -> tuple[bool, Any]:
    try:
        good, value = rank.results.recv()
    except EOFError:
        rank.process.join()
        return False, f"died without a result, exit code {rank.process.exitcode}."
    return good, value


def _rank_main(
    number: int,
    world_size: int,
    folder: str,
    payload: bytes,
    timeout_s: float,
    results: connection.Connection,
) -> None:
    """Run in the new process: join the group, call the function, send what came of it."""
    try:
        if Path("/sys/class/net/lo").exists():
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=number,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        fn, args = pickle.loads(payload)
        value = pickle.dumps(fn(number, *args))
        distributed.destroy_process_group()
    except BaseException:
        results.send((False, traceback.format_exc()))
    else:
        results.send((True, value))
