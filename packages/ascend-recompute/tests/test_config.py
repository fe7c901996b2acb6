"""What the configuration refuses before it sees a model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from ascend_core.errors import ConfigError
from ascend_recompute import RecomputeActivationConfig, recompute_activation
from ascend_recompute.features import RECOMPUTE_ACTIVATION
from ascend_recompute.policy import DEFAULT

pytestmark = pytest.mark.host


def message(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RecomputeActivationConfig(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules": ("mlp",)},
        {"modules": ["mlp", nn.Sequential]},
        {"layers": ()},
        {"layers": range(4)},
        {"layers": [3, 1]},
        {"policy": DEFAULT},
        {"modules": (nn.Linear,), "layers": (0,), "policy": DEFAULT},
    ],
)
def test_what_is_allowed(options: dict[str, Any]) -> None:
    config = RecomputeActivationConfig(**options)
    for name in ("modules", "layers", "policy"):
        assert getattr(config, name) == options.get(name)


@pytest.mark.parametrize(
    ("options", "what", "instead"),
    [
        ({"modules": "mlp"}, "modules is 'mlp', which is one module", "modules=('mlp',)"),
        ({"modules": nn.GELU}, "which is one module", "modules=(GELU,)"),
        ({"layers": 2}, "layers is 2.", "layers=range(4)"),
        ({"modules": ("mlp", 3)}, "modules holds 3.", "pass its class"),
        ({"modules": (nn.GELU(),)}, "modules holds GELU(", "pass its class"),
        ({"modules": ()}, "modules is empty", "leave it out"),
        ({"layers": (-1,)}, "layers holds -1.", "layers=range(4)"),
        ({"layers": (0, 1.0)}, "layers holds 1.0.", "layers=range(4)"),
        ({"layers": (True,)}, "layers holds True.", "layers=range(4)"),
        ({"layers": ("0",)}, "layers holds '0'.", "layers=range(4)"),
    ],
)
def test_what_cannot_be_right_is_refused(options: dict[str, Any], what: str, instead: str) -> None:
    text = message(options)
    assert what in text
    assert instead in text.partition("instead")[2]


def test_a_config_is_a_value() -> None:
    config = RecomputeActivationConfig(modules=("mlp",))
    assert config == RecomputeActivationConfig(modules=("mlp",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = (1,)  # type: ignore[misc]
    with pytest.raises(TypeError):
        RecomputeActivationConfig(("mlp",))  # type: ignore[misc]


def two_mlps() -> nn.Module:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    return nn.Sequential(mlp(), mlp())


def test_options_are_given_by_config_or_by_keyword() -> None:
    config = RecomputeActivationConfig(layers=(1,))
    for handle in (
        recompute_activation(two_mlps(), config),
        recompute_activation(two_mlps(), layers=(1,)),
        RECOMPUTE_ACTIVATION.apply(two_mlps(), config),
    ):
        assert handle.report()["modules"] == ["1"]


@pytest.mark.parametrize("option", [{"modules": ("0",)}, {"layers": (0,)}, {"policy": DEFAULT}])
def test_a_config_and_single_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a config and single options as well") as caught:
        recompute_activation(two_mlps(), RecomputeActivationConfig(), **option)
    assert "put everything into the config" in str(caught.value)


def test_the_config_and_the_feature_import_no_torch() -> None:
    code = (
        "import sys, ascend_recompute.config as c, ascend_recompute.features\n"
        "c.RecomputeActivationConfig(modules=('mlp',), layers=range(3))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
