"""A simulated NPU: the real torch_npu on a CPU, with limits, streams and races that are real.

Call `start` before torch_npu is imported. Importing this package imports no torch.
"""

from __future__ import annotations

from ascend_sim._simulator import Simulator
from ascend_sim._start import current, start
from ascend_sim._version import __version__
from ascend_sim.config import SCHEDULES, SimConfig
from ascend_sim.counters import Counters
from ascend_sim.errors import BuildError, ConfigError, FaultNotReachedError, RefusedError, SimError
from ascend_sim.inject import Fault
from ascend_sim.kernels import Fate
from ascend_sim.profile import Profile
from ascend_sim.races import Race
from ascend_sim.timeline import Report, StreamReport, Timeline

__all__ = [
    "SCHEDULES",
    "BuildError",
    "ConfigError",
    "Counters",
    "Fate",
    "Fault",
    "FaultNotReachedError",
    "Profile",
    "Race",
    "RefusedError",
    "Report",
    "SimConfig",
    "SimError",
    "Simulator",
    "StreamReport",
    "Timeline",
    "__version__",
    "current",
    "start",
]
