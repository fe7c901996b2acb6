"""Recording cheap calls while the model runs forward, and claiming what they made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ascend_core.layout import Layout, read
from ascend_core.rng import RngState
from ascend_core.saved import Frame, Packed, PackedParameter, StorageRecord
from ascend_recompute._recipe import Made, Modes, Operand, Rebuild, Recipe
from ascend_recompute.policy import DROPOUT, Policy

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "ReshapeAlias", "UnsafeView", "T", "Transpose", "Permute", "Unsqueeze")
)


class Tally:
    """Bytes that are not held for backward, by the module whose call made them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def begin(self, label: str) -> None:
        """A new forward of the module begins."""
        with self._lock:
            self._bytes[label] = 0

    def add(self, label: str, nbytes: int) -> None:
        """A storage of so many bytes is dropped."""
        with self._lock:
            self._bytes[label] = self._bytes.get(label, 0) + nbytes

    def by_label(self) -> dict[str, int]:
        """Bytes dropped in the latest forward of each module."""
        with self._lock:
            return dict(self._bytes)


class RebuildKeeper:
    """A keeper that rebuilds what recorded calls made.

    Attributes:
        moves: False: what it claims is rebuilt where it was.
        policy: Which operators may be run again.
        tally: Counts what was dropped.
    """

    moves = False

    def __init__(self, policy: Policy, tally: Tally | None = None) -> None:
        self.policy = policy
        self.tally = tally if tally is not None else Tally()

    def open(self, frame: Frame) -> Recorder:
        """Begin to record in a frame."""
        return Recorder(frame, self.policy, self.tally)


class Recorder:
    """The calls recorded in one frame. Used by one thread while the frame is open."""

    def __init__(self, frame: Frame, policy: Policy, tally: Tally) -> None:
        self._frame = frame
        self._policy = policy
        self._tally = tally
        self._modes = Modes.now("cpu")
        # Under autocast only: what was made, by the sequence number of its autograd node.
        self._by_node: dict[int, tuple[Made, Operand]] = {}

    def close(self) -> None:
        """The frame ends: nothing more can be claimed."""
        self._by_node.clear()

    def call(
        self,
        label: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call `function` and note how its output was made.

        Returns:
            Just what the function returns.
        """
        first = self._frame.serial
        is_random = function in self._policy.random
        rng = _rng_before(function, args) if is_random else None
        output = function(*args, **kwargs)
        if type(output) is not Tensor or not output.requires_grad or "out" in kwargs:
            return output
        noted = self._note_arguments((*args, *kwargs.values()), output)
        if noted is None:
            return output
        own = range(first + 1, self._frame.serial + 1)
        if is_random and rng is None:
            mask = self._saved_mask(own, output)
            if mask is None:
                return output
            function, noted, kwargs = torch.mul, (noted[0], mask), {}
        made = Made(
            function,
            noted,
            tuple(kwargs),
            stride=output.stride(),
            version=output._version,
            nbytes=output.untyped_storage().nbytes(),
            own=own,
            label=label,
            modes=self._modes_now(output),
            rng=rng,
        )
        self._note_output(made, output)
        return output

    def _note_arguments(self, values: tuple[Any, ...], output: Tensor) -> tuple[Any, ...] | None:
        """The arguments without the tensors in them; None when the call cannot be recorded."""
        storage = output.untyped_storage()
        noted: list[Any] = []
        for value in values:
            if type(value) is Tensor and Layout.fits(value):
                record = self._frame.table.track(value)
                if record() is storage:  # a view, or the input itself: nothing was made
                    return None
                noted.append(Operand(record, value._version, read(value)))
            elif type(value) is torch.nn.Parameter:
                if value.untyped_storage() is storage:
                    return None
                noted.append(PackedParameter(value))
            elif _may_hold_tensors(value):
                return None
            else:
                noted.append(value)
        return tuple(noted)

    def _saved_mask(self, own: range, output: Tensor) -> Operand | None:
        """The scaled mask that dropout multiplied with, when its node saved just that.

        On CPU `at::dropout` is a product with a mask of zeros and 1 / (1 - p), which the
        product's node saves; multiplying again gives the same bits and draws nothing.
        """
        record = self._frame.latest
        if record is None or len(own) != 1 or _node_name(output) != "MulBackward0":
            return None
        mask = record.latest()
        if mask is None or mask.serial not in own:
            return None
        layout = mask.layout if mask.layout is not None else read(mask.alias)
        same = layout.size == output.size() and layout.dtype == output.dtype
        return Operand(record, mask.version, layout) if same else None

    def _note_output(self, made: Made, output: Tensor) -> None:
        covered = output.numel() * output.element_size()
        if covered != made.nbytes or output.storage_offset() != 0:
            return  # part of a larger storage, which this call alone did not make
        record = self._frame.table.track(output)
        record.made = made
        if made.modes.autocast and output.grad_fn is not None:
            seen = Operand(record, made.version, read(output))
            self._by_node[output.grad_fn._sequence_nr()] = (made, seen)
        if made.own and made.nbytes >= self._policy.min_bytes:
            self._recipe(made, record, only_if_saved=True)

    def _modes_now(self, output: Tensor) -> Modes:
        """The modes in force; the same object as long as they are the same."""
        modes = Modes.now(_device_type(output))
        if modes != self._modes:
            self._modes = modes
        return self._modes

    # Claiming

    def claim(self, tensor: Tensor, record: StorageRecord) -> Rebuild | None:
        """Claim a saved tensor that a recorded call made, where rebuilding it is legal and pays."""
        made = record.made if record.made is not None else self._made_by_autocast(tensor, record)
        if (
            made is None
            or made.version != tensor._version
            or made.nbytes < self._policy.min_bytes
            or not tensor.requires_grad
        ):
            return None
        recipe = self._recipe(made, record)
        return None if recipe is None else Rebuild(recipe, read(tensor))

    def _recipe(
        self, made: Made, record: StorageRecord, *, only_if_saved: bool = False
    ) -> Recipe | None:
        """The recipe of a storage; whoever kept the storage until now lets go of it.

        [Note: one storage, many saves]
        Dropping a storage pays only when nobody keeps it. So a storage that another recipe needs
        as it is (anchored), or that another keeper has moved, is left alone, and a producer that
        saved its own output (sigmoid, tanh) hands it over as soon as a recipe for it is legal.
        """
        kept: list[Packed] = []
        for saved in record.saved(made.version):
            if not isinstance(saved, Packed):
                continue
            if isinstance(saved.claim, Rebuild):
                return saved.claim.recipe
            if saved.anchored or saved.claim is not None:
                return None
            kept.append(saved)
        if only_if_saved and not kept:
            return None
        recipe = made.resolve(self._policy.max_operators)
        if recipe is None or recipe.foreign_bytes() > made.nbytes:
            return None
        for leaf, _ in recipe.leaves():
            leaf.anchored = True
        for saved in kept:
            saved.hand_over(Rebuild(recipe, read(saved.alias)))
        self._tally.add(made.label, made.nbytes)
        return recipe

    def _made_by_autocast(self, tensor: Tensor, record: StorageRecord) -> Made | None:
        """How a copy that autocast made of a recorded output was made.

        Autocast casts the arguments of an operator below the level at which calls are recorded;
        the cast shows in the graph, between the saved tensor and the recorded call's node.
        """
        if not self._by_node:
            return None
        node = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0":
            return None
        source = node.next_functions[0][0]
        found = self._by_node.get(source._sequence_nr()) if source is not None else None
        if found is None:
            return None
        origin, seen = found
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes != seen.layout.size.numel() * tensor.element_size():
            return None
        if _device_type(tensor) != origin.modes.device_type:
            return None
        made = record.made = Made(
            Tensor.to,
            (seen, tensor.dtype),
            (),
            stride=seen.layout.stride,
            version=tensor._version,
            nbytes=nbytes,
            own=range(0),
            label=origin.label,
            modes=origin.modes,
        )
        return made


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
        if function in self._operators:
            return self._recorder.call(self._label, function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _rng_before(function: Callable[..., Any], args: tuple[Any, ...]) -> RngState | None:
    """The random state that the call is about to use.

    None for dropout on CPU, whose mask is saved by its own node and serves as well.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if function in DROPOUT and all(tensor.is_cpu for tensor in tensors):
        return None
    return RngState.capture({tensor.device for tensor in tensors if not tensor.is_cpu})


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_may_hold_tensors(item) for item in value)
    return isinstance(value, (Tensor, dict))


def _device_type(tensor: Tensor) -> str:
    return "cpu" if tensor.is_cpu else tensor.device.type


def _node_name(tensor: Tensor) -> str:
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()
