"""Which features go together best: of those that were measured, and that the rules permit.

[Note: how the best combination is chosen]
Greedily. The features that lower the plain run's peak are tried in the order of how much they do;
the first one is in, and each further one stays if no rule speaks against it beside those that are
in (warnings count: they tell of features that undo each other), and the peak of all of them
together, which is measured, is lower for it. Where the plain run is out of memory, so may be a
feature alone that is of use beside others: those are tried last. Only features that run on the
plain run's model take part: not those that need BF16 weights or ranks. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ascend_core.feature import Feature
from ascend_suite.check import check
from ascend_suite.finding import Severity
from ascend_suite.plan import Plan

__all__ = ["best_combination", "go_together"]

Measure = Callable[[Sequence[Feature]], int | None]
"""Measures the peak of features together, in bytes; None where they do not run."""


def best_combination(
    peaks: Mapping[str, int | None],
    features: Mapping[str, Feature],
    plain: int | None,
    layers: int,
    measure: Measure,
) -> list[Feature]:
    """Choose features, see [Note: how the best combination is chosen].

    Args:
        peaks: That of each feature alone, by its name, in bytes; None where that was out of memory.
        features: The features by name.
        plain: The peak without any; None where that was out of memory.
        layers: Of the model.
        measure: Measures features together.

    Returns:
        The features, the one that saves the most first; none where none saves anything.
    """
    sizes = {name: math.inf if peak is None else peak for name, peak in peaks.items()}
    most = math.inf if plain is None else plain
    ranked = sorted((n for n in sizes if plain is None or sizes[n] < most), key=sizes.__getitem__)
    chosen = [features[name] for name in ranked[:1]]
    least = min(sizes.values(), default=most)
    for name in ranked[1:]:
        tried = [*chosen, features[name]]
        peak = measure(tried) if go_together(tried, layers) else None
        if peak is not None and peak < least:
            chosen, least = tried, peak
    return chosen


def go_together(features: Sequence[Feature], layers: int) -> bool:
    """Whether no rule speaks against features as they are by default."""
    plan = Plan({feature.name: feature.config() for feature in features}, {"num_layers": layers})
    return all(finding.severity is Severity.NOTE for finding in check(plan))
