"""The weights of a sharded model: flat buffers, and how they become whole after a step."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import CommunicationError, ConfigError
from ascend_core.layout import Layout
from ascend_ddp._bucket import view_of
from ascend_ddp._parameters import Parameters
from ascend_ddp._plan import BucketPlan
from ascend_ddp._ranks import Ranks
from ascend_ddp._reducer import Reducer
from ascend_ddp._travelling import travelling

__all__ = ["ChunkWeights", "WeightBucket", "refuse_shared_memory"]

_WEIGHTS = "one has ended, or its step has failed. Begin again from a checkpoint."


class WeightBucket:
    """The weights of one bucket, laid out as its gradients are.

    Args:
        plan: The slots.
        parameters: All of the chunk's. Those of the bucket become views of `flat`: of their shape,
            and of their strides where they have no gaps.
        ranks: Who steps them, each its part.
        name: For errors.
        names: Those of its parameters, for errors.

    Attributes:
        flat: [plan.numel], of the parameters' dtype.
        own: [plan.numel / ranks]: the part that this rank steps, a view.
        gathers: How often it was gathered.
        waits: How often something waited for it that was no hook of ours.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Parameters,
        ranks: Ranks,
        name: str,
        names: str,
    ) -> None:
        self.plan = plan
        self._parameters = [parameters[slot.parameter] for slot in plan.slots]
        first = self._parameters[0]
        size = plan.numel // ranks.size
        self.flat = torch.zeros(plan.numel, dtype=first.dtype, device=first.device)
        self.own = self.flat[ranks.number * size : (ranks.number + 1) * size]
        self.gathers = 0
        self.waits = 0
        self._ranks = ranks
        self._name = name
        self._names = names
        self._work: distributed.Work | None = None
        self._failure: Callable[[], CommunicationError] | None = None  # makes it every time anew
        self._kind = travelling(_found(self))
        self._lock = threading.RLock()  # several threads may read what travels
        with torch.no_grad():
            for slot, parameter in zip(plan.slots, self._parameters, strict=True):
                view = view_of(self.flat, slot, parameter)
                view.copy_(parameter.detach())
                parameter.data = view

    @property
    def travels(self) -> bool:
        """Whether the weights are on their way."""
        return self._work is not None

    def send(self) -> None:
        """Start to give every rank what each has stepped."""
        self.arrive()
        torch.autograd.graph.increment_version(self._parameters)  # as a step in place does
        self.gathers += 1
        if not self.flat.numel():
            return
        with self._lock:
            with self._ranks.named(self._what, self._names, _WEIGHTS):
                self._work = self._ranks.all_gather(self.flat, self.own)
            for parameter in self._parameters:
                parameter.__class__ = self._kind

    def arrive(self) -> None:
        """Wait for the weights. On an accelerator the current stream waits, and the host goes on.

        Raises:
            CommunicationError: When a rank has ended, or does not come in time; every time again.
        """
        if self._work is not None:
            self._arrive(self._work)

    def _arrive(self, work: distributed.Work) -> None:
        """Wait, one thread for all that read."""
        with self._lock:
            if self._work is not work:
                return
            if self._failure is not None:
                raise self._failure()
            try:
                self._wait(work)
            except CommunicationError as error:
                self._failure = partial(
                    CommunicationError, error.what, why=error.why, instead=error.instead
                )
                raise
            for parameter in self._parameters:
                parameter.__class__ = nn.Parameter
            self._work = None  # last: another thread that finds it so reads a plain parameter

    def check(self) -> None:
        """Refuse to step weights that nobody uses any more.

        Raises:
            ConfigError: When a parameter was moved out of the buffer.
        """
        self.arrive()
        first, size = self.flat.data_ptr(), self.flat.element_size()
        for slot, parameter in zip(self.plan.slots, self._parameters, strict=True):
            if slot.numel and parameter.data_ptr() != first + slot.begin * size:
                raise ConfigError(
                    f"the weights of {self._name} were moved after the optimizer was sharded.",
                    why="they lie in a flat buffer, which is what is stepped and gathered; "
                    "model.to(), model.half() or p.data = ... gives a parameter other memory.",
                    instead="convert the model before shard_optimizer(), or remove() the "
                    "optimizer, convert, and shard again; write values with p.copy_().",
                )

    def read(self) -> None:
        """Wait, because something reads a weight that no hook of ours has waited for."""
        self.waits += 1
        self.arrive()

    def leave(self) -> None:
        """Give each parameter memory of its own."""
        self.arrive()
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()

    @property
    def _what(self) -> str:
        return f"the weights of {self._name}"

    def _wait(self, work: distributed.Work) -> None:
        self._ranks.wait(work, self._what, self._names, _WEIGHTS)


def _found(bucket: WeightBucket) -> Callable[[], None]:
    """A call that does not keep the bucket alive: a class is collected late."""
    reference = weakref.ref(bucket)

    def read() -> None:
        found = reference()
        assert found is not None, "the modules of the parameters hold it"
        found.read()

    return read


class ChunkWeights:
    """The weights of a model chunk, in buckets, and the hooks that wait for them.

    Args:
        reducer: Of the chunk.
        seconds: That a gather may take.

    Attributes:
        buckets: As the reducer's.
        ranks: Among whom they are divided.
    """

    def __init__(self, reducer: Reducer, seconds: float | None) -> None:
        parameters = reducer.parameters
        self.ranks = Ranks(reducer.group, seconds)
        self.buckets = [
            WeightBucket(
                bucket.plan,
                parameters,
                self.ranks,
                f"bucket {number}",
                reducer.buckets.named(bucket.indices),
            )
            for number, bucket in enumerate(reducer.buckets)
        ]
        place = {
            id(parameters[i]): bucket
            for bucket in self.buckets
            for i in (slot.parameter for slot in bucket.plan.slots)
        }
        chunk = reducer.chunk()
        self._hooks = list(_hooked(chunk.modules(), place)) if chunk is not None else []

    def send(self, numbers: Iterable[int]) -> None:
        """Start to gather buckets, in the order in which forward needs them."""
        for number in sorted(numbers, reverse=True):
            self.buckets[number].send()

    def wait(self) -> None:
        """Wait for all."""
        for bucket in self.buckets:
            bucket.arrive()

    def check(self) -> None:
        """Refuse to step weights that nobody uses any more; waits for all."""
        for bucket in self.buckets:
            bucket.check()

    def remove(self) -> None:
        """Give each parameter memory of its own, and take the hooks away."""
        for bucket in self.buckets:
            bucket.leave()
        for hook in self._hooks:
            hook.remove()


def _hooked(
    modules: Iterable[nn.Module], place: dict[int, WeightBucket]
) -> Iterable[RemovableHandle]:
    """Let the forward of each module wait for the buckets of its own parameters."""
    for module in modules:
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in place
        }
        if own:
            buckets = list(dict.fromkeys(place[id(parameter)] for parameter in own.values()))
            yield module.register_forward_pre_hook(_Waiting(module, own, buckets), prepend=True)


class _Waiting:
    """A forward pre-hook that waits for buckets.

    In a copy or a pickle of the module it does nothing: that has parameters of its own.

    Args:
        module: The module.
        own: Its parameters, by name.
        buckets: Those in which they are.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        own: Mapping[str, nn.Parameter] | None = None,
        buckets: Sequence[WeightBucket] = (),
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._own = own or {}
        self._buckets = buckets

    def __call__(self, module: nn.Module, args: Any) -> None:
        for bucket in self._buckets:
            bucket.arrive()
        if self._module is None or module is not self._module():
            return
        for name, parameter in self._own.items():
            found = module._parameters.get(name)
            # A tensor that is none is there for one call, as functional_call() puts it.
            if found is not parameter and isinstance(found, nn.Parameter):
                raise ConfigError(
                    f"a {type(module).__name__} was given another parameter as its {name}.",
                    why="the one that is reduced and stepped is used no more: it was set anew, "
                    "as load_state_dict(assign=True) does.",
                    instead="load with assign=False, or build the reduction and the optimizer "
                    "behind it.",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Waiting, ()


def refuse_shared_memory(parameters: Parameters) -> None:
    """Refuse parameters that lie in the same memory: in a flat buffer they would part.

    Raises:
        ConfigError: Naming two.
    """
    ranges = sorted(
        (str(p.device), p.data_ptr(), Layout.of(p).nbytes, name)
        for name, p in parameters.named()
        if p.numel()
    )
    for one, other in itertools.pairwise(ranges):
        if one[0] == other[0] and other[1] < one[1] + one[2]:
            raise ConfigError(
                f"{one[3]} and {other[3]} are two parameters in the same memory.",
                why="weights are moved into flat buffers, where each would have its own.",
                instead="tie them as one parameter: a.weight = b.weight.",
            )
