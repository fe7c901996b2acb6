"""The public test harness: proves that a feature changes memory and nothing else.

Import it explicitly (`import ascend_core.testing`); nothing of the suite imports it when it
trains. pytest (the extra `testing`) is needed for `parametrize_devices` only.
"""

from __future__ import annotations

from ascend_core.testing.compare import (
    Difference,
    assert_bitwise_equal,
    bits,
    bitwise_equal,
    compare_runs,
)
from ascend_core.testing.devices import available_devices, parametrize_devices
from ascend_core.testing.leaks import Growth, alive_after, live_storage_count
from ascend_core.testing.ops import OpCounts, count_ops
from ascend_core.testing.ranks import RanksFailedError, run_ranks
from ascend_core.testing.saved_bytes import SavedStorage, held_bytes, saved_storages
from ascend_core.testing.training import RunRecord, StepRecord, random_states, record_run

__all__ = [
    "Difference",
    "Growth",
    "OpCounts",
    "RanksFailedError",
    "RunRecord",
    "SavedStorage",
    "StepRecord",
    "alive_after",
    "assert_bitwise_equal",
    "available_devices",
    "bits",
    "bitwise_equal",
    "compare_runs",
    "count_ops",
    "held_bytes",
    "live_storage_count",
    "parametrize_devices",
    "random_states",
    "record_run",
    "run_ranks",
    "saved_storages",
]
