"""Timelines: peaks, thinning, files and pictures."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_core import ConfigError, MemoryTimeline, UnavailableError, plot_timelines
from ascend_core.memory._profiler import _changes

SIZES = st.lists(st.integers(min_value=-(10**12), max_value=10**12), min_size=1, max_size=300)


def timeline_of(sizes: list[int]) -> MemoryTimeline:
    return MemoryTimeline(tuple((index * 0.5, size) for index, size in enumerate(sizes)))


def test_the_peak_of_nothing_is_zero() -> None:
    assert MemoryTimeline(()).peak == 0
    assert MemoryTimeline(()).seconds == 0


@given(SIZES, st.integers(min_value=4, max_value=60))
def test_thinning_keeps_peak_low_and_ends_within_the_limit(sizes: list[int], limit: int) -> None:
    full = timeline_of(sizes)
    thin = full.downsampled(limit)
    assert len(thin.events) <= limit
    assert thin.peak == full.peak
    assert min(size for _, size in thin.events) == min(sizes)
    assert thin.events[0] == full.events[0]
    assert thin.events[-1] == full.events[-1]
    assert list(thin.events) == sorted(set(thin.events) & set(full.events))


def test_thinning_to_fewer_than_four_events_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 events"):
        timeline_of([1, 2]).downsampled(3)


@given(sizes=SIZES)
def test_json_brings_back_the_same_timeline(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    timeline = MemoryTimeline(tuple((index / 3, size) for index, size in enumerate(sizes)))
    path = tmp_path_factory.getbasetemp() / "memory.json"
    timeline.to_json(path)
    assert MemoryTimeline.from_json(path) == timeline


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no json", '{"format": "other", "version": 1, "seconds": [], "bytes": []}']
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json is no memory timeline"):
        MemoryTimeline.from_json(path)


def test_a_block_whose_free_was_not_seen_ends_when_its_address_is_used_again() -> None:
    events = [(1, 0xA, 100), (2, 0xA, 60), (3, 0xB, -5), (4, 0xA, -60)]
    assert list(_changes(events)) == [(1, 100), (2, -40), (4, -60)]


def test_a_picture_has_one_panel_per_timeline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    one = timeline_of([0, 5 << 20, 1 << 20])
    one.to_png(tmp_path / "one.png")
    plot_timelines({"plain": one, "less": timeline_of([0, 2 << 20])}, tmp_path / "two.png")
    (width, low), (same_width, high) = (
        struct.unpack(">II", (tmp_path / name).read_bytes()[16:24])
        for name in ("one.png", "two.png")
    )
    assert width == same_width
    assert high > low


def test_drawing_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no timeline"):
        plot_timelines({"plain": MemoryTimeline(())}, tmp_path / "none.png")


def test_without_matplotlib_drawing_names_the_extra(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["matplotlib"] = None
from ascend_core import MemoryTimeline, UnavailableError
try:
    MemoryTimeline(((0.0, 1),)).to_png({str(tmp_path / "x.png")!r})
except UnavailableError as error:
    assert "ascend-core[plot]" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert issubclass(UnavailableError, RuntimeError)
