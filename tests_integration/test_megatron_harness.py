"""The harness that trains megatron-core in other processes, without a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests_integration.megatron_npu import launch, losses
from tests_integration.megatron_npu.changes import CHANGES
from tests_integration.megatron_npu.configurations import BY_WORLD, reference, trained_on_cpu

# A worker that trains nothing. What its configurations are called says what happens in them.
WORKER = """
import json, os, sys, time
folder, rank, world, device, *names = sys.argv[1:]
out = open(f"{folder}/{rank}.jsonl", "a", buffering=1)
for name in names:
    print(json.dumps({"name": name}), file=out)
    if rank == "1" and name == "dies":
        print("I have a reason", flush=True)
        os.kill(os.getpid(), 9)
    if rank == "0" and name == "late":
        time.sleep(2)
    if rank == "1" and name == "hangs" or name == "dies":
        time.sleep(60)
    found = {"losses": [[(1.5 + int(rank)).hex()]], "norms": [(2.5).hex()], "seconds": 1}
    print(json.dumps({"name": name, **found}), file=out)
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return [str(path)]


def test_losses_of_all_ranks_are_gathered(worker: list[str]) -> None:
    found = launch.run(["a", "b"], world=2, device="cpu", worker=worker)
    assert list(found) == ["a", "b"]
    assert found["b"].losses == (f"{(1.5).hex()} {(2.5).hex()}",)
    assert found["b"].norms == ((2.5).hex(),)
    assert found["b"].means() == [2.0]
    assert found["b"].error is None


def test_a_rank_that_dies_takes_only_its_configuration_with_it(worker: list[str]) -> None:
    found = launch.run(["a", "dies", "b"], world=2, device="cpu", worker=worker)
    assert found["dies"].error is not None
    assert "Rank 1 ended with -9" in found["dies"].error
    assert "I have a reason" in found["dies"].error
    assert found["a"].means() == found["b"].means() == [2.0]


def test_what_a_rank_finished_before_it_died_the_others_may_finish(worker: list[str]) -> None:
    found = launch.run(["late", "dies", "b"], world=2, device="cpu", worker=worker)
    assert "Rank 1 ended with -9" in str(found["dies"].error)
    assert found["late"].means() == found["b"].means() == [2.0]


def test_a_rank_that_hangs_is_given_up(worker: list[str]) -> None:
    found = launch.run(["hangs", "b"], world=2, device="cpu", worker=worker, patience=5)
    assert "Nothing happened for 5 seconds" in str(found["hangs"].error)
    assert found["b"].means() == [2.0]


def test_what_cannot_start_is_not_tried_again(tmp_path: Path) -> None:
    missing = [str(tmp_path / "missing.py")]
    found = launch.run(["a", "b"], world=1, device="cpu", worker=missing)
    assert all("No such file" in str(outcome.error) for outcome in found.values())
    assert list(found) == ["a", "b"]


def test_losses_are_kept_for_every_configuration() -> None:
    for world, configurations in BY_WORLD.items():
        assert list(losses.kept(world)) == trained_on_cpu(world)
        for name, configuration in configurations.items():
            kept = reference(name, world) in losses.kept(world)
            assert kept or configuration.dropout or configuration.fused
            assert configuration.change is None or configuration.change in CHANGES


@pytest.mark.parametrize(("world", "names"), [(1, ["fp32", "bf16"]), (2, ["dp2", "pp2, vpp2"])])
def test_losses_that_are_kept_are_those_of_the_cpu(world: int, names: list[str]) -> None:
    found = launch.run(names, world=world, device="cpu")
    for name in names:
        assert found[name].error is None, found[name].error
        assert found[name].losses == losses.kept(world)[name].losses
        assert found[name].norms == losses.kept(world)[name].norms
