"""A home in which the FP32 master of a BF16 weight exists only inside a window."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ascend_core.errors import ConfigError
from ascend_core.optim import (
    MASTER,
    Cohort,
    CohortWindow,
    Entry,
    Held,
    Kernel,
    Resident,
    ResidentWalk,
    Slot,
)
from ascend_reuse_param._bits import Codec
from ascend_reuse_param._masters import SplitMasters

__all__ = ["SplitHome"]


class SplitHome(Resident):
    """Keeps moments on the device, and masters in the bits of their weights.

    Args:
        device: Of the parameters.
        codec: Splits and joins.

    Attributes:
        split: The masters.
    """

    def __init__(self, device: torch.device, codec: Codec) -> None:
        super().__init__()
        self._device = device
        self.masters = self.split = SplitMasters(codec, device)
        self.kernel: Kernel | None = None
        self._addresses: list[int] = []

    def kept(self, slot: Slot) -> Sequence[Entry]:
        """All but the master."""
        return [entry for entry in slot.elements if entry.name != MASTER]

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Refuse what is not the upper half of its master.

        Raises:
            ConfigError: When the parameter is FP16.
        """
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"{name} is FP16.",
                why="an FP16 weight is not the upper half of its FP32 master: its exponent is "
                "shorter.",
                instead="train in BF16, or keep FP32 masters beside the weights.",
            )

    def check_all(self, parameters: Collection[torch.Tensor]) -> None:
        """Refuse to keep nothing but moments: it would look as if it worked.

        Raises:
            ConfigError: When no parameter is BF16, and none was.
        """
        if not parameters or any(one.dtype == torch.bfloat16 for one in parameters):
            return
        if not any(slot.has_master for slot in self.slots()):
            raise ConfigError(
                "no parameter of the optimizer is BF16 any more.",
                why="others took their places, as megatron-core's optimizers put FP32 masters of "
                "their own there; nothing would be saved.",
                instead="step the model's BF16 parameters, or leave reuse_param out.",
            )

    def admit(self, cohort: Cohort) -> None:
        """Make room for new slots.

        Raises:
            ConfigError: When a parameter is FP16, on another device, or shares memory.
        """
        for slot in cohort.slots:
            self.check(slot.parameter, slot.name)
            _check_device(slot, self._device)
        _check_apart([*self.slots(), *cohort.slots])
        self.split.admit(cohort)
        try:
            super().admit(cohort)
        except BaseException:
            self.split.dismiss(cohort)
            raise

    def dismiss(self, cohort: Cohort) -> None:
        """Drop what is kept for a cohort."""
        super().dismiss(cohort)
        self.split.dismiss(cohort)

    def walk(self, windows: Sequence[CohortWindow]) -> _SplitWalk:
        """Allocate the bitmaps that a step writes.

        Raises:
            ConfigError: When a parameter was moved into the memory of another.
        """
        self._check_moved()
        return _SplitWalk(self, windows)

    def tidy(self) -> None:
        """Let lists of exceptions take the place of bitmaps."""
        self.split.tidy()

    def report(self) -> Mapping[str, Any]:
        """Bytes on the device beside the weights."""
        moments = super().report()["device_state_bytes"]
        split = self.split.report()
        kept = sum(nbytes for name, nbytes in split.items() if name.endswith("_bytes"))
        return {
            "device_state_bytes": moments + kept,
            "host_state_bytes": 0,
            "moment_bytes": moments,
            **split,
        }

    def _check_moved(self) -> None:
        """Refuse parameters that share memory since somebody set their `.data`."""
        addresses = [slot.parameter.data_ptr() for slot in self.slots()]
        if addresses != self._addresses:
            _check_apart(self.slots())
            self._addresses = addresses


class _SplitWalk(ResidentWalk):
    def __init__(self, home: SplitHome, windows: Sequence[CohortWindow]) -> None:
        super().__init__(home, windows)
        self._splits = [home.split.window(window) for window in windows]
        try:
            for split in self._splits:
                split.prepare()
        except BaseException:
            self.close()
            raise

    def enter(self, window: int) -> list[Held]:
        self._splits[window].open()
        return super().enter(window)

    def leave(self, window: int, held: list[Held]) -> None:
        self._splits[window].close()
        self._splits[window].tidy()

    def close(self) -> None:
        for split in self._splits:
            split.drop()
            split.tidy()


def _check_device(slot: Slot, device: torch.device) -> None:
    if slot.device != device:
        raise ConfigError(
            f"{slot.name} is on {slot.device}, and the first parameter on {device}.",
            instead="move the model first, and call reuse_param then.",
        )


def _check_apart(slots: Collection[Slot]) -> None:
    """Refuse parameters that lie in the same memory: one's weight would be the other's too."""
    spans = sorted(
        (slot.parameter.data_ptr(), slot.parameter.nbytes, slot.name)
        for slot in slots
        if slot.has_master and slot.parameter.data_ptr()  # not where there is no memory
    )
    for (begin, nbytes, name), (other, _, other_name) in pairwise(spans):
        if begin + nbytes > other:
            raise ConfigError(
                f"{name} and {other_name} lie in the same memory.",
                why="each would take the other's step for a write by somebody else, and lose its "
                "residual.",
                instead="tie them by sharing one Parameter object, and list that once.",
            )
