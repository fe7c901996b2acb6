"""The table of rules: each speaks where it should and nowhere else, and names what there is."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_suite._kinds import fits
from ascend_suite.check import check
from ascend_suite.finding import Severity
from ascend_suite.plan import Plan
from ascend_suite.predicate import Compare
from ascend_suite.rule import Rule
from ascend_suite.rules import RULES
from ascend_suite.rules.out_of_scope import OUT_OF_SCOPE
from ascend_suite.vocabulary import VOCABULARY

sys.path.insert(0, str(Path(__file__).parent))
from rule_examples import CONFIGS, EXAMPLES

ROOT = Path(__file__).parents[3]
ROWS = 124  # of the table of constraints of the incumbent, its documents and megatron-core
by_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])


def speak(plan: Plan) -> set[str | None]:
    return {finding.rule for finding in check(plan)}


def test_every_rule_has_an_example_and_an_id_of_its_own() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))
    assert set(EXAMPLES) == set(ids)


@by_rule
def test_it_speaks(rule: Rule) -> None:
    assert rule.id in speak(EXAMPLES[rule.id][0])


@by_rule
def test_it_is_silent(rule: Rule) -> None:
    assert rule.id not in speak(EXAMPLES[rule.id][1])


@by_rule
def test_it_is_silent_about_what_is_not_known(rule: Rule) -> None:
    speaking = EXAMPLES[rule.id][0]
    read = rule.fires_when.names()
    for name in speaking.training:
        if f"training.{name}" in read:
            fewer = {key: value for key, value in speaking.training.items() if key != name}
            held = rule.fires_when.holds(Plan(speaking.features, fewer))
            assert held is not True, f"{rule.id} holds without {name}"


@by_rule
def test_a_framework_that_it_is_not_about(rule: Rule) -> None:
    other = {"pytorch": "megatron-core", "megatron-core": "pytorch"}.get(rule.scope)
    speaking = EXAMPLES[rule.id][0]
    if other is not None:
        elsewhere = Plan(speaking.features, {**speaking.training, "framework": other})
        assert rule.id not in speak(elsewhere)


@by_rule
def test_what_it_names_is_there(rule: Rule) -> None:
    assert rule.subject in CONFIGS or rule.subject in VOCABULARY
    for name in rule.fires_when.names():
        owner, _, option = name.partition(".")
        if owner == "training":
            assert option in VOCABULARY, name
        elif option:
            assert option in {field.name for field in dataclasses.fields(CONFIGS[owner])}, name
        else:
            assert owner in CONFIGS, name


def leaves(predicate: object) -> Iterator[Compare]:
    if isinstance(predicate, Compare):
        yield predicate
    for part in (getattr(predicate, "part", None), *getattr(predicate, "parts", ())):
        if part is not None:
            yield from leaves(part)


@by_rule
def test_what_it_compares_with_may_be_given(rule: Rule) -> None:
    for leaf in leaves(rule.fires_when):
        name = str(leaf.left)
        if name not in VOCABULARY or leaf.relation not in ("is", "is among", "has", "lacks"):
            continue
        values = leaf.right if leaf.relation == "is among" else (leaf.right,)
        assert isinstance(values, tuple)
        for value in values:
            given = (value,) if leaf.relation in ("has", "lacks") else value
            assert fits(given, VOCABULARY[name].type), (name, given)


@by_rule
def test_its_examples_are_plans_that_may_be_read(rule: Rule) -> None:
    for example in EXAMPLES[rule.id]:
        for name, value in example.training.items():
            assert fits(value, VOCABULARY[name].type), (name, value)


@by_rule
def test_its_texts(rule: Rule) -> None:
    for text in (rule.what, rule.because, rule.instead):
        assert text.endswith("."), text
        assert len(text) > 12, text
        assert "  " not in text, text
        assert ".." not in text.replace("(...", ""), text
    assert rule.source
    assert str(rule.fires_when)


@by_rule
def test_its_proof_is_a_test(rule: Rule) -> None:
    if rule.proof is None:
        return
    assert rule.severity is Severity.ERROR, "what is no error needs no leave"
    path, _, name = rule.proof.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_constraints_is_a_rule_or_out_of_scope() -> None:
    ruled = {
        int(number)
        for rule in RULES
        for listed in re.findall(r"constraints ([\d, ]+)", rule.source)
        for number in re.findall(r"\d+", listed)
    }
    out = [entry.row for entry in OUT_OF_SCOPE]
    assert len(out) == len(set(out))
    assert ruled.isdisjoint(out)
    assert ruled | set(out) == set(range(1, ROWS + 1))


def test_what_is_out_of_scope_says_why() -> None:
    for entry in OUT_OF_SCOPE:
        assert entry.subject
        assert entry.reason.endswith("."), entry.reason
        assert len(entry.reason) > 20
