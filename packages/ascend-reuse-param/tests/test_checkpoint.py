"""Saved and loaded, in every direction, and gone on with to the bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ascend_core.testing import bitwise_equal, parametrize_devices
from ascend_reuse_param import ReuseParamConfig

WAYS = ("windowed", "reuse")


def saved(trained: Any) -> dict[str, Any]:
    """Weights and optimizer through a file, with plain types and tensors alone."""
    file = io.BytesIO()
    weights = [weight.detach().cpu() for weight in trained.weights]
    torch.save({"weights": weights, "optimizer": trained.optimizer.state_dict()}, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def load_weights(into: Any, weights: list[torch.Tensor]) -> None:
    for weight, value in zip(into.weights, weights, strict=True):
        weight.data.copy_(value)


@parametrize_devices()
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in WAYS for b in WAYS])
def test_resume(
    before: str, after: str, weights_first: bool, device: torch.device, run: Any
) -> None:
    """Under another plan too: the feature on and off, and another number of windows."""
    form = {"fused": True, "device": device}
    whole = run("windowed", **form).train(6)
    checkpoint = saved(run(before, **form).train(3))
    resumed = run(after, config=ReuseParamConfig(times=3), **form)
    if weights_first:
        load_weights(resumed, checkpoint["weights"])
    resumed.optimizer.load_state_dict(checkpoint["optimizer"])
    if not weights_first:
        load_weights(resumed, checkpoint["weights"])
    assert resumed.train(3, first=3).same_as(whole)


def test_loading_leaves_the_weights_alone(run: Any) -> None:
    checkpoint = saved(run("reuse").train(3))
    other = run("reuse")
    before = [weight.detach().clone() for weight in other.weights]
    other.optimizer.load_state_dict(checkpoint["optimizer"])
    assert all(map(bitwise_equal, before, (w.detach() for w in other.weights)))


def test_weights_that_do_not_belong_to_the_loaded_masters_win(run: Any) -> None:
    """As with masters beside the weights: what the model computes with is what counts."""
    checkpoint = saved(run("reuse").train(3))
    other = run("reuse", lr=0.0)
    checkpoint["optimizer"]["param_groups"][0]["lr"] = 0.0
    before = [weight.detach().clone() for weight in other.weights]
    other.optimizer.load_state_dict(checkpoint["optimizer"])
    other.train(1)
    assert all(map(bitwise_equal, before, (w.detach() for w in other.weights)))
    assert all(map(bitwise_equal, (w.float() for w in before), other.masters()))


def test_a_checkpoint_without_masters_takes_the_weights(run: Any) -> None:
    """From an optimizer that stepped BF16 weights as they are."""
    trained = run("reuse").train(3)
    checkpoint = trained.optimizer.state_dict()
    for state in checkpoint["state"].values():
        del state["master_param"]
    trained.optimizer.load_state_dict(checkpoint)
    weights = [weight.detach().float() for weight in trained.weights]
    assert all(map(bitwise_equal, weights, trained.masters()))


def test_saving_changes_nothing(run: Any) -> None:
    plain = run("beside").train(6)
    ours = run("reuse", config=ReuseParamConfig(times=16))
    for number in range(6):
        ours.train(1, first=number)
        ours.optimizer.state_dict()
        assert ours.optimizer.report()["windows"] == 16
    assert ours.same_as(plain)


def test_masters_are_saved_on_the_host_at_fp32(run: Any) -> None:
    trained = run("reuse").train(1)
    for weight, state in trained.optimizer.state.items():
        master = state["master_param"]
        assert (master.dtype, master.device.type) == (torch.float32, "cpu")
        assert (master.shape, master.stride()) == (weight.shape, weight.stride())
        assert state["exp_avg"].dtype == torch.float32


def test_all_classes_of_bits_survive_a_checkpoint(run: Any) -> None:
    """Ties, NaN, infinities, zeros and denormals: masters are restored to the bit."""
    tops = torch.arange(65536, dtype=torch.int64)
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = (tops[:, None] << 16 | lows).flatten()
    masters = torch.where(patterns >= 2**31, patterns - 2**32, patterns).int().view(torch.float32)
    trained = run("reuse", [masters.shape]).train(1)
    checkpoint = trained.optimizer.state_dict()
    checkpoint["state"][0]["master_param"] = masters
    trained.optimizer.load_state_dict(checkpoint)
    trained.weights[0].data.copy_(rounded(masters))
    assert bitwise_equal(trained.masters()[0], masters)
    report = trained.optimizer.report()
    assert report["windows_with_a_bitmap"] == report["windows"] > 1


def rounded(masters: torch.Tensor) -> torch.Tensor:
    """As SPEC rounds: torch's cast, and NaN keeps the upper half with its quiet bit set."""
    upper = (masters.view(torch.int32) >> 16 | 0x40).to(torch.int16).view(torch.bfloat16)
    return torch.where(masters.isnan(), upper, masters.bfloat16())


def test_remove_gives_the_moments_back(run: Any) -> None:
    trained = run("reuse").train(2)
    inner = trained.optimizer._inner
    trained.optimizer.remove()
    trained.optimizer.remove()
    for weight in trained.weights:
        assert inner.state[weight]["exp_avg"].dtype == torch.bfloat16
    trained.optimizer = inner
    trained.train(1, first=2)
