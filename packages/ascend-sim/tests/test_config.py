from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import ascend_sim
from ascend_sim import ConfigError, SimConfig
from ascend_sim.config import parse_size
from ascend_sim.profile import PUBLISHED


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64M", 64 * 2**20),
        ("1.5G", 3 * 2**29),
        ("4 KiB", 4096),
        ("2gb", 2**31),
        ("512", 512),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_sizes_are_powers_of_1024(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "64X", "-1", "1e3", "64MM"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hbm": 0}, "no memory"),
        ({"devices": 0}, "devices=0 cannot be simulated.*\n.*from 1 to 64"),
        ({"devices": 65}, "devices=65"),
        ({"schedule": "fast"}, "eager, thread, lazy, early, random, timed"),
        ({"h2d_gbps": 0.0}, "h2d_gbps"),
        ({"d2h_gbps": float("inf")}, "d2h_gbps"),
        ({"d2d_gbps": float("nan")}, "d2d_gbps"),
        ({"copy_latency_us": -1.0}, "copy_latency_us"),
        ({"copy_latency_us": float("nan")}, "copy_latency_us"),
        ({"query_stall": -1}, "query_stall"),
        ({"seed": -1}, "seed=-1 is no seed"),
        ({"profile": "/no/such.toml"}, "/no/such.toml is no profile"),
        ({"collective_timeout_s": 0.0}, "collective_timeout_s"),
        ({"collective_timeout_s": float("inf")}, "collective_timeout_s"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimConfig(**options)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"hbm": 1.5}, "a whole number of bytes, or a text"),
        ({"hbm": None}, "a whole number of bytes, or a text"),
        ({"hbm": True}, "a whole number of bytes, or a text"),
        ({"devices": "2"}, "a whole number"),
        ({"devices": 1.5}, "a whole number"),
        ({"devices": True}, "a whole number"),
        ({"schedule": None}, "a text"),
        ({"h2d_gbps": "20"}, "a number, or None"),
        ({"h2d_gbps": True}, "a number, or None"),
        ({"copy_latency_us": "1"}, "a number, or None"),
        ({"query_stall": 1.5}, "a whole number"),
        ({"poison": "yes"}, "True or False"),
        ({"poison": 1}, "True or False"),
        ({"strict": None}, "True or False"),
    ],
)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], instead: str) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as caught:
        SimConfig(**options)
    assert caught.value.what == f"{name}={value!r} cannot be."
    assert caught.value.instead.startswith(instead)


def test_a_config_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start\('64M'\).*\n.*by their names"):
        ascend_sim.start("64M")  # type: ignore[arg-type]


def test_the_same_device_is_the_same_config() -> None:
    one, other = SimConfig(hbm="64M"), SimConfig(hbm=64 * 2**20)
    assert one == other
    assert len({one, other, SimConfig(hbm="65M"), SimConfig(hbm="64M", devices=2)}) == 3
    assert one != "64M"


def test_every_option_can_come_from_the_environment() -> None:
    environment = {
        "ASCENDSIM_HBM": "64M",
        "ASCENDSIM_DEVICES": "2",
        "ASCENDSIM_SCHEDULE": "lazy",
        "ASCENDSIM_H2D_GBPS": "1.5",
        "ASCENDSIM_D2H_GBPS": "2",
        "ASCENDSIM_D2D_GBPS": "100",
        "ASCENDSIM_COPY_LATENCY_US": "10",
        "ASCENDSIM_POISON": "yes",
        "ASCENDSIM_QUERY_STALL": "7",
        "ASCENDSIM_COLLECTIVE_TIMEOUT_S": "2.5",
        "ASCENDSIM_BLOCKING_SENDS": "1",
        "ASCENDSIM_STRICT": "1",
        "ASCENDSIM_SEED": "3",
        "ASCENDSIM_PROFILE": str(PUBLISHED),
        "ASCENDSIM_TRACE": "1",
    }
    expected = SimConfig(
        hbm="64M",
        devices=2,
        schedule="lazy",
        h2d_gbps=1.5,
        d2h_gbps=2.0,
        d2d_gbps=100.0,
        copy_latency_us=10.0,
        poison=True,
        query_stall=7,
        collective_timeout_s=2.5,
        blocking_sends=True,
        strict=True,
        seed=3,
        profile=str(PUBLISHED),
        trace=True,
    )
    assert len(environment) == len(dataclasses.fields(SimConfig))
    assert SimConfig.from_environment(environment) == expected


def test_an_argument_has_the_last_word_over_the_environment() -> None:
    environment = {"ASCENDSIM_SCHEDULE": "lazy", "ASCENDSIM_DEVICES": "2", "HOME": "/"}
    config = SimConfig.from_environment(environment, schedule="thread")
    assert (config.schedule, config.devices) == ("thread", 2)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ASCENDSIM_MODE": "lazy"}, "ASCENDSIM_MODE is no option.*\n.*ASCENDSIM_SCHEDULE"),
        ({"ASCENDSIM_DEVICES": "two"}, "ASCENDSIM_DEVICES='two'.*\n.*a whole number is needed"),
        ({"ASCENDSIM_H2D_GBPS": "fast"}, "ASCENDSIM_H2D_GBPS='fast'.*\n.*a number is needed"),
        ({"ASCENDSIM_POISON": "maybe"}, "ASCENDSIM_POISON='maybe'"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimConfig.from_environment(environment)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="memory is no option"):
        SimConfig.from_environment({}, memory="64M")


def test_variables_that_are_no_options_are_left_alone() -> None:
    environment = {"ASCENDSIM_CACHE": "/somewhere", "ASCENDSIM_CXX": "clang++"}
    assert SimConfig.from_environment(environment) == SimConfig()
