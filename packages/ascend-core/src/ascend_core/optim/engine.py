"""Walks the windows of a step, each through torch's own arithmetic.

[Note: a step, and what is written when]
1. Everything that the step needs is allocated: the home's device memory, and scratch for gradients
   and weights. Torch's forms that are not fused ask the allocator for temporaries in each window.
   The first window's are asked for before it is written; the arithmetic of every other one, unless
   its slices have the same sizes as an earlier one's, is tried before, on memory that holds
   nothing, so that the allocator has the blocks. (A sum of sizes would not do: small blocks and
   large ones come from different pools.)
   Until here nothing was written: an allocation that fails leaves all unstepped.
2. For each window: the next one is fetched; this one is entered. Its slices become the parameters
   of a *shadow*, an instance of the wrapped optimizer's own class that holds nothing else, and the
   class's own `step` runs on it. Where the home does not work in place, all of that is done on
   copies: the slice's weight (or FP32 master), its gradient, its state.
3. The window is *committed*: weights are written, the home takes the state back. These are copies
   out of memory that nobody changes any more, so a commit may be repeated.
4. The journal notes the window.

An exception between two of these lines leaves a step that can be finished: windows in the journal
are done; a commit that was begun is repeated; any other window is as it was. Behind the last window
the step is done, and the next call with the same gradients does no more than return.

A failed kernel or copy is another thing: what it wrote is not known, and the journal is closed for
good. A kernel fails when it runs, and whoever waits for the device next is told. `step`, `state`
and `state_dict` are such places; each says then that the optimizer failed. The user's own code may
be told first (`loss.item()`), which changes nothing: a device on which a kernel failed stops (CUDA
always; an NPU since torch_npu asks for ACL_STOP_ON_FAILURE), and tells everybody who asks, until
the process ends or somebody resets it. So loading a checkpoint ends the failure of the optimizer,
and not that of the device: where that has stopped, the load or the next step says so again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from ascend_core.optim.arena import Arena, aligned
from ascend_core.optim.gradients import Gradients, Scaling
from ascend_core.optim.home import MASTER, CohortWindow, Held, Home, Slot, Walk
from ascend_core.optim.incoming import Incoming
from ascend_core.optim.journal import Journal, failed_because
from ascend_core.optim.rules import unhooked_step

__all__ = ["Engine"]

Targets = Sequence[tuple[torch.Tensor, Held]]
"""For each slice the tensor that torch steps, with its gradient in `.grad`."""


class Engine:
    """Steps windows of slots.

    Args:
        kind: The class whose arithmetic is used.
        defaults: Its `defaults`.
        home: Where state lives.
        gradients: Where gradients come from.
        attributes: What instances of the class have beyond those of torch's optimizers.
    """

    def __init__(
        self,
        kind: type[optim.Optimizer],
        defaults: dict[str, Any],
        home: Home,
        gradients: Gradients,
        attributes: Mapping[str, Any],
    ) -> None:
        self._kind = kind
        self._defaults = defaults
        self._attributes = attributes
        self.home = home
        self.gradients = gradients
        self.step = unhooked_step(kind)

    def run(self, journal: Journal, active: set[Slot], scaling: Scaling) -> None:
        """Walk every window that the journal does not have yet.

        Args:
            journal: Of this step; complete when this returns.
            active: The slots that have a gradient.
            scaling: What the gradients are multiplied by.

        Raises:
            OptimizerFailedError: When a kernel or copy failed.
        """
        try:
            journal.repeat_commit()
            journal.close()
            for window in journal.finished:
                self.release(window, active)
            windows = journal.remaining()
            if windows:
                _Step(self, windows, active, scaling, journal).run()
        except BaseException as error:
            if not journal.is_damaged_by(error):
                raise
            journal.failure = failed_because(error)
            if isinstance(error, Exception):
                raise journal.failure from error
            raise  # an interrupt stays one; the next call says that the optimizer failed

    def release(self, window: CohortWindow, active: set[Slot]) -> None:
        """Give up the gradients that end with a window. May be repeated."""
        for piece in window.slices:
            slot = window.slot(piece)
            if piece.is_last and slot in active:
                self.gradients.release(slot)

    def shadow(self, targets: Targets, scaling: Scaling) -> Any:
        """An instance of the wrapped class that holds the given slices and nothing else.

        Args:
            targets: The slices.
            scaling: Handed to kernels that take it.
        """
        shadow: Any = self._kind.__new__(self._kind)
        groups: dict[int, dict[str, Any]] = {}
        state = {}
        for target, (slot, _, elements, scalars) in targets:
            if id(slot.group) not in groups:
                groups[id(slot.group)] = {**slot.group, "params": []}
            groups[id(slot.group)]["params"].append(target)
            kept = {n: t for n, t in elements.items() if n != MASTER and n not in slot.unmade}
            state[target] = {**scalars, **kept}
        shadow.__dict__.update(
            self._attributes,
            defaults=self._defaults,
            param_groups=list(groups.values()),
            state=_EmptyByDefault(state),
            grad_scale=scaling.grad_scale,
            found_inf=scaling.found_inf,
            _warned_capturable_if_run_uncaptured=True,
        )
        return shadow


class _EmptyByDefault(dict[torch.Tensor, Any]):
    """`state` as torch's optimizers expect it."""

    def __missing__(self, key: torch.Tensor) -> dict[str, Any]:
        self[key] = {}
        found: dict[str, Any] = self[key]
        return found


class _Step:
    """What is left of one step: its windows and the memory that it works in."""

    def __init__(
        self,
        engine: Engine,
        windows: Sequence[CohortWindow],
        active: set[Slot],
        scaling: Scaling,
        journal: Journal,
    ) -> None:
        self._engine = engine
        self._windows = windows
        self._active = active
        self._scaling = scaling
        self._journal = journal
        self._in_place = engine.home.in_place
        self._masters = engine.home.masters
        self._kernel = kernel = engine.home.kernel
        slots = {window.slot(piece) for window in windows for piece in window.slices} & active
        self._flat = {slot: slot.flat() for slot in slots}
        self._gradients = {slot: engine.gradients.flat(slot) for slot in slots}
        self._by_kernel = {
            slot
            for slot, gradient in self._gradients.items()
            if kernel is not None and kernel.takes(slot, gradient.dtype)
        }
        scale = scaling.grad_scale
        # As GradScaler.unscale_ computes it.
        self._unscale = None if scale is None else scale.double().reciprocal().float()

    def run(self) -> None:
        walk = self._journal.walk = self._engine.home.walk(self._windows)
        try:
            scratch = Arena(max(map(self._scratch_bytes, self._windows)), self._device())
            incoming = Incoming(self._engine.gradients, self._gradients, self._windows)
            try:
                self._walk_through(walk, incoming, scratch)
            finally:
                incoming.close()
        finally:
            if not self._journal.has_commit:  # its memory holds what is still to be written
                self._journal.close()
        self._journal.is_writing = False

    def _walk_through(self, walk: Walk, incoming: Incoming, scratch: Arena) -> None:
        walk.fetch(0)
        incoming.fetch(0)
        for number in self._rehearsals():
            incoming.blank(number)
            self._computed(walk.blank(number), incoming, scratch)
        self._journal.is_writing = True
        for number, window in enumerate(self._windows):
            if number + 1 < len(self._windows):
                walk.fetch(number + 1)
                incoming.fetch(number + 1)
            held = walk.enter(number)
            incoming.enter(number)
            targets = self._computed(held, incoming, scratch)
            self._commit(walk, number, held, targets, scratch)
            self._journal.finish(window)
            self._release(window)

    def _device(self) -> torch.device:
        return next(iter(self._active)).parameter.device

    def _computed(self, held: list[Held], incoming: Incoming, scratch: Arena) -> Targets:
        """Run the class's own step; forms that are not fused know nothing of scaling."""
        scratch.rewind()
        mine = [one for one in held if one.slot in self._active]
        by_kernel = [one for one in mine if one.slot in self._by_kernel]
        by_torch = [one for one in mine if one.slot not in self._by_kernel]
        # All masters before all gradients: what passes while one is opened takes no room then.
        targets = [(self._target(one, scratch), one) for one in by_torch]
        for target, one in targets:
            target.grad = self._gradient(one, incoming, scratch)
        gradients = [self._gradient(one, incoming, scratch) for one in by_kernel]
        self._journal.is_computing_in_place = self._in_place
        for one, gradient in zip(by_kernel, gradients, strict=True):
            assert self._kernel is not None
            self._kernel.step(one, self._weight(one), gradient)
        parts: dict[tuple[bool, bool], list[tuple[torch.Tensor, Held]]] = {}
        for target, one in targets:
            parts.setdefault(_form(one.slot), []).append((target, one))
        for (is_fused, _), part in parts.items():
            shadow = self._engine.shadow(part, self._scaling if is_fused else Scaling())
            self._engine.step(shadow)
            for target, one in part:
                target.grad = None  # a master outlives the step, and would hold the scratch
                for name in one.slot.unmade:
                    one.elements[name].copy_(shadow.state[target][name])
        return targets

    def _commit(
        self, walk: Walk, number: int, held: list[Held], targets: Targets, scratch: Arena
    ) -> None:
        def write() -> None:
            for target, one in targets:
                self._write_weight(one, target, scratch)
            walk.leave(number, held)
            for one in held:
                if one.piece.is_last and one.slot in self._active:
                    one.slot.unmade.clear()
                    one.slot.is_stepped = True

        self._journal.commit(write)

    def _release(self, window: CohortWindow) -> None:
        for piece in window.slices:
            if piece.is_last:
                self._gradients.pop(window.slot(piece), None)
        self._engine.release(window, self._active)

    def _rehearsals(self) -> Sequence[int]:
        """The windows whose arithmetic is tried before anything is written.

        The first window's runs before the first write as it is. Another one is tried where it may
        ask for other temporaries than those before it.
        """
        if self._in_place or self._device().type == "cpu":
            return ()
        asked: dict[tuple[object, ...], int] = {(): 0}
        for number, window in enumerate(self._windows):
            asked.setdefault(self._temporaries(window), number)
        return [number for number in asked.values() if number > 0]

    def _temporaries(self, window: CohortWindow) -> tuple[object, ...]:
        """What decides which temporaries the forms that are not fused ask for, by slice."""
        slots = ((window.slot(piece), piece) for piece in window.slices)
        return tuple(
            (id(s.group), s.dtype, p.numel)
            for s, p in slots
            if s in self._active and not s.group.get("fused")
        )

    # What is stepped, and what that needs of scratch.

    def _weight(self, held: Held) -> torch.Tensor:
        return self._flat[held.slot][held.piece.start : held.piece.stop]

    def _gradient(self, held: Held, incoming: Incoming, scratch: Arena) -> torch.Tensor:
        """A slice's gradient, or the copy of it that is stepped with."""
        gradient = incoming.slice(held.slot, held.piece)
        return self._scaled(held.slot, gradient, scratch) if self._copies(held.slot) else gradient

    def _target(self, held: Held, scratch: Arena) -> torch.Tensor:
        """The tensor that torch steps for a slice: master, weight or a copy of it."""
        weight = self._weight(held)
        if held.slot.has_master:
            return self._masters.open(held, weight, scratch)
        if self._in_place:
            return weight
        return scratch.take(weight.numel(), weight.dtype).copy_(weight)

    def _write_weight(self, held: Held, target: torch.Tensor, scratch: Arena) -> None:
        if held.slot.has_master:
            self._masters.write(held, self._weight(held), target, scratch)
        elif not self._in_place:
            self._weight(held).copy_(target)

    def _copies(self, slot: Slot) -> bool:
        """Whether the step works on a copy: never change a gradient that may be needed again."""
        return (
            not self._in_place
            or (self._scaling.grad_scale is not None and not slot.group.get("fused"))
            or (self._gradients[slot].dtype != slot.dtype and slot not in self._by_kernel)
        )

    def _scaled(self, slot: Slot, gradient: torch.Tensor, scratch: Arena) -> torch.Tensor:
        """A copy of a gradient in the slot's dtype, unscaled."""
        copy = scratch.take(gradient.numel(), slot.dtype).copy_(gradient)
        if self._unscale is not None and not slot.group.get("fused"):
            copy.mul_(self._unscale)
        return copy

    def _scratch_bytes(self, window: CohortWindow) -> int:
        """The most that a window takes of scratch, first for targets, then for gradients too."""
        targets = gradients = opening = writing = 0
        for piece in window.slices:
            slot, numel = window.slot(piece), piece.numel
            if slot not in self._active:
                continue
            if self._copies(slot):
                gradients += aligned(numel * slot.dtype.itemsize)
            if slot.has_master and slot not in self._by_kernel:
                targets += aligned(self._masters.kept_bytes(numel))
                opening = max(opening, self._masters.opening_bytes(slot, numel))
                writing = max(writing, self._masters.writing_bytes(slot, numel))
            elif not self._in_place:
                targets += aligned(numel * slot.dtype.itemsize)
        return targets + max(opening, gradients + writing)


def _form(slot: Slot) -> tuple[bool, bool]:
    """What the slices of one call of torch must have in common: fused, and the first step."""
    return bool(slot.group.get("fused")), bool(slot.unmade)
