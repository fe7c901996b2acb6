"""How one saved value is computed again from values that autograd holds anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_core.layout import Layout
from ascend_core.rng import RngState
from ascend_core.saved import Packed, PackedParameter, Passed, StorageRecord

Saved = Packed | Passed


class Modes(NamedTuple):
    """The thread's modes that change what a cheap operator computes."""

    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype | None
    default_dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """The modes that are on for operators on devices of this type."""
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        return cls(device_type, autocast, dtype, torch.get_default_dtype())

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Put these modes in force.

        Autocast's cache of weights is left alone: a cast that is made here, without grad, must
        not be handed to a later forward.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.autocast(
                self.device_type, self.autocast_dtype, self.autocast, cache_enabled=False
            ):
                yield
        finally:
            torch.set_default_dtype(before)


class Operand(NamedTuple):
    """A tensor argument of a recorded call: which storage, at which version, seen how."""

    record: StorageRecord
    version: int
    layout: Layout


class Made:
    """One recorded call: how the contents of a storage were computed.

    It holds no tensor but parameters, only where its operands lie, so it keeps nothing alive.
    `resolve` turns it into a `Recipe` when autograd holds every operand at that moment.

    Attributes:
        function: The callable as the model called it.
        values: Its arguments, those by position first; an `Operand` or a `PackedParameter`
            stands for each tensor.
        names: The names of the last arguments, which were passed by keyword.
        stride: The strides of the output as the call returned it.
        version: The version of the output at which the recipe is good.
        nbytes: Size of the output's storage in bytes; the output covers it.
        own: The serials of the saves that this very call made: what its own node holds.
        label: The module that made the call, for reports.
        modes, rng: What else the result depends on.
    """

    __slots__ = (
        "function", "label", "modes", "names", "nbytes", "own", "rng", "stride", "values",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        names: tuple[str, ...],
        *,
        stride: tuple[int, ...],
        version: int,
        nbytes: int,
        own: range,
        label: str,
        modes: Modes,
        rng: RngState | None = None,
    ) -> None:
        self.function = function
        self.values = values
        self.names = names
        self.stride = stride
        self.version = version
        self.nbytes = nbytes
        self.own = own
        self.label = label
        self.modes = modes
        self.rng = rng

    def resolve(self, limit: int) -> Recipe | None:
        """A recipe whose inputs are all held by autograd now, or parameters, or made from such.

        Args:
            limit: The most operators that the recipe may run.
        """
        sources: list[Source | None] = []
        count = 1
        for value in self.values:
            source = None
            if isinstance(value, Operand):
                source = self._source(value, limit - count)
                if source is None:
                    return None
                count += source.operators
            sources.append(source)
        return Recipe(self, sources, count) if count <= limit else None

    def _source(self, operand: Operand, limit: int) -> Source | None:
        """Where the operand comes from at backward; what this call's own node saved comes first."""
        found: Source | None = None
        for saved in operand.record.saved(operand.version):
            source = _source_of_saved(saved, operand, own=saved.serial in self.own)
            if source is not None and source.own:
                return source
            found = found or source
        made = operand.record.made
        if found is None and limit > 0 and made is not None and made.version == operand.version:
            recipe = made.resolve(limit)
            return None if recipe is None else Source(recipe, None, operand.layout, own=True)
        return found


class Source(NamedTuple):
    """One input of a recipe: another recipe's output, or what autograd holds.

    Attributes:
        own: Whether the recorded call's own node (or the chain it hangs on) holds it; the node
            that asks for the value keeps that one alive, so it costs nothing to refer to it.
    """

    recipe: Recipe | None
    saved: Saved | None
    layout: Layout
    own: bool

    @property
    def operators(self) -> int:
        """How many operators it takes to have it."""
        return 0 if self.recipe is None else self.recipe.operators

    def value(self, memo: dict[Recipe, Tensor]) -> Tensor:
        """The input, in the layout that the call saw."""
        if self.recipe is not None:
            if self.saved is not None:
                self.saved.check()
            return self.layout.look_at(self.recipe.run(memo))
        assert self.saved is not None
        return self.layout.look_at(self.saved.get())


def _source_of_saved(saved: Saved, operand: Operand, *, own: bool) -> Source | None:
    claim = saved.claim if isinstance(saved, Packed) else None
    if isinstance(claim, Rebuild):
        return Source(claim.recipe, saved, operand.layout, own)
    if saved.layout is None or saved.layout == operand.layout:
        return Source(None, saved, operand.layout, own)
    return None  # moved or handed down in another layout: its bytes cannot be seen in this one


class Recipe:
    """A recorded call with all its inputs at hand.

    [Note: never more than plain]
    A recipe refers to what autograd holds; it must not be the last to do so, or it would pin
    inputs where the plain run held one output. Inputs that the recorded call's own node saved,
    or that nodes further up its chain saved, live at least as long as the node that asks for the
    value, because that node has an edge to them. Other inputs (saved by some branch that may be
    dropped) count as foreign: a recipe is used only when its foreign inputs weigh no more than
    the value it replaces.

    Attributes:
        operators: How many operators a run executes.
    """

    __slots__ = ("_made", "_sources", "_uses", "operators")

    def __init__(self, made: Made, sources: list[Source | None], operators: int) -> None:
        self._made = made
        self._sources = sources
        self._uses = 0
        self.operators = operators
        for source in self._inputs():
            if source.recipe is not None:
                source.recipe._uses += 1

    def _inputs(self) -> Iterator[Source]:
        return (source for source in self._sources if source is not None)

    def leaves(self) -> Iterator[tuple[Saved, bool]]:
        """The saved tensors at the bottom, each with whether the chain itself holds it."""
        for source in self._inputs():
            if source.recipe is not None:
                yield from source.recipe.leaves()
            elif source.saved is not None:
                yield source.saved, source.own

    def foreign_bytes(self) -> int:
        """Bytes that this recipe could be the last to hold."""
        own: set[object] = set()
        foreign: dict[object, int] = {}
        for saved, is_own in self.leaves():
            key, nbytes = _weight(saved)
            if is_own:
                own.add(key)
            else:
                foreign[key] = nbytes
        return sum(nbytes for key, nbytes in foreign.items() if key not in own)

    def run(self, memo: dict[Recipe, Tensor]) -> Tensor:
        """Compute the value again; grad recording is off.

        Args:
            memo: Values that this rebuild needs more than once.
        """
        known = memo.get(self)
        if known is not None:
            return known
        made = self._made
        values = [
            source.value(memo) if source is not None else _as_passed(value)
            for source, value in zip(self._sources, made.values, strict=True)
        ]
        split = len(values) - len(made.names)
        with contextlib.ExitStack() as stack:
            if made.rng is not None:
                stack.enter_context(made.rng.replaying())
            if made.modes != Modes.now(made.modes.device_type):
                stack.enter_context(made.modes.replaying())
            keywords = dict(zip(made.names, values[split:], strict=True))
            output: Tensor = made.function(*values[:split], **keywords)
        if output.stride() != made.stride:
            output = _with_strides(output, made.stride)
        if self._uses > 1:
            memo[self] = output
        return output


def _as_passed(value: Any) -> Any:
    return value.unchanged() if isinstance(value, PackedParameter) else value


def _with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values, laid out as the forward's output was."""
    empty = torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def _weight(saved: Saved) -> tuple[object, int]:
    """What identifies the bytes that a saved tensor holds, and how many they are."""
    if isinstance(saved, Packed) and saved.claim is None:
        storage = saved.alias.untyped_storage()
        return storage._cdata, storage.nbytes()
    layout = saved.layout
    assert layout is not None
    return saved, layout.nbytes


class Rebuild:
    """The claim on a saved tensor that is rebuilt when backward asks for it."""

    __slots__ = ("layout", "recipe")

    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        self.recipe = recipe
        self.layout = layout

    def value(self) -> Tensor:
        """Run the recipe and look at its output as the saved tensor looked at it."""
        return self.layout.look_at(self.recipe.run({}))
