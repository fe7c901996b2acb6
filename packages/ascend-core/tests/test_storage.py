"""Releasing and restoring the bytes of a tensor below the tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ascend_core.errors import StorageError
from ascend_core.memory import measure_peak
from ascend_core.storage import (
    bring_back,
    hollow,
    is_released,
    release,
    share_version,
    version_of,
    why_not_releasable,
)
from ascend_core.testing import parametrize_devices


def numbers(*size: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32, device=device).view(size)


@parametrize_devices()
@pytest.mark.parametrize(
    "make",
    [
        lambda d: numbers(3, 5, device=d),
        lambda d: numbers(3, 5, device=d).t().clone(memory_format=torch.preserve_format),
        lambda d: numbers(2, 3, 4, 5, device=d).contiguous(memory_format=torch.channels_last),
        lambda d: numbers(1, device=d).reshape(()),
        lambda d: numbers(7, device=d).bfloat16(),
        lambda d: numbers(7, device=d).long(),
        lambda d: torch.complex(numbers(3, device=d), numbers(3, device=d)),
    ],
    ids=["matrix", "transposed", "channels_last", "scalar", "bf16", "int64", "complex"],
)
def test_the_bytes_go_and_come_back_with_the_layout(
    make: Callable[[torch.device], Tensor], device: torch.device
) -> None:
    tensor = make(device)
    view = tensor.view(tensor.size())
    expected, stride, version = tensor.clone(), tensor.stride(), tensor._version
    nbytes = tensor.numel() * tensor.element_size()
    released = release(tensor)
    assert released.nbytes == nbytes and tensor.untyped_storage().nbytes() == 0
    assert is_released(tensor) and is_released(view)
    alias = released.restore(expected)
    assert not is_released(tensor) and not is_released(view) and type(tensor) is Tensor
    assert tensor.stride() == stride and tensor._version == view._version == version
    assert torch.equal(tensor, expected) and torch.equal(view, expected)
    assert alias is not None and alias.untyped_storage() is tensor.untyped_storage()
    assert alias._version == 0 or alias._version != tensor._version
    assert released.restore(torch.zeros_like(expected)) is None  # a second time does nothing
    assert torch.equal(tensor, expected)


def test_the_memory_is_really_given_back() -> None:
    tensor = torch.ones(1 << 18)
    with measure_peak("cpu") as memory:
        released = release(tensor)
    assert memory.held_bytes == -(1 << 20)
    released.restore(torch.ones(1 << 18))


def test_the_values_to_restore_are_not_kept() -> None:
    tensor, values = torch.ones(4), torch.zeros(4)
    reference = weakref.ref(values.untyped_storage())
    release(tensor).restore(values)
    del values
    assert reference() is None
    assert torch.equal(tensor, torch.zeros(4))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: numbers(4)[1:], "view of a larger storage"),
        (lambda: numbers(4)[:2], "view of a larger storage"),
        (lambda: numbers(2, 4)[:, ::2], "view of a larger storage"),
        (lambda: numbers(2, 4).chunk(2, -1)[0], "view of a larger storage"),
        (lambda: numbers(1, 4).expand(3, 4), "view of a larger storage"),
        (lambda: torch.as_strided(numbers(4), (2, 2), (1, 1)), "view of a larger storage"),
        (lambda: torch.empty(0), "no bytes"),
        (lambda: nn.Parameter(numbers(4)), "it is a Parameter"),
        (lambda: numbers(4).requires_grad_(), "leaf that requires grad"),
        (lambda: numbers(2, 2).to_sparse(), "its layout is torch.sparse_coo"),
        (lambda: torch.complex(numbers(2), numbers(2)).conj(), "lazy conjugate"),
        (lambda: numbers(4).share_memory_(), "cannot be resized"),
        (lambda: torch.from_numpy(numbers(4).numpy()), "cannot be resized"),
    ],
)
def test_what_does_not_solely_own_its_bytes_is_refused(
    make: Callable[[], Tensor], reason: str
) -> None:
    tensor = make()
    expected = tensor.detach().clone()
    assert reason in str(why_not_releasable(tensor))
    with pytest.raises(StorageError, match=reason):
        release(tensor)
    assert torch.equal(tensor.detach().to_dense(), expected.to_dense())


def test_what_shares_with_others_is_named() -> None:
    tensor = numbers(4)
    assert why_not_releasable(tensor, [numbers(4), numbers(2, 2).to_sparse()]) is None
    assert "shares its storage" in str(why_not_releasable(tensor, [tensor.view(2, 2)]))


def test_a_released_tensor_is_refused_a_second_release() -> None:
    tensor = numbers(4)
    released = release(tensor)
    with pytest.raises(StorageError):
        release(tensor)
    released.restore(torch.ones(4))
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize("values", [torch.ones(5), torch.ones(2, 2), torch.ones(4).double()])
def test_other_values_than_were_there_are_refused_and_nothing_changes(values: Tensor) -> None:
    tensor = numbers(4)
    released = release(tensor)
    with pytest.raises(StorageError, match="cannot be restored from"):
        released.restore(values)
    assert is_released(tensor)
    released.restore(numbers(4))
    assert torch.equal(tensor, numbers(4))


@pytest.mark.parametrize("through", ["tensor", "view"])
def test_backward_refuses_what_nobody_restored_and_accepts_what_was(through: str) -> None:
    x = numbers(4).requires_grad_()
    y = torch.sin(x)
    z = (y if through == "tensor" else y.view(2, 2)).square().sum()
    value = y.detach().clone()
    released = release(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward(retain_graph=True)
    released.restore(value)
    z.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * value * torch.cos(x.detach()))


@pytest.mark.parametrize("given", [False, True])
def test_the_version_is_the_same_for_those_who_know(given: bool) -> None:
    tensor = numbers(4)
    tensor.add_(1)
    probe = hollow(tensor)
    assert probe.untyped_storage().nbytes() == 0
    released = release(tensor, counter=probe if given else None)
    assert tensor._version == probe._version > 1 << 29
    assert version_of(tensor) == version_of(probe) == 1
    released.restore(numbers(4))
    tensor.add_(1)
    assert tensor._version == probe._version == version_of(tensor) == 2
    with torch.inference_mode():
        assert version_of(torch.ones(2)) == 0


def test_bring_back_asks_whoever_released_it() -> None:
    tensor = numbers(4)
    view = tensor.view(2, 2)
    bring_back(tensor)  # nothing to do
    released = release(tensor, on_demand=lambda: released.restore(numbers(4)))
    bring_back(view)
    assert torch.equal(view, numbers(2, 2))


@pytest.mark.parametrize("on_demand", [None, lambda: None])
def test_bring_back_says_when_nobody_can(on_demand: Callable[[], None] | None) -> None:
    tensor = numbers(4)
    release(tensor, on_demand=on_demand)
    with pytest.raises(StorageError, match="is needed now"):
        bring_back(tensor)


def test_what_is_kept_for_the_restoration_goes_with_the_storage() -> None:
    class Restorer:
        def __call__(self) -> None: ...

    gc.collect()
    gc.disable()
    try:
        tensor, restorer = numbers(4), Restorer()
        reference = weakref.ref(restorer)
        released = weakref.ref(release(tensor, on_demand=restorer))
        del restorer
        assert reference() is not None and released() is not None
        del tensor
        assert reference() is None and released() is None
    finally:
        gc.enable()


def test_a_storage_that_died_is_restored_as_nothing() -> None:
    tensor = numbers(4)
    released = release(tensor)
    del tensor
    assert released.restore(numbers(4)) is None


def test_restoring_after_the_tensor_died_serves_its_views() -> None:
    tensor = numbers(4)
    view = tensor.detach()
    released = release(tensor)
    del tensor
    released.restore(numbers(4))
    assert torch.equal(view, numbers(4)) and view._version == 0


def test_only_the_released_tensor_is_guarded_and_only_meanwhile() -> None:
    tensor, other = numbers(4), numbers(4)
    released = release(tensor)
    with pytest.raises(StorageError, match="add reads a tensor whose storage was released"):
        torch.add(other, tensor)
    assert tensor.shape == (4,) and torch.equal(other, numbers(4))
    released.restore(other)
    assert torch.equal(torch.add(other, tensor), 2 * numbers(4))


def test_views_share_a_version_and_data_does_not() -> None:
    whole = torch.zeros(4)
    for other, shared in ((whole[1:], True), (whole.detach(), True), (whole.data, False)):
        version = whole._version, other._version
        assert share_version(whole, other) is shared
        assert share_version(other, whole) is shared
        assert (whole._version, other._version) == version
