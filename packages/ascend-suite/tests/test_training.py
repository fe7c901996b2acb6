from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch

from ascend_core.errors import ConfigError
from ascend_core.feature import Feature
from ascend_suite.demo.corpus import Batch, corpus, draw_batches
from ascend_suite.demo.gpt import GatedMLP
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.training import Outcome, Training

CPU = torch.device("cpu")


def batches(settings: DemoSettings) -> list[Batch]:
    return draw_batches(
        corpus(),
        count=settings.batches,
        batch=settings.batch,
        seq=settings.seq,
        seed=settings.seed,
        device=CPU,
    )


def outcome(settings: DemoSettings, *features: Feature) -> Outcome:
    with Training(settings, CPU, features) as training:
        losses = [training.step(batch) for batch in batches(settings)]
        return Outcome.of(losses, training.model)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_loss_falls(tiny: DemoSettings, activation: str, norm: str) -> None:
    losses = outcome(dataclasses.replace(tiny, activation=activation, norm=norm)).losses
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("hidden", [32, 512])
def test_the_loss_falls_whatever_the_width(tiny: DemoSettings, hidden: int) -> None:
    losses = outcome(dataclasses.replace(tiny, hidden=hidden)).losses
    assert losses[-1] < losses[0] - 0.5


def test_one_seed_gives_one_outcome_and_another_seed_another(tiny: DemoSettings) -> None:
    plain = outcome(tiny)
    assert outcome(tiny).difference_from(plain) is None
    assert outcome(dataclasses.replace(tiny, seed=1)).difference_from(plain) is not None


def test_a_feature_is_on_inside_and_off_afterwards(
    tiny: DemoSettings, features: ModuleType
) -> None:
    with Training(tiny, CPU, (features.HONEST,)) as training:
        block = training.model.blocks[0]
        assert type(block.mlp) is features.CheckpointedMLP
        assert training.report() == {"undone": False, "share": 0.5}
    assert type(block.mlp) is GatedMLP


def test_a_feature_that_cannot_be_turned_on_leaves_no_other_on(
    tiny: DemoSettings, features: ModuleType
) -> None:
    modules = []

    def note(module: torch.nn.Module, *_: object) -> None:
        modules.append(module)

    watch = torch.nn.modules.module.register_module_module_registration_hook(note)
    with watch, pytest.raises(ConfigError, match="no such layer"):
        Training(tiny, CPU, (features.HONEST, features.PICKY))
    assert any(type(module) is GatedMLP for module in modules)
    assert not any(isinstance(module, features.CheckpointedMLP) for module in modules)


def test_an_optimizer_that_a_feature_returns_is_the_one_that_steps(
    tiny: DemoSettings, features: ModuleType
) -> None:
    with Training(tiny, CPU, (features.FACADE,)) as training:
        facade = training.optimizer
        assert type(facade) is features.LazyAdamW
        training.step(batches(tiny)[0])
        assert len(facade.state) == len(list(training.model.parameters()))
    assert facade.removed
    assert outcome(tiny, features.FACADE).difference_from(outcome(tiny)) is None


def test_a_difference_names_the_first_loss_that_is_not_equal(tiny: DemoSettings) -> None:
    plain = outcome(tiny)
    losses = (*plain.losses[:-1], plain.losses[-1] + 1e-6)
    difference = dataclasses.replace(plain, losses=losses).difference_from(plain)
    assert difference == f"the loss of step 9 is {losses[-1]!r} instead of {plain.losses[-1]!r}"


@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_one_bit_in_one_tensor_is_a_difference(tiny: DemoSettings, kind: str) -> None:
    plain = outcome(tiny)
    name = "blocks.1.mlp.down.weight"
    tensors = dict(getattr(plain, kind))
    tensors[name] = tensors[name].clone()
    tensors[name].view(torch.int32)[3, 5] ^= 1
    bent = dataclasses.replace(plain, **{kind: tensors})
    assert bent.difference_from(plain) == f"the {kind[:-1]} {name} differs after the last step"


def test_a_missing_gradient_is_a_difference(tiny: DemoSettings) -> None:
    plain = outcome(tiny)
    gradients = {name: grad for name, grad in plain.gradients.items() if "head" not in name}
    missing = dataclasses.replace(plain, gradients=gradients)
    assert missing.difference_from(plain) == "the gradients are not those of the same parameters"


def test_runs_that_went_astray_in_the_same_way_do_not_differ() -> None:
    astray = Outcome((5.0, float("nan")), {"w": torch.tensor([torch.nan])}, {})
    assert astray.difference_from(dataclasses.replace(astray)) is None


def test_an_outcome_keeps_what_was_when_training_goes_on(tiny: DemoSettings) -> None:
    with Training(tiny, CPU) as training:
        first, second, *_ = batches(tiny)
        kept = Outcome.of([training.step(first)], training.model)
        weight, gradient = (part["head.weight"].clone() for part in (kept.weights, kept.gradients))
        training.step(second)
    assert torch.equal(kept.weights["head.weight"], weight)
    assert torch.equal(kept.gradients["head.weight"], gradient)
