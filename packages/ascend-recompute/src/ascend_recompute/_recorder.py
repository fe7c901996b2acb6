"""Recording cheap calls while the model runs forward, and claiming what they made."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ascend_core.layout import Layout, fills_storage
from ascend_core.saved import (
    Frame,
    Packed,
    PackedParameter,
    Passed,
    StorageRecord,
    backward_runs,
)
from ascend_core.storage import hollow
from ascend_recompute import _nodes
from ascend_recompute._calls import Operator, random_state_before, use_saved_mask, write_down
from ascend_recompute._digest import digest
from ascend_recompute._parts import COMPOSITES, Parts
from ascend_recompute._recipe import UNKNOWABLE, Castable, Made, Modes, Operand, Rebuild, Recipe
from ascend_recompute._tally import Tally
from ascend_recompute._widened import Widened
from ascend_recompute.policy import Policy


class RebuildKeeper:
    """A keeper that rebuilds what recorded calls made.

    Attributes:
        moves: False: what it claims is rebuilt where it was.
        policy: Which operators may be run again.
        operators: All of them.
        verify: Whether rebuilt values are compared with those of the forward.
        tally: Counts what was dropped.
    """

    moves = False

    def __init__(self, policy: Policy, *, verify: bool = False) -> None:
        self.policy = policy
        self.verify = verify
        self.operators = policy.operators | policy.random
        self.tally = Tally()

    def open(self, frame: Frame) -> Recorder:
        """Begin to record in a frame.

        What it drops is counted when it belongs to a forward, and when its tensors are not
        somebody else's to keep: inside a checkpoint nothing is held anyway.
        """
        counts = not backward_runs() and not frame.over_foreign
        if counts:
            self.tally.begin()
        tally = self.tally if counts else Tally()
        return Recorder(frame, self.policy, tally, verify=self.verify)


class Recorder:
    """The calls recorded in one frame. Used by one thread while the frame is open."""

    def __init__(self, frame: Frame, policy: Policy, tally: Tally, *, verify: bool) -> None:
        self._frame = frame
        self._policy = policy
        self._random = policy.random
        self._tally = tally
        self._verify = verify
        self._self = weakref.ref(self)
        self._modes = Modes.now("cpu")
        # While a call is under way.
        self._widened: Widened | None = None
        self._parts: Parts | None = None

    def close(self) -> None:
        """The frame ends. What was claimed stays good; there is nothing to give back."""

    def forget(self, tensor: Tensor) -> None:
        """The tensor may be written to without any version counter moving (`tensor.data`)."""
        if Layout.fits(tensor):
            self._frame.table.track(tensor).made = UNKNOWABLE

    def call(
        self,
        label: str,
        function: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call `function` and note how its output was made.

        Returns:
            Just what the function returns.
        """
        frame, rng = self._frame, None
        is_random = function in self._random
        if is_random:
            rng = random_state_before(function, (*args, *kwargs.values()))
        first = frame.serial + 1
        widened = self._widened = Widened()
        parts = self._parts = Parts(label) if function in COMPOSITES else None
        try:
            output = function(*args, **kwargs)
        finally:
            self._widened = self._parts = None
        if not self._is_recordable(output):
            return output
        made = write_down(frame, function, args, kwargs, output, range(first, frame.serial + 1))
        if made is None:
            return output
        made.rng = rng
        if is_random and rng is None and not use_saved_mask(frame, made, output):
            return output
        made.returned(output, self._modes_now(output), self._tally, label)
        if widened:
            widened.complete(made, (*args, *kwargs.values()))
        if self._verify:
            made.digest = digest(output)
        self._note(made, output)
        if parts is not None:
            parts.shorten(made, output)
        return output

    def _note(self, made: Made, output: Tensor) -> None:
        """Note a call where a node that asks for its output can find it."""
        record = self._frame.table.track(output)
        if record.made is not UNKNOWABLE:
            record.made = made
        if made.modes.autocast:
            made.cast = Castable(self._self, Operand.of(output, record), hollow(output))
        _nodes.note(output.grad_fn, made)
        if made.own:
            self._reconsider(made, record)

    def _is_recordable(self, output: Any) -> bool:
        """Whether it is one large enough tensor with a graph, and all there is in its storage."""
        return (
            type(output) is Tensor
            and output.requires_grad
            and output.layout is torch.strided
            and output.nbytes >= self._policy.min_bytes
            and not (output.is_meta or output.is_nested)
            and fills_storage(output)
        )

    def _modes_now(self, output: Tensor) -> Modes:
        """The modes in force; the same object for as long as they are the same."""
        device_type = "cpu" if output.is_cpu else output.device.type
        if self._modes.differ(device_type):
            self._modes = Modes.now(device_type)
        return self._modes

    def _reconsider(self, made: Made, record: StorageRecord) -> None:
        """Hand over what the call's own node kept, now that more is known.

        The node may have saved its own output (tanh), for which there was no recipe yet, or
        an operand whose sources it was about to save itself.
        """
        if record.latest() is not None:
            self._recipe(made, record, made)
        for operand in made.operands():
            before = operand.made
            if before is not None:
                self._recipe(before, operand.record, made)

    def claim(self, tensor: Tensor, record: StorageRecord) -> Rebuild | None:
        """Claim a saved tensor that a recorded call made, where rebuilding it is legal and pays."""
        if self._widened is not None:
            self._widened.note(tensor, record)
        if record.made is None and self._modes.autocast:
            record.made = self._made_by_autocast(tensor)
        if self._parts is not None:
            self._note_product(self._parts, tensor, record)
        made = record.made
        if not isinstance(made, Made) or made.version != tensor._version:
            return None
        if made.tally is not self._tally:  # another keeper recorded it, and claims it
            return None
        if not _nodes.leads_to(tensor, made):
            return None
        recipe = self._recipe(made, record, None)
        return None if recipe is None else Rebuild(recipe)

    def _note_product(self, parts: Parts, tensor: Tensor, record: StorageRecord) -> None:
        """Note how a tensor that a call saves was made inside the call."""
        made = parts.product(tensor, record, self._frame.serial)
        if made is None or record.made is not None or not self._is_recordable(tensor):
            return
        made.returned(tensor, self._modes_now(tensor), self._tally, parts.label)
        if self._verify:
            made.digest = digest(tensor)
        record.made = made
        _nodes.note(tensor.grad_fn, made)

    def _recipe(self, made: Made, record: StorageRecord, asking: Made | None) -> Recipe | None:
        """The recipe of a storage for a node that asks; whoever kept the storage lets go of it.

        [Note: one storage, many saves]
        Dropping a storage pays only when nobody keeps it. So a storage that another recipe needs
        as it is (anchored), that another keeper has moved, or that a node keeps which does not
        reach the recipe's inputs, is left alone.

        Args:
            made: How the storage was made.
            record: The storage.
            asking: The call whose node asks and has saved already; None while a save is under
                way, by a node of which only this is known, that it leads to the node of `made`.
        """
        may_let_go = made.own if asking is None else asking.own
        kept: list[Packed] = []
        dropped_before = False
        for saved in record.saved(made.version):
            if isinstance(saved, Passed):
                continue
            if isinstance(saved, Packed) and isinstance(saved.claim, Rebuild):
                dropped_before = True
            elif isinstance(saved, PackedParameter) or not _lets_go(saved, may_let_go):
                return None
            else:
                kept.append(saved)
        if asking is not None and not kept:
            return None
        reach = made.reach if asking is None else asking.reach
        recipe = made.resolve(self._policy.max_operators, reach)
        if recipe is None:
            return None
        recipe.anchor()
        for saved in kept:
            saved.hand_over(Rebuild(recipe))
        if not dropped_before:
            made.tally.add(made.label, made.nbytes)
        return recipe

    def _made_by_autocast(self, tensor: Tensor) -> Made | None:
        """How a copy that autocast made of a recorded output was made.

        Autocast casts the arguments of an operator below the level at which calls are recorded;
        the cast shows in the graph, between the saved tensor and the recorded call's node.
        """
        cast = _nodes.cast_of_a_call(tensor)
        castable = None if cast is None else cast.of.cast
        if cast is None or castable is None or castable.recorder() is not self:
            return None
        seen, probe = castable.seen, castable.probe
        # The cast must have read the output as the call left it, here, and kept its strides.
        if seen.made is not cast.of or probe._version != seen.version:
            return None
        if probe.device != tensor.device:
            return None
        if not _nodes.kept_strides(tensor, seen.layout, flattened=cast.flattened):
            return None
        made = Made(Tensor.to, (seen, tensor.dtype), (), range(0), cast.of.reach)
        made.returned(tensor, cast.of.modes, cast.of.tally, cast.of.label)
        made.stride = seen.layout.stride
        _nodes.note(cast.node, made)
        return made


def _lets_go(saved: Packed, allowed: range) -> bool:
    return saved.claim is None and not saved.anchored and saved.serial in allowed
