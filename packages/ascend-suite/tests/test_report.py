"""The report of a session: bytes, times, notes."""

from __future__ import annotations

import json

from ascend_suite.report import FeatureReport, SessionReport

VALUES = {
    "moved_bytes": 3 << 20,
    "moved_bytes_by_layer": {"a": 1},
    "device_state_bytes_in_step": 7,
    "exposed_ms": 1.5,
    "hit_rate": None,
    "prefetch_hits": 4,
    "modules": ["a", "b"],
    "recomputed": [],
    "optimizer": "AdamW",
    "undone": True,
}
ROW = FeatureReport.of("swap-attention", VALUES, 0.25, ["it only costs on a CPU."])


def test_values_are_sorted_into_bytes_times_and_notes() -> None:
    assert ROW.bytes == {"moved_bytes": 3 << 20, "device_state_bytes_in_step": 7}
    assert ROW.seconds == {"turning_on": 0.25, "exposed": 0.0015}
    assert ROW.notes == (
        "it only costs on a CPU.", "prefetch_hits: 4", "modules: 2", "optimizer: AdamW",
        "undone: True",
    )  # fmt: skip


def test_the_table_is_readable() -> None:
    lines = str(SessionReport((ROW,), ("Something else.",))).splitlines()
    assert lines[0].split() == ["feature", "bytes", "time", "notes"]
    assert "moved 3.0 MiB" in lines[2] and "turning on 250.0 ms" in lines[2]
    assert "device state in step 7 B" in lines[3] and "exposed 1.5 ms" in lines[3]
    assert lines[-1] == "Something else."
    assert max(map(len, lines)) <= 150
    assert str(SessionReport(())) == "no feature is on"


def test_metrics_are_flat_numbers() -> None:
    assert SessionReport((ROW,)).metrics() == {
        "ascend/swap-attention/turning_on_seconds": 0.25,
        "ascend/swap-attention/moved_bytes": 3 << 20,
        "ascend/swap-attention/device_state_bytes_in_step": 7,
        "ascend/swap-attention/exposed_ms": 1.5,
        "ascend/swap-attention/prefetch_hits": 4,
    }


def test_as_json() -> None:
    [row] = json.loads(json.dumps(SessionReport((ROW,), ("Else.",)).as_json()))["features"]
    assert row["values"] == VALUES
    assert row["bytes"]["moved_bytes"] == 3 << 20
