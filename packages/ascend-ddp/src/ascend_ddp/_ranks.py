"""The ranks that hold the same model, and what they say to one another beside gradients.

Every failure of a collective is a `CommunicationError` that says which rank waited for what.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from ascend_core.errors import CommunicationError, ConfigError

__all__ = ["Ranks"]

# A number of 63 bits as three that all backends add up.
_SHIFTS, _MASK = (0, 21, 42), 2**21 - 1

_GRADIENTS = (
    "one has ended, or is elsewhere in the program. A rank that has nothing to do in a step must "
    "step its optimizer all the same."
)


class Ranks:
    """A process group.

    Args:
        group: It; the default one when None.
        timeout_s: Seconds that a collective may take; as the group has it when None. It is that of
            the collective, too, not that of `wait` alone: threads of the group that went on
            waiting would not let the process end.

    Attributes:
        group: It.
        size: How many ranks there are.
        number: This rank, counted within the group.

    Raises:
        ConfigError: When this rank is none of the group.
    """

    def __init__(self, group: distributed.ProcessGroup | None, timeout_s: float | None) -> None:
        self.group = group
        self.size = distributed.get_world_size(group)
        self.number = distributed.get_rank(group)
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        if self.number < 0:
            raise ConfigError(
                "this rank is not in the group that reduce_gradients got.",
                why="a rank's gradients are averaged with those of its own group.",
                instead="call it on the ranks of the group, each with the group that it is in.",
            )

    def wait(
        self, work: distributed.Work, what: str, names: str, instead: str = _GRADIENTS
    ) -> None:
        """Wait for a collective: on an accelerator the current stream does, and the host goes on.

        Args:
            work: It.
            what: What is waited for.
            names: What travels in it.
            instead: What to do where it does not arrive.

        Raises:
            CommunicationError: When it failed or took too long.
        """
        with self.named(what, names, instead):
            if self._timeout is None:
                work.wait()
            else:
                work.wait(self._timeout)

    @contextmanager
    def named(self, what: str, names: str, instead: str = _GRADIENTS) -> Iterator[None]:
        """Give a collective's failure a name. The arguments are those of `wait`.

        Raises:
            CommunicationError: When a collective within fails.
        """
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.number} of {self.size} waited in vain for {what}.",
                why=f"it holds {names}, and its collective ended with: {error}",
                instead=f"look at the other ranks: {instead}",
            ) from error

    def all_reduce(
        self, tensor: Tensor, operator: ReduceOp.RedOpType = ReduceOp.SUM
    ) -> distributed.Work:
        """Reduce a tensor where it lies; it is there when the result was waited for."""
        # A complex number is two real ones, of which backends know more.
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._connected.allreduce([sent], operator, self._timeout)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> distributed.Work:
        """Add a tensor up, and give each rank its part."""
        options = distributed.ReduceScatterOptions()
        if self._timeout is not None:
            options.timeout = self._timeout
        if whole.is_complex():
            part, whole = torch.view_as_real(part), torch.view_as_real(whole)
        return self._connected.reduce_scatter_single(part, whole, options)

    def all_gather(self, whole: Tensor, part: Tensor) -> distributed.Work:
        """Give each rank the parts of all."""
        options = AllgatherOptions()
        if self._timeout is not None:
            options.timeout = self._timeout
        if whole.is_complex():
            whole, part = torch.view_as_real(whole), torch.view_as_real(part)
        return self._connected.all_gather_single(whole, part, options)

    def nearest(self, device: torch.device) -> torch.device:
        """Where ranks say what their hosts want to know: on the host, if the group can.

        Args:
            device: On which they talk otherwise.
        """
        return self.within_reach(torch.device("cpu"), device)

    def within_reach(self, device: torch.device, other: torch.device) -> torch.device:
        """A device, if the group sends from there, and another one otherwise."""
        kinds = [known.type for known in self._connected._device_types]
        return device if device.type in kinds else other

    @property
    def _connected(self) -> distributed.ProcessGroup:
        """The group, or the default one: it is asked for late, since programs make it anew."""
        group = distributed.group.WORLD if self.group is None else self.group
        assert group is not None
        return group

    def compare(self, mine: str, device: torch.device, names: str) -> None:
        """Refuse ranks with different plans.

        Args:
            mine: A text that ranks with another plan do not have.
            device: On which ranks talk.
            names: What the plan is about.

        Raises:
            ConfigError: When another rank has another text.
            CommunicationError: When a rank does not answer.
        """
        other = self.first_other(mine, device, "the plan of the other ranks", names)
        if other is None:
            return
        raise ConfigError(
            f"ranks 0 and {other} would put gradients into different buckets.",
            why="their parameters differ in name, shape, dtype or in whether they require a "
            f"gradient, or their options do; here, the plan is about {names}.",
            instead="build the same model with the same options on every rank, and freeze the "
            "same parameters.",
        )

    def first_other(self, mine: str, device: torch.device, what: str, names: str) -> int | None:
        """The first rank that has another text than the first one.

        Args:
            mine: The text of this rank.
            device: On which ranks talk.
            what: What the text is about, for errors.
            names: What that holds.

        Returns:
            None where all have the same.

        Raises:
            CommunicationError: When a rank does not answer.
        """
        digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:8], "little") >> 1
        all_numbers = torch.zeros(self.size, len(_SHIFTS), dtype=torch.int32, device=device)
        for place, shift in enumerate(_SHIFTS):
            all_numbers[self.number, place] = digest >> shift & _MASK
        self._sum(all_numbers, what, names)
        numbers = all_numbers.tolist()
        return next((rank for rank, one in enumerate(numbers) if one != numbers[0]), None)

    def from_first(self, numbers: Sequence[int], count: int, device: torch.device) -> list[int]:
        """The numbers that the first rank has.

        Args:
            numbers: Those of this rank, from 0.
            count: How many there can be.
            device: On which ranks talk.

        Raises:
            CommunicationError: When a rank does not answer.
        """
        told = [number + 1 for number in numbers] if self.number == 0 else []
        told += [0] * (count - len(told))
        sent = torch.tensor(told, dtype=torch.int32, device=device)
        self._sum(sent, "the order of the first rank", "the order in which gradients come")
        return [number - 1 for number in sent.tolist() if number > 0]

    def agree_on_number(self, device: torch.device) -> int:
        """A number of 31 bits that no other call returns, the same on every rank.

        Not from torch's generator: the state of that is the program's.
        """
        mine = int.from_bytes(os.urandom(4), "little") >> 1
        sent = torch.tensor([mine if self.number == 0 else 0], dtype=torch.int32, device=device)
        self._sum(sent, "a number of the first rank", "no gradient yet")
        return int(sent.item())

    def _sum(self, tensor: Tensor, what: str, names: str) -> None:
        with self.named(what, names):
            work = self.all_reduce(tensor)
        self.wait(work, what, names)
