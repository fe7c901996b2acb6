"""How one saved value is computed again from values that autograd holds anyway."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_core.errors import ReplayError
from ascend_core.layout import Layout, read
from ascend_core.rng import RngState
from ascend_core.saved import Packed, PackedParameter, Passed, Saved, StorageRecord
from ascend_recompute._digest import digest
from ascend_recompute._tally import Tally


class Modes(NamedTuple):
    """The thread's modes that change what a cheap operator computes.

    Attributes:
        threads: On CPU the last bits of some operators depend on where the work is divided.
    """

    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype | None
    default_dtype: torch.dtype
    threads: int

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """The modes that are on for operators on devices of this type."""
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        threads = torch.get_num_threads()
        return cls(device_type, autocast, dtype, torch.get_default_dtype(), threads)

    def differ(self, device_type: str) -> bool:
        """Whether other modes are on now; cheaper than to compare with `now`."""
        return (
            torch.is_autocast_enabled(device_type) is not self.autocast
            or device_type != self.device_type
            or torch.get_default_dtype() is not self.default_dtype
            or torch.get_num_threads() != self.threads
            or (self.autocast and torch.get_autocast_dtype(device_type) is not self.autocast_dtype)
        )

    @contextlib.contextmanager
    def replaying(self, rng: RngState | None) -> Iterator[None]:
        """Put these modes in force, and the random state if there is one.

        Autocast's cache of weights is left alone: a cast that is made here, without grad, must
        not be handed to a later forward.
        """
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        try:
            with (
                torch.autocast(
                    self.device_type, self.autocast_dtype, self.autocast, cache_enabled=False
                ),
                _AS_IT_IS if rng is None else rng.replaying(),
            ):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)


_AS_IT_IS: AbstractContextManager[None] = contextlib.nullcontext()
# What a record's `made` is once its storage may be written to unseen (through `tensor.data`).
UNKNOWABLE = object()


class Operand(NamedTuple):
    """A tensor argument of a recorded call.

    Attributes:
        record: Its storage.
        version: The version that the call read.
        layout: How the call saw the storage.
        narrowed: How to make it from a copy in a wider type that the call saved in its place.
    """

    record: StorageRecord
    version: int
    layout: Layout
    narrowed: Made | None

    @classmethod
    def of(cls, tensor: Tensor, record: StorageRecord) -> Operand:
        """Note a tensor whose storage has this record."""
        return tuple.__new__(cls, (record, tensor._version, read(tensor), None))

    @classmethod
    def of_saved(cls, saved: Saved, record: StorageRecord) -> Operand:
        """Note a tensor as autograd saved it."""
        layout = None if isinstance(saved, PackedParameter) else saved.layout
        if layout is None:
            assert not isinstance(saved, Passed)
            layout = read(saved.alias)
        return cls(record, saved.version, layout, None)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the call saw the storage of `tensor`, and in its layout."""
        return self.record() is tensor.untyped_storage() and self.layout == read(tensor)

    @property
    def made(self) -> Made | None:
        """How the contents that the call read were made, when that was recorded."""
        made = self.record.made
        return made if isinstance(made, Made) and made.version == self.version else None


class Castable(NamedTuple):
    """What it takes to recognise a cast of a recorded output as one.

    Attributes:
        recorder: Who recorded the call.
        seen: The output as the call returned it.
        probe: Shares the version counter of the output.
    """

    recorder: weakref.ref[Any]
    seen: Operand
    probe: Tensor


class Made:
    """One recorded call: how the contents of a storage were computed.

    It holds no tensor, only where its operands lie, so it keeps nothing alive. `resolve` turns it
    into a `Recipe` when autograd holds every operand at that moment.

    [Note: reach, or why a recipe never costs more than plain]
    A recipe refers to tensors that autograd saved. It must not be the last to hold them, and they
    must be tensors that plain autograd would need unchanged as well. Both are certain for what
    was saved by nodes that the asking node leads to: those live as long as it does, and a full
    backward visits them after it. The asking node leads to the node of this call, and from there
    along the edges to the nodes of the recorded calls before it. `reach` lists the saves of all
    those, as ranges of serials. Whatever else saved an operand (a branch that may be dropped from
    the loss, a parameter that no node saved) does not count.

    Attributes:
        function: The callable as the model called it.
        values: Its arguments, those by position first; an `Operand` stands for each tensor.
        names: The names of the last arguments, which were passed by keyword.
        own: The serials of the saves that this very call made: what its own node holds.
        reach: The serials of what this call's node and those behind it hold.
        version: The version of the output at which the recipe is good.
        stride: The strides of the output as the call returned it; it covers its storage.
        nbytes: Size of the output in bytes.
        tally: Counts what is dropped under the label.
        label: The module that made the call, for reports.
        digest: Of the output, when rebuilt values are compared with it.
        modes, rng: What else the result depends on.
        cast: While autocast is on, what a cast of the output needs to know.
    """

    __slots__ = (
        "cast", "digest", "function", "label", "modes", "names", "nbytes", "own", "reach", "rng",
        "stride", "tally", "values", "version",
    )  # fmt: skip

    label: str
    modes: Modes
    nbytes: int
    stride: tuple[int, ...]
    tally: Tally
    version: int

    def __init__(
        self,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        names: tuple[str, ...],
        own: range,
        reach: tuple[range, ...],
    ) -> None:
        self.function = function
        self.values = values
        self.names = names
        self.own = own
        self.reach = reach
        self.rng: RngState | None = None
        self.cast: Castable | None = None
        self.digest: Tensor | None = None

    def returned(self, output: Tensor, modes: Modes, tally: Tally, label: str) -> None:
        """Note what the call returned, under what modes, and where it is counted."""
        self.version = output._version
        self.stride = output.stride()
        self.nbytes = output.nbytes
        self.modes = modes
        self.tally = tally
        self.label = label

    def conditions(self) -> AbstractContextManager[Any]:
        """A context in which the call gives what it gave: its modes, its random numbers."""
        if self.modes.differ(self.modes.device_type):
            return self.modes.replaying(self.rng)
        return _AS_IT_IS if self.rng is None else self.rng.replaying()

    def compare(self, output: Tensor) -> None:
        """Raise when a rebuilt value is not what the call returned.

        Raises:
            ReplayError: Naming the module and the operator.
        """
        assert self.digest is not None
        if torch.equal(digest(output), self.digest):
            return
        operator = getattr(self.function, "__name__", str(self.function))
        raise ReplayError(
            f"{operator} in {self.label or 'the model'} gave another value when it ran again.",
            why="it is not deterministic, or reads something besides its arguments.",
            instead="leave it out of the policy, or keep the module out of modules=.",
        )

    def operands(self) -> Iterator[Operand]:
        """The tensor arguments."""
        return (value for value in self.values if isinstance(value, Operand))

    def resolve(self, limit: int, reach: tuple[range, ...]) -> Recipe | None:
        """A recipe whose inputs autograd holds now, or that are made from such.

        Args:
            limit: The most operators that the recipe may run.
            reach: The serials of the saves that may be referred to.
        """
        sources: list[Source | None] = []
        count = 1
        for value in self.values:
            source = None
            if isinstance(value, Operand):
                source = _find_source(value, limit - count, reach)
                if source is None:
                    return None
                count += source.operators
            sources.append(source)
        return Recipe(self, sources, count) if count <= limit else None


class Source(NamedTuple):
    """One input of a recipe: what autograd holds, or another recipe's output, or both."""

    recipe: Recipe | None
    saved: Saved | None
    layout: Layout

    @property
    def operators(self) -> int:
        """How many operators it takes to have it."""
        return 0 if self.recipe is None else self.recipe.operators

    def value(self, run: Run) -> Tensor:
        """The input, in the layout that the call saw."""
        if self.recipe is None:
            assert self.saved is not None
            return self.layout.look_at(self.saved.borrow())
        if not isinstance(self.saved, Packed):
            return self.layout.look_at(self.recipe.run(run))
        self.saved.check()
        early = self.saved.early
        if early is not None:
            return self.layout.look_at(early)
        output = self.recipe.run(run)
        run.passed_by(self.saved, self.recipe, output)
        return self.layout.look_at(output)


class Run:
    """One rebuild: the values that it needs more than once, and the one worth holding on to.

    [Note: rebuilt once for two consumers in a row]
    Rebuilding silu(gate) * up for the linear layer's backward passes by silu(gate), for which the
    product's backward will ask next. Of the saved tensors that a rebuild passes by, the one that
    took most operators is held until autograd asks for it. So a backward holds at most one such
    value for each value that was asked for, and less than the plain run, which holds them all.
    """

    __slots__ = ("_costliest", "memo")

    def __init__(self) -> None:
        self.memo: dict[Recipe, Tensor] = {}
        self._costliest: tuple[Packed, Recipe, Tensor] | None = None

    def passed_by(self, saved: Packed, recipe: Recipe, output: Tensor) -> None:
        """A tensor that autograd will ask for was rebuilt on the way."""
        if self._costliest is None or recipe.operators > self._costliest[1].operators:
            self._costliest = saved, recipe, output

    def hold_costliest(self, most_bytes: int) -> None:
        """Let autograd find the costliest value that was passed by, if it is no larger."""
        if self._costliest is not None and self._costliest[2].nbytes <= most_bytes:
            saved, _, output = self._costliest
            assert saved.layout is not None
            saved.early = saved.layout.look_at(output)


def _find_source(operand: Operand, limit: int, reach: tuple[range, ...]) -> Source | None:
    """Where an operand comes from at backward; what is held as it is comes first."""
    if operand.record.made is UNKNOWABLE:
        return None
    rebuilt: Source | None = None
    layout = operand.layout
    for saved in operand.record.saved(operand.version):
        if not _lies_in(saved.serial, reach):
            continue
        if isinstance(saved, Packed) and isinstance(saved.claim, Rebuild):
            rebuilt = Source(saved.claim.recipe, saved, layout)
        elif saved.shows(layout):
            return Source(None, saved, layout)
    if rebuilt is not None or limit <= 0:
        return rebuilt
    for made in (operand.made, operand.narrowed):
        recipe = None if made is None else made.resolve(limit, reach)
        if recipe is not None:
            return Source(recipe, None, layout)
    return None


def _lies_in(serial: int, reach: tuple[range, ...]) -> bool:
    # (`any` would make a generator, and this runs for each operand.)
    for serials in reach:  # noqa: SIM110
        if serial in serials:
            return True
    return False


class Recipe:
    """A recorded call with all its inputs at hand.

    Attributes:
        operators: How many operators a run executes at most.
    """

    __slots__ = ("_made", "_sources", "_uses", "operators")

    def __init__(self, made: Made, sources: list[Source | None], operators: int) -> None:
        self._made = made
        self._sources = sources
        self._uses = 0
        self.operators = operators
        for source in sources:
            if source is not None and source.recipe is not None:
                source.recipe._uses += 1

    @property
    def label(self) -> str:
        """The module that made the call."""
        return self._made.label

    def anchor(self) -> None:
        """Mark the saved tensors that a run reads as needed where they are."""
        for source in self._sources:
            if source is None:
                continue
            if source.recipe is not None:
                source.recipe.anchor()
            elif isinstance(source.saved, Packed):
                source.saved.anchored = True

    def run(self, run: Run) -> Tensor:
        """Compute the value again; grad recording is off."""
        known = run.memo.get(self)
        if known is not None:
            return known
        made = self._made
        values = [
            value if source is None else source.value(run)
            for source, value in zip(self._sources, made.values, strict=True)
        ]
        split = len(values) - len(made.names)
        keywords = dict(zip(made.names, values[split:], strict=True))
        with made.conditions():
            output: Tensor = made.function(*values[:split], **keywords)
        if output.stride() != made.stride or output.untyped_storage().nbytes() != made.nbytes:
            output = _with_strides(output, made.stride)
        if made.digest is not None:
            made.compare(output)
        if self._uses > 1:
            run.memo[self] = output
        return output


def _with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values, laid out and alone in their storage as the forward's output was."""
    empty = torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


class Rebuild:
    """The claim on a saved tensor that is rebuilt when backward asks for it."""

    __slots__ = ("recipe",)

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def value(self, layout: Layout) -> Tensor:
        """Run the recipe and look at its output as the saved tensor looked at it."""
        run = Run()
        output = self.recipe.run(run)
        run.hold_costliest(output.nbytes)
        return layout.look_at(output)
