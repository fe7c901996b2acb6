"""What `optimizer.state` shows, and that looking at one master does not join them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ascend_core import FeatureError
from ascend_core.testing import bitwise_equal

SHAPES = [(5,), (4097,), (3, 7)]


@pytest.fixture
def joined(run: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A run of two steps, and the slots whose masters were put together since."""
    trained, found = run("reuse", SHAPES).train(2), []
    masters = trained.optimizer._home.masters
    read = masters.read

    def noting(slot: Any) -> torch.Tensor:
        found.append(slot.parameter)
        master: torch.Tensor = read(slot)
        return master

    monkeypatch.setattr(masters, "read", noting)
    return trained, found


def test_a_master_is_joined_when_its_own_parameter_is_read(joined: Any) -> None:
    trained, found = joined
    state = trained.optimizer.state
    assert list(state) == list(state.keys()) == trained.weights
    assert len(state) == len(SHAPES)
    assert trained.weights[1] in state
    assert found == []
    first = state[trained.weights[1]]
    assert state[trained.weights[1]] is first
    assert found == [trained.weights[1]]


def test_saving_joins_each_master_once(joined: Any) -> None:
    trained, found = joined
    saved = trained.optimizer.state_dict()["state"]
    assert found == trained.weights
    assert all(type(kept) is dict and "master_param" in kept for kept in saved.values())


COPIES: dict[str, Callable[[Any], Mapping[Any, Any]]] = {
    "dict": dict,
    "unpacked": lambda state: {**state},
    "updated": lambda state: (into := {}).update(state) or into,
    "items": lambda state: dict(state.items()),
    "values": lambda state: dict(zip(state, state.values(), strict=True)),
    "get": lambda state: {weight: state.get(weight) for weight in state},
}


@pytest.mark.parametrize("way", COPIES)
def test_however_it_is_read_all_is_there(way: str, run: Any) -> None:
    trained = run("reuse", SHAPES).train(2)
    plain = run("beside", SHAPES).train(2)
    copied = COPIES[way](trained.optimizer.state)
    for weight, master in zip(trained.weights, plain.masters(), strict=True):
        assert bitwise_equal(copied[weight]["master_param"], master)


def test_a_parameter_without_state_has_none(run: Any) -> None:
    state = run("reuse", SHAPES).train(1).optimizer.state
    assert state[torch.ones(1)] == {}
    assert state.get(torch.ones(1)) is None
    assert state.get(torch.ones(1), 3) == 3


def test_what_is_read_behind_a_step_is_of_then(run: Any) -> None:
    trained, plain = run("reuse", SHAPES).train(1), run("beside", SHAPES).train(2)
    state = trained.optimizer.state
    trained.train(1, first=1)
    for weight, master in zip(trained.weights, plain.masters(), strict=True):
        assert bitwise_equal(state[weight]["master_param"], master)


def test_behind_the_removal_nothing_can_be_read(run: Any) -> None:
    trained = run("reuse", SHAPES).train(1)
    state = trained.optimizer.state
    trained.optimizer.remove()
    with pytest.raises(FeatureError, match="this optimizer was removed"):
        state[trained.weights[0]]
