"""The public test harness: proves that a feature changes memory and nothing else.

Import it explicitly (`import ascend_core.testing`); nothing of the suite imports it when it
trains. pytest is needed for `parametrize_devices` only.
"""

from __future__ import annotations

from ascend_core.testing.compare import (
    Difference,
    assert_bitwise_equal,
    bits,
    bitwise_equal,
    compare_runs,
)
from ascend_core.testing.ops import OpCounts, count_ops
from ascend_core.testing.saved_bytes import SavedStorage, held_bytes, saved_storages
from ascend_core.testing.training import RunRecord, StepRecord, random_states, record_run

__all__ = [
    "Difference",
    "OpCounts",
    "RunRecord",
    "SavedStorage",
    "StepRecord",
    "assert_bitwise_equal",
    "bits",
    "bitwise_equal",
    "compare_runs",
    "count_ops",
    "held_bytes",
    "random_states",
    "record_run",
    "saved_storages",
]
