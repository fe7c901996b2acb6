"""The exception tree of the suite.

Every error says what went wrong, why, and what to do instead:

    AscendError
    ├── ConfigError              an option or argument that cannot be right (a ValueError)
    │   └── NothingToDoError     a model in which there is nothing for the feature
    ├── UnavailableError         right in principle, but not on this machine (a RuntimeError)
    │   └── DeviceUnavailableError
    ├── FeatureError             a feature could not be found, turned on or turned off
    │   └── FeatureNotFoundError
    ├── HostMemoryError          host memory for moved bytes could not be had
    │   └── BudgetExceededError
    ├── StorageError             a storage cannot be released or restored safely
    ├── OptimizerFailedError     a step failed half-way; weights and state are not to be trusted
    ├── CommunicationError       a collective failed, or ranks do not fit one another
    ├── ReplayError              a recomputation does not match the forward pass it repeats
    └── MeasurementError         a measurement could not be taken or does not add up

This module imports no torch.
"""

from __future__ import annotations

__all__ = [
    "AscendError",
    "BudgetExceededError",
    "CommunicationError",
    "ConfigError",
    "DeviceUnavailableError",
    "FeatureError",
    "FeatureNotFoundError",
    "HostMemoryError",
    "MeasurementError",
    "NothingToDoError",
    "OptimizerFailedError",
    "ReplayError",
    "StorageError",
    "UnavailableError",
]


class AscendError(Exception):
    """Base of every error that the suite raises on purpose.

    Args:
        what: One sentence that says what went wrong.
        why: The reason, when the first sentence does not carry it.
        instead: What the user can do about it.
    """

    def __init__(self, what: str, *, why: str | None = None, instead: str | None = None) -> None:
        super().__init__(what, why, instead)
        self.what = what
        self.why = why
        self.instead = instead

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why      {self.why}")
        if self.instead:
            lines.append(f"  instead  {self.instead}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.instead)


def _rebuild(
    kind: type[AscendError], what: str, why: str | None, instead: str | None
) -> AscendError:
    return kind(what, why=why, instead=instead)


class ConfigError(AscendError, ValueError):
    """A value in a config or an argument that cannot be right."""


class NothingToDoError(ConfigError):
    """A model in which there is nothing that the feature could work on."""


class UnavailableError(AscendError, RuntimeError):
    """Something that is right in principle but cannot be had on this machine."""


class DeviceUnavailableError(UnavailableError):
    """A device or backend that this machine does not have."""


class FeatureError(AscendError, RuntimeError):
    """A feature that could not be found, turned on or turned off."""


class FeatureNotFoundError(FeatureError):
    """No installed package offers a feature of that name."""


class HostMemoryError(AscendError, RuntimeError):
    """Host memory for moved bytes that could not be had."""


class BudgetExceededError(HostMemoryError):
    """A request that would take a pool of host memory over its byte budget."""


class StorageError(AscendError, RuntimeError):
    """A storage that cannot be released or restored safely."""


class OptimizerFailedError(AscendError, RuntimeError):
    """An optimizer whose step failed half-way, until it is given a checkpoint."""


class CommunicationError(AscendError, RuntimeError):
    """A collective that failed or took too long, or ranks that do not fit one another."""


class ReplayError(AscendError, RuntimeError):
    """A recomputation that does not match the forward pass that it repeats."""


class MeasurementError(AscendError, RuntimeError):
    """A measurement that could not be taken, or that does not add up."""
