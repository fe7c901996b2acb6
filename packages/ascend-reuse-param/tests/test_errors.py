"""What cannot work is refused by name, and nothing is lost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_core import (
    AscendError,
    ConfigError,
    FeatureError,
    OptimizerFailedError,
    UnavailableError,
)
from ascend_core.testing import bitwise_equal, parametrize_devices
from ascend_reuse_param import ReuseParamConfig, reuse_param


def weight(*size: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": 0}, "times is 0."),
        ({"times": True}, "times is True."),
        ({"window_bytes": -1}, "window_bytes is -1."),
        ({"window_bytes": 1.5}, "window_bytes is 1.5."),
        ({"times": 1, "window_bytes": 64}, "times and window_bytes were both given."),
        ({"rounding": "up"}, "rounding is 'up'."),
        ({"kernels": "fast"}, "kernels is 'fast'."),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReuseParamConfig(**options)


def test_wrong_arguments_are_refused() -> None:
    given: Any = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="reuse_param was given a Linear"):
        reuse_param(given)
    config: Any = {"times": 1}
    with pytest.raises(ConfigError, match="reuse_param was given a dict as its config"):
        reuse_param(optim.AdamW([weight(3)]), config)


def test_an_optimizer_without_bf16_parameters_is_refused() -> None:
    optimizer = optim.AdamW([weight(3, dtype=torch.float32)])
    with pytest.raises(ConfigError, match="no parameter of the optimizer is BF16"):
        reuse_param(optimizer)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


def test_fp32_parameters_in_the_place_of_all_bf16_ones_are_refused() -> None:
    """As a wrapper does that keeps masters of its own."""
    params = [weight(3), weight(5)]
    optimizer = reuse_param(optim.AdamW(params, lr=0.1))
    masters = [nn.Parameter(one.detach().float()) for one in params]
    optimizer.param_groups[0]["params"] = masters
    for master in masters:
        master.grad = torch.ones_like(master)
    with pytest.raises(ConfigError, match="no parameter of the optimizer is BF16 any more"):
        optimizer.step()
    assert all((master == 1).all() for master in masters)
    optimizer.param_groups[0]["params"] = [masters[0], params[1]]
    optimizer.step()
    assert (masters[0] < 1).all()


def test_groups_that_lost_their_bf16_parameters_later_are_let_be() -> None:
    params = [weight(3), weight(5, dtype=torch.float32)]
    optimizer = reuse_param(optim.AdamW([{"params": [one]} for one in params], lr=0.1))
    for one in params:
        one.grad = torch.ones_like(one)
    optimizer.step()
    before = params[1].detach().clone()
    optimizer.param_groups.pop(0)
    optimizer.step()
    optimizer.param_groups.clear()
    optimizer.step()
    assert (params[1] < before).all()


def test_fp16_is_refused_at_once() -> None:
    inner = optim.AdamW([weight(3), weight(3, dtype=torch.float16)])
    with pytest.raises(ConfigError, match="parameter 1 of group 0 is FP16"):
        reuse_param(inner)
    inner.state_dict()  # as it was


def test_fp16_is_refused_when_it_is_added() -> None:
    params = [weight(3)]
    optimizer = reuse_param(optim.AdamW(params, lr=0.1))
    with pytest.raises(ConfigError, match="parameter 0 of group 1 is FP16"):
        optimizer.add_param_group({"params": [weight(3, dtype=torch.float16)]})
    assert len(optimizer.param_groups) == 1
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not (params[0] == 1).any()


def test_fp16_that_is_not_trained_is_let_be() -> None:
    frozen = weight(3, dtype=torch.float16).requires_grad_(False)
    params = [weight(3), frozen]
    optimizer = reuse_param(optim.AdamW(params))
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert (frozen == 1).all()


def test_parameters_in_the_same_memory_are_refused() -> None:
    flat = torch.ones(100, dtype=torch.bfloat16)
    params = [nn.Parameter(flat[:60]), nn.Parameter(flat[59:])]
    optimizer = reuse_param(optim.AdamW(params))
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="lie in the same memory"):
        optimizer.step()
    assert (flat == 1).all()


def test_a_parameter_that_is_moved_into_the_memory_of_another_is_refused(run: Any) -> None:
    plain = run("beside", [(60,), (60,)]).train(4)
    trained = run("reuse", [(60,), (60,)]).train(2)
    one, other = trained.weights
    flat = torch.cat([one.detach(), other.detach()])
    one.data, other.data = flat[:60], flat[1:61]
    trained.backward(2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="lie in the same memory"):
            trained.optimizer.step()
    other.data = flat[60:]  # nothing was stepped or lost
    assert trained.train(2, first=2).same_as(plain)


def test_parameters_may_change_places(run: Any) -> None:
    """As an average is swapped in and out: moved between steps, and apart at each."""
    trained, plain = run("reuse", [(60,), (60,)]).train(2), run("beside", [(60,), (60,)]).train(4)
    one, other = trained.weights
    first, second = one.detach().clone(), other.detach().clone()
    one.data, other.data = other.data, one.data
    one.data.copy_(first)
    other.data.copy_(second)
    assert trained.train(2, first=2).same_as(plain)


def test_parameters_without_memory_are_in_nobodys_way(run: Any) -> None:
    """As those that a wrapper has released; they have no gradient in this step."""
    trained = run("reuse", [(60,), (60,), (60,)]).train(2)
    trained.backward(2)
    for released in trained.weights[1:]:
        released.grad = None
        released.untyped_storage().resize_(0)
    plain = run("beside", [(60,), (60,), (60,)]).train(3)
    trained.optimizer.step()
    assert bitwise_equal(trained.weights[0].detach(), plain.weights[0].detach())


def test_parameters_that_touch_are_not_refused() -> None:
    flat = torch.ones(100, dtype=torch.bfloat16)
    params = [nn.Parameter(flat[60:]), nn.Parameter(flat[:60])]
    optimizer = reuse_param(optim.AdamW(params, lr=0.1))
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (flat < 1).all()


@pytest.mark.parametrize("kind", ["expanded", "sliced"])
def test_strides_that_overlap_or_leave_gaps_are_refused(kind: str) -> None:
    data = torch.ones(8, 8, dtype=torch.bfloat16)
    given = nn.Parameter(data[:1].expand(4, 8) if kind == "expanded" else data[:, ::2])
    optimizer = reuse_param(optim.AdamW([given]))
    given.grad = torch.ones_like(given)
    with pytest.raises(ConfigError, match="leave gaps in its memory or overlap"):
        optimizer.step()


def test_an_optimizer_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS cannot be stepped in windows"):
        reuse_param(optim.LBFGS([weight(3)]))


def test_it_cannot_be_copied() -> None:
    with pytest.raises(FeatureError, match="cannot be copied"):
        copy.deepcopy(reuse_param(optim.AdamW([weight(3)])))


# Torch's own, around `step`: behind its end an optimizer cannot know of an interrupt.
AROUND = ("_record_function_enter_new", "_record_function_exit")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, run: Any) -> None:
    plain, weights = run("beside").train(3), run("beside").weights
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        ours = run("reuse", weights=weights)
        assert ours.optimizer._home.kernel is not None
    finally:
        torch.set_default_dtype(before)
    assert ours.train(3).same_as(plain)


@parametrize_devices()
def test_the_default_device_changes_nothing(device: torch.device) -> None:
    masters = []
    for default in ("cpu", "meta" if device.type == "cpu" else device):
        given = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16, device=device))
        given.grad = torch.ones_like(given)
        with torch.device(default):
            optimizer = reuse_param(optim.AdamW([given], lr=0.1))
            optimizer.step()
            masters.append(optimizer.state[given]["master_param"])
    assert masters[1].device.type == "cpu"
    assert (masters[1] < 1).all()
    assert bitwise_equal(*masters)


def test_a_large_parameter_that_comes_late_has_large_windows() -> None:
    bias, matrix = weight(64), weight(1 << 17)
    optimizer = reuse_param(optim.AdamW([bias, matrix]), ReuseParamConfig(times=16))
    bias.grad = torch.ones_like(bias)
    optimizer.step()
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    assert optimizer.report()["windows"] == 1 + 16


class RaisingAt(TorchDispatchMode):
    """Raises before the n-th operator."""

    def __init__(self, nth: int, error: BaseException) -> None:
        super().__init__()
        self._left = nth
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = func.overloadpacket.__name__ not in AROUND
        self._left -= counts
        if counts and self._left == 0:
            raise self._error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [1, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=["interrupt", "kernel"])
@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_after_an_exception_anywhere_nothing_is_half_stepped_in_silence(
    form: dict[str, bool], error: type[BaseException], first: int, run: Any
) -> None:
    """Unstepped or finished by another step, or failed by name until a checkpoint is loaded.

    Each tries every eleventh of some seven hundred operators.
    """
    shapes, config = [(200,), (7,)], ReuseParamConfig(times=2)
    whole = run("beside", shapes, **form).train(3)
    outcomes = set()
    for nth in range(first, 2000, 11):
        trained = run("reuse", shapes, config=config, **form).train(1)
        weights = [one.detach().clone() for one in trained.weights]
        checkpoint = copied(trained.optimizer.state_dict())
        trained.backward(1)
        try:
            with RaisingAt(nth, error()):
                trained.optimizer.step()
        except (error, AscendError):
            outcomes.add(go_on(trained, checkpoint, weights))
        else:
            break
        assert trained.train(1, first=2).same_as(whole), nth
    assert nth > 20
    # (Of the fused form one operator in a window works in place.)
    assert outcomes == {"finished", "failed"} or (form.get("fused") and outcomes == {"finished"})


def copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: {name: value.clone() for name, value in one.items()}
        for key, one in checkpoint["state"].items()
    }
    return {**checkpoint, "state": state}


def go_on(trained: Any, checkpoint: dict[str, Any], weights: list[torch.Tensor]) -> str:
    try:
        trained.optimizer.step()
    except OptimizerFailedError:
        with pytest.raises(OptimizerFailedError):
            trained.optimizer.state_dict()
        for one, value in zip(trained.weights, weights, strict=True):
            one.data.copy_(value)
        trained.optimizer.load_state_dict(checkpoint)
        trained.optimizer.step()
        return "failed"
    return "finished"


def test_a_closure_and_a_step_without_gradients(run: Any) -> None:
    trained, plain = run("reuse"), run("beside")
    trained.optimizer.step()
    plain.train(1)

    def closure() -> float:
        trained.backward(0)
        return 3.5

    assert trained.optimizer.step(closure) == 3.5
    assert trained.same_as(plain)
    assert all(map(bitwise_equal, trained.masters(), plain.masters()))


@parametrize_devices()
def test_kernels_of_another_device_are_refused(device: torch.device) -> None:
    if device.type == "cpu":
        device = torch.device("meta")
    given = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))
    with pytest.raises(ConfigError, match="kernels is 'native', and the parameters are on"):
        reuse_param(optim.AdamW([given]), ReuseParamConfig(kernels="native"))


def test_triton_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"kernels is 'triton'.* on cpu") as caught:
        reuse_param(optim.AdamW([weight(3)]), ReuseParamConfig(kernels="triton"))
    assert "these kernels are for cuda." in str(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("kernels", ["native", "compiled", "eager"])
@pytest.mark.parametrize("form", [{}, {"fused": True}])
def test_all_kernels_give_the_same_bits(kernels: str, form: dict[str, bool], run: Any) -> None:
    config = ReuseParamConfig(kernels=kernels, times=2)
    plain = run("beside", **form).train(4)
    assert run("reuse", config=config, **form).train(4).same_as(plain)


def test_without_a_compiler_steps_are_slower_and_say_so(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(RuntimeWarning, match="more slowly, to the same bits: native code cannot"):
        trained = run("reuse").train(3)
    assert trained.same_as(run("beside").train(3))
    with pytest.raises(UnavailableError, match="there is no C compiler"):
        reuse_param(optim.AdamW([weight(3)]), ReuseParamConfig(kernels="native"))


def test_half_away_is_its_own_and_restores_what_it_split(run: Any) -> None:
    """Rounding differs on ties alone; masters are what the same steps make of them."""
    config = ReuseParamConfig(rounding="half-away")
    away, even = run("reuse", config=config).train(5), run("reuse").train(5)
    assert away.optimizer.report()["exception_bytes"] == 0
    pairs = zip(away.masters(), even.masters(), strict=True)
    assert all(bitwise_equal(one, other) for one, other in pairs)
