"""What autograd holds in place of a saved tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ascend_core.layout import Layout, read
from ascend_core.saved._parameters import WithAttributes
from ascend_core.saved.keeper import Claim


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
    """

    __slots__ = (
        "__weakref__", "alias", "anchored", "claim", "layout", "serial", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, serial: int) -> None:
        self.alias = tensor.detach()
        self.claim: Claim | None = None
        self.version: int = tensor._version
        self.serial = serial
        self.layout: Layout | None = None
        self.anchored = False

    def hand_over(self, claim: Claim) -> None:
        """Let `claim` bring the tensor back from now on. Frees this hold on the storage."""
        self.layout = read(self.alias)
        self.alias = hollow(self.alias)
        self.claim = claim

    def check(self) -> None:
        """Raise autograd's own error when the tensor was written to after it was saved."""
        if self.alias._version != self.version:
            size = self.alias.size() if self.layout is None else self.layout.size
            raise written_to(self.alias, size, self.version)

    def get(self) -> Tensor:
        """The saved tensor, as autograd asks for it.

        Raises:
            RuntimeError: When it was modified in place after it was saved, as without hooks.
        """
        self.check()
        if self.claim is None:
            return self.alias
        with torch.no_grad():
            return self.claim.value()


class PackedParameter:
    """A saved parameter: it stays where it is, and its attributes stay with it."""

    __slots__ = ("parameter", "version")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.version: int = parameter._version

    def unchanged(self) -> Tensor:
        """The parameter itself.

        Raises:
            RuntimeError: When it was modified in place after it was saved, as without hooks.
        """
        parameter = self.parameter
        if parameter._version != self.version:
            raise written_to(parameter, parameter.size(), self.version)
        return parameter

    def get(self) -> Tensor:
        """The parameter, or a stand-in that carries its Python attributes into backward."""
        parameter = self.unchanged()
        return WithAttributes(parameter) if parameter.__dict__ else parameter


class Passed:
    """A saved tensor that was handed to the pair of hooks below ours."""

    __slots__ = ("__weakref__", "anchored", "layout", "packed", "serial", "unpack", "version")

    def __init__(
        self, tensor: Tensor, serial: int, packed: object, unpack: Callable[[object], Tensor]
    ) -> None:
        self.packed = packed
        self.unpack = unpack
        self.layout = read(tensor)
        self.version: int = tensor._version
        self.serial = serial
        self.anchored = False

    def check(self) -> None:
        """Nothing to check: the pair below decides what a later write means."""

    def get(self) -> Tensor:
        """The saved tensor, from the pair below."""
        return self.unpack(self.packed)


def hollow(tensor: Tensor) -> Tensor:
    """An alias that shares the version counter of `tensor` and holds none of its bytes."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def written_to(tensor: Tensor, size: torch.Size, version: int) -> RuntimeError:
    """Autograd's own error for a saved tensor that was modified in place after `version`."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(size)}] is at version {tensor._version}; "
        f"expected version {version} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
