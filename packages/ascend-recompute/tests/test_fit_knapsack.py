"""The choice of recompute against brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_recompute._knapsack import Choice, Option, choose

pytestmark = pytest.mark.host

Groups = list[list[Option]]

options = st.builds(Option, st.integers(1, 20), st.integers(0, 20).map(float))
groups_of_options = st.lists(st.lists(options, max_size=4), max_size=5)


def cheapest(groups: Groups, nbytes: int) -> float | None:
    """Every set there is, tried."""
    sets = itertools.product(*([Option(0, 0.0), *group] for group in groups))
    fitting = [one for one in sets if sum(option.nbytes for option in one) >= nbytes]
    return min((sum(option.seconds for option in one) for one in fitting), default=None)


def totals(groups: Groups, choice: Choice) -> Option:
    taken = zip(groups, choice.taken, strict=True)
    chosen = [group[place] for group, place in taken if place is not None]
    return Option(sum(one.nbytes for one in chosen), sum(one.seconds for one in chosen))


@given(groups_of_options, st.integers(0, 60))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_no_set_is_cheaper(groups: Groups, nbytes: int) -> None:
    choice, best = choose(groups, nbytes), cheapest(groups, nbytes)
    if best is None:
        assert choice is None
        return
    assert choice is not None
    assert choice.exact
    assert choice.seconds == choice.at_least == best
    assert totals(groups, choice) == (choice.nbytes, best)
    assert choice.nbytes >= nbytes


@given(groups_of_options, st.integers(1, 60))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_the_greedy_choice_keeps_its_bound(groups: Groups, nbytes: int) -> None:
    choice, best = choose(groups, nbytes, most_sets=0), cheapest(groups, nbytes)
    if best is None:
        assert choice is None
        return
    assert choice is not None
    assert not choice.exact
    assert totals(groups, choice) == (choice.nbytes, choice.seconds)
    assert choice.nbytes >= nbytes
    assert choice.at_least <= best + 1e-9
    assert best <= choice.seconds
    dearest = max(option.seconds for group in groups for option in group)
    assert choice.seconds <= choice.at_least + dearest + 1e-9


def test_thirty_candidates_of_the_worst_kind_are_exact() -> None:
    # No set of them beats another one: as many sets to keep as there are.
    groups = [[Option(2**n, float(2**n))] for n in range(30)]
    choice = choose(groups, 2**30 - 2**13 - 5)
    assert choice is not None
    assert choice.exact
    assert choice.seconds == 2**30 - 2**13 - 5


def layers(count: int, *, alike: bool) -> Groups:
    draw = random.Random(0)

    def layer() -> list[Option]:
        norm = Option(draw.randrange(900, 1100), draw.random())
        activation = Option(draw.randrange(1900, 2200), 1 + draw.random())
        whole = Option(draw.randrange(9000, 11000), 20 + draw.random())
        return [norm, activation, norm.and_also(activation), whole]

    first = layer()
    return [first if alike else layer() for _ in range(count)]


def test_many_layers_that_are_alike_are_exact() -> None:
    groups = layers(100, alike=True)
    choice = choose(groups, 500_000)
    assert choice is not None
    assert choice.exact


def test_many_layers_that_differ_are_close() -> None:
    groups = layers(100, alike=False)
    choice = choose(groups, 500_000)
    assert choice is not None
    assert choice.at_least <= choice.seconds <= choice.at_least * 1.02
