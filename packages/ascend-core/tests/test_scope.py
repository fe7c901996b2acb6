"""A context around the calls of a module."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_core.scope import around_forward, instead_of_forward, owners

pytestmark = pytest.mark.usefixtures("default_device")


class Log:
    """Counts how often its contexts are opened and closed."""

    def __init__(self) -> None:
        self.depth = 0
        self.opened = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.depth += 1
        self.opened += 1
        try:
            yield
        finally:
            self.depth -= 1


class Inner(nn.Module):
    """Checks that the context is open while it runs, and raises what it is told to."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.__dict__["log"] = log
        self.error: BaseException | None = None
        self.deep = 0

    def forward(self, x: Tensor) -> Tensor:
        assert self.log.depth > 0
        if self.error is not None:
            raise self.error
        if self.deep:
            self.deep -= 1
            return self(x)
        return x * self.weight


def make() -> tuple[Log, Inner]:
    log = Log()
    return log, Inner(log)


def test_the_context_is_open_during_the_call_and_closed_after() -> None:
    log, module = make()
    around_forward(module, log.open)
    assert torch.equal(module(torch.arange(3.0)), torch.arange(3.0))
    assert (log.depth, log.opened) == (0, 1)


class Stop(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for the user's."""


@pytest.mark.parametrize("error", [ValueError(), Stop()])
def test_the_context_is_closed_however_the_call_ends(error: BaseException) -> None:
    log, module = make()
    around_forward(module, log.open)
    module.error = error
    with pytest.raises(type(error)):
        module(torch.ones(3))
    module.error = None
    module(torch.ones(3))
    assert (log.depth, log.opened) == (0, 2)


def test_an_exception_in_somebody_elses_hook_closes_the_context() -> None:
    log, module = make()
    around_forward(module, log.open)

    def refuse(*_: object) -> None:
        raise ZeroDivisionError

    hook = module.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ZeroDivisionError):
        module(torch.ones(3))
    hook.remove()
    assert log.depth == 0


def test_recursive_calls_open_one_context_each() -> None:
    log, module = make()
    around_forward(module, log.open)
    module.deep = 2
    module(torch.ones(3))
    assert (log.depth, log.opened) == (0, 3)


def test_threads_open_contexts_of_their_own() -> None:
    module = nn.Linear(2, 2)
    local = threading.local()
    seen: list[int] = []

    @contextlib.contextmanager
    def open_context() -> Iterator[None]:
        local.depth = getattr(local, "depth", 0) + 1
        seen.append(local.depth)
        yield
        local.depth -= 1

    around_forward(module, open_context)
    threads = [threading.Thread(target=module, args=(torch.ones(2),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1, 1]


def test_the_module_keeps_its_names_and_its_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    before = repr(module), list(module.state_dict()), type(module).__qualname__
    around_forward(module, Log().open)
    around_forward(module[0], Log().open)
    assert (repr(module), list(module.state_dict()), type(module).__qualname__) == before
    assert isinstance(module[0], nn.Linear)


def test_copies_and_pickles_are_of_the_modules_own_class() -> None:
    log = Log()
    module = nn.Sequential(nn.Linear(2, 2))
    for target in (module, module[0], module[0]):
        around_forward(target, log.open)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(copied) is nn.Sequential
        assert type(copied[0]) is nn.Linear
        assert torch.equal(copied[0].weight, module[0].weight)
        copied(torch.ones(2))
    assert log.opened == 0


def test_remove_gives_the_class_back_and_can_be_repeated() -> None:
    log, module = make()
    around = around_forward(module, log.open)
    around.remove()
    around.remove()
    assert type(module) is Inner
    with pytest.raises(AssertionError):
        module(torch.ones(3))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_contexts_are_removed_in_any_order(order: tuple[int, int]) -> None:
    log, module = make()
    arounds = [around_forward(module, log.open), around_forward(module, log.open)]
    module(torch.ones(3))
    assert log.opened == 2
    arounds[order[0]].remove()
    module(torch.ones(3))
    assert log.opened == 3
    arounds[order[1]].remove()
    assert type(module) is Inner


def test_a_class_that_somebody_built_on_ours_stays_and_ours_does_nothing() -> None:
    log = Log()
    module = nn.Linear(2, 2)
    around = around_forward(module, log.open)
    module.__class__ = type("Theirs", (type(module),), {})
    around.remove()
    module(torch.ones(2))
    assert log.opened == 0
    assert type(module).__name__ == "Theirs"


def test_nothing_is_opened_while_compile_traces() -> None:
    log, module = Log(), nn.Sequential(nn.Linear(2, 2), nn.GELU())
    around_forward(module, log.open)
    around_forward(module[1], log.open)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), module(torch.ones(2)))
    assert log.opened == 2  # by the call without compile alone


def test_a_forward_is_computed_otherwise_inside_the_modules_hooks() -> None:
    module = nn.Linear(2, 2)
    order: list[str] = []
    module.register_forward_pre_hook(lambda *_: order.append("before"))
    module.register_forward_hook(lambda *_: order.append("after"))

    def run(_: nn.Module, call: Any, args: Any, kwargs: Any) -> Tensor:
        order.append("ours")
        result: Tensor = call(*args, **kwargs)
        return 2 * result

    own = module(torch.ones(2))
    instead = instead_of_forward(module, run, owner="us")
    assert torch.equal(module(input=torch.ones(2)), 2 * own)
    assert order == ["before", "after", "before", "ours", "after"]
    assert owners(module) == ["us"]
    assert "input" in inspect.signature(module.forward).parameters
    instead.remove()
    assert type(module) is nn.Linear
    assert torch.equal(module(torch.ones(2)), own)


def test_a_forward_is_computed_otherwise_while_compile_traces() -> None:
    torch._dynamo.reset()  # it counts what other tests of this process have compiled
    module = nn.Sequential(nn.Linear(2, 2))
    own = module(torch.ones(2))
    instead = instead_of_forward(module[0], lambda _, call, args, kwargs: 2 * call(*args, **kwargs))
    around_forward(module[0], Log().open)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), 2 * own)
    instead.remove()
    assert torch.equal(compiled(torch.ones(2)), own)
