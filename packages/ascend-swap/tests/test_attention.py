"""swap-attention as its users see it: options, report, whole trainings, bad input."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ConfigError
from ascend_core.memory import measure_peak
from ascend_core.pinned import PinnedPool
from ascend_core.testing import RunRecord, assert_bitwise_equal, record_run
from ascend_swap import AttentionSwap, SwapAttentionConfig, swap_attention

LAYERS, BATCH, SEQ, WIDTH = 4, 2, 6, 16
HIDDEN = BATCH * SEQ * WIDTH * 4  # bytes of a hidden state
SUMS = BATCH * 4 * SEQ * 4  # bytes of the logarithms of the sums of 4 heads
# What a layer saves in self_attention: its input, queries, keys and values, and its result; and in
# a norm: its input, and two statistics.
ATTENTION = 5 * HIDDEN + SUMS
NORM = HIDDEN + 2 * BATCH * SEQ * 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(WIDTH)
        self.self_attention = Attention()
        self.post_attention_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_norm(x))
        out: Tensor = x + self.mlp(self.post_attention_norm(x))
        return out


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def batch(number: int) -> Tensor:
    return torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(number))


def turn_on(**options: Any) -> Callable[[nn.Module, Any], AttentionSwap]:
    config = SwapAttentionConfig(**{"min_bytes": 1, **options})
    return lambda model, optimizer: swap_attention(model, config)


def trained(**options: Any) -> RunRecord:
    return record_run(Model, batch, **options)


def swapped(model: nn.Module | None = None, **options: Any) -> AttentionSwap:
    return turn_on(**options)(Model() if model is None else model, None)


def step(model: nn.Module, number: int = 0) -> None:
    model(batch(number)).square().mean().backward()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_last": 0},
        {"keep_last": 2, "prefetch": 0},
        {"keep_last": 0, "prefetch": 3},
        {"swap_modules": "self_attention"},
        {"swap_modules": (Layer,)},
        {"recompute_num_layers": 2},
        {"recompute_num_layers": LAYERS, "swap_modules": ("mlp",)},
        {"host_budget": 1 << 13},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:swap_attention leaves:RuntimeWarning")
def test_a_training_is_the_plain_one(options: dict[str, Any], accumulate: int) -> None:
    plain = trained(accumulate=accumulate)
    assert_bitwise_equal(plain, trained(accumulate=accumulate, apply=turn_on(**options)))


def test_autocast_and_frozen_layers_change_nothing() -> None:
    def make() -> nn.Module:
        model = Model()
        model.layers[1].requires_grad_(False)
        model.layers[2].self_attention.requires_grad_(False)
        return model

    options: dict[str, Any] = {"autocast": torch.bfloat16, "steps": 3}
    plain = record_run(make, batch, **options)
    assert_bitwise_equal(plain, record_run(make, batch, apply=turn_on(), **options))


def test_a_resumed_training_is_the_one_that_went_on() -> None:
    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model()
        swapped(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            torch.manual_seed(number)
            step(model, number)
            optimizer.step()

    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(2, 4))
    resumed, its_optimizer = model_and_optimizer()
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    assert list(of_model) == list(Model().state_dict())
    resumed.load_state_dict(of_model)
    its_optimizer.load_state_dict(of_optimizer)
    train(resumed, its_optimizer, range(2, 4))
    for left, right in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_report_counts_what_the_shapes_say() -> None:
    model = Model()
    handle = swapped(model, keep_last=1)
    step(model)
    report = handle.report()
    names = [f"layers.{n}" for n in range(LAYERS)]
    assert report["layers"] == names
    assert report["modules"] == [
        f"{name}.{part}"
        for name in names
        for part in ("input_norm", "self_attention", "post_attention_norm")
    ]
    layer = ATTENTION + 2 * NORM
    assert report["moved_bytes_by_layer"] == dict(zip(names, [layer] * 3 + [0], strict=True))
    assert report["kept_bytes_by_layer"] == dict(zip(names, [0] * 3 + [layer], strict=True))
    assert (report["moved_bytes"], report["kept_bytes"]) == (3 * layer, layer)
    # Each of the two norms has three storages; attention has its input, q k v, sums and result.
    assert (report["prefetch_hits"], report["prefetch_misses"]) == (3 * (2 * 3 + 4), 0)
    assert report["hit_rate"] == 1.0
    assert report["in_vain_bytes"] == report["over_budget_bytes"] == report["exposed_waits"] == 0
    # The pool hands out whole cache lines.
    assert 3 * layer <= report["host_peak_bytes"] < 3 * layer + 30 * 64
    assert report["host_reserved_bytes"] == 32 << 20


def test_without_a_prefetch_every_storage_is_missed_and_nothing_is_lost() -> None:
    model = Model()
    handle = swapped(model, keep_last=0, prefetch=0)
    step(model)
    report = handle.report()
    assert (report["prefetch_hits"], report["prefetch_misses"]) == (0, LAYERS * 10)


def test_it_learns_which_layer_turns_around() -> None:
    model = Model()
    handle = swapped(model)
    kept = []
    for number in range(3):
        step(model, number)
        kept.append([bool(n) for n in handle.report()["kept_bytes_by_layer"].values()])
    assert kept == [[False] * 4, [False] * 3 + [True], [False] * 3 + [True]]
    # With the micro-batches of a pipeline in flight it does not, and moves again.
    losses = [model(batch(number)).square().mean() for number in range(3)]
    for loss in losses:
        loss.backward()
    losses = [model(batch(number)).square().mean() for number in range(3)]
    assert handle.report()["kept_bytes"] == 0


def test_small_storages_stay() -> None:
    model = Model()
    handle = swapped(model, keep_last=0, min_bytes=HIDDEN)
    step(model)
    assert handle.report()["moved_bytes"] == LAYERS * (5 + 2) * HIDDEN


def test_beyond_the_budget_activations_stay_with_one_warning() -> None:
    model = Model()
    reference = copy.deepcopy(model)
    layer = ATTENTION + 2 * NORM
    handle = swapped(model, keep_last=0, host_budget=2 * layer)
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="the host has no room") as warned:
        step(model)
    assert len(warned) == 1
    torch.manual_seed(0)
    step(reference)
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    report = handle.report()
    assert report["moved_bytes"] + report["kept_bytes"] == LAYERS * layer
    assert report["over_budget_bytes"] == report["kept_bytes"] > 0
    assert report["host_reserved_bytes"] <= 2 * layer
    step(model)  # no second warning


def test_a_pool_may_be_shared() -> None:
    pool = PinnedPool()
    models = Model(), Model()
    for model in models:
        swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)
    loss = models[1](models[0](batch(0))).square().mean()
    assert pool.stats().in_use_bytes >= 2 * LAYERS * (ATTENTION + 2 * NORM)
    loss.backward()
    del loss
    assert pool.stats().in_use_bytes == 0
    with pytest.raises(ConfigError, match="host_budget was given beside a pool"):
        swap_attention(Model(), SwapAttentionConfig(host_budget=1 << 20), pool=pool)


class ByName(nn.Sequential):
    """Takes its input by name."""

    def forward(self, *, hidden: Tensor) -> Tensor:
        out: Tensor = super().forward(hidden)
        return out


class LayerByName(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = ByName(*self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_norm(x))
        out: Tensor = x + self.mlp(hidden=self.post_attention_norm(x))
        return out


@pytest.mark.parametrize("layer", [Layer, LayerByName])
def test_recomputed_mlps_hold_their_inputs_on_the_host_alone(layer: type[Layer]) -> None:
    """On the CPU both sides are the host; the pool says which is which."""

    def held(**options: Any) -> int:
        model = Model()
        model.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        pool = PinnedPool()
        config = SwapAttentionConfig(min_bytes=1, keep_last=0, **options)
        handle = swap_attention(model, config, pool=pool)
        with measure_peak("cpu") as memory:
            loss = model(torch.ones(BATCH, 64 * SEQ, WIDTH))
        del loss, handle
        return memory.held_bytes - pool.stats().reserved_bytes

    # An MLP saves its input, and, four times as wide, what GELU and the last linear layer read, and
    # dropout's noise. In their place there is the state of the random numbers.
    saved = 64 * HIDDEN * (1 + 4 + 4 + 4)
    state = torch.get_rng_state().nbytes
    assert held() - held(recompute_num_layers=LAYERS) == LAYERS * (saved - state)


def test_random_numbers_of_a_recomputed_mlp_are_those_of_its_forward() -> None:
    handle_of = turn_on(recompute_num_layers=3)
    assert_bitwise_equal(trained(steps=3), trained(steps=3, apply=handle_of))


def test_threads_may_share_a_model() -> None:
    model = Model().eval()
    expected = []
    for number in range(4):
        model.zero_grad()
        step(model, number)
        expected.append(model.head.weight.grad.clone())
    for module in model.modules():
        module.training = not isinstance(module, nn.Dropout)
    swapped(model)
    losses: dict[int, Tensor] = {}

    def run(number: int) -> None:
        for _ in range(5):
            losses[number] = model(batch(number)).square().mean()
            grads = torch.autograd.grad(losses[number], model.head.weight)
            if not torch.equal(grads[0], expected[number]):
                losses.clear()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(losses) == [0, 1, 2, 3]


def test_copies_of_the_model_are_plain() -> None:
    model = Model()
    swapped(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made.layers[0].self_attention) is Attention
        step(made)


class Like(nn.Module):
    """A model whose modules are called as in another library."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_attention_is_found_by_its_usual_names() -> None:
    def found(**parts: nn.Module) -> list[str]:
        names: list[str] = swap_attention(Like(**parts)).report()["modules"]
        return names

    assert found(self_attn=Attention(), norm=nn.LayerNorm(3)) == ["self_attn"]
    assert found(attention=Attention(), attn=Attention()) == ["attention", "attn"]
    assert found(mixer=nn.MultiheadAttention(4, 2)) == ["mixer"]
    # megatron-core calls its norms otherwise: there attention alone moves.
    core = {"self_attention": Attention(), "input_layernorm": nn.LayerNorm(3)}
    assert found(**core) == ["self_attention"]
    assert found(outer=Like(attn=Like(attn=Attention()))) == ["outer.attn"]


@pytest.mark.parametrize("name", ["self_attention", "attention"])
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_container_that_is_never_called_is_not_taken_for_attention(
    kind: type[nn.Module], name: str
) -> None:
    heads = kind([Attention()]) if kind is nn.ModuleList else kind({"attn": Attention()})
    model = Like(**{name: heads, "norm": nn.LayerNorm(3)})
    if kind is nn.ModuleDict:
        assert swap_attention(model).report()["modules"] == [f"{name}.attn"]
    else:
        with pytest.raises(ConfigError, match="looks like attention"):
            swap_attention(model)
    with pytest.raises(ConfigError, match=f"'{name}' is a {kind.__name__}, which is never called"):
        swapped(model, swap_modules=name)


def test_modules_are_matched_exactly() -> None:
    model = Model()
    one = swapped(model, swap_modules="layers.1.self_attention, post_attention_norm")
    assert one.report()["modules"] == [
        "layers.0.post_attention_norm",
        "layers.1.self_attention",
        "layers.1.post_attention_norm",
        "layers.2.post_attention_norm",
        "layers.3.post_attention_norm",
    ]
    with pytest.raises(ConfigError, match="no module called 'attention'") as raised:
        swapped(model, swap_modules="self_attention,attention")
    assert "self_attention" in str(raised.value)
    assert "did you mean" in str(raised.value)
    with pytest.raises(ConfigError, match="is a Conv2d"):
        swapped(model, swap_modules=(nn.Conv2d,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_modules": ""}, "swap_modules holds ''"),
        ({"swap_modules": "a,,b"}, "swap_modules holds ''"),
        ({"swap_modules": ()}, "swap_modules is empty"),
        ({"swap_modules": 3}, "swap_modules is 3"),
        ({"swap_modules": (3,)}, "swap_modules holds 3"),
        ({"min_bytes": 0}, "min_bytes is 0"),
        ({"min_bytes": None}, "min_bytes is None"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"prefetch": None}, "prefetch is None"),
        ({"prefetch": True}, "prefetch is True"),
        ({"keep_last": -1}, "keep_last is -1"),
        ({"keep_last": 1.5}, "keep_last is 1.5"),
        ({"host_budget": 0}, "host_budget is 0"),
        ({"recompute_num_layers": 0}, "recompute_num_layers is 0"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwapAttentionConfig(**options)


def test_what_does_not_fit_the_model_is_refused() -> None:
    model = Model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match="recompute_num_layers is 5, and there are 4 layers"):
        swapped(model, recompute_num_layers=5)
    with pytest.raises(ConfigError, match="recompute_num_layers is 1, and there are 0 layers"):
        swapped(Like(attn=Attention()), recompute_num_layers=1)
    with pytest.raises(ConfigError, match="keep_last is 4, and activations of 4 layers"):
        swapped(model, keep_last=4)
    with pytest.raises(ConfigError, match="looks like attention"):
        swapped(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="was given a dict as its config"):
        swap_attention(model, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="was given a function"):
        swap_attention(turn_on)  # type: ignore[arg-type]
    assert [type(module) for module in model.modules()] == kinds
