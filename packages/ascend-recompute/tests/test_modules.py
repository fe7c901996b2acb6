"""Which modules the verb finds, and what it says when it finds none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_recompute import recompute_activation

pytestmark = pytest.mark.host


def found(
    model: nn.Module,
    modules: Sequence[str | type[nn.Module]] | None = None,
    layers: Sequence[int] | None = None,
) -> list[str]:
    handle = recompute_activation(model, modules=modules, layers=layers)
    names = handle.report()["modules"]
    handle.remove()
    assert isinstance(names, list)
    return names


def refusal(
    model: nn.Module,
    modules: Sequence[str | type[nn.Module]] | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[str, str]:
    """The message, and its advice."""
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ConfigError) as caught:
        recompute_activation(model, modules=modules, layers=layers)
    assert {name: type(module) for name, module in model.named_modules()} == before
    return str(caught.value), caught.value.instead or ""


class Gated(nn.Module):
    """Three linear layers with functional code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(4)
        for name, child in children.items():
            self.add_module(name, child)


def stack(*blocks: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embedding, model.layers = nn.Embedding(7, 4), nn.ModuleList(blocks)
    model.head = nn.Linear(4, 7)
    return model


class LlamaMLP(Gated):
    pass


class FeedForward(Gated):
    pass


class MoEMlpList(nn.ModuleList):
    pass


# Finding -----------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it: no subclass of torch's, and its weight lies the other way."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out))
        self.bias = nn.Parameter(torch.zeros(width_out))


class TransposedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4, 16), Conv1D(16, 4)


def test_an_mlp_may_be_made_of_linear_layers_of_its_library() -> None:
    assert found(nn.ModuleDict({"h": nn.ModuleList([TransposedMLP()])})) == ["h.0"]
    assert found(nn.ModuleDict({"mlp": nn.ModuleDict({"up": Conv1D(4, 8)})})) == ["mlp"]
    embeddings = nn.ModuleDict({"mlp": nn.ModuleDict({"table": nn.Embedding(4, 8)})})
    assert "looks like an MLP" in refusal(embeddings)[0]


@pytest.mark.parametrize(
    "name", ["mlp", "ffn", "feed_forward", "feedforward", "MLP", "dense_mlp", "mlp_block"]
)
def test_mlps_are_found_by_their_attribute_name(name: str) -> None:
    model = stack(Block(**{name: Gated()}), Block(**{name: Gated()}))
    assert found(model) == [f"layers.0.{name}", f"layers.1.{name}"]


@pytest.mark.parametrize("kind", [LlamaMLP, FeedForward])
def test_mlps_are_found_by_their_class_name(kind: Callable[[], nn.Module]) -> None:
    assert found(stack(Block(second_half=kind()))) == ["layers.0.second_half"]


@pytest.mark.parametrize(
    "activation", [nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Tanh(), nn.Mish(), nn.GLU(), nn.PReLU()]
)
def test_mlps_are_found_by_what_they_are_made_of(activation: nn.Module) -> None:
    second = nn.Sequential(nn.Linear(4, 8), activation, nn.Dropout(0.1), nn.Linear(8, 4))
    assert found(stack(Block(second=second))) == ["layers.0.second"]


def test_a_transformer_layer_of_torch_is_found() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert found(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)) == [
        "layers.0",
        "layers.1",
    ]


def test_the_model_itself_may_be_the_mlp() -> None:
    assert found(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))) == [""]
    assert found(LlamaMLP()) == [""]


def test_only_the_outermost_of_nested_mlps_is_taken() -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    outer = Gated()
    outer.add_module("inner_mlp", inner)
    assert found(stack(Block(mlp=outer))) == ["layers.0.mlp"]
    assert found(outer, modules=("inner_mlp",)) == ["inner_mlp"]


def test_an_mlp_inside_a_model_that_is_one_itself() -> None:
    model = LlamaMLP()
    model.add_module("mlp", Gated())
    assert found(model) == [""]


def test_what_is_no_mlp_is_left_alone() -> None:
    block = Block(
        mlp_norm=nn.LayerNorm(4),  # no linear layer in it
        mlp_dropout=nn.Dropout(0.1),
        mlps=MoEMlpList([nn.Linear(4, 4)]),
        projection=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),  # no activation
        classifier=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),  # one linear layer
        mlp=Gated(),
    )
    assert found(stack(block)) == ["layers.0.mlp"]


# Choosing ----------------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Module:
    return stack(Block(mlp=LlamaMLP()), Block(mlp=LlamaMLP()), Block(other=Gated()))


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (("mlp",), ["layers.0.mlp", "layers.1.mlp"]),
        (("layers.1.mlp",), ["layers.1.mlp"]),
        (("layers.1.mlp", "layers.0.mlp"), ["layers.0.mlp", "layers.1.mlp"]),
        ((LlamaMLP,), ["layers.0.mlp", "layers.1.mlp"]),
        ((Gated,), ["layers.0.mlp", "layers.1.mlp", "layers.2.other"]),
        ((LlamaMLP, "mlp"), ["layers.0.mlp", "layers.1.mlp"]),
        (("other", LlamaMLP), ["layers.0.mlp", "layers.1.mlp", "layers.2.other"]),
        (("attention",), ["layers.0.attention", "layers.1.attention", "layers.2.attention"]),
        (("2",), ["layers.2"]),
    ],
    ids=str,
)
def test_modules_are_chosen_by_name_and_by_type(
    model: nn.Module, modules: tuple[str | type[nn.Module], ...], names: list[str]
) -> None:
    assert found(model, modules) == names


def test_the_model_itself_is_chosen_by_its_type() -> None:
    assert found(LlamaMLP(), modules=(LlamaMLP,)) == [""]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ((0,), ["layers.0.mlp"]),
        ((1, 0), ["layers.0.mlp", "layers.1.mlp"]),
        (range(1, 2), ["layers.1.mlp"]),
        ((), []),
        ((1, 1), ["layers.1.mlp"]),
    ],
    ids=str,
)
def test_layers_count_the_chosen_modules(
    model: nn.Module, layers: Sequence[int], names: list[str]
) -> None:
    assert found(model, ("mlp",), layers) == names


def test_a_module_that_stands_in_two_places_is_found_once() -> None:
    shared = Block(mlp=Gated())
    assert found(stack(shared, shared)) == ["layers.0.mlp"]


def test_a_model_with_the_feature_on_is_searched_as_before(model: nn.Module) -> None:
    recompute_activation(model)
    assert found(model) == ["layers.0.mlp", "layers.1.mlp"]
    assert found(model, (LlamaMLP,)) == ["layers.0.mlp", "layers.1.mlp"]


# Refusing ----------------------------------------------------------------------------------------


def test_a_model_without_an_mlp() -> None:
    text, instead = refusal(stack(Block()))
    assert text.startswith("no module of this Module looks like an MLP.")
    assert "none is called mlp or feed_forward" in text
    assert instead == "name them, as in modules=('embedding',), or pass their class."
    text, _ = refusal(nn.Linear(4, 4))
    assert text.startswith("no module of this Linear looks like an MLP.")


def test_a_name_that_is_not_there(model: nn.Module) -> None:
    text, instead = refusal(model, ("mpl",))
    assert text.startswith("this Module has no module called 'mpl'.")
    assert "names are matched exactly" in text
    assert "attention" in text
    assert instead == "did you mean 'mlp'?"
    _, instead = refusal(model, ("zzzzzz",))
    assert instead == "use a name of model.named_modules()."
    _, instead = refusal(model, ("layers.0.mpl",))
    assert instead == "did you mean 'layers.0.mlp'?"


def test_one_of_several_names_that_is_not_there(model: nn.Module) -> None:
    text, _ = refusal(model, ("mlp", "mpl"))
    assert "'mpl'" in text


def test_the_empty_name_is_no_name(model: nn.Module) -> None:
    text, _ = refusal(model, ("",))
    assert text.startswith("this Module has no module called ''.")


def test_a_type_that_is_not_there(model: nn.Module) -> None:
    text, instead = refusal(model, (nn.GELU,))
    assert text.startswith("no module of this Module is a GELU.")
    assert "LlamaMLP" in text
    assert instead == "pass one of those types, or a module's name."


def test_a_type_that_is_no_module(model: nn.Module) -> None:
    text, _ = refusal(model, (int,))  # type: ignore[arg-type]
    assert text.startswith("no module of this Module is a int.")


def test_positions_beyond_the_last(model: nn.Module) -> None:
    text, instead = refusal(model, ("mlp",), (0, 2, 7))
    assert text.startswith("layers asks for 7, and there are 3.")
    assert "counted from 0" in text
    assert instead == "use positions from 0 to 2."
    text, _ = refusal(model, ("mlp",), (2,))
    assert text.startswith("none of the modules is in layer 2.")


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
                            for _ in range(50)))  # fmt: skip
    text, _ = refusal(model, ("mlp",))
    assert " and 10 more" in text


def test_searching_draws_nothing_and_moves_nothing(model: nn.Module) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found(model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
