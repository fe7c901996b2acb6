"""Every pair of features trains together, bit for bit, or is refused by the rule that says why.

See [Note: what a combination is held to] in pairs.py. Triples are in the nightly run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_core.device import available_backends
from ascend_core.testing import compare_runs, run_ranks
from ascend_recompute.config import RecomputeLayersConfig
from ascend_suite.check import check
from ascend_suite.explain import Kind
from ascend_suite.explain import pairs as verdicts
from ascend_suite.finding import IncompatiblePlanError, errors_of
from ascend_suite.plan import Plan
from ascend_suite.rules import RULES
from ascend_swap.config import SwapAttentionConfig
from tests_integration import pairs

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ROOT / "packages/ascend-sim/tests/launch_ranks.py"
SIMULATED = "npu" in available_backends() and "ASCENDSIM_SCHEDULE" in os.environ
DEVICES = ["cpu", *(["npu:0"] if SIMULATED else [])]
SIZES = [2, pytest.param(3, marks=pytest.mark.nightly)]

Found = Sequence[Mapping[str, str]]

# Of the demo's MLPs, which have gate and up apart; what is computed is the same in every run.
pytestmark = pytest.mark.filterwarnings(
    "ignore:ascend_ops.swiglu is computed by torch's operators:UserWarning"
)


def every(*, ranks: bool) -> list[Any]:
    """The pairs and, for the nightly run, the triples, as parameters."""
    return [
        pytest.param(names, id=" + ".join(names), marks=[pytest.mark.nightly] if size == 3 else [])
        for size in (2, 3)
        for names in pairs.combinations(size, ranks=ranks)
    ]


def refused(names: tuple[str, ...]) -> bool:
    """Whether rules refuse these features; that nothing is turned on then is looked at, too."""
    plan = pairs.plan_of(names)
    errors = errors_of(check(plan))
    if errors:
        with pytest.raises(IncompatiblePlanError) as caught:
            pairs.turned_on(plan)
        assert {error.rule for error in errors} <= {one.rule for one in caught.value.findings}
    return bool(errors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", every(ranks=False))
def test_together_or_refused(names: tuple[str, ...], device: str) -> None:
    if not refused(names):
        assert pairs.difference(pairs.plan_of(names), device) is None


# Between ranks -----------------------------------------------------------------------------------


def ranks_of_cpu(size: int) -> Found:
    permitted = pairs.permitted(size, ranks=True)
    return run_ranks(pairs.on_ranks, pairs.RANKS, permitted, "cpu", timeout_s=900)


def ranks_of_npu(size: int, folder: Path) -> Found:
    function = {2: "pairs_on_npu", 3: "triples_on_npu"}[size]
    variables = {
        "ASCENDSIM_DEVICES": str(pairs.RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    module, backends = "tests_integration.pairs", "cpu:gloo,npu:hccl"
    command = [LAUNCHER, module, function, str(pairs.RANKS), backends, folder]
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **variables}, capture_output=True,
        text=True, timeout=900, check=False,
    )  # fmt: skip
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert done.returncode == 0, done.stderr
    results = (folder / f"{rank}.json" for rank in range(pairs.RANKS))
    return [json.loads(result.read_text())[function] for result in results]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Found]:
    """What went wrong on two ranks, by device and number of features: one start for each."""
    return {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", every(ranks=True))
def test_together_or_refused_between_ranks(
    names: tuple[str, ...],
    device: str,
    ranks: dict[tuple[str, int], Found],
    tmp_path: Path,
) -> None:
    key = device, len(names)
    if refused(names):
        return
    if key not in ranks:
        ranks[key] = ranks_of_cpu(key[1]) if device == "cpu" else ranks_of_npu(key[1], tmp_path)
    found = ranks[key]
    assert len(found) == pairs.RANKS
    assert [rank.get(" + ".join(names)) for rank in found] == [None] * pairs.RANKS


# What the tests see ------------------------------------------------------------------------------


def test_runs_that_differ_are_told_apart() -> None:
    plain, fused, bf16 = (
        pairs.reference("cpu", fused=fused, bf16=bf16, ranks=False)
        for fused, bf16 in ((False, False), (True, False), (False, True))
    )
    assert compare_runs(plain, fused) is not None
    assert compare_runs(plain, bf16) is not None


def test_a_feature_that_does_nothing_is_seen() -> None:
    idle = {"swap-attention": SwapAttentionConfig(min_bytes=1 << 30)}
    plan = pairs.plan_of(["recompute-norm"], configs=idle)
    assert pairs.difference(plan, "cpu") == "swap-attention did nothing"


# Behind allow ------------------------------------------------------------------------------------

ALLOWED: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "swap-attention/mlp-recomputed-twice": (
        {
            "recompute-activation": pairs.CONFIGS["recompute-activation"],
            "swap-attention": dataclasses.replace(
                pairs.CONFIGS["swap-attention"], recompute_num_layers=1
            ),
        },
        (),
    ),
    "swap-attention/all-layers-recomputed": (
        {
            "recompute-layers": RecomputeLayersConfig(),
            "swap-attention": pairs.CONFIGS["swap-attention"],
        },
        ("swap-attention",),
    ),
}
"""For each rule that can be allowed, features that it refuses, and which of them find nothing."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ALLOWED)
def test_allowed(rule: str, device: str) -> None:
    """What our design makes work, and the documents do not: refused unless it is asked for."""
    configs, may_idle = ALLOWED[rule]
    with pytest.raises(IncompatiblePlanError) as caught:
        pairs.trained(pairs.plan_of([], configs=configs), device)
    assert {error.rule for error in errors_of(caught.value.findings)} == {rule}
    plan = pairs.plan_of([], (rule,), configs)
    assert pairs.difference(plan, device, may_idle) is None


def test_every_rule_on_features_alone_that_can_be_allowed_is_tried() -> None:
    of_features = {
        rule.id
        for rule in RULES
        if rule.proof is not None
        and not any(name.startswith("training.") for name in rule.fires_when.names())
        and len({name.partition(".")[0] for name in rule.fires_when.names()}) > 1
    }
    assert of_features == set(ALLOWED)


@pytest.mark.parametrize("names", pairs.combinations(2, ranks=False), ids=" + ".join)
def test_the_verdict_that_is_shown_is_what_the_rules_say(names: tuple[str, ...]) -> None:
    """A pair that goes together does so also as it is by default."""
    kind = verdicts()[frozenset(names)].kind
    plans = [pairs.plan_of(names), Plan({name: type(pairs.CONFIGS[name])() for name in names})]
    errors = [bool(errors_of(check(plan))) for plan in plans]
    assert kind is not Kind.REFUSED or all(errors)
    assert kind is not Kind.TOGETHER or not any(errors)
    assert kind is Kind.REFUSED or not errors[0]
