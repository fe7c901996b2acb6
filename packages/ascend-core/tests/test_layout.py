"""Layouts: what a strided tensor is beside its storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_core.layout import Layout

pytestmark = pytest.mark.usefixtures("default_device")


@pytest.mark.parametrize(
    ("tensor", "span"),
    [
        (torch.ones(3, 4), 12),
        (torch.ones(3, 4)[:, :2], 10),
        (torch.ones(3, 1).expand(3, 5), 3),
        (torch.ones(()), 1),
        (torch.ones(0, 7), 0),
        (torch.ones(9).unfold(0, 3, 2), 9),
    ],
    ids=["dense", "gaps", "expanded", "0_d", "empty", "overlapping"],
)
def test_the_span_counts_gaps_and_each_element_of_storage_once(
    tensor: torch.Tensor, span: int
) -> None:
    assert Layout.of(tensor).span == span
    assert Layout.of(tensor).nbytes == span * 4


def test_equal_layouts_are_equal_and_may_be_keys() -> None:
    x = torch.ones(4, 4)
    assert Layout.of(x) == Layout.of(torch.zeros(4, 4))
    assert len({Layout.of(x), Layout.of(x.t()), Layout.of(x[1:]), Layout.of(x.clone())}) == 3


def test_a_layout_holds_no_tensor() -> None:
    x = torch.ones(4, 4)
    assert not any(isinstance(getattr(Layout.of(x), f), torch.Tensor) for f in Layout.__slots__)


@given(data=st.data())
def test_any_strided_view_is_rebuilt_from_its_span(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    offset = data.draw(st.integers(0, 20))
    base = torch.arange(200, dtype=torch.int16)
    view = base.as_strided(sizes, strides, offset)
    layout = Layout.of(view)
    stored = layout.flatten(view)
    assert stored.is_contiguous()
    assert stored.numel() == layout.span
    for kept, first in (
        (stored.clone(), offset * 2),
        (layout.flatten(view, whole_storage=True), 0),
    ):
        rebuilt = layout.rebuild(kept, first)
        assert rebuilt.stride() == view.stride()
        assert torch.equal(rebuilt, view)


def test_flattening_makes_no_copy() -> None:
    x = torch.ones(4, 4).t()
    assert Layout.of(x).flatten(x).data_ptr() == x.data_ptr()
    y = torch.ones(4, dtype=torch.complex64).conj()
    assert Layout.of(y).flatten(y).data_ptr() == y.data_ptr()
    assert not Layout.of(y).flatten(y).is_conj()


@pytest.mark.parametrize(
    ("view", "dense"),
    [
        (lambda x: x, True),
        (lambda x: x.T, True),
        (lambda x: x[:, :1], False),
        (lambda x: x[1:], True),
        (lambda x: x[:1].expand(4, 6), False),
        (lambda x: x[:, ::2], False),
        (lambda x: x.reshape(4, 1, 6).expand(4, 3, 6), False),
        (lambda x: x[0, 0], True),
    ],
)
def test_dense_is_a_view_without_gaps_or_repetitions(
    view: Callable[[torch.Tensor], torch.Tensor], dense: bool
) -> None:
    assert Layout.of(view(torch.zeros(4, 6))).is_dense is dense
