"""Collectives on the modelled clock, and where the clocks of several processes meet.

The figures are computed by hand from profile.toml: a submission costs the host 5 µs; a kernel takes
2 µs and a µs per 1.2 MB; a step between ranks takes 5 µs and a µs per 25 kB. torch_npu records an
event and lets the stream of the collective wait for it, then submits the collective and records two
more events.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = list[dict[str, Any]]
Launch = Callable[..., Ranks]

pytestmark = pytest.mark.schedules("timed")

KERNEL = 22  # of 12 MB, read and written


@pytest.fixture(scope="module")
def pair(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    names = "late_to_a_collective,early_and_late_receives,two_groups_in_two_orders"
    names += ",how_long_each_takes"
    return launch(tmp_path_factory.mktemp("pair"), names, 2)


def test_a_collective_begins_when_the_last_rank_is_ready(pair: Ranks) -> None:
    # Rank 1 submits kernels at 5 and 10, which run until 49: then it is ready. A ring of two ranks
    # takes 2 steps of 6 MB, 490 µs.
    assert pair[0]["late_to_a_collective"]["spans"] == [
        ["aten::mul_.Tensor", 30, 30 + KERNEL],
        ["all_reduce", 49, 539],
        ["aten::mul_.Tensor", 539, 539 + KERNEL],
    ]
    assert pair[1]["late_to_a_collective"]["spans"] == [
        ["aten::mul_.Tensor", 5, 5 + KERNEL],
        ["aten::mul_.Tensor", 27, 27 + KERNEL],
        ["aten::mul_.Tensor", 49, 49 + KERNEL],
        ["all_reduce", 49, 539],
        ["aten::mul_.Tensor", 539, 539 + KERNEL],
    ]


def test_idle_time_is_laid_to_the_collective_and_to_the_rank_that_is_late(pair: Ranks) -> None:
    first, second = (rank["late_to_a_collective"] for rank in pair)
    # Until 30 nothing was submitted; from 52 to 539 the kernel waits for the collective.
    assert (first["idle"], first["exposed"]) == ([539 - 52, 30], 539 - 52)
    assert (second["idle"], second["exposed"]) == ([539 - 71, 5], 539 - 71)
    assert "collectives  idle: transfer  idle: collective  idle: other" in first["text"]
    assert "exposed collectives 487.0 µs" in first["text"]
    assert first["text"].endswith("not an NPU's timing.")


def test_a_receive_ends_when_the_message_is_there(pair: Ranks) -> None:
    sender, receiver = (rank["early_and_late_receives"] for rank in pair)
    sends = [span for span in sender if span[0] == "send"]
    # The first is ready with the kernel's end at 27, and takes 5 µs and 1 MB / 25 GB/s.
    assert sends == [["send", 27, 72], ["send", 72, 117]]
    receives = [span for span in receiver if span[0] == "recv"]
    assert receives[0] == ["recv", 27, 72]
    last = [span for span in receiver if span[0] == "aten::mul_.Tensor"][-1]
    assert receives[1] == ["recv", last[2], last[2]]  # it lay there
    assert last[2] > 117


def test_groups_in_different_orders_keep_nobody_waiting(pair: Ranks) -> None:
    # The second collective is ready after the two kernels, at 74; the peer's first waits for it.
    for rank in pair:
        spans = rank["two_groups_in_two_orders"]
        assert [s[1:] for s in spans if s[0] == "all_reduce"] == [[74, 88], [74, 88]]
        assert [s[1:] for s in spans if s[0] != "all_reduce"] == [
            [30, 52],
            [52, 74],
            [74, 96],
            [96, 118],
        ]


LATENCY, BANDWIDTH = 5, 25_000  # µs, bytes per µs


def expected(ranks: int) -> dict[str, float]:
    """What 1 MB takes."""
    steps, whole, part = ranks - 1, 1_000_000, 1_000_000 / ranks
    ring = steps * LATENCY + steps * part / BANDWIDTH
    pipeline = steps * LATENCY + whole / BANDWIDTH
    return {
        "all_reduce": 2 * ring,
        "reduce": pipeline,
        "broadcast": pipeline,
        "all_gather": ring,
        "reduce_scatter": ring,
        "scatter": ring,
        "all_to_all": ring,
        # Rank 0 gets half as much again of each of the others.
        "unequal": steps * LATENCY + 1.5 * steps * part / BANDWIDTH,
        "alone": 0,
    }


def test_each_takes_what_its_formula_says(pair: Ranks) -> None:
    for rank in pair:
        assert rank["how_long_each_takes"] == expected(2)


def test_with_four_ranks_too(launch: Launch, tmp_path: Path) -> None:
    for rank in launch(tmp_path, "how_long_each_takes", 4):
        assert rank["how_long_each_takes"] == expected(4)
