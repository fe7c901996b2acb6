"""An interrupt at every point of a step, and the step again: as if nothing had happened."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_core.testing import parametrize_devices
from ascend_core.transfer import Transfer

SIZES = (7, 4097, 200)
FORMS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "masters": {"fused": True, "dtype": torch.bfloat16, "master_weights": True},
}


# An interrupt between two of these is one behind the operator before them.
VIEWS = ("alias", "as_strided", "detach", "select", "slice", "view")
# Torch's own, around `step`: behind its end an optimizer cannot know of an interrupt.
AROUND = ("_record_function_enter_new", "_record_function_exit")


class InterruptedAt(TorchDispatchMode):
    """Raises before or behind the n-th operator that allocates, computes or copies."""

    def __init__(self, nth: int, *, behind: bool) -> None:
        super().__init__()
        self.left = nth
        self._behind = behind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = None
        counts = func.overloadpacket.__name__ not in (*VIEWS, *AROUND)
        self.left -= counts
        if self._behind or self.left or not counts:
            result = func(*args, **(kwargs or {}))
        if counts and not self.left:
            raise KeyboardInterrupt
        return result


def expected(training: Any, kind: dict[str, Any]) -> list[torch.Tensor]:
    return training(SIZES, 4, **kind).train(3)


@parametrize_devices()
@pytest.mark.parametrize(
    ("form", "behind"), [("fused", False), ("foreach", True), ("masters", False)]
)
def test_at_every_operator(
    form: str, behind: bool, device: torch.device, training: Any, same: Any
) -> None:
    kind = {"device": str(device), **FORMS[form]}
    right = expected(training, kind)
    for nth in range(1, 1000):
        trained = training(SIZES, 4, **kind)
        trained.train(1)
        trained.backward(1)
        if not interrupted(trained, InterruptedAt(nth, behind=behind)):
            break
        finish(trained)
        assert same(trained.train(1, 2), right), nth
    assert nth > 30


def interrupted(trained: Any, context: AbstractContextManager[Any]) -> bool:
    """Step inside a context; say whether that was interrupted, and finish the step if it was."""
    try:
        with context:
            trained.optimizer.step()
    except KeyboardInterrupt:
        trained.optimizer.step()
        return True
    return False


def finish(trained: Any) -> None:
    """The rest of a step of `Training`."""
    trained._scheduler.step()
    trained.optimizer.zero_grad()


@parametrize_devices()
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("method", ["send", "bring", "wait", "tie"])
def test_at_every_call_of_the_transfer(
    method: str,
    behind: bool,
    device: torch.device,
    training: Any,
    same: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = {"device": str(device), "fused": True}
    right = expected(training, kind)
    real = getattr(Transfer, method)
    left = 0

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not behind:
            raise KeyboardInterrupt
        result = real(*args, **kwargs)
        if left == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Transfer, method, interrupting)
    for nth in range(1, 100):
        trained = training(SIZES, 4, **kind)
        trained.train(1)
        trained.backward(1)
        left = nth
        if not interrupted(trained, contextlib.nullcontext()):
            break
        finish(trained)
        assert same(trained.train(1, 2), right), nth
    assert nth == {"send": 5, "bring": 5, "wait": 5, "tie": 4}[method]


@parametrize_devices()
def test_behind_the_last_window_new_gradients_begin_a_new_step(
    device: torch.device, training: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = training(SIZES, 4, device=str(device), fused=True)
    trained.train(1)
    trained.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "tie", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained.optimizer.step()
    finish(trained)  # whoever catches it goes on: all was stepped
    right = expected(training, {"device": str(device), "fused": True})
    assert same(trained.train(1, 2), right)


def raise_interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@parametrize_devices()
def test_a_copy_of_an_interrupted_step_does_not_reach_what_was_loaded(
    device: torch.device, training: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = training(SIZES, 4, device=str(device), fused=True)
    saved.train(1)
    checkpoint = saved.optimizer.state_dict()
    trained = training(SIZES, 4, device=str(device), fused=True)
    trained.train(1)
    trained.backward(1)
    real = Transfer.send

    def interrupting(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "send", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trained.optimizer.step()
    trained.optimizer.load_state_dict(checkpoint)
    # Given back by the interrupted step, and taken by somebody else.
    others = [torch.full((4097 * 2,), 3.0, device=device) for _ in range(6)]
    kept = trained.outcome()[3:]
    assert same(kept, saved.outcome()[3:])
    assert all((other == 3.0).all() for other in others)


@parametrize_devices()
def test_each_gradient_is_released_once_however_often_the_step_is_interrupted(
    device: torch.device, training: Any
) -> None:
    for nth in range(1, 1000):
        trained = training(SIZES, 4, device=str(device), fused=True, release_grads=True)
        trained.backward(1)
        if not interrupted(trained, InterruptedAt(nth, behind=True)):
            break
        assert all(parameter.grad is None for parameter in trained.parameters)
    assert nth > 30
