"""Recording cheap calls while the model runs forward, and claiming what they made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ascend_core.layout import Layout, read
from ascend_core.rng import RngState
from ascend_core.saved import Frame, Packed, PackedParameter, Passed, StorageRecord, hollow
from ascend_recompute._recipe import Made, Modes, Operand, Rebuild, Recipe
from ascend_recompute._tally import Tally
from ascend_recompute.policy import CASTS, DROPOUT, Policy

Operator = Callable[..., Any]
# A call as it is repeated: the function, its arguments, the names of the last of them.
_Recorded = tuple[Operator, tuple[Any, ...], tuple[str, ...]]

_NODE_KEY = "ascend_recompute"
_FLATTENS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
_NO_CONSTANT = object()
_CONSTANTS = (
    bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
_READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# So many views of an output are followed back to the call that made it.
_LONGEST_VIEW = 8
# Reaches of long chains are cut: what is forgotten is not rebuilt, and stays as in the plain run.
_LONGEST_REACH = 64


class RebuildKeeper:
    """A keeper that rebuilds what recorded calls made.

    Attributes:
        moves: False: what it claims is rebuilt where it was.
        policy: Which operators may be run again.
        tally: Counts what was dropped.
    """

    moves = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tally = Tally()

    def open(self, frame: Frame) -> Recorder:
        """Begin to record in a frame; what it drops is counted when it belongs to a forward."""
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and not frame.over_foreign:
            self.tally.begin()
        return Recorder(frame, self.policy, self.tally if in_forward else Tally())


class _OnNode(NamedTuple):
    """What is noted on the autograd node of a recorded call; it lives as long as the node.

    Attributes:
        recorder: Who recorded the call.
        made: The call.
        probe: Under autocast, shares the version counter of the output.
    """

    recorder: weakref.ref[Recorder]
    made: Made
    probe: Tensor | None


class Recorder:
    """The calls recorded in one frame. Used by one thread while the frame is open."""

    def __init__(self, frame: Frame, policy: Policy, tally: Tally) -> None:
        self._frame = frame
        self._policy = policy
        self._tally = tally
        self._self = weakref.ref(self)
        self._modes = Modes.now("cpu")

    def forget(self, tensor: Tensor) -> None:
        """Its contents may be written to without any version counter moving (`tensor.data`)."""
        record = self._frame.table.find(tensor) if Layout.fits(tensor) else None
        if record is not None:
            record.made = None

    def close(self) -> None:
        """The frame ends. What was claimed stays good; there is nothing to give back."""

    # Recording

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
        first = self._frame.serial
        rng = _rng_before(function, args) if function in self._policy.random else None
        output = function(*args, **kwargs)
        if not self._is_recordable(output):
            return output
        values = (*args, *kwargs.values()) if kwargs else args
        record = self._frame.table.track(output)
        noted = self._note_arguments(values, record)
        own = range(first + 1, self._frame.serial + 1)
        recorded = None if noted is None else (function, noted, tuple(kwargs))
        if noted is not None and rng is None and function in self._policy.random:
            recorded = self._with_saved_mask(noted, own, output)
        elif noted is not None and function in CASTS:
            recorded = _cast(function, noted, tuple(kwargs), values, output)
        if recorded is None:
            return output
        function, noted, names = recorded
        reach = self._reach(own, values, noted, output)
        seen, modes = Operand.of(output, record), self._modes_now(output)
        record.made = made = Made(
            function, noted, names, seen, output.nbytes, own, reach, label, modes, rng
        )
        probe = hollow(output) if modes.autocast else None
        _notes(output.grad_fn)[_NODE_KEY] = _OnNode(self._self, made, probe)
        if own:
            self._reconsider(made, record)
        return output

    def _is_recordable(self, output: Any) -> bool:
        """Whether it is one large enough tensor with a graph, and all there is in its storage."""
        return (
            type(output) is Tensor
            and output.requires_grad
            and output.layout is torch.strided
            and output.nbytes >= self._policy.min_bytes
            and not (output.is_meta or output.is_nested)
            and output.untyped_storage().nbytes() == output.nbytes
        )

    def _note_arguments(
        self, values: tuple[Any, ...], output: StorageRecord
    ) -> tuple[Any, ...] | None:
        """The arguments without the tensors in them; None when the call cannot be recorded."""
        noted: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                if not Layout.fits(value) or not (value.requires_grad or _has_version(value)):
                    return None
                record = self._frame.table.track(value)
                if record is output:  # a view, or the input itself: nothing was made
                    return None
                noted.append(Operand.of(value, record))
            else:
                constant = _constant(value)
                if constant is _NO_CONSTANT:
                    return None
                noted.append(constant)
        return tuple(noted)

    def _with_saved_mask(
        self, noted: tuple[Any, ...], own: range, output: Tensor
    ) -> _Recorded | None:
        """Dropout as a product with the scaled mask, when its node saved just that.

        On CPU `at::dropout` is a product with a mask of zeros and 1 / (1 - p), which the
        product's node saves; multiplying again gives the same bits and draws nothing.
        """
        record = self._frame.latest
        if record is None or len(own) != 1 or _name(output.grad_fn) != "MulBackward0":
            return None
        mask = record.latest()
        if mask is None or mask.serial not in own or isinstance(mask, PackedParameter):
            return None
        layout = mask.layout if mask.layout is not None else read(mask.alias)
        if (layout.size, layout.dtype) != (output.size(), output.dtype):
            return None
        (dropped,) = (value for value in noted if isinstance(value, Operand))
        return torch.mul, (dropped, Operand((record, mask.version, *layout))), ()

    def _reach(
        self, own: range, values: tuple[Any, ...], noted: tuple[Any, ...], output: Tensor
    ) -> tuple[range, ...]:
        """The saves of the call's own node and of the recorded nodes behind it."""
        reach: tuple[range, ...] = (own,) if own else ()
        for value, operand in zip(values, noted, strict=False):
            made = operand.made if isinstance(operand, Operand) else None
            if made is None or not made.reach or not isinstance(value, Tensor):
                continue
            if _has_edge(output, value) and _leads_to(value, made):
                reach = made.reach + tuple(r for r in reach if r not in made.reach)
        return reach[-_LONGEST_REACH:]

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

    def _modes_now(self, output: Tensor) -> Modes:
        """The modes in force; the same object for as long as they are the same."""
        device_type = "cpu" if output.is_cpu else output.device.type
        if self._modes.differ(device_type):
            self._modes = Modes.now(device_type)
        return self._modes

    # Claiming

    def claim(self, tensor: Tensor, record: StorageRecord) -> Rebuild | None:
        """Claim a saved tensor that a recorded call made, where rebuilding it is legal and pays."""
        made: Made | None = record.made
        if made is None and self._modes.autocast:
            made = record.made = self._made_by_autocast(tensor, record)
        if made is None or made.version != tensor._version or not _leads_to(tensor, made):
            return None
        recipe = self._recipe(made, record, None)
        return None if recipe is None else Rebuild(recipe, read(tensor))

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
            saved.hand_over(Rebuild(recipe, read(saved.alias)))
        if not dropped_before:
            self._tally.add(made.label, made.nbytes)
        return recipe

    def _made_by_autocast(self, tensor: Tensor, record: StorageRecord) -> Made | None:
        """How a copy that autocast made of a recorded output was made.

        Autocast casts the arguments of an operator below the level at which calls are recorded;
        the cast shows in the graph, between the saved tensor and the recorded call's node.
        """
        node = tensor.grad_fn
        flattened = False
        while node is not None and node.name() in _FLATTENS:
            node, flattened = node.next_functions[0][0], True
        if node is None or _name(node) != "ToCopyBackward0":
            return None
        source = node.next_functions[0][0]
        note = None if source is None else _notes(source).get(_NODE_KEY)
        if not isinstance(note, _OnNode) or note.recorder() is not self or note.probe is None:
            return None
        made, probe = note.made, note.probe
        layout = made.output.layout
        # The cast read the output as the call left it, on this device, and kept its strides.
        if made.output.made is not made or probe._version != made.version:
            return None
        if probe.device != tensor.device:
            return None
        if not _same_strides(tensor, layout, flattened=flattened):
            return None
        nbytes = tensor.untyped_storage().nbytes()
        output = Operand((record, tensor._version, *layout._replace(dtype=tensor.dtype)))
        cast = Made(
            Tensor.to,
            (made.output, tensor.dtype),
            (),
            output,
            nbytes,
            range(0),
            made.reach,
            made.label,
            made.modes,
            None,
        )
        _notes(node)[_NODE_KEY] = _OnNode(self._self, cast, None)
        return cast


class Recording(TorchFunctionMode):
    """While it is entered, cheap calls on this thread are recorded under `label`."""

    def __init__(self, recorder: Recorder, policy: Policy, label: str) -> None:
        super().__init__()
        self._recorder = recorder
        self._operators = policy.operators | policy.random
        self._label = label

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `function`, by way of the recorder when the policy covers it."""
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        if function in self._operators:
            return self._recorder.call(self._label, function, args, kwargs or {})
        if function in (_READ_DATA, _WRITE_DATA):
            self._recorder.forget(args[0])
        return function(*args, **(kwargs or {}))


def _cast(
    function: Operator, noted: tuple[Any, ...], names: tuple[str, ...], values: Any, output: Tensor
) -> _Recorded | None:
    """A cast as it can be repeated: on one device, and without the tensor that named the dtype."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or tensors[0].device != output.device:
        return None
    if len(tensors) == 2:  # `x.type_as(other)`, `x.to(other)`
        (source, _) = (value for value in noted if isinstance(value, Operand))
        return Tensor.to, (source, output.dtype), ()
    return function, noted, names


def _has_edge(output: Tensor, value: Tensor) -> bool:
    """Whether the output's graph leads to an operand; `type_as(other)` asks none of `other`."""
    node = output.grad_fn
    for _ in range(_LONGEST_VIEW):  # a composite operator is a short chain of nodes
        if node is None or value.grad_fn is None:
            return False
        behind = node.next_functions
        if any(operand is value.grad_fn for operand, _ in behind):
            return True
        node = behind[0][0] if len(behind) == 1 else None
    return False


def _leads_to(tensor: Tensor, made: Made) -> bool:
    """Whether the tensor's graph leads to the node of a call, by way of views of its output.

    Not so for a leaf that was made of the output by `detach().requires_grad_()`.
    """
    node = tensor.grad_fn
    for _ in range(_LONGEST_VIEW):
        if node is None:
            return False
        note = _notes(node).get(_NODE_KEY)
        if isinstance(note, _OnNode):
            return note.made is made
        behind = node.next_functions
        node = behind[0][0] if len(behind) == 1 else None
    return False


def _name(node: Any) -> str:
    return "" if node is None else str(node.name())


def _notes(node: Any) -> dict[str, Any]:
    """The dictionary that lives as long as an autograd node (its stub is wrong)."""
    notes: dict[str, Any] = node.metadata
    return notes


def _lets_go(saved: Packed, allowed: range) -> bool:
    return saved.claim is None and not saved.anchored and saved.serial in allowed


def _same_strides(tensor: Tensor, layout: Layout, *, flattened: bool) -> bool:
    """Whether the cast that `tensor` shows has the strides of what was cast."""
    if tensor.untyped_storage().nbytes() != layout.size.numel() * tensor.element_size():
        return False
    if not flattened:
        return tensor.size() == layout.size and tensor.stride() == layout.stride
    return tensor.is_contiguous() and _is_contiguous(layout)


def _is_contiguous(layout: Layout) -> bool:
    expected = 1
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _rng_before(function: Operator, args: tuple[Any, ...]) -> RngState | None:
    """The random state that the call is about to use.

    None for dropout on CPU, whose mask is saved by its own node and serves as well.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if function in DROPOUT and all(tensor.is_cpu for tensor in tensors):
        return None
    return RngState.capture({tensor.device for tensor in tensors if not tensor.is_cpu})


def _constant(value: Any) -> Any:
    """The value, as it will still be in backward; `_NO_CONSTANT` when nobody can promise that."""
    if isinstance(value, _CONSTANTS):
        return value
    if type(value) in (list, tuple):
        items = tuple(_constant(item) for item in value)
        return _NO_CONSTANT if any(item is _NO_CONSTANT for item in items) else items
    return _NO_CONSTANT


def _has_version(tensor: Tensor) -> bool:
    """Whether writes to it can be noticed; not so for tensors made in inference mode."""
    return not tensor.is_inference()
