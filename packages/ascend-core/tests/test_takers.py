"""A hook that takes gradients is found on its parameter."""

from __future__ import annotations

import torch
from torch import nn

from ascend_core.takers import Taker, taker_of

ONE = Taker("one", "sends it", "leave one off")
OTHER = Taker("other", "moves it", "leave other off")


class Hook:
    def __init__(self, taker: Taker | None) -> None:
        self.taker = taker

    def __call__(self, parameter: torch.Tensor) -> None:
        pass


def test_the_taker_is_found_until_its_hook_is_removed() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert taker_of(parameter, besides=OTHER) is None
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert taker_of(parameter, besides=OTHER) is None
    handle = parameter.register_post_accumulate_grad_hook(Hook(ONE))
    assert taker_of(parameter, besides=OTHER) == ONE
    assert taker_of(parameter, besides=ONE) is None
    handle.remove()
    assert taker_of(parameter, besides=OTHER) is None


def test_a_hook_whose_owner_is_gone_takes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.register_post_accumulate_grad_hook(Hook(None))
    parameter.register_post_accumulate_grad_hook(Hook(ONE))
    assert taker_of(parameter, besides=OTHER) == ONE
