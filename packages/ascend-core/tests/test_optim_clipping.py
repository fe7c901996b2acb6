"""The facade's own clipping is torch's, for the gradients that are there when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.errors import OptimizerFailedError
from ascend_core.optim import windowed
from ascend_core.optim.journal import Journal
from ascend_core.testing import bitwise_equal

Clip = Callable[..., torch.Tensor]


def pair(*dtypes: torch.dtype) -> list[tuple[list[nn.Parameter], Any, Clip]]:
    """A plain optimizer and a windowed one over equal parameters, and what clips for each."""
    runs: list[tuple[list[nn.Parameter], Any, Clip]] = []
    for wrap in (lambda plain: plain, lambda plain: windowed(plain, times=3)):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(n).to(dtype))
            for n, dtype in zip((4097, 33, 130), dtypes or (torch.float32,) * 3, strict=True)
        ]
        optimizer = wrap(optim.AdamW(params, lr=1e-2))
        own = getattr(optimizer, "clip_grad_norm_", None)

        def by_torch(*args: Any, params: list[nn.Parameter] = params) -> torch.Tensor:
            return nn.utils.clip_grad_norm_(params, *args)

        runs.append((params, optimizer, own or by_torch))
    return runs


def with_gradients(params: list[nn.Parameter], seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def assert_same(act: Callable[[list[nn.Parameter], Any, Clip], Any], *dtypes: torch.dtype) -> None:
    """Whatever is done to both, they give the same norms and step to the same weights."""
    outcomes = []
    for params, optimizer, clip in pair(*dtypes):
        norms = act(params, optimizer, clip)
        optimizer.step()
        outcomes.append((params, norms))
    (plain, norms), (ours, own_norms) = outcomes
    assert all(map(bitwise_equal, plain, ours))
    assert all(map(bitwise_equal, norms, own_norms))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_over_several_dtypes_are_torchs(norm_type: float) -> None:
    def act(params: list[nn.Parameter], _: Any, clip: Clip) -> list[torch.Tensor]:
        with_gradients(params)
        return [clip(0.1, norm_type)]

    assert_same(act, torch.bfloat16, torch.float32, torch.bfloat16)


def test_clips_follow_one_another() -> None:
    def act(params: list[nn.Parameter], _: Any, clip: Clip) -> list[torch.Tensor]:
        with_gradients(params)
        return [clip(1.0), clip(0.3, 1.0), clip(0.01, float("inf"))]

    assert_same(act)
    assert_same(act, torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "drop",
    [
        lambda params, _: nn.ParameterList(params).zero_grad(),
        lambda params, _: [setattr(p, "grad", None) for p in params],
        lambda _, optimizer: optimizer.zero_grad(),
        lambda _, optimizer: optimizer.step(),
        lambda params, _: with_gradients(params, 3),
    ],
)
def test_a_clip_is_for_the_gradients_of_then(drop: Callable[..., Any]) -> None:
    def act(params: list[nn.Parameter], optimizer: Any, clip: Clip) -> list[torch.Tensor]:
        with_gradients(params)
        norm = clip(0.1)
        drop(params, optimizer)
        with_gradients(params, 2)
        return [norm]

    assert_same(act)


def test_what_is_added_after_a_clip_is_not_clipped() -> None:
    def act(params: list[nn.Parameter], _: Any, clip: Clip) -> list[torch.Tensor]:
        with_gradients(params)
        norm = clip(0.1)
        for parameter in params:
            parameter.square().sum().backward()
        return [norm]

    assert_same(act)


def test_clipping_is_refused_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (params, optimizer, clip) = pair()
    with_gradients(params)
    finish = Journal.finish

    def interrupted(self: Any, window: Any) -> None:
        finish(self, window)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "finish", interrupted)
        optimizer.step()
    with pytest.raises(OptimizerFailedError, match="clip_grad_norm_ is not possible in the middle"):
        clip(1.0)
    optimizer.step()
    clip(1.0)
