from __future__ import annotations

from pathlib import Path

import pytest

from ascend_sim import ConfigError, Profile, SimConfig
from ascend_sim.profile import PUBLISHED


def test_the_published_profile_is_in_the_package_and_says_that_it_is_a_model() -> None:
    assert Profile.read(PUBLISHED).launch_us > 0
    assert "It is a model and not an NPU's timing." in PUBLISHED.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("launch_us", "launch_ms", "missing or unknown: launch_ms, launch_us"),
        ("launch_us = 5.0", "launch_us = -1", "launch_us=-1 cannot be.*\n.*0 or more"),
        ("memory_gbps = 1200.0", "memory_gbps = 0", "memory_gbps=0 cannot be.*\n.*more than 0"),
        ("h2d_gbps = 25.0", "h2d_gbps = nan", "h2d_gbps=nan cannot be"),
        ("h2d_gbps = 25.0", 'h2d_gbps = "fast"', "h2d_gbps='fast' is no number"),
        ("launch_us = 5.0", "launch_us = true", "launch_us=True is no number"),
        ("launch_us = 5.0", "launch_us 5", "is no profile"),
    ],
)
def test_what_is_no_profile_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = PUBLISHED.read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    assert path.read_text() != text
    with pytest.raises(ConfigError, match=message):
        SimConfig(profile=str(path))


def test_options_take_the_place_of_the_profiles_figures() -> None:
    published = Profile.read(PUBLISHED)
    rates = SimConfig(h2d_gbps=1.5, copy_latency_us=0.0).rates()
    assert (rates.h2d_gbps, rates.copy_latency_us) == (1.5, 0.0)
    assert (rates.d2h_gbps, rates.launch_us) == (published.d2h_gbps, published.launch_us)
