"""Replays under the forward's state: the same results, and the ambient state untouched."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ascend_core.errors import ConfigError
from ascend_core.modes import ForwardState
from ascend_core.rng import RngState
from ascend_core.testing import parametrize_devices


def ambient(device: torch.device) -> tuple[Any, ...]:
    kinds = ("cpu", device.type)
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
        torch.is_autocast_cache_enabled(),
        torch.get_rng_state().tolist(),
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_a_thread(work: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@parametrize_devices()
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_a_replay_runs_under_the_autocast_of_the_forward(
    enabled: bool, dtype: torch.dtype, cache: bool, device: torch.device
) -> None:  # AR-08
    with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=cache):
        state = ForwardState.capture(devices=[device])
    before = ambient(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = ambient(device)
        with state.replaying():
            assert torch.is_autocast_enabled(device.type) == enabled
            assert torch.get_autocast_dtype(device.type) == dtype
            # In the region's cache are casts to the region's dtype.
            usable = cache and enabled and dtype is torch.bfloat16
            assert torch.is_autocast_cache_enabled() == usable
            if enabled:
                x = torch.ones(2, 2, device=device)
                assert (x @ x).dtype == dtype
        assert ambient(device) == inside
    assert ambient(device) == before


def test_a_replay_in_another_thread_runs_under_the_autocast_of_the_forward() -> None:  # AR-08
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = ForwardState.capture()

    def replay() -> tuple[torch.dtype, bool]:
        with state.replaying():
            dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return dtype, torch.is_autocast_enabled("cpu")

    assert in_a_thread(replay) == (torch.bfloat16, False)


def test_a_replay_outside_autocast_is_not_in_the_autocast_around_it() -> None:  # AR-08
    state = ForwardState.capture()
    with torch.autocast("cpu", dtype=torch.bfloat16), state.replaying():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_replay_under_no_grad_leaves_no_cast_of_a_weight_for_the_next_forward() -> None:
    linear = nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = ForwardState.capture()
        with torch.no_grad(), state.replaying():
            linear(torch.ones(1, 2))
        linear(torch.ones(1, 2)).sum().backward()
    assert linear.weight.grad is not None


def test_default_dtype_and_device_are_those_of_the_forward() -> None:  # AR-24
    with default_dtype(torch.float64), torch.device("meta"):
        state = ForwardState.capture()
    before = ambient(torch.device("cpu"))
    with state.replaying():
        made = torch.ones(2)
        assert (made.dtype, made.device.type) == (torch.float64, "meta")
    assert ambient(torch.device("cpu")) == before
    assert torch.ones(2).device.type == "cpu"


def test_a_default_device_around_the_replay_alone_does_not_reach_it() -> None:  # AR-24
    state = ForwardState.capture()
    with default_dtype(torch.float64), torch.device("meta"):
        before = ambient(torch.device("cpu"))
        with state.replaying():
            made = torch.ones(2)
            assert (made.dtype, made.device.type) == (torch.float32, "cpu")
        assert ambient(torch.device("cpu")) == before
        assert torch.ones(2).device.type == "meta"


def test_a_default_device_is_replayed_in_another_thread() -> None:  # AR-24
    with torch.device("meta"):
        state = ForwardState.capture()

    def replay() -> tuple[str, str]:
        with state.replaying():
            inside = torch.ones(2).device.type
        return inside, torch.ones(2).device.type

    assert in_a_thread(replay) == ("meta", "cpu")


def test_a_default_device_that_was_set_for_good_is_replayed() -> None:  # AR-24
    torch.set_default_device("meta")
    try:
        state = ForwardState.capture()
        with state.replaying():
            assert torch.ones(2).device.type == "meta"
    finally:
        torch.set_default_device(None)
    with state.replaying():
        assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:  # noqa: ANN001
        return func(*args, **(kwargs or {}))


def test_the_innermost_default_device_is_replayed() -> None:  # AR-24
    torch.set_default_device("cpu")
    try:
        with torch.device("meta"):
            state = ForwardState.capture()
        with state.replaying():
            assert torch.empty(1).device.type == "meta"
        assert torch.empty(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_a_default_device_is_seen_below_other_modes() -> None:
    with torch.device("meta"), Passing():
        state = ForwardState.capture()
    with Passing():
        assert ForwardState.capture().default_device is None
    assert state.default_device == torch.device("meta")


class Spy:
    """A context factory that counts, and remembers whether it is entered."""

    def __init__(self) -> None:
        self.made = 0
        self.inside = False

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        self.made += 1
        return self.entered()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def test_the_users_context_is_entered_on_each_replay_and_only_there() -> None:  # AR-28
    spy = Spy()
    state = ForwardState.capture(context_fn=spy)
    assert spy.made == 0
    for turn in (1, 2):
        with state.replaying():
            assert spy.inside
        assert not spy.inside
        assert spy.made == turn


def test_the_users_context_decides_over_what_was_captured() -> None:  # AR-28
    state = ForwardState.capture(context_fn=lambda: torch.autocast("cpu", dtype=torch.float16))
    with state.replaying():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_a_users_context_that_draws_does_not_shift_the_replay() -> None:  # AR-06, AR-28
    @contextlib.contextmanager
    def drawing() -> Iterator[None]:
        torch.rand(3)
        yield
        torch.rand(3)

    state = ForwardState.capture(context_fn=drawing)
    first = torch.rand(4)
    before = torch.get_rng_state()
    with state.replaying():
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("off", [None, False, 0])
def test_no_context_is_entered_when_it_is_off(off: Any) -> None:  # AR-04
    state = ForwardState.capture(context_fn=off)
    assert state.context_fn is None
    with state.replaying():
        pass


@pytest.mark.parametrize("wrong", [True, 3, contextlib.nullcontext()])
def test_a_context_that_is_no_factory_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        ForwardState.capture(context_fn=wrong)


@parametrize_devices()
def test_random_numbers_are_replayed_and_the_stream_stays(device: torch.device) -> None:  # AR-06
    state = ForwardState.capture(devices=[device])
    first = torch.rand(4, device=device).cpu()
    ambient = RngState.capture([device])
    following = torch.rand(4, device=device).cpu()
    ambient.restore()
    with state.replaying():
        assert torch.equal(torch.rand(4, device=device).cpu(), first)
    assert torch.equal(torch.rand(4, device=device).cpu(), following)


def test_without_rng_the_stream_is_left_alone() -> None:
    state = ForwardState.capture(rng=False)
    assert state.rng is None
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with state.replaying():
        assert torch.equal(torch.rand(2), expected[:2])
    assert torch.equal(torch.rand(2), expected[2:])


@pytest.mark.parametrize("where", ["replay", "entering"])
def test_after_an_exception_everything_is_as_it_was(where: str) -> None:
    @contextlib.contextmanager
    def users() -> Iterator[None]:
        if where == "entering":
            raise KeyError
        yield

    with (
        default_dtype(torch.float64),
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    ):
        state = ForwardState.capture(context_fn=users)
    before = ambient(torch.device("cpu"))
    with pytest.raises(KeyError), state.replaying():
        torch.rand(3, device="cpu")
        raise KeyError
    assert ambient(torch.device("cpu")) == before


def test_what_a_replay_changes_itself_is_undone() -> None:
    state = ForwardState.capture()
    before = ambient(torch.device("cpu"))
    with state.replaying():
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
        torch.manual_seed(99)
    assert ambient(torch.device("cpu")) == before


def test_threads_that_replay_at_once_do_not_mix_their_states() -> None:
    states = []
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype):
            states.append(ForwardState.capture())
    before = ambient(torch.device("cpu"))
    wrong: list[str] = []

    def work(i: int) -> None:
        for _ in range(100):
            with states[i].replaying():
                if torch.ones(1).dtype != states[i].default_dtype:
                    wrong.append(f"thread {i} saw the other's default dtype")

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ambient(torch.device("cpu")) == before


@parametrize_devices()
@pytest.mark.parametrize("within", ["the region", "a region that is off inside it", "no region"])
def test_a_replay_leaves_the_casts_of_a_region_and_none_of_its_own(
    within: str, device: torch.device
) -> None:
    linear = nn.Linear(8, 8, device=device)
    x, other = torch.randn(2, 4, 8, device=device)

    def gradient(*, replay: bool) -> torch.Tensor | None:
        linear.weight.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16):
            state = ForwardState.capture(devices=[device])
            y = linear(x).float()
            with contextlib.ExitStack() as stack:
                if within == "a region that is off inside it":
                    stack.enter_context(torch.autocast(device.type, enabled=False))
                if replay and within != "no region":
                    stack.enter_context(torch.enable_grad())
                    stack.enter_context(state.replaying())
                    linear(x)
            y = y + linear(other).float()  # its weight's cast is the first call's
        if replay and within == "no region":
            with state.replaying():
                linear(x)
        with torch.no_grad():
            linear.weight += 1
        with torch.autocast(device.type, dtype=torch.bfloat16):
            fresh = linear(x)
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
            assert torch.equal(fresh, linear(x))
        with torch.no_grad():
            linear.weight -= 1
        y.square().sum().backward()
        return linear.weight.grad

    plain, ours = gradient(replay=False), gradient(replay=True)
    assert plain is not None and ours is not None and torch.equal(ours, plain)
