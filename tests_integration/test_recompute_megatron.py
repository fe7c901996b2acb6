"""Recompute on real megatron-core, on the CPU: equal to plain, lighter by what the shapes say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ConfigError
from ascend_core.testing import (
    RunRecord,
    assert_bitwise_equal,
    bitwise_equal,
    count_ops,
    held_bytes,
    record_run,
)
from ascend_recompute import (
    CheckpointWithoutOutput,
    policy,
    recompute_activation,
    recompute_layers,
    recompute_norm,
)
from ascend_recompute.norm import DEFAULT as NORMS
from tests_integration.megatron_cpu import (
    BATCH,
    HIDDEN,
    INNER,
    LAYERS,
    MASK,
    POSITIONS,
    SEQUENCE,
    gpt,
    loss_of,
    tokens,
)

ONE = SEQUENCE * BATCH * HIDDEN * 4  # bytes of one hidden state in FP32
WIDE = SEQUENCE * BATCH * INNER * 4  # of one between the MLP's linear layers
STATE = torch.get_rng_state().nbytes  # of a CPU generator; a replay holds torch's and the tracker's

TurnOn = Callable[[nn.Module], Sequence[Any]]

pytestmark = [
    # megatron-core's own layers leave the group of tensor parallelism to its default.
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
    pytest.mark.usefixtures("megatron"),
]


def activation(model: nn.Module, **options: Any) -> Any:
    small = dataclasses.replace(policy.DEFAULT, min_bytes=0)
    return recompute_activation(model, policy=small, **options)


def norm(model: nn.Module, **options: Any) -> Any:
    return recompute_norm(model, policy=dataclasses.replace(NORMS, min_bytes=0), **options)


VERBS: dict[str, TurnOn] = {
    "activation": lambda model: [activation(model)],
    "norm": lambda model: [norm(model)],
    "block": lambda model: [recompute_layers(model)],
    "uniform": lambda model: [recompute_layers(model, method="uniform", num_layers=2)],
    "all": lambda model: [
        recompute_layers(model, num_layers=2, verify=True),
        activation(model, verify=True),
        norm(model, verify=True),
    ],
}
by_verb = pytest.mark.parametrize("verb", list(VERBS))
by_activation = pytest.mark.parametrize("swiglu", [False, True], ids=["gelu", "swiglu"])


def train(turn_on: Callable[[nn.Module], Any] | None = None, **options: Any) -> RunRecord:
    """Five steps, with the states of megatron-core's tracker at the end as the report."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    apply = None if turn_on is None else lambda model, _: turn_on(model) and None
    run = record_run(lambda: gpt(**options), tokens, forward=loss_of, apply=apply)
    return dataclasses.replace(run, report=get_cuda_rng_tracker().get_states())


@functools.cache
def plain(**options: Any) -> RunRecord:
    return train(**options)


def assert_same_training(
    turn_on: Callable[[nn.Module], Any], *, change: dict[str, Any] | None = None, **options: Any
) -> None:
    expected, ours = plain(**options), train(turn_on, **options, **(change or {}))
    assert_bitwise_equal(expected, ours)
    assert len(set(expected.losses)) == 5
    assert all(bitwise_equal(expected.report[k], ours.report[k]) for k in expected.report)


def held(model: nn.Module) -> int:
    # Without the loss: its sums over ranks are let go of in a thread of gloo's, which nobody sees.
    batch, _ = tokens()
    model.eval()
    model(batch, POSITIONS, MASK)  # what megatron-core caches is there
    return held_bytes(lambda: model(batch, POSITIONS, MASK))


@by_activation
@by_verb
def test_five_steps(verb: str, *, swiglu: bool) -> None:
    assert_same_training(VERBS[verb], swiglu=swiglu)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@by_activation
def test_values_that_are_not_held(normalization: str, *, swiglu: bool) -> None:
    model = gpt(swiglu=swiglu, normalization=normalization)
    before = held(model)
    handles = [activation(model), norm(model)]
    # gelu; or silu, its product, and the other half to which megatron-core adds an offset of 0.
    # A norm's output; and of torch's RMSNorm, which has no kernel on a CPU, the normalised value.
    per_norm = 2 if normalization == "RMSNorm" else 1
    dropped = [(3 if swiglu else 1) * LAYERS * WIDE, per_norm * (2 * LAYERS + 1) * ONE]
    assert before - held(model) == sum(dropped)
    assert [handle.report()["saved_bytes"] for handle in handles] == dropped


@by_activation
def test_layers_that_are_not_held(*, swiglu: bool) -> None:
    model = gpt(swiglu=swiglu)
    before = held(model)
    handle = recompute_layers(model)
    block = held(model)
    report = handle.report()
    assert report["saved_bytes"] == before - block + LAYERS * 2 * STATE
    assert set(report["saved_bytes_by_layer"].values()) == {report["saved_bytes"] // LAYERS}
    handle.remove()
    handle = recompute_layers(model, num_layers=1)
    assert (before - held(model)) * LAYERS == before - block
    handle.remove()
    recompute_layers(model, method="uniform", num_layers=2)
    assert block - held(model) == LAYERS // 2 * ONE  # the inputs of every second layer


def test_a_context_of_the_user_is_entered_too() -> None:
    entered = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append(True)
        yield

    assert_same_training(lambda model: recompute_layers(model, context_fn=context), swiglu=False)
    assert len(entered) == 5 * LAYERS


def test_states_are_brought_back_for_a_checkpoint_by_hand() -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from ascend_recompute.integrations.megatron import random_states

    gpt()  # begins the states anew
    tracker = get_cuda_rng_tracker()
    tracker.states_["of CUDA graphs"] = torch.Generator().manual_seed(1)

    def dropped(x: Tensor) -> Tensor:
        with tracker.fork():
            x = F.dropout(x, 0.5)
        return x * torch.rand(x.shape, generator=tracker.states_["of CUDA graphs"])

    x = torch.ones(64, requires_grad=True)
    checkpoint = CheckpointWithoutOutput(context_fn=random_states())
    y = checkpoint.checkpoint(dropped, False, x)
    expected = y.detach().clone()
    dropped(x)
    states = tracker.get_states()
    ambient = [states["model-parallel-rng"], states["of CUDA graphs"].get_state()]
    z = y.square()
    checkpoint.discard_output_and_register_recompute(z)
    z.sum().backward()
    assert bitwise_equal(x.grad, 2 * expected * expected)
    states = tracker.get_states()
    assert torch.equal(states["model-parallel-rng"], ambient[0])
    assert torch.equal(states["of CUDA graphs"].get_state(), ambient[1])


# Fused activations -------------------------------------------------------------------------------


FUSED = [
    {"swiglu": False, "bias_activation_fusion": True},
    {"swiglu": True, "bias_activation_fusion": True},
    {"swiglu": True, "bias_activation_fusion": True, "add_bias_linear": False},
]
by_fusion = pytest.mark.parametrize(
    "fusion", FUSED, ids=["bias gelu", "bias swiglu", "swiglu without bias"]
)


def visible(spec: Any) -> Any:
    from ascend_recompute.integrations.megatron import with_visible_activation

    return with_visible_activation(spec)


@pytest.mark.parametrize("verb", ["activation", "all"])
@by_fusion
def test_five_steps_of_fused_activations(fusion: dict[str, Any], verb: str) -> None:
    assert_same_training(VERBS[verb], change={"change_spec": visible}, **fusion)


@by_fusion
def test_what_fused_activations_return_is_not_held(fusion: dict[str, Any]) -> None:
    model = gpt(change_spec=visible, **fusion)
    before = held(model)
    assert before == held(gpt(**fusion))
    handle = activation(model)
    assert before - held(model) == handle.report()["saved_bytes"] == LAYERS * WIDE
    assert list(model.state_dict()) == list(gpt(**fusion).state_dict())


def test_backward_runs_fused_activations_once_more_and_no_matmul() -> None:
    model, batch = gpt(change_spec=visible, **FUSED[1]), tokens()
    with count_ops() as before:
        loss_of(model, batch).backward()
    activation(model)
    with count_ops() as ours:
        loss_of(model, batch).backward()
    extra = ours.extra_in_backward(before)
    assert extra["aten.silu"] == extra["aten.mul"] == LAYERS
    assert ours.backward_flops == before.backward_flops > 0


def test_the_spec_stays_as_it_is() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from ascend_recompute.integrations.megatron import with_visible_activation

    spec = get_gpt_layer_local_spec()
    block = TransformerBlockSubmodules(layer_specs=[spec, spec])
    ours = with_visible_activation(block)
    assert spec.submodules.mlp.module is MLP
    assert all(issubclass(layer.submodules.mlp.module, MLP) for layer in ours.layer_specs)
    again = with_visible_activation(ours.layer_specs[0])
    assert again.submodules.mlp == ours.layer_specs[0].submodules.mlp != spec.submodules.mlp
    again.submodules.mlp.module = nn.Linear
    for unknown in (again, TransformerBlockSubmodules(layer_specs=[again])):
        with pytest.raises(ConfigError, match="the spec's MLP is Linear"):
            with_visible_activation(unknown)
    mixed = with_visible_activation(TransformerBlockSubmodules(layer_specs=[again, spec]))
    assert [layer.submodules.mlp.module for layer in mixed.layer_specs] == [
        nn.Linear, ours.layer_specs[0].submodules.mlp.module,
    ]  # fmt: skip


# Options -----------------------------------------------------------------------------------------


def recompute(model: nn.Module, **options: Any) -> Any:
    from ascend_recompute.integrations.megatron import recompute_by_options

    return recompute_by_options(model, SimpleNamespace(**options))


ACTIVATION, NORM = {"recompute_activation_function": True}, {"recompute_norm": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 2,
}


@pytest.mark.parametrize("own", [False, True], ids=["ours", "megatron's own"])
def test_full_layers_first_then_the_others(*, own: bool) -> None:
    change: dict[str, Any] = FULL if own else {}
    asked = {**ACTIVATION, **NORM, **({} if own else FULL)}
    assert_same_training(lambda model: recompute(model, **asked), change=change, swiglu=False)
    model = gpt(**change)
    handle = recompute(model, **asked)
    loss_of(model, tokens())
    report = handle.report()
    assert list(handle.handles)[:-2] == ([] if own else ["recompute_granularity"])
    assert report["recompute_activation_function"]["modules"] == [
        f"decoder.layers.{n}.mlp" for n in (2, 3)
    ]
    assert report["recompute_activation_function"]["saved_bytes"] == 2 * WIDE
    assert report["saved_bytes"] >= 2 * WIDE + 4 * ONE
    handle.remove()
    handle.remove()


@pytest.mark.parametrize("own", [False, True], ids=["ours", "megatron's own"])
def test_counts_that_do_not_add_up(*, own: bool) -> None:
    model = gpt(**(FULL if own else {}))
    asked = {**ACTIVATION, "recompute_activation_function_num_layers": 1}
    with pytest.warns(UserWarning, match="2 fully recomputed layers and 1 more are not the 4"):
        handle = recompute(model, **asked, **({} if own else FULL))
    assert handle.report()["recompute_activation_function"]["modules"] == ["decoder.layers.2.mlp"]
    handle.remove()
    asked["recompute_activation_function_num_layers"] = 3
    with pytest.raises(ConfigError, match="counted first"):
        recompute(model, **asked, **({} if own else FULL))


def test_options_that_are_off() -> None:
    model = gpt()
    asked = {**NORM, "recompute_norm_num_layers": 0, "recompute_activation_function": False}
    assert recompute(model, **asked).handles == {}
    handle = recompute(model, **NORM, recompute_norm_num_layers=4)
    assert len(handle.report()["recompute_norm"]["modules"]) == 2 * LAYERS


@pytest.mark.parametrize(
    ("own", "asked", "message"),
    [
        ({}, {**FULL, **ACTIVATION, "recompute_method": "uniform"}, "recompute_method='uniform'"),
        ({}, {**FULL, **NORM, "recompute_method": "uniform"}, "recompute_method='uniform'"),
        ({**FULL, "recompute_method": "uniform"}, ACTIVATION, "recompute_method='uniform'"),
        ({**FULL, "recompute_num_layers": 4}, ACTIVATION, "which are 0 of 4"),
        ({}, {**FULL, **ACTIVATION, "recompute_num_layers": 4}, "nothing is left"),
        ({}, {"recompute_norm_num_layers": 2}, "recompute_norm is off"),
        ({}, {**NORM, "recompute_norm_num_layers": "2"}, "_num_layers is '2'"),
        ({}, {**NORM, "recompute_norm_num_layers": -1}, "num_layers is -1"),
        ({}, {**NORM, "recompute_norm_num_layers": 5}, "num_layers is 5"),
        ({}, {**FULL, **ACTIVATION, "recompute_activation_function_num_layers": 3}, "2 of the 4"),
        ({}, {**FULL, "recompute_method": None}, "recompute_method is not given"),
        ({}, {"recompute_granularity": "layers"}, "recompute_granularity is 'layers'"),
        ({"bias_activation_fusion": True}, ACTIVATION, "cannot see"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            ACTIVATION,
            "'mlp' in recompute_modules",
        ),
    ],
)
def test_what_does_not_go_together(
    own: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    model = gpt(**own)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=message):
        recompute(model, **asked)
    assert [type(module) for module in model.modules()] == kinds


def test_beside_recompute_of_attention_by_megatron() -> None:
    own = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert_same_training(
        lambda model: recompute(model, **ACTIVATION, **NORM), change=own, swiglu=True
    )
