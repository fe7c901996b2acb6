"""Which features go together best."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_core.feature import Feature, discover
from ascend_suite.demo.best import best_combination, go_together

FEATURES = discover()
PEAKS: dict[str, int | None] = {
    "fused-ops": 80, "recompute-layers": 50, "swap-optimizer": 70, "recompute-norm": 90
}  # fmt: skip


def chosen(
    peaks: dict[str, int | None], together: dict[frozenset[str], int], plain: int | None = 100
) -> tuple[list[str], list[frozenset[str]]]:
    """The names that are chosen, and what was measured for it."""
    measured: list[frozenset[str]] = []

    def measure(features: Sequence[Feature]) -> int | None:
        measured.append(frozenset(feature.name for feature in features))
        return together.get(measured[-1])

    found = best_combination(peaks, FEATURES, plain, 4, measure)
    return [feature.name for feature in found], measured


def test_each_further_feature_has_to_lower_the_peak() -> None:
    first = frozenset({"recompute-layers", "swap-optimizer"})
    second = first | {"fused-ops"}
    assert chosen(PEAKS, {first: 40, second: 40}) == (
        ["recompute-layers", "swap-optimizer"], [first, second]
    )  # fmt: skip
    assert chosen(PEAKS, {first: 40, second: 39})[0] == [
        "recompute-layers", "swap-optimizer", "fused-ops"
    ]  # fmt: skip


def test_what_a_rule_refuses_or_warns_of_is_not_tried() -> None:
    names, measured = chosen(PEAKS, {})
    assert names == ["recompute-layers"]
    assert not any("recompute-norm" in together for together in measured)
    assert not go_together([FEATURES["fused-ops"], FEATURES["recompute-norm"]], 4)
    assert go_together([FEATURES["fused-ops"], FEATURES["recompute-layers"]], 4)


def test_what_saves_nothing_takes_no_part() -> None:
    assert chosen({"fused-ops": 100, "swap-optimizer": 120}, {}) == ([], [])
    assert chosen({"fused-ops": 99, "swap-optimizer": 120}, {}) == (["fused-ops"], [])


def test_where_the_plain_run_is_out_of_memory_all_that_ran_take_part() -> None:
    both = frozenset({"fused-ops", "swap-optimizer"})
    peaks = {"fused-ops": 100, "swap-optimizer": 120}
    assert chosen(peaks, {both: 90}, plain=None) == (["fused-ops", "swap-optimizer"], [both])


def test_what_does_not_run_together_stays_out() -> None:
    assert chosen({"fused-ops": 60, "swap-optimizer": 70}, {})[0] == ["fused-ops"]


def test_what_is_out_of_memory_alone_may_help_beside_others() -> None:
    both = frozenset({"recompute-layers", "swap-optimizer"})
    peaks = {"swap-optimizer": None, "recompute-layers": 50}
    found = chosen(peaks, {both: 40}, plain=None)
    assert found == (["recompute-layers", "swap-optimizer"], [both])
    assert chosen(peaks, {both: 40}, plain=100)[0] == ["recompute-layers"]
    assert chosen({"fused-ops": None, "swap-optimizer": None}, {}, plain=None)[0] == ["fused-ops"]
