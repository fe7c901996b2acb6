"""Where optimizer state lives between steps, and how a window of it is had during one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ascend_core.errors import ConfigError
from ascend_core.layout import Layout, read
from ascend_core.optim.rules import Entry, scalar_dtype
from ascend_core.optim.windows import Slice, Window

if TYPE_CHECKING:
    from ascend_core.optim.masters import Kernel, Masters

__all__ = ["MASTER", "Cohort", "CohortWindow", "Held", "Home", "Slot", "Walk"]

MASTER = "master_param"
"""The key under which an FP32 master is kept and saved, beside the wrapped optimizer's own."""


class Slot:
    """The place of one parameter in the optimizer. The parameter itself may be replaced.

    Attributes:
        parameter: The parameter now.
        group: Its group's options.
        name: How errors call it.
        entries: What is kept for it; the master first, if it has one.
        dtype: Of the arithmetic, and of all that is kept for each element.
        device: Of the parameter when it was taken in.
        layout: Of the parameter; the order of its memory is the order of all that is kept.
        unmade: The entries that its first step is still to make.
        scalar_dtype: Of what is kept once; as torch chooses it.
        moves_scalars: Whether the kernels read it on the device, by the options of then.
        is_stepped: Whether it has been stepped, so that it has state in the eyes of its user.
        slices: Into how many slices it was cut.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        name: str,
        entries: tuple[Entry, ...],
        *,
        master: bool,
    ) -> None:
        self.parameter = parameter
        self.group = group
        self.name = name
        self.layout = checked_layout(parameter, name)
        self.device = parameter.device
        self.dtype = torch.float32 if master else parameter.dtype
        self.entries = (Entry(MASTER, fill=None), *entries) if master else entries
        self.has_master = master
        self.scalar_dtype = torch.float32 if group.get("fused") else scalar_dtype()
        self.moves_scalars = self.scalars_on_device
        self.is_stepped = False
        self.slices = 0
        self.unmade = {e.name for e in entries if e.fill is None}

    @property
    def elements(self) -> tuple[Entry, ...]:
        """What is kept for each element."""
        return tuple(entry for entry in self.entries if not entry.is_scalar)

    @property
    def scalars(self) -> tuple[Entry, ...]:
        """What is kept once for the parameter."""
        return tuple(entry for entry in self.entries if entry.is_scalar)

    @property
    def scalars_on_device(self) -> bool:
        """Whether torch's kernels read the scalars on the device, by the options of now."""
        return bool(self.group.get("fused") or self.group.get("capturable"))

    @property
    def scalar_device(self) -> torch.device:
        """Where torch's kernels read the scalars, by the options of now."""
        return self.parameter.device if self.scalars_on_device else torch.device("cpu")

    def flat(self) -> torch.Tensor:
        """The parameter as it lies in memory: a detached view of shape [numel].

        Raises:
            ConfigError: When somebody gave it other memory (`.data = ...`) of another form.
        """
        if self.parameter.device != self.device or read(self.parameter) != self.layout:
            self.replace(self.parameter)
        return self.layout.flatten(self.parameter)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """View values that lie like `flat()` in the parameter's own shape and strides."""
        return flat.as_strided(self.layout.size, self.layout.stride)

    def still_is(self, parameter: torch.Tensor) -> bool:
        """Whether this is the very parameter, in the form that it had."""
        return self.parameter is parameter and self.takes(parameter)

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether another tensor has the shape, strides, dtype and device of the parameter."""
        old, new = self.layout, checked_layout(parameter, self.name)
        return parameter.device == self.device and (
            (old.size, _order(old), old.dtype) == (new.size, _order(new), new.dtype)
        )

    def replace(self, parameter: torch.Tensor) -> None:
        """Take another tensor as the parameter.

        Raises:
            ConfigError: When `takes` says no.
        """
        layout = checked_layout(parameter, self.name)
        if not self.takes(parameter):
            raise ConfigError(
                f"{self.name} was replaced by a tensor that does not fit its optimizer state.",
                why=f"it was {_describe(self.layout, self.device)} and is "
                f"{_describe(layout, parameter.device)}.",
                instead="move or convert the model first, and build the optimizer then.",
            )
        self.parameter, self.layout = parameter, layout


def checked_layout(parameter: torch.Tensor, name: str) -> Layout:
    """The layout of a parameter that can be stepped in slices.

    Raises:
        ConfigError: When it cannot; the message says why.
    """
    instead = "leave it to an optimizer of its own that is not windowed."
    if not Layout.fits(parameter):
        raise ConfigError(
            f"{name} cannot be stepped in windows.",
            why=f"it is a {type(parameter).__name__} of layout {parameter.layout}.",
            instead=instead,
        )
    if not parameter.is_floating_point():
        raise ConfigError(
            f"{name} cannot be stepped in windows.",
            why=f"its dtype is {parameter.dtype}.",
            instead=instead,
        )
    layout = Layout.of(parameter)
    if layout.negative:
        raise ConfigError(
            f"{name} cannot be stepped in windows.",
            why="its memory holds the negative of its values.",
            instead="make the parameter from parameter.resolve_neg().",
        )
    if not layout.is_dense and parameter.numel():
        raise ConfigError(
            f"{name} cannot be stepped in windows.",
            why=f"its strides {tuple(layout.stride)} leave gaps in its memory or overlap.",
            instead="make the parameter from a contiguous tensor.",
        )
    return layout


def _order(layout: Layout) -> list[int]:
    """The strides that matter: that of a dimension of one element may be anything."""
    sized = zip(layout.size, layout.stride, strict=True)
    return [stride for size, stride in sized if size != 1]


def _describe(layout: Layout, device: torch.device) -> str:
    return f"{list(layout.size)} {layout.dtype} with strides {layout.stride} on {device}"


@dataclasses.dataclass(frozen=True, eq=False)
class CohortWindow:
    """A window of a cohort, as the engine walks them.

    Attributes:
        cohort: Whose slots the slices are of.
        index: Its place among the cohort's windows.
        slices: What it holds.
    """

    cohort: Cohort
    index: int
    slices: Window

    def slot(self, piece: Slice) -> Slot:
        """The slot that a slice is of."""
        return self.cohort.slots[piece.parameter]


class Cohort:
    """Parameters that were taken in together, and the windows that they were cut into."""

    def __init__(self, slots: Sequence[Slot], windows: Sequence[Window]) -> None:
        self.slots = tuple(slots)
        self.windows = tuple(CohortWindow(self, i, w) for i, w in enumerate(windows))
        for piece in chain.from_iterable(windows):
            self.slots[piece.parameter].slices += 1


class Held(NamedTuple):
    """One slice during its window.

    Attributes:
        slot: Whose slice it is.
        piece: Which.
        elements: By entry name, tensors of shape [piece.numel] and the slot's dtype, on the device.
        scalars: By entry name, tensors of no dimension, where torch's kernels want them.
    """

    slot: Slot
    piece: Slice
    elements: dict[str, torch.Tensor]
    scalars: dict[str, torch.Tensor]


class Walk(Protocol):
    """One step's way through its windows. Each is fetched, entered and left, in order."""

    def fetch(self, window: int) -> None:
        """Start to bring what a window needs. Does not block the host."""

    def enter(self, window: int) -> list[Held]:
        """Give a window's slices. Makes the current stream wait until they are there."""

    def leave(self, window: int, held: list[Held]) -> None:
        """Take back what was changed. May be repeated until the next window is entered."""

    def blank(self, window: int) -> list[Held]:
        """A window's slices in memory that holds nothing yet, to try arithmetic on.

        Asked only between `fetch(0)` and `enter(0)`, of a home that does not work in place.
        """

    def close(self) -> None:
        """Give back the device memory of the walk, also half-way. Does not block the host."""


class Home(Protocol):
    """Where state lives between steps.

    Attributes:
        in_place: Whether what a window holds is the state itself. Otherwise it is a copy until
            `Walk.leave`, so that a window that was interrupted can be walked again.
        early: Whether room is made when a parameter is first seen, and not when it has a gradient.
        masters: What gives the FP32 masters.
        kernel: What steps a slice in place of the wrapped class, where it can; of homes that work
            in place.
    """

    in_place: bool
    early: bool
    masters: Masters
    kernel: Kernel | None

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Refuse what it can never keep, when that is first listed.

        Raises:
            ConfigError: When it cannot be kept.
        """

    def check_all(self, parameters: Collection[torch.Tensor]) -> None:
        """Refuse what is listed now, taken together. Asked before each step.

        Raises:
            ConfigError: When there is no sense in keeping state of these.
        """

    def admit(self, cohort: Cohort) -> None:
        """Make room for new slots and fill in what they have before their first step.

        Raises:
            AscendError: When there is no room. Nothing has changed then.
        """

    def dismiss(self, cohort: Cohort) -> None:
        """Give the room of a cohort back."""

    def walk(self, windows: Sequence[CohortWindow]) -> Walk:
        """Allocate all that a step needs on the device, before anything is written."""

    def elements(self, slot: Slot) -> dict[str, torch.Tensor]:
        """The state itself, live: flat tensors of shape [numel]. Blocks the host until it rests."""

    def scalars(self, slot: Slot) -> list[dict[str, torch.Tensor]]:
        """The scalars themselves, live: for each slice of the slot by name."""

    def spread_scalars(self) -> None:
        """Let every slice begin with the scalars of its slot's first one, which its user sees.

        Asked before a step. May block the host where somebody wrote to them.
        """

    def settle(self) -> None:
        """Block the host until no copy of state is under way."""

    def tidy(self) -> None:
        """Give back what need not be kept any more. Does not block the host."""

    def report(self) -> Mapping[str, Any]:
        """What the home holds, in bytes."""
