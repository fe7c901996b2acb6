"""Conditions on a plan: three values, what they read, and how they are written."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_suite.plan import Plan
from ascend_suite.predicate import All, AnyOf, Compare, Not, On, Option, Product, Sum, Unless
from ascend_suite.rule import Predicate

sys.path.insert(0, str(Path(__file__).parent))
from rule_examples import plan

A, B, C = (Option(f"training.{name}") for name in "abc")
VALUES = st.sampled_from([True, False, None, 0, 1, 2, "x"])
PLANS = st.builds(
    lambda training, features: Plan(dict.fromkeys(features), training),
    st.dictionaries(st.sampled_from("abc"), VALUES),
    st.sets(st.sampled_from(["f", "g"])),
)
LEAVES = st.one_of(
    st.builds(On, st.sampled_from(["f", "g"])),
    st.builds(
        Compare,
        st.sampled_from([A, B, C]),
        st.sampled_from(["is", "is not", "is more than", "is a multiple of"]),
        VALUES,
    ),
)
PREDICATES: st.SearchStrategy[Predicate] = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.builds(Not, parts),
        st.lists(parts, min_size=1, max_size=3).map(lambda ones: All(*ones)),
        st.lists(parts, min_size=1, max_size=3).map(lambda ones: AnyOf(*ones)),
    ),
    max_leaves=8,
)


@given(PREDICATES, PLANS)
def test_not_is_the_opposite_and_knows_no_more(predicate: Predicate, where: Plan) -> None:
    held, opposite = predicate.holds(where), Not(predicate).holds(where)
    assert (held is None) == (opposite is None)
    assert held is None or opposite is not held


@given(st.lists(PREDICATES, min_size=1, max_size=3), PLANS)
def test_not_all_is_any_of_nots(parts: list[Predicate], where: Plan) -> None:
    assert Not(All(*parts)).holds(where) is AnyOf(*map(Not, parts)).holds(where)


@given(PREDICATES, PLANS, st.sampled_from("abc"), VALUES)
def test_what_is_known_stays_so_when_more_is_known(
    predicate: Predicate, where: Plan, name: str, value: object
) -> None:
    held = predicate.holds(where)
    if held is not None and name not in where.training:
        assert predicate.holds(Plan(where.features, {**where.training, name: value})) is held


@given(PREDICATES, PLANS)
def test_what_it_does_not_name_does_not_matter(predicate: Predicate, where: Plan) -> None:
    names = predicate.names()
    read = Plan(
        {name: config for name, config in where.features.items() if name in names},
        {name: value for name, value in where.training.items() if f"training.{name}" in names},
    )
    assert predicate.holds(read) is predicate.holds(where)


@pytest.mark.parametrize("values", list(itertools.product([True, False, None], repeat=2)))
def test_three_values(values: tuple[bool | None, bool | None]) -> None:
    known = {name: value for name, value in zip("ab", values, strict=True) if value is not None}
    where = Plan({}, known)
    parts = A.equals(True), B.equals(True)
    both, either = All(*parts).holds(where), AnyOf(*parts).holds(where)
    assert both is (False if False in values else None if None in values else True)
    assert either is (True if True in values else None if None in values else False)
    assert Unless(parts[0]).holds(where) is (values[0] is not True)


@pytest.mark.parametrize(
    ("predicate", "held"),
    [
        (A.equals(1), True),
        (A.equals(True), False),
        (A.differs(True), True),
        (A.within((1, 2)), True),
        (A.outside((1, 2)), False),
        (A.at_least(1), True),
        (A.more_than(1), False),
        (A.less_than(2), True),
        (A.more_than("1"), None),
        (A.more_than(Option("training.unknown")), None),
        (A.holding("x"), None),
        (A.divisible_by(0), None),
        (Option("training.eight").divisible_by(Product(Option("training.two"), 2)), True),
        (Option("training.eight").indivisible_by(3), True),
        (Option("training.eight").divisible_by(Option("training.words")), None),
        (Sum(A, 1).equals(2), True),
        (Sum(A, Option("training.nothing")).equals(2), None),
        (Option("training.list").holding("x"), True),
        (Option("training.list").lacking("z"), True),
        (Option("training.words").holding("y"), True),
        (Option("training.list").within(("x", "y", "z")), True),
        (Option("training.list").outside(("x",)), True),
        (Option("training.words").sharing(Option("training.list")), True),
        (Option("training.list").sharing(("q",)), False),
        (Option("training.list").sharing(1), None),
        (Option("training.places").reaching(5), True),
        (Option("training.places").reaching(6), False),
        (Option("training.places").reaching_below(3), True),
        (Option("training.places").reaching_below(2), False),
        (Option("training.places").reaching("x"), None),
        (Option("training.words").reaching(1), False),
        (Option("training.nothing").equals(None), True),
        (Option("training.nothing").holding("x"), None),
        (Option("training.nothing").more_than(0), None),
        (Option("training.version").older_than("2.13"), True),
        (Option("training.version").older_than("2.12"), False),
        (Option("training.words").older_than("2.12"), None),
        (Option("swap-attention.prefetch").equals(1), True),
        (Option("swap-optimizer.disk").equals(None), None),
    ],
    ids=str,
)
def test_comparisons(predicate: Compare, held: bool | None) -> None:
    where = plan(
        "swap-attention",
        a=1,
        two=2,
        eight=8,
        list=("x", "y"),
        places=(2, 5),
        words="x, y",
        nothing=None,
        version="2.12.1",
    )
    assert predicate.holds(where) is held


def test_names() -> None:
    predicate = All(
        On("f"), Not(AnyOf(On("g"), Sum(A, Product(B, 2)).more_than(C))), Unless(On("h"))
    )
    assert predicate.names() == {"f", "g", "h", "training.a", "training.b", "training.c"}


def test_words() -> None:
    assert str(All(On("f"), Not(On("g")), AnyOf(A.equals(1), B.differs(None)))) == (
        "f is on and g is off and (a is 1 or b is set)"
    )
    assert str(Not(A.within((1, 2)))) == "not (a is among 1, 2)"
    assert str(Unless(On("f"))) == "unless (f is on)"
    assert str(Product(A, Sum(B, 2)).more_than(C)) == "a x (b + 2) is more than c"
    assert str(All(On("f"), All(On("g"), On("h")))) == "f is on and g is on and h is on"
    assert str(A.equals(())) == "a is empty"


def test_a_relation_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no relation 'resembles'"):
        Compare(A, "resembles", 1)


def test_they_are_data() -> None:
    assert All(On("f"), A.equals(1)) == All(On("f"), A.equals(1))
    assert All(On("f")) != AnyOf(On("f"))
    assert len({Sum(A, B), Sum(A, B), Product(A, B)}) == 2
