"""The check of a plan: all findings at once, their order, and rules that are allowed."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from ascend_core.errors import ConfigError
from ascend_suite.check import check, require
from ascend_suite.finding import IncompatiblePlanError, Severity, errors_of
from ascend_suite.plan import Plan
from ascend_suite.predicate import On
from ascend_suite.rule import Rule, Scope
from ascend_suite.rules import RULES

sys.path.insert(0, str(Path(__file__).parent))
from rule_examples import plan

FIVE_FAULTS = plan(
    "swap-optimizer",
    "reuse-fp32-param",
    "recompute-activation",
    "recompute-layers",
    bf16=False,
    capturable=True,
    position_embedding_type="alibi",
    context_parallel_size=2,
)
ALLOWABLE = plan("swap-attention", lora=True)
RULE = Rule(
    id="a/b",
    subject="a",
    relation="conflicts",
    fires_when=On("a"),
    what="a is on.",
    because="it is.",
    instead="leave it off.",
    source="this test",
)


def test_five_faults_are_five_errors() -> None:
    assert [finding.rule for finding in errors_of(check(FIVE_FAULTS))] == [
        "swap-optimizer/reuse-fp32-param",
        "recompute-activation/all-layers-recomputed",
        "reuse-fp32-param/bf16",
        "swap-optimizer/capturable",
        "reuse-fp32-param/capturable",
        "alibi/context-parallel",
    ]  # capturable is a fault of the plan, and a matter of two features


def test_a_refused_plan_tells_of_all_of_them() -> None:
    with pytest.raises(IncompatiblePlanError) as caught:
        require(FIVE_FAULTS)
    assert isinstance(caught.value, ConfigError)
    text = str(caught.value)
    for finding in errors_of(check(FIVE_FAULTS)):
        assert finding.what in text
    assert text.count("  instead  ") == 6
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.findings == caught.value.findings == check(FIVE_FAULTS)


def test_a_plan_without_a_fault_is_taken() -> None:
    assert require(plan("swap-optimizer", "recompute-norm", device="npu")) == ()


def test_warnings_and_notes_do_not_refuse() -> None:
    findings = require(plan("swap-attention", device="cpu", use_flash_attn=False))
    assert [finding.severity for finding in findings] == [Severity.WARNING, Severity.NOTE]


def test_the_gravest_come_first_and_then_the_order_of_the_table() -> None:
    rules = [
        dataclasses.replace(RULE, id=f"a/{severity}{number}", severity=severity)
        for number in range(2)
        for severity in (Severity.NOTE, Severity.ERROR, Severity.WARNING)
    ]
    assert [finding.rule for finding in check(Plan({"a": None}), rules=rules)] == [
        *("a/error0", "a/error1", "a/warning0", "a/warning1", "a/note0", "a/note1"),
    ]


@pytest.mark.parametrize("scope", typing.get_args(Scope))
@pytest.mark.parametrize("framework", ["pytorch", "megatron-core", None])
def test_a_rule_of_another_framework_is_not_asked(scope: Scope, framework: str | None) -> None:
    training = {} if framework is None else {"framework": framework}
    found = check(Plan({"a": None}, training), rules=[dataclasses.replace(RULE, scope=scope)])
    assert bool(found) is (scope == "both" or framework in (None, scope))


def test_the_plan_stays_as_it_is() -> None:
    features, training = dict(FIVE_FAULTS.features), dict(FIVE_FAULTS.training)
    check(FIVE_FAULTS)
    assert (dict(FIVE_FAULTS.features), dict(FIVE_FAULTS.training)) == (features, training)


# allow -------------------------------------------------------------------------------------------


def allowing(given: Plan, *ids: str) -> Plan:
    return dataclasses.replace(given, allow=ids)


def test_what_can_be_allowed_says_so() -> None:
    (finding,) = check(ALLOWABLE)
    assert finding.severity is Severity.ERROR
    assert "allow = ['swap-attention/lora']" in str(finding.instead)


def test_what_is_allowed_is_a_note() -> None:
    (finding,) = require(allowing(ALLOWABLE, "swap-attention/lora"))
    assert finding.severity is Severity.NOTE
    assert finding.rule == "swap-attention/lora"
    assert "test_adapters_on_frozen_weights" in str(finding.why)


def test_an_unknown_rule_suggests_the_right_one() -> None:
    findings = check(allowing(ALLOWABLE, "swap-attention/lorra"))
    assert [finding.subject for finding in findings] == ["swap-attention", "allow"]
    assert findings[1].severity is Severity.ERROR
    assert findings[1].instead == "did you mean 'swap-attention/lora'?"
    (nothing,) = check(allowing(plan(), "zzz"))
    assert nothing.instead == "leave it out."


def test_a_rule_without_a_proof_cannot_be_allowed() -> None:
    refused = plan("swap-optimizer", "reuse-fp32-param")
    findings = check(allowing(refused, "swap-optimizer/reuse-fp32-param"))
    assert [finding.severity for finding in findings] == [Severity.ERROR, Severity.ERROR]
    assert findings[1].what.endswith("cannot be allowed.")
    assert "no test" in str(findings[1].why)


def test_to_allow_what_does_not_speak_is_noted_once() -> None:
    (finding,) = require(allowing(plan(), "swap-attention/lora", "swap-attention/lora"))
    assert finding.severity is Severity.NOTE
    assert "has nothing against" in finding.what


# The time that it takes -------------------------------------------------------------------------


def test_it_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from ascend_suite.check import check\n"
        "from ascend_suite.explain import pairs\n"
        "from ascend_suite.plan import Plan\n"
        "check(Plan())\n"
        "pairs()\n"
        "assert not {'torch', 'megatron', 'torch_npu'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_rule_that_is_an_error_is_one_in_the_check() -> None:
    assert {rule.severity for rule in RULES} == set(Severity)
