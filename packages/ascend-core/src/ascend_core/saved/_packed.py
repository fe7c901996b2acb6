"""What autograd holds in place of a saved tensor.

Three kinds, told apart by who has the bytes: `Packed` (kept where they are, or with a keeper),
`PackedParameter` (with the model), `Passed` (with the pair of hooks below ours). All three answer
`get()`, which is autograd asking, and `borrow()`, which is a claim on another tensor asking for
its own input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ascend_core.layout import Layout, read
from ascend_core.saved._parameters import WithAttributes
from ascend_core.saved.keeper import Claim
from ascend_core.storage import bring_back, hollow, version_of


class Packed:
    """A saved tensor that is kept, or that a keeper claimed.

    [Note: the alias is also the version probe]
    `alias` shares the version counter of the saved tensor. While the tensor is kept it is a
    detached alias and holds the storage. Once a keeper has claimed it, the alias is hollow: it
    shares the counter and holds no bytes. Either way a write after the save shows, and `get`
    raises what plain autograd raises.

    Attributes:
        alias: Shares the version counter; holds the storage only while nobody claimed it.
        claim: How to bring the tensor back, once a keeper claimed it.
        version: The version at which it was saved.
        serial: Its place among the tensors saved in its frame.
        layout: The layout it was saved with; None while kept (the alias has it).
        anchored: Whether a claim of another tensor needs this one as it is.
        early: The tensor as a claim on another one has already rebuilt it, until autograd asks.
        checked: Whether a later write is an error. Not over somebody else's hooks: there the
            plain run would not notice it either.
    """

    __slots__ = (
        "__weakref__", "alias", "anchored", "checked", "claim", "early", "layout", "serial",
        "version",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, serial: int, claim: Claim | None = None, *, checked: bool = True
    ) -> None:
        self.alias = tensor.detach() if claim is None else hollow(tensor)
        self.claim = claim
        self.version: int = tensor._version
        self.serial = serial
        self.layout: Layout | None = None if claim is None else read(tensor)
        self.anchored = False
        self.early: Tensor | None = None
        self.checked = checked

    def hand_over(self, claim: Claim) -> None:
        """Let `claim` bring the tensor back from now on. Frees this hold on the storage."""
        self.layout = read(self.alias)
        self.alias = hollow(self.alias)
        self.claim = claim

    def shows(self, layout: Layout) -> bool:
        """Whether `borrow` gives something that can be seen in `layout`."""
        return self.claim is None or self.layout == layout

    def check(self) -> None:
        """Raise autograd's own error when the tensor was written to after it was saved."""
        if self.checked and self.alias._version != self.version:
            self._check_with_its_bytes()

    def _check_with_its_bytes(self) -> None:
        if self.claim is None:
            bring_back(self.alias)  # a storage whose bytes are away looks written to
        # A claim brings back what was saved, also when those bytes were given away since.
        if version_of(self.alias) != self.version:
            size = self.alias.size() if self.layout is None else self.layout.size
            raise written_to(self.alias, size, self.version)

    def get(self) -> Tensor:
        """The saved tensor, as autograd asks for it.

        Raises:
            RuntimeError: When it was modified in place after it was saved, as without hooks.
        """
        if self.checked and self.alias._version != self.version:
            self._check_with_its_bytes()
        if self.claim is None:
            return self.alias
        early, self.early = self.early, None
        if early is not None:
            return early
        with torch.no_grad():
            assert self.layout is not None
            return self.claim.value(self.layout)

    borrow = get


class PackedParameter:
    """A saved parameter: it stays where it is, and its attributes stay with it."""

    __slots__ = ("__weakref__", "alias", "serial", "version")

    def __init__(self, parameter: nn.Parameter, serial: int = 0) -> None:
        self.alias = parameter
        self.version: int = parameter._version
        self.serial = serial

    def shows(self, layout: Layout) -> bool:
        """True: its whole storage is there."""
        return True

    def borrow(self) -> Tensor:
        """The parameter itself.

        Raises:
            RuntimeError: When it was modified in place after it was saved, as without hooks.
        """
        if self.alias._version != self.version:
            raise written_to(self.alias, self.alias.size(), self.version)
        return self.alias

    def get(self) -> Tensor:
        """The parameter, or a stand-in that carries its Python attributes into backward."""
        parameter = self.borrow()
        return WithAttributes(parameter) if parameter.__dict__ else parameter


class Passed:
    """A saved tensor that was handed to the pair of hooks below ours.

    [Note: the pair below is asked once]
    A non-reentrant checkpoint, and a user's own pair, may count on being asked once per save and
    backward. So what a claim borrowed early is held until autograd asks for it itself.
    """

    __slots__ = ("__weakref__", "_borrowed", "_packed", "_unpack", "layout", "serial", "version")

    def __init__(
        self, tensor: Tensor, serial: int, packed: object, unpack: Callable[[object], Tensor]
    ) -> None:
        self._packed = packed
        self._unpack = unpack
        self._borrowed: Tensor | None = None
        self.layout = read(tensor)
        self.version: int = tensor._version
        self.serial = serial

    def shows(self, layout: Layout) -> bool:
        """Whether it was saved in this very layout: its bytes cannot be seen in another."""
        return self.layout == layout

    def borrow(self) -> Tensor:
        """The saved tensor, before autograd asks for it."""
        if self._borrowed is None:
            self._borrowed = self._unpack(self._packed)
        return self._borrowed

    def get(self) -> Tensor:
        """The saved tensor, as autograd asks for it."""
        borrowed, self._borrowed = self._borrowed, None
        return self._unpack(self._packed) if borrowed is None else borrowed


Saved = Packed | PackedParameter | Passed


def written_to(tensor: Tensor, size: torch.Size, version: int) -> RuntimeError:
    """Autograd's own error for a saved tensor that was modified in place after `version`."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(size)}] is at version {tensor._version}; "
        f"expected version {version} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
