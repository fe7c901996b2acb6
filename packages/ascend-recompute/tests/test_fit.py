"""Recompute by budget: the plan fits, training is equal, and measuring leaves no trace."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ConfigError
from ascend_core.testing import (
    assert_bitwise_equal,
    bitwise_equal,
    held_bytes,
    random_states,
    record_run,
)
from ascend_recompute import (
    RecomputePlan,
    recompute_activation,
    recompute_layers,
    recompute_to_fit,
)

BATCH, SEQUENCE, HIDDEN, INNER, LAYERS = 4, 16, 32, 128, 4
quickly = functools.partial(recompute_to_fit, repeats=2)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


class PostNormLayer(Layer):
    """What its last norm returns is saved by the layer after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.out(self.qkv(x)[..., :HIDDEN]))
        y: Tensor = self.norm2(x + self.mlp(x))
        return y


class SlowPostNormLayer(PostNormLayer):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


class PlainLayer(nn.Module):
    """Neither a norm nor an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.tanh()).tanh()


class SlowLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(kind() for kind in kinds or [Layer] * LAYERS)
        self.norm = nn.LayerNorm(HIDDEN)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("made_late", None)
        self.statistics = nn.BatchNorm1d(SEQUENCE)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.made_late = torch.ones(1)
        x = self.statistics(self.embedding(x))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x) * scale
        return y


def batch(_: int = 0) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, HIDDEN)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine threads wait for one another, and what is timed is that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def held(model: nn.Module, x: Tensor) -> int:
    model(x)  # makes what is made once
    torch.clear_autocast_cache()
    return held_bytes(lambda: model(x), device=torch.get_default_device())


def between(model: nn.Module, x: Tensor, share: float) -> int:
    """A budget: 0 is what is held with every layer recomputed, 1 what is held without."""
    plain = held(model, x)
    handle = recompute_layers(model)
    least = held(model, x)
    handle.remove()
    return int(least + share * (plain - least))


# Fits, and is equal ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", [Layer, PostNormLayer, PlainLayer])
def test_within_the_budget(kind: type[nn.Module], share: float) -> None:
    model, x = Model(*[kind] * LAYERS), batch()
    plain, budget = held(model, x), between(model, x, share)
    plan = quickly(model, x, budget)
    assert (plan.plain_bytes, plan.budget_bytes) == (plain, budget)
    assert 0 < plan.seconds_at_least <= plan.seconds
    handle = plan.apply(model)
    assert held(model, x) == plan.held_bytes <= budget
    # A replayed layer keeps its input and a random state; a device rounds blocks up.
    assert 0 < plain - held(model, x) <= handle.report()["saved_bytes"] * 1.1
    handle.remove()
    assert held(model, x) == plain


@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_five_steps(share: float, autocast: torch.dtype | None) -> None:
    place, x = torch.get_default_device(), batch()
    precision = functools.partial(
        torch.autocast, place.type, torch.bfloat16, enabled=autocast is not None
    )
    with precision():
        budget = between(Model(), x, share)

    def measure_and_apply(model: nn.Module, _: Any) -> Any:
        with precision():
            plan = quickly(model, x, budget)
        assert plan.whole or plan.activation or plan.norm
        return plan.apply(model)

    run = functools.partial(record_run, Model, batch, autocast=autocast, device=place)
    plain = run()
    assert_bitwise_equal(plain, run(apply=measure_and_apply))
    assert plain.losses[0] != plain.losses[-1]


def test_what_fits_already_is_left_alone() -> None:
    model, x = Model(), batch()
    plan = quickly(model, x, held(model, x))
    assert (plan.whole, plan.activation, plan.norm, plan.seconds) == ((), (), (), 0.0)
    assert plan.exact
    handle = plan.apply(model)
    assert handle.report() == {"saved_bytes": 0}


def test_the_slow_layer_is_left_alone() -> None:
    model, x = Model(Layer, SlowLayer, Layer, Layer), batch()
    plan = quickly(model, x, between(model, x, 0.35))
    assert plan.whole
    assert 1 not in plan.whole


def test_cheap_parts_come_before_whole_layers() -> None:
    model, x = Model(Layer, SlowLayer), batch()
    plan = quickly(model, x, between(model, x, 0.9))
    assert not plan.whole
    assert plan.activation or plan.norm
    handle = plan.apply(model)
    assert handle.report().keys() <= {"activation", "norm", "saved_bytes"}
    assert handle.report()["saved_bytes"] == 0  # of no forward yet


@pytest.mark.parametrize("share", [0.3, 0.4, 0.45])
def test_parts_that_do_not_add_up_are_chosen_again(share: float) -> None:
    # What the last norm of a layer returns is held as the input of the layer that is replayed.
    model, x = Model(*[SlowPostNormLayer, Layer] * 2), batch()
    plan = quickly(model, x, between(model, x, share))
    assert plan.held_bytes <= plan.budget_bytes
    assert plan.seconds >= plan.seconds_at_least > 0


def test_what_does_not_fit_says_what_would() -> None:
    model, x = Model(), batch()
    with pytest.raises(ConfigError, match="cannot be made to hold 1 bytes") as caught:
        quickly(model, x, 1)
    least = int(str(caught.value.instead).split()[4])
    assert quickly(model, x, least).held_bytes == least
    with pytest.raises(ConfigError, match=f"a budget of {least} bytes"):
        quickly(model, x, least - 1)


# Leaves no trace ---------------------------------------------------------------------------------


def traces(model: nn.Module) -> list[Any]:
    """What measuring must not change."""
    tensors = [*model.parameters(), *model.buffers(), *random_states().values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    kinds = [type(module) for module in model.modules()]
    names = [list(module.state_dict()) for module in model.modules()]
    return [
        [tensor.detach().clone() for tensor in tensors],
        [None if gradient is None else gradient.clone() for gradient in gradients],
        [id(gradient) for gradient in gradients],
        [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        [kinds, names, [module.training for module in model.modules()]],
    ]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return bitwise_equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    equal: bool = left == right
    return equal


@pytest.mark.parametrize("budget", [1, 200_000, 10**9])
def test_nothing_of_the_model_changes(budget: int) -> None:
    model, x = Model(), batch()
    model.layers[0].requires_grad_(requires_grad=False)
    model(x).sum().backward()
    model.made_late = None
    fired = []
    for parameter in model.layers[1].parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    before = traces(model)
    try:
        quickly(model, x, budget)
    except ConfigError:
        assert budget == 1
    assert same(before, traces(model))
    assert not fired


class StopError(Exception):
    pass


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_a_forward_that_raises_leaves_the_model_clean(call: int) -> None:
    model, x = Model(), batch()
    budget = between(model, x, 0.5)
    before, calls = traces(model), 0

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y: Tensor = model(x)
        if calls == call:
            raise StopError
        return y

    with pytest.raises(StopError):
        quickly(model, x, budget, forward=forward)
    assert same(before, traces(model))


# Samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "forward"),
    [
        (lambda x: (x, 2.0), None),
        (lambda x: [x], None),
        (lambda x: {"x": x, "scale": 2.0}, None),
        (lambda x: {x}, lambda model, sample: {"loss": model(*sample).sum(), "other": 1}),
    ],
    ids=["tuple", "list", "dict", "by a function"],
)
def test_samples(of: Callable[[Tensor], Any], forward: Any) -> None:
    model, x = Model(), batch()
    plan = quickly(model, of(x), between(model, x, 0.5), forward=forward)
    assert 0 < plan.held_bytes <= plan.budget_bytes < plan.plain_bytes


@pytest.mark.parametrize(
    ("sample", "options", "message"),
    [
        ("text", {}, "the sample is a str"),
        (None, {}, "the sample is a NoneType"),
        (0, {"budget_bytes": 0}, "budget_bytes is 0"),
        (0, {"budget_bytes": True}, "budget_bytes is True"),
        (0, {"budget_bytes": 1e9}, "budget_bytes is 1000000000.0"),
        (0, {"repeats": 0}, "repeats is 0"),
        (0, {"forward": lambda model, sample: 1.0}, "returned a float in which no tensor"),
        (0, {"model": nn.Linear(2, 2)}, "has no stack of layers"),
        (0, {"model": []}, "was given a list as its model"),
    ],
)
def test_bad_values_are_named(sample: Any, options: dict[str, Any], message: str) -> None:
    model = Model()
    before = traces(model)
    with pytest.raises(ConfigError, match=message):
        recompute_to_fit(**{"model": model, "sample": sample, "budget_bytes": 1, **options})
    assert same(before, traces(model))


def test_without_gradients_there_is_nothing_to_fit() -> None:
    model = Model().requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="no tensor requires grad"):
        quickly(model, batch(), 1)


def test_it_measures_without_other_recompute() -> None:
    model = Model()
    for verb, name in ((recompute_activation, "layers.0.mlp"), (recompute_layers, "layers.0")):
        handle = verb(model, layers=[0])
        with pytest.raises(ConfigError, match="recomputed already"):
            quickly(model, batch(), 1)
        assert name in str(handle.report())
        handle.remove()


# Plans -------------------------------------------------------------------------------------------

PLAN = RecomputePlan(
    num_layers=4,
    whole=(0, 2),
    activation=(1,),
    norm=(1, 3),
    budget_bytes=100,
    plain_bytes=200,
    held_bytes=90,
    seconds=0.1,
    seconds_at_least=0.05,
    exact=False,
)


@pytest.mark.host
def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert RecomputePlan.load(str(tmp_path / "plan.json")) == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    with pytest.raises(FileNotFoundError):
        RecomputePlan.load(tmp_path / "none.json")


@pytest.mark.host
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "its version is 2, and this release reads 1"),
        ({"format": "ascend-memory-timeline"}, "its format is another"),
        ({"whole": None}, "TypeError"),
        ({"whole": [4]}, "it holds positions below 4|whole of a recompute plan is"),
        ({"whole": [1]}, "layer 1 .* in two ways"),
        ({"norm": [True]}, "norm of a recompute plan"),
        ({"held_bytes": "90"}, "held_bytes of a recompute plan is '90'"),
        ({"seconds": "1"}, "seconds of a recompute plan is '1'"),
        ({"version": True}, "its version is True"),
        ({"norm": [2, 2]}, r"norm of a recompute plan is \(2, 2\)"),
        ({"seconds": float("nan")}, "seconds of a recompute plan is nan"),
        ({"seconds_at_least": -1}, "seconds_at_least of a recompute plan is -1"),
        ({"exact": 1}, "exact of a recompute plan is 1"),
        ({"other": 1}, "other"),
    ],
    ids=str,
)
def test_a_bad_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        RecomputePlan.load(path)
    assert str(path) in caught.value.what


@pytest.mark.host
@pytest.mark.parametrize("text", ["", "[]", "{}", "\udcff", "not json"])
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"plan\.json is no recompute plan"):
        RecomputePlan.load(path)


def test_a_plan_turns_on_each_part() -> None:
    model, x = Model().eval(), batch()
    kinds = [type(module) for module in model.modules()]
    plain = held(model, x)
    handle = PLAN.apply(model)
    light = held(model, x)
    report = handle.report()
    assert report["whole"]["layers"] == ["layers.0", "layers.2"]
    assert report["activation"]["modules"] == ["layers.1.mlp"]
    assert report["norm"]["modules"][0] == "layers.1.norm1"
    assert len(report["norm"]["modules"]) == 4
    parts = [report[name]["saved_bytes"] for name in ("whole", "activation", "norm")]
    assert report["saved_bytes"] == sum(parts)
    assert min(parts) > 0
    assert light < plain
    handle.remove()
    handle.remove()
    assert held(model, x) == plain
    assert [type(module) for module in model.modules()] == kinds


def test_a_plan_for_another_model() -> None:
    with pytest.raises(ConfigError, match="for 4 layers, and this Model has 3"):
        PLAN.apply(Model(Layer, Layer, Layer))
    with pytest.raises(ConfigError, match="and this Linear has 0"):
        PLAN.apply(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="was given a list as its model"):
        PLAN.apply([])  # type: ignore[arg-type]
    model = Model(*[PlainLayer] * 4)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match="looks like an MLP"):
        PLAN.apply(model)
    assert [type(module) for module in model.modules()] == kinds
