"""What features are built on: devices, transfers, storage, saved tensors, measurement.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "AscendError": "ascend_core.errors",
    "Backend": "ascend_core.device",
    "BudgetExceededError": "ascend_core.errors",
    "CommunicationError": "ascend_core.errors",
    "Claim": "ascend_core.saved",
    "ConfigError": "ascend_core.errors",
    "DeviceCopy": "ascend_core.transfer",
    "DeviceUnavailableError": "ascend_core.errors",
    "Event": "ascend_core.streams",
    "Feature": "ascend_core.feature",
    "FeatureError": "ascend_core.errors",
    "FeatureNotFoundError": "ascend_core.errors",
    "ForwardState": "ascend_core.modes",
    "Handle": "ascend_core.feature",
    "HostBuffer": "ascend_core.pinned",
    "HostCopy": "ascend_core.transfer",
    "HostMemoryError": "ascend_core.errors",
    "Kind": "ascend_core.memory",
    "Keeper": "ascend_core.saved",
    "Layout": "ascend_core.layout",
    "LiveStorage": "ascend_core.memory",
    "LiveStorages": "ascend_core.memory",
    "MeasurementError": "ascend_core.errors",
    "MemoryTimeline": "ascend_core.memory",
    "OptimizerFailedError": "ascend_core.errors",
    "PeakMeasurement": "ascend_core.memory",
    "PinnedPool": "ascend_core.pinned",
    "PoolStats": "ascend_core.pinned",
    "ReplayError": "ascend_core.errors",
    "RngState": "ascend_core.rng",
    "StorageError": "ascend_core.errors",
    "Stream": "ascend_core.streams",
    "Transfer": "ascend_core.transfer",
    "UnavailableError": "ascend_core.errors",
    "WindowedOptimizer": "ascend_core.optim",
    "__version__": "ascend_core._version",
    "available_backends": "ascend_core.device",
    "backend_of": "ascend_core.device",
    "current_backend": "ascend_core.device",
    "device_of": "ascend_core.device",
    "discover": "ascend_core.feature",
    "get_backend": "ascend_core.device",
    "get_feature": "ascend_core.feature",
    "measure_peak": "ascend_core.memory",
    "plot_timelines": "ascend_core.memory",
    "region": "ascend_core.saved",
    "track_live": "ascend_core.memory",
    "windowed": "ascend_core.optim",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_core._version import __version__ as __version__
    from ascend_core.device import Backend as Backend
    from ascend_core.device import available_backends as available_backends
    from ascend_core.device import backend_of as backend_of
    from ascend_core.device import current_backend as current_backend
    from ascend_core.device import device_of as device_of
    from ascend_core.device import get_backend as get_backend
    from ascend_core.errors import AscendError as AscendError
    from ascend_core.errors import BudgetExceededError as BudgetExceededError
    from ascend_core.errors import CommunicationError as CommunicationError
    from ascend_core.errors import ConfigError as ConfigError
    from ascend_core.errors import DeviceUnavailableError as DeviceUnavailableError
    from ascend_core.errors import FeatureError as FeatureError
    from ascend_core.errors import FeatureNotFoundError as FeatureNotFoundError
    from ascend_core.errors import HostMemoryError as HostMemoryError
    from ascend_core.errors import MeasurementError as MeasurementError
    from ascend_core.errors import OptimizerFailedError as OptimizerFailedError
    from ascend_core.errors import ReplayError as ReplayError
    from ascend_core.errors import StorageError as StorageError
    from ascend_core.errors import UnavailableError as UnavailableError
    from ascend_core.feature import Feature as Feature
    from ascend_core.feature import Handle as Handle
    from ascend_core.feature import discover as discover
    from ascend_core.feature import get_feature as get_feature
    from ascend_core.layout import Layout as Layout
    from ascend_core.memory import Kind as Kind
    from ascend_core.memory import LiveStorage as LiveStorage
    from ascend_core.memory import LiveStorages as LiveStorages
    from ascend_core.memory import MemoryTimeline as MemoryTimeline
    from ascend_core.memory import PeakMeasurement as PeakMeasurement
    from ascend_core.memory import measure_peak as measure_peak
    from ascend_core.memory import plot_timelines as plot_timelines
    from ascend_core.memory import track_live as track_live
    from ascend_core.modes import ForwardState as ForwardState
    from ascend_core.optim import WindowedOptimizer as WindowedOptimizer
    from ascend_core.optim import windowed as windowed
    from ascend_core.pinned import HostBuffer as HostBuffer
    from ascend_core.pinned import PinnedPool as PinnedPool
    from ascend_core.pinned import PoolStats as PoolStats
    from ascend_core.rng import RngState as RngState
    from ascend_core.saved import Claim as Claim
    from ascend_core.saved import Keeper as Keeper
    from ascend_core.saved import region as region
    from ascend_core.streams import Event as Event
    from ascend_core.streams import Stream as Stream
    from ascend_core.transfer import DeviceCopy as DeviceCopy
    from ascend_core.transfer import HostCopy as HostCopy
    from ascend_core.transfer import Transfer as Transfer
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
