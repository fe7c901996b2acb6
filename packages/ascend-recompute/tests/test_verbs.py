"""Every verb on a small transformer: equal to plain, and lighter by what the shapes say."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import ConfigError, ReplayError
from ascend_core.saved import is_weight
from ascend_core.testing import (
    Growth,
    alive_after,
    assert_bitwise_equal,
    bitwise_equal,
    count_ops,
    held_bytes,
    record_run,
)
from ascend_recompute import (
    RecomputeLayersConfig,
    RecomputeNormConfig,
    recompute_activation,
    recompute_layers,
    recompute_norm,
)
from ascend_recompute.activation import DEFAULT
from ascend_recompute.norm import DEFAULT as NORMS

BATCH, SEQUENCE, HIDDEN, INNER, HEADS, LAYERS = 2, 8, 16, 64, 2, 4
ONE = BATCH * SEQUENCE * HIDDEN * 4  # bytes of one hidden state in FP32

Handles = Sequence[Any]
TurnOn = Callable[[nn.Module], Handles]


class PythonRMSNorm(nn.Module):
    """Functional code, as in Hugging Face's models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Layer(nn.Module):
    """Takes a keyword and returns a structure, as megatron's layers do."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)  # type: ignore[call-arg]
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> tuple[Tensor, None]:
        shape = (BATCH, SEQUENCE, 3, HEADS, HIDDEN // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(BATCH, SEQUENCE, HIDDEN))
        return x + self.mlp(self.norm2(x)) * scale["mlp"], None


class Model(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.norm = norm(HIDDEN)  # type: ignore[call-arg]
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        scale = {"mlp": torch.tensor(0.5, device=x.device)}
        for layer in self.layers:
            x, _ = layer(x, scale=scale)
        out: Tensor = self.head(self.norm(x))
        return out


def batch(_: int = 0) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, HIDDEN)


def values(verb: Callable[..., Any], **options: Any) -> TurnOn:
    policy = DEFAULT if verb is recompute_activation else NORMS
    small = dataclasses.replace(policy, min_bytes=0)
    return lambda model: [verb(model, policy=small, **options)]


def whole(**options: Any) -> TurnOn:
    return lambda model: [recompute_layers(model, **options)]


def all_of(*verbs: TurnOn) -> TurnOn:
    return lambda model: [handle for verb in verbs for handle in verb(model)]


VERBS: dict[str, TurnOn] = {
    "activation": values(recompute_activation),
    "norm": values(recompute_norm),
    "activation and norm": all_of(values(recompute_activation), values(recompute_norm)),
    "norm and activation": all_of(values(recompute_norm), values(recompute_activation)),
    "block of all": whole(),
    "block of 2": whole(num_layers=2),
    "layer 1 and 3": whole(layers=[3, 1]),
    "uniform of 1": whole(method="uniform"),
    "uniform of 2": whole(method="uniform", num_layers=2),
    "uniform of 3": whole(method="uniform", num_layers=3),
    "block, then values": all_of(
        whole(num_layers=2), values(recompute_activation), values(recompute_norm)
    ),
    "verified": all_of(
        whole(num_layers=1, verify=True),
        values(recompute_activation, verify=True),
        values(recompute_norm, verify=True),
    ),
}
every_verb = pytest.mark.parametrize("verb", list(VERBS))
# One of each kind, where what differs between the others takes no part.
by_verb = pytest.mark.parametrize(
    "verb", ["activation", "norm", "block of all", "uniform of 2", "block, then values"]
)
# The last turns on all three.
by_group = pytest.mark.parametrize("verb", ["uniform of 2", "block, then values"])


def assert_same_training(verb: str, make: Callable[[], nn.Module] = Model, **options: Any) -> None:
    options = {"device": torch.get_default_device(), **options}
    plain = record_run(make, batch, **options)

    def apply(model: nn.Module, _: Any) -> Any:
        VERBS[verb](model)

    assert_bitwise_equal(plain, record_run(make, batch, apply=apply, **options))
    assert plain.losses[0] != plain.losses[-1]


def held(model: nn.Module, x: Tensor) -> int:
    return held_bytes(lambda: model(x), device=torch.get_default_device())


# Equal to plain ----------------------------------------------------------------------------------


# Torch says that its RMSNorm of BF16 with FP32 weights is not the fused one.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, PythonRMSNorm])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@by_verb
def test_five_steps(verb: str, norm: type[nn.Module], autocast: torch.dtype | None) -> None:
    assert_same_training(verb, lambda: Model(norm), autocast=autocast)


@every_verb
def test_every_verb(verb: str) -> None:
    assert_same_training(verb, steps=2)


@by_verb
def test_gradient_accumulation(verb: str) -> None:
    assert_same_training(verb, accumulate=3, steps=2)


@by_verb
def test_a_model_in_bfloat16(verb: str) -> None:
    assert_same_training(verb, lambda: Model().to(torch.bfloat16), steps=2, forward=_in_bfloat16)


def _in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x.to(torch.bfloat16)).float().square().mean()
    return loss


@by_group
@pytest.mark.parametrize("frozen", ["layers.0", "layers.1.norm1", "layers.2.mlp", "norm", "layers"])
def test_frozen_layers(verb: str, frozen: str) -> None:
    def make() -> nn.Module:
        model = Model()
        model.get_submodule(frozen).requires_grad_(requires_grad=False)
        return model

    assert_same_training(verb, make, steps=2)


@by_verb
def test_tied_weights(verb: str) -> None:
    def make() -> nn.Module:
        model = Model()
        model.head.weight = model.embedding.weight
        for layer in model.layers:
            layer.norm2 = layer.norm1
        return model

    assert_same_training(verb, make, steps=2)


@by_verb
def test_two_models_whose_forwards_come_before_their_backwards(verb: str) -> None:
    torch.manual_seed(0)
    plain = [Model(), Model(nn.RMSNorm)]
    ours = copy.deepcopy(plain)
    for model in ours:
        VERBS[verb](model)

    def run(models: list[Model]) -> list[Tensor]:
        torch.manual_seed(1)
        losses = [model(batch()).square().mean() for model in models for _ in range(2)]
        for loss in losses:
            loss.backward()
        return [p.grad for model in models for p in model.parameters() if p.grad is not None]

    expected = run(plain)
    assert len(expected) == sum(1 for model in plain for _ in model.parameters())
    assert all(map(bitwise_equal, expected, run(ours)))


@by_verb
def test_autograd_grad_and_double_backward(verb: str) -> None:
    torch.manual_seed(0)
    plain = Model().eval()
    ours = copy.deepcopy(plain)
    VERBS[verb](ours)
    x = batch().requires_grad_()

    def run(model: nn.Module) -> list[Tensor]:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), list(model.layers.parameters()))]

    assert all(map(bitwise_equal, run(plain), run(ours)))


@by_verb
def test_backward_twice(verb: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    ours = copy.deepcopy(plain)
    VERBS[verb](ours)

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(bitwise_equal, run(plain), run(ours)))


class Checkpointed(Model):
    """A model whose author has checkpointed something already."""

    def __init__(self, where: str, *, reentrant: bool, keep_random_state: bool = True) -> None:
        super().__init__()
        self._where = where
        self._options: dict[str, Any] = {
            "use_reentrant": reentrant,
            "preserve_rng_state": keep_random_state,
        }
        for layer in self.layers:
            around_mlp = functools.partial(self.around, "inside the layers", layer.mlp.forward)
            layer.mlp.forward = around_mlp

    def around(self, here: str, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        if self._where != here:
            return function(x)
        return checkpoint(function, x, **self._options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.around("around the model", self.whole, x)
        return out

    def whole(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        scale = {"mlp": torch.tensor(0.5, device=x.device)}
        for layer in self.layers:
            x, _ = self.around("around the layers", functools.partial(layer, scale=scale), x)
        out: Tensor = self.head(self.norm(x))
        return out


def of_a_leaf(model: nn.Module, x: Tensor) -> Tensor:
    """A reentrant checkpoint wants an argument that requires grad."""
    loss: Tensor = model(x.requires_grad_()).square().mean()
    return loss


by_checkpoint = pytest.mark.parametrize(
    ("where", "reentrant"),
    [
        (f"{place} the {what}", reentrant)
        for place, what in (("around", "layers"), ("around", "model"), ("inside", "layers"))
        for reentrant in (True, False)
    ],
)


@by_checkpoint
@by_group
def test_with_checkpoints_of_the_user(verb: str, where: str, *, reentrant: bool) -> None:
    make = functools.partial(Checkpointed, where, reentrant=reentrant)
    assert_same_training(verb, make, steps=2, forward=of_a_leaf)


@by_checkpoint
@by_group
def test_beside_checkpoints_it_holds_no_more(verb: str, where: str, *, reentrant: bool) -> None:
    # (A random state that a checkpoint keeps is as large as this model's activations.)
    make = functools.partial(Checkpointed, where, reentrant=reentrant, keep_random_state=False)
    x = batch().requires_grad_()
    both, ours = make().eval(), Model().eval()
    user = held(both, x)
    VERBS[verb](both)
    VERBS[verb](ours)
    assert held(both, x) <= user
    if where == "inside the layers":
        # Its arguments are held by the checkpoint, whatever they are.
        assert held(both, x) <= held(ours, x) + LAYERS * ONE


@by_verb
def test_without_gradients_nothing_is_done(verb: str) -> None:
    model = Model().eval()
    x = batch()
    expected = model(x)
    handles = VERBS[verb](model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), expected)
    assert all(handle.report()["saved_bytes"] == 0 for handle in handles)


@every_verb
def test_removed_it_is_plain_and_may_come_back(verb: str) -> None:
    model, x = Model().eval(), batch()
    kinds = [type(module) for module in model.modules()]
    plain = held(model, x)
    handles = VERBS[verb](model)
    light = held(model, x)
    graph = model(x).sum()
    for handle in handles:
        handle.remove()
        handle.remove()
    assert [type(module) for module in model.modules()] == kinds
    assert held(model, x) == plain > light
    graph.backward()  # a graph of before still runs
    assert [held(model, x) for _ in [VERBS[verb](model)]] == [light]


@by_verb
def test_nothing_grows(verb: str) -> None:
    model = Model()
    VERBS[verb](model)

    def step() -> None:
        model.zero_grad()
        model(batch()).square().mean().backward()
        model(batch())  # a backward that never comes

    assert alive_after(step, steps=50) == Growth(nbytes=0, storages=0)


class StopError(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward"])
@by_verb
def test_an_exception_does_no_harm_to_the_next_step(verb: str, where: str) -> None:
    def raise_it(*_: Any) -> None:
        raise StopError

    torch.manual_seed(0)
    plain = Model()
    ours = copy.deepcopy(plain)
    VERBS[verb](ours)
    middle = ours.layers[2].out
    if where == "forward":
        hook = middle.register_forward_hook(raise_it)
    else:
        hook = middle.register_full_backward_hook(raise_it)
    with pytest.raises(StopError):
        ours(batch()).square().mean().backward()
    hook.remove()
    ours.zero_grad()
    for model in (plain, ours):
        torch.manual_seed(1)
        model(batch()).square().mean().backward()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)


# Lighter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "dropped"),
    {
        # The outputs of 2 norms in each of 4 layers, and of the last.
        "norm": [ONE] * 9,
        # gelu, 4 times as wide as the hidden state.
        "activation": [4 * ONE] * LAYERS,
        "activation and norm": [ONE] * 9 + [4 * ONE] * LAYERS,
        "norm and activation": [ONE] * 9 + [4 * ONE] * LAYERS,
    }.items(),
    ids=str,
)
def test_values_that_are_not_held(
    verb: str, dropped: list[int], taken: Callable[[int], int]
) -> None:
    model, x = Model().eval(), batch()
    plain = held(model, x)
    handles = VERBS[verb](model)
    assert plain - held(model, x) == sum(map(taken, dropped))
    assert sum(handle.report()["saved_bytes"] for handle in handles) == sum(dropped)


def test_norms_under_autocast(taken: Callable[[int], int]) -> None:
    model, x = Model().eval(), batch()

    def run() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = model(x)
        return out

    place = torch.get_default_device()
    plain = held_bytes(run, device=place)
    (handle,) = VERBS["norm"](model)
    # On CPU autocast lets norms compute in BF16. Elsewhere they compute in FP32, from a copy of
    # their input that only they hold, and the linear layers hold a BF16 copy of their output.
    assert plain - held_bytes(run, device=place) == 9 * taken(ONE // 2)
    assert handle.report()["saved_bytes"] == 9 * ONE // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_a_model_in_few_bits(
    norm: type[nn.Module], dtype: torch.dtype, taken: Callable[[int], int]
) -> None:
    # `F.rms_norm` computes in FP32, from a copy of its input that only it holds, and saves the
    # normalised value in FP32 as well.
    dropped = [ONE // 2] if norm is nn.LayerNorm else [ONE // 2, ONE]
    model, x = Model(norm).to(dtype).eval(), batch().to(dtype)
    copied = copy.deepcopy(model)
    (handle,) = VERBS["norm"](copied)
    assert held(model, x) - held(copied, x) == 9 * sum(map(taken, dropped))
    assert handle.report()["saved_bytes"] == 9 * sum(dropped)
    model(x).square().sum().backward()
    copied(x).square().sum().backward()
    for ours, plain in zip(copied.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None
        assert torch.equal(ours.grad, plain.grad)


def test_whole_layers_hold_their_inputs() -> None:
    x, one = batch(), saved_by_a_layer()
    # A replay keeps the state of the CPU's generator.
    random_state = torch.get_rng_state().nbytes if x.is_cpu else 0

    def check(verb: str, layers: int, inputs: int = 0) -> None:
        model = Model().eval()
        plain = held(model, x)
        (handle,) = VERBS[verb](model)
        dropped = layers * one + inputs * ONE
        light = plain - held(model, x)
        # (torch_npu rounds up, so there it is more.)
        assert light == dropped - layers * random_state or (light > dropped and not x.is_cpu)
        assert handle.report()["saved_bytes"] == dropped

    check("block of all", LAYERS)
    check("block of 2", 2)
    check("layer 1 and 3", 2)
    check("uniform of 1", LAYERS)
    # The inputs of the second and fourth layer are made again by the one before.
    check("uniform of 2", LAYERS, inputs=2)
    check("uniform of 3", LAYERS, inputs=2)


def saved_by_a_layer() -> int:
    """What a layer saves beside its input, which is held, and its parameters."""
    layer, scale = Layer(nn.LayerNorm).eval(), {"mlp": torch.tensor(0.5)}
    h = batch().requires_grad_()
    seen: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        if not is_weight(tensor) or tensor is h:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = layer(h, scale=scale)[0]
    del seen[h.untyped_storage().data_ptr()]
    del seen[scale["mlp"].untyped_storage().data_ptr()]
    assert output.untyped_storage().data_ptr() not in seen
    return sum(seen.values())


def operators(model: nn.Module, x: Tensor) -> dict[str, int]:
    with count_ops() as counts:
        model(x).sum().backward()
    return dict(counts.backward)


def test_what_backward_runs_again() -> None:
    x = batch()
    plain = operators(Model().eval(), x)

    def more(verb: str) -> dict[str, int]:
        model = Model().eval()
        VERBS[verb](model)
        counts = operators(model, x)
        names = counts.keys() | plain.keys()
        difference = {name: counts.get(name, 0) - plain.get(name, 0) for name in names}
        return {name: count for name, count in difference.items() if "norm" in name or "mm" in name}

    norm = next(name for name in operators(Model().eval(), x) if "layer_norm_backward" in name)
    forward = norm.replace("_backward", "")
    assert {n: c for n, c in more("norm").items() if c} == {forward: 9}
    assert not any(more("activation").values())
    # Four linear layers and two matrix products in each layer.
    matmuls = {n: c for n, c in more("block of all").items() if "mm" in n}
    assert sum(matmuls.values()) == LAYERS * 6
    assert sum({n: c for n, c in more("uniform of 2").items() if "mm" in n}.values()) == LAYERS * 6


# Which layers ------------------------------------------------------------------------------------


def chosen(handle: Any) -> list[str]:
    report = handle.report()
    names: list[str] = report.get("layers", report.get("modules"))
    return names


@pytest.mark.host
def test_norms_are_chosen_by_their_layer() -> None:
    assert len(chosen(recompute_norm(Model()))) == 2 * LAYERS + 1
    assert chosen(recompute_norm(Model(), layers=[1])) == ["layers.1.norm1", "layers.1.norm2"]
    assert chosen(recompute_norm(Model(), num_layers=1)) == ["layers.0.norm1", "layers.0.norm2"]
    assert chosen(recompute_norm(Model(), modules=("norm2",), layers=[3])) == ["layers.3.norm2"]
    assert chosen(recompute_norm(Model(), modules=("norm",))) == ["norm"]


@pytest.mark.host
def test_full_layers_are_counted_first() -> None:
    model = Model()
    assert chosen(recompute_layers(model, num_layers=1)) == ["layers.0"]
    assert chosen(recompute_activation(model)) == [f"layers.{n}.mlp" for n in (1, 2, 3)]
    with pytest.warns(UserWarning, match="1 fully recomputed layers and 2 more") as caught:
        assert chosen(recompute_norm(model, num_layers=2))[0] == "layers.1.norm1"
        other = Model()
        recompute_layers(other, num_layers=1)
        recompute_activation(other, num_layers=2)
    assert [warning.filename for warning in caught] == [__file__] * 2
    model = Model()
    recompute_layers(model, num_layers=1)
    assert chosen(recompute_activation(model, num_layers=3))[-1] == "layers.3.mlp"


@pytest.mark.host
def test_a_layer_is_never_both() -> None:
    model = Model()
    recompute_activation(model, layers=[2])
    with pytest.raises(ConfigError, match=r"layers\.2 is recomputed already"):
        recompute_layers(model)
    recompute_layers(model, num_layers=2)
    with pytest.raises(ConfigError, match=r"layers\.0 is recomputed already"):
        recompute_layers(model, layers=[0])
    with pytest.raises(ConfigError, match="1, which recompute_layers replays whole"):
        recompute_norm(model, layers=[1])
    with pytest.raises(ConfigError, match="num_layers is 3, and 2 of the 4"):
        recompute_norm(model, num_layers=3)
    recompute_layers(model, layers=[3])
    model = Model()
    recompute_layers(model)
    with pytest.raises(ConfigError, match="nothing is left"):
        recompute_activation(model)


@pytest.mark.host
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "selective"}, "method is 'selective'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_layers": 5}, "num_layers is 5, and there are 4 layers"),
        ({"method": "uniform", "num_layers": 5}, "num_layers is 5, and there are 4 layers"),
        ({"layers": [4]}, "layers asks for 4, and there are 4"),
        ({"layers": 2}, "layers is 2"),
        ({"layers": [0], "num_layers": 1}, "layers is given beside num_layers"),
        ({"layers": [0], "method": "uniform"}, "layers is given beside num_layers"),
        ({"stack": "norm"}, "no container of layers called 'norm'"),
        ({"verify": 1}, "verify is 1"),
        ({"config": RecomputeNormConfig()}, "given a RecomputeNormConfig as its config"),
        ({"config": RecomputeLayersConfig(), "num_layers": 1}, "a config and single options"),
    ],
    ids=str,
)
def test_bad_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recompute_layers(Model(), **options)


@pytest.mark.host
def test_models_without_layers_or_norms() -> None:
    with pytest.raises(ConfigError, match="has no stack of layers"):
        recompute_layers(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="looks like a norm"):
        recompute_norm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ConfigError, match="was given a list as its model"):
        recompute_norm([])  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2), nn.Linear(2, 2))
    assert chosen(recompute_norm(model, layers=[1])) == ["2"]
    assert chosen(recompute_layers(nn.Sequential(MLP(), MLP()))) == ["0", "1"]
    assert chosen(recompute_layers(Model(), stack="layers", num_layers=1)) == ["layers.0"]


# Verified ----------------------------------------------------------------------------------------


@by_verb
def test_a_backward_within_an_autocast_region_leaves_its_casts_alone(verb: str) -> None:
    """A penalty on the gradient, and another model's backward, between two forwards."""

    def gradients(*, on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, other, x, y = Model().eval(), Model().eval(), batch().requires_grad_(), batch()
        if on:
            VERBS[verb](model)
            VERBS[verb](other)
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x).float().square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            other(y).float().sum().backward()
            loss = loss + slope.float().square().sum() + model(y).float().square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for ours, plain in zip(gradients(on=True), gradients(on=False), strict=True):
        assert torch.equal(ours, plain)


class Skipping(nn.Module):
    """Calls some of its layers, some of them more than once."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.order = layers, list(range(len(layers)))

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = self.layers[place](x)
        return x


@pytest.mark.parametrize("whole", [True, False], ids=["by the model", "by the caller"])
def test_a_report_is_of_the_latest_forward(*, whole: bool) -> None:
    model, x = Skipping(nn.ModuleList(MLP() for _ in range(3))), batch()
    handle = recompute_layers(model)

    def saved(*order: int) -> list[int]:
        model.order = list(order)
        for _ in range(2):
            (model if whole else functools.partial(Skipping.forward, model))(x).sum().backward()
        return list(handle.report()["saved_bytes_by_layer"].values())

    one = saved(0)[0]
    assert one > 0 and saved(0, 1, 2) == [one, one, one]
    if whole:
        assert saved(1, 2) == [0, one, one]
        assert saved(1, 1, 2, 0, 0, 0) == [3 * one, 2 * one, one]


class Changing(nn.Module):
    """Gives another value each time."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight * float(self.calls)


def test_a_layer_that_is_not_deterministic_is_named() -> None:
    def make() -> Model:
        model = Model()
        model.layers[1].norm2 = Changing()
        return model

    model = make()
    recompute_layers(model, verify=True)
    with pytest.raises(ReplayError, match=r"layers\.1 saved .* in forward"):
        model(batch()).sum().backward()
    unnoticed = make()
    recompute_layers(unnoticed)
    unnoticed(batch()).sum().backward()  # why there is `verify`


def test_an_operator_that_is_not_deterministic_is_named() -> None:
    calls = itertools.count(1)
    changing = torch.library.custom_op(
        f"recompute_test::changing_on_{torch.get_default_device().type}",
        lambda x: x * next(calls),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    changing.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    class ChangingMLP(MLP):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(changing(self.up(x)) * 1.0)
            return out

    def run(*, verify: bool) -> None:
        model = nn.Sequential(ChangingMLP(), ChangingMLP())
        policy = dataclasses.replace(DEFAULT, min_bytes=0, random=frozenset()).extended(changing)
        recompute_activation(model, policy=policy, verify=verify)
        model(batch()).square().sum().backward()

    run(verify=False)
    with pytest.raises(ReplayError, match=r"changing.* in 1 gave another value"):
        run(verify=True)
