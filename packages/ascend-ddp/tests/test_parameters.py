"""A chunk's parameters are known, and others are seen, wherever in it they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ascend_ddp._parameters import Parameters, lists_plainly


class Tree(nn.Module):
    """Modules within modules; one that is there twice, one that is its own child, and gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2)))
        self.again = self.inner
        self.inner.append(self)
        self.register_module("nothing", None)
        self.weight = nn.Parameter(torch.zeros(2))

    @property
    def deepest(self) -> nn.Module:
        return self.inner[1][0]  # type: ignore[index,return-value]


def known(tree: nn.Module) -> Parameters:
    return Parameters(dict(tree.named_parameters()))


def add(tree: Tree) -> None:
    tree.deepest.added = nn.Parameter(torch.zeros(2))


def exchange(tree: Tree) -> None:
    tree.deepest.weight = nn.Parameter(torch.zeros(2, 2))  # its memory may be at the same place


def add_module(tree: Tree) -> None:
    tree.nothing = nn.Linear(2, 2)


@pytest.mark.parametrize("change", [add, exchange, add_module])
def test_another_parameter_is_seen(change: Callable[[Tree], None]) -> None:
    tree = Tree()
    parameters = known(tree)
    assert parameters.are_all_of(tree)
    change(tree)
    assert not parameters.are_all_of(tree)
    assert any(parameter not in parameters for parameter in tree.parameters())


def test_one_that_requires_no_gradient_is_none_of_ours() -> None:
    tree = Tree()
    parameters = known(tree)
    tree.deepest.added = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert parameters.are_all_of(tree)
    tree.requires_grad_()
    assert not parameters.are_all_of(tree)


def test_one_that_is_taken_out_is_not_missed() -> None:
    tree = Tree()
    parameters = known(tree)
    del tree.deepest.weight
    assert parameters.are_all_of(tree)


class Listing(nn.Linear):
    """Has parameters that are not torch's to find."""

    def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        yield "", self


def test_a_class_with_a_list_of_its_own_is_no_plain_one() -> None:
    assert lists_plainly(Tree())
    assert not lists_plainly(nn.Sequential(nn.Sequential(Listing(2, 2))))
