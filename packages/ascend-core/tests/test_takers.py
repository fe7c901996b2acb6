"""A hook that takes gradients is found on its parameter."""

from __future__ import annotations

import torch
from torch import nn

from ascend_core.takers import Taker, takers_of

ONE = Taker("one", "sends it", "leave one off")
OTHER = Taker("other", "moves it", "leave other off")


class Hook:
    def __init__(self, taker: Taker | None) -> None:
        self.taker = taker

    def __call__(self, parameter: torch.Tensor) -> None:
        pass


def test_takers_are_found_until_their_hooks_are_removed() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert takers_of(parameter) == ()
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert takers_of(parameter) == ()
    handle = parameter.register_post_accumulate_grad_hook(Hook(OTHER))
    parameter.register_post_accumulate_grad_hook(Hook(ONE))
    assert takers_of(parameter) == (OTHER, ONE)
    handle.remove()
    assert takers_of(parameter) == (ONE,)


def test_a_hook_whose_owner_is_gone_takes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.register_post_accumulate_grad_hook(Hook(None))
    parameter.register_post_accumulate_grad_hook(Hook(ONE))
    assert takers_of(parameter) == (ONE,)
