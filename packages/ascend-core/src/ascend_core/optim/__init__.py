"""Stepping a torch optimizer in windows, with its state wherever a home keeps it.

The second of the two seams of the suite, beside `ascend_core.saved`.
"""

from __future__ import annotations

from ascend_core.optim.arena import Arena, aligned
from ascend_core.optim.facade import WindowedOptimizer
from ascend_core.optim.gradients import AttributeGradients, Gradients, flattened
from ascend_core.optim.home import MASTER, Cohort, CohortWindow, Held, Home, Slot, Walk
from ascend_core.optim.masters import Kernel, Masters, StoredMasters
from ascend_core.optim.resident import Resident, ResidentWalk
from ascend_core.optim.rules import Entry
from ascend_core.optim.windows import GRID, Slice
from ascend_core.optim.wrapping import windowed

__all__ = [
    "GRID",
    "MASTER",
    "Arena",
    "AttributeGradients",
    "Cohort",
    "CohortWindow",
    "Entry",
    "Gradients",
    "Held",
    "Home",
    "Kernel",
    "Masters",
    "Resident",
    "ResidentWalk",
    "Slice",
    "Slot",
    "StoredMasters",
    "Walk",
    "WindowedOptimizer",
    "aligned",
    "flattened",
    "windowed",
]
