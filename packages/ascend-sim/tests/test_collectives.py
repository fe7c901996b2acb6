"""HCCL between real processes, in each schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AS_MANY_AS_ASKED_FOR = 15  # the checks; there may be more
SHARED_MEMORY = Path("/dev/shm")

Ranks = list[dict[str, Any]]
Launch = Callable[..., Ranks]


@pytest.fixture(scope="module")
def pair(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two ranks have found in one run."""
    names = "all_checks,ddp,early_reads,a_peer_on_gloo,tensors_of_both_devices,send_and_send"
    return launch(tmp_path_factory.mktemp("pair"), names, 2)


def check_names(ranks: Ranks) -> None:
    assert all(len(rank["all_checks"]) >= AS_MANY_AS_ASKED_FOR for rank in ranks)


def test_all_collectives_on_two_ranks(pair: Ranks) -> None:
    check_names(pair)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.schedules("lazy")), 4])
def test_all_collectives(launch: Launch, tmp_path: Path, world_size: int) -> None:
    check_names(launch(tmp_path, "all_checks", world_size, backend="hccl"))


@pytest.mark.schedules("lazy", "thread")  # in eager the host waits, and the circle is closed
def test_a_circle_of_waits_ends(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(tmp_path, "a_circle_of_waits", 4, ASCENDSIM_COLLECTIVE_TIMEOUT_S="10")
    assert [rank["a_circle_of_waits"] for rank in ranks] == [
        [3.0, 3.0],
        [3.0, 1.0],
        [3.0, 2.0],
        [3.0, 3.0],
    ]


def test_one_group_serves_both_devices(pair: Ranks) -> None:
    assert [rank["tensors_of_both_devices"] for rank in pair] == [[1.0] * 4] * 2


def test_ddp_over_hccl_equals_ddp_over_gloo(pair: Ranks) -> None:
    for rank in pair:
        assert rank["ddp"]["equal"] == [True] * 16  # 4 losses, 6 gradients, 6 weights
        assert rank["ddp"]["moved"]
    assert pair[0]["ddp"]["losses"] != pair[1]["ddp"]["losses"]


@pytest.mark.schedules("lazy")
def test_a_missing_wait_shows(pair: Ranks) -> None:
    for rank in pair:
        assert rank["early_reads"] == {
            "all_reduce": [1.0, 2.0],
            "all_gather": [0.0, 2.0],
            "reduce_scatter": [1.0, 2.0],
        }


def test_a_rank_that_waits_elsewhere_keeps_no_peer_waiting(pair: Ranks) -> None:
    assert [rank["a_peer_on_gloo"] for rank in pair] == [3.0, 3.0]


def test_sends_are_buffered(pair: Ranks) -> None:
    assert [rank["send_and_send"] for rank in pair] == [[], []]


def test_blocking_sends_show_that_both_ranks_send_first(launch: Launch, tmp_path: Path) -> None:
    ranks = launch(
        tmp_path,
        "send_and_send",
        2,
        ASCENDSIM_BLOCKING_SENDS="1",
        ASCENDSIM_COLLECTIVE_TIMEOUT_S="2",
    )
    texts = [text for rank in ranks for text in rank["send_and_send"]]
    assert len(texts) == 2
    for number, text in enumerate(texts):
        assert f": send of 4 float32 to rank {1 - number}, number 0 of group " in text
    # Who gives up first, leaves; the other may notice that before its own time is over.
    (late, *_) = (text for text in texts if "HCCL_E_TIMEOUT" in text)
    assert "did not receive it (blocking_sends is on) within 2 s" in late


@pytest.fixture(scope="module")
def failures(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two ranks have found in a run that ends with the death of the second."""
    before = set(SHARED_MEMORY.iterdir())
    names = "wrong_uses,never_there,killed"
    folder = tmp_path_factory.mktemp("failures")
    ranks = launch(folder, names, 2, ASCENDSIM_COLLECTIVE_TIMEOUT_S="2")
    for rank in ranks:
        rank["left behind"] = [str(path) for path in set(SHARED_MEMORY.iterdir()) - before]
    return ranks


def test_a_rank_that_is_killed_is_named_and_leaves_nothing(failures: Ranks) -> None:
    survivor, victim = failures
    assert "killed" not in victim
    text, _, again, _ = survivor["killed"]
    assert "HCCL_E_REMOTE: all_reduce of 100000 float32 (sum), number 1 of group " in text
    assert "rank 1 of 2 (process " in text
    assert text.endswith(" has ended")
    assert "this group has failed before" in again
    assert survivor["left behind"] == []


def test_a_rank_that_does_not_call_is_named(failures: Ranks) -> None:
    text, seconds = failures[0]["wrong_uses"]["absent"]
    assert "HCCL_E_TIMEOUT: all_reduce of 4 float32 (sum), number 1 of group " in text
    assert "did not call it within 2 s" in text
    assert float(seconds) >= 2


def test_different_calls_are_named(failures: Ranks) -> None:
    texts = [rank["wrong_uses"]["different"][0] for rank in failures]
    assert "calls broadcast of 4 float32 with root 1" in texts[0]
    assert "calls all_reduce of 4 float32 (sum)" in texts[1]


def test_different_lengths_are_named(failures: Ranks) -> None:
    text, _ = failures[1]["wrong_uses"]["lengths"]
    assert "HCCL_E_REMOTE: recv of 3 float32 from rank 0" in text
    assert "calls send of 4 float32" in text


def test_a_rank_that_never_joins_is_named(failures: Ranks) -> None:
    text, _ = failures[0]["never_there"]
    assert "HCCL_E_TIMEOUT: making the group " in text
    assert "rank 1 of 2 did not join within 2 s" in text
