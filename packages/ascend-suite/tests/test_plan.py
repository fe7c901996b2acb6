"""Plans of configs and of tables: what is right is read, and all that is wrong is told of."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_core.errors import ConfigError
from ascend_core.feature import discover
from ascend_ddp import DDPConfig
from ascend_ops import FusedOpsConfig
from ascend_recompute import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param import ReuseParamConfig
from ascend_suite import IncompatiblePlanError, Plan, Severity, read_plan
from ascend_suite._reading import PACKAGES
from ascend_suite.vocabulary import VOCABULARY
from ascend_swap import SwapAttentionConfig, SwapOptimizerConfig


def findings(tables: Mapping[Any, object]) -> dict[str, tuple[str, str]]:
    """For each subject what the finding says, and what to do instead."""
    _, found = read_plan(tables)
    assert all(one.severity is Severity.ERROR and one.rule is None for one in found)
    assert len({one.subject for one in found}) == len(found)
    return {one.subject: (one.what, one.instead or "") for one in found}


# Configs -----------------------------------------------------------------------------------------


def test_a_plan_is_made_of_configs() -> None:
    plan = Plan.of(
        SwapOptimizerConfig(master_weights=True),
        RecomputeNormConfig(),
        training={"bf16": True, "recompute_modules": ["mlp"]},
        allow=["a/b"],
    )
    assert plan.features == {
        "swap-optimizer": SwapOptimizerConfig(master_weights=True),
        "recompute-norm": RecomputeNormConfig(),
    }
    assert plan.training == {"bf16": True, "recompute_modules": ("mlp",)}
    assert plan.allow == ("a/b",)


def test_every_feature_is_known_by_its_config() -> None:
    features = discover()
    plan = Plan.of(*(feature.config() for feature in features.values()))
    assert set(plan.features) == set(features)


def test_faults_of_configs_and_of_training_are_told_together() -> None:
    with pytest.raises(IncompatiblePlanError) as caught:
        Plan.of(
            SwapOptimizerConfig(),
            SwapOptimizerConfig(master_weights=True),
            RecomputeNormConfig,
            Path(),
            training={"bf_16": True, "fp16": 1},
        )
    assert [one.subject for one in caught.value.findings] == [
        "swap-optimizer",
        "RecomputeNormConfig",
        type(Path()).__name__,
        "training.bf_16",
        "training.fp16",
    ]
    assert "write RecomputeNormConfig()." in str(caught.value)


def test_a_plan_can_be_sent_to_another_process() -> None:
    plan = Plan.of(SwapOptimizerConfig(), training={"bf16": True}, allow=["a"])
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_does_not_change() -> None:
    training = {"bf16": True}
    plan = Plan.of(training=training)
    training["bf16"] = False
    assert plan.training == {"bf16": True}
    with pytest.raises(TypeError):
        plan.training["bf16"] = False  # type: ignore[index]


# Tables ------------------------------------------------------------------------------------------


def test_a_plan_with_many_faults_tells_of_each() -> None:
    found = findings(
        {
            "version": 2,
            "bf16": True,
            "swap_optimizer": {},
            "swap-optimizer": {"swap_optimizer_times": 0, "window_bytes": -3, "disk": 4},
            "recompute-layers": {"method": "blocks", "context_fn": "f", "num_layers": "3"},
            "training": {
                "fp16": "true",
                "num_experts": 3,
                "recompute_modules": ["typo", "mpl"][:1],
            },
            "allow": "a",
        }
    )
    assert set(found) == {
        "version",
        "bf16",
        "swap_optimizer",
        "swap-optimizer.swap_optimizer_times",
        "swap-optimizer.window_bytes",
        "swap-optimizer.disk",
        "recompute-layers.method",
        "recompute-layers.context_fn",
        "recompute-layers.num_layers",
        "training.fp16",
        "training.num_experts",
        "training.recompute_modules",
        "allow",
    }


@pytest.mark.parametrize(
    ("tables", "subject", "instead"),
    [
        ({"swap_optimizer": {}}, "swap_optimizer", "did you mean swap-optimizer?"),
        ({"swap-optimiser": {}}, "swap-optimiser", "did you mean swap-optimizer?"),
        ({"bf16": True}, "bf16", "write it in the table training"),
        ({"swap_modules": "a"}, "swap_modules", "option of swap-attention"),
        ({"trainign": {}}, "trainign", "did you mean training?"),
        ({"zzz": 1}, "zzz", "take it out"),
        ({1: {}}, "1", "quotes"),
        ({"training": {"swap_optimizer": True}}, "training.swap_optimizer", "[swap-optimizer]"),
        ({"training": {"swap_modules": "a"}}, "training.swap_modules", "swap-attention"),
        ({"training": {"bf_16": True}}, "training.bf_16", "did you mean bf16?"),
        ({"training": {"num_experts": 8}}, "training.num_experts", "num_moe_experts"),
        ({"training": {"fp8_format": "e4m3"}}, "training.fp8_format", "it is called fp8 here"),
        (
            {"training": {"no_rope_fusion": True}},
            "training.no_rope_fusion",
            "write apply_rope_fusion = false.",
        ),
        (
            {"training": {"--disable-bias-linear": True}},
            "training.--disable-bias-linear",
            "write add_bias_linear = false.",
        ),
        ({"training": {"num_layers": -1}}, "training.num_layers", "give such a number"),
        ({"training": {"clip_grad": math.nan}}, "training.clip_grad", "give such a number"),
        (
            {"training": {"context_parallel_size": 0}},
            "training.context_parallel_size",
            "give such a number",
        ),
        ({"training": {"zzz": 8}}, "training.zzz", "no rule reads it"),
        ({"training": 3}, "training", "[training]"),
        ({"training": {"bf16": "true"}}, "training.bf16", "write true, without quotes"),
        ({"training": {"bf16": 1}}, "training.bf16", "give such a value"),
        ({"training": {"num_layers": True}}, "training.num_layers", "give such a value"),
        ({"training": {"clip_grad": "0.5"}}, "training.clip_grad", "write 0.5, without quotes"),
        (
            {"training": {"recompute_modules": "mlp"}},
            "training.recompute_modules",
            "write a list, also of one",
        ),
        (
            {"training": {"recompute_modules": ["mlp", "mpl"]}},
            "training.recompute_modules",
            "did you mean mlp?",
        ),
        (
            {"training": {"recompute_granularity": "selectiv"}},
            "training.recompute_granularity",
            "did you mean 'selective'?",
        ),
        ({"swap-optimizer": True}, "swap-optimizer", "[swap-optimizer]"),
        ({"swap-optimizer": False}, "swap-optimizer", "leave swap-optimizer out"),
        ({"swap-optimizer": 3}, "swap-optimizer", "the options below it"),
        ({"swap-optimizer": {"enabled": True}}, "swap-optimizer.enabled", "its table is there"),
        (
            {"swap-optimizer": {"times": 3}},
            "swap-optimizer.times",
            "did you mean swap_optimizer_times?",
        ),
        ({"swap-optimizer": {"bf16": True}}, "swap-optimizer.bf16", "in the table training"),
        ({"swap-optimizer": {"rounding": "x"}}, "swap-optimizer.rounding", "reuse-fp32-param"),
        ({"swap-optimizer": {"qqq": 3}}, "swap-optimizer.qqq", "take it out"),
        (
            {"recompute-norm": {"policy": "all"}},
            "recompute-norm.policy",
            "Plan.of(RecomputeNormConfig(policy=...))",
        ),
        (
            {"swap-optimizer": {"window_bytes": 1, "swap_optimizer_times": 1}},
            "swap-optimizer",
            "leave one of them out",
        ),
        ({"fused-ops": {"operators": ["typo"]}}, "fused-ops.operators", "use those names"),
        ({"fused-ops": {"operators": "swiglu"}}, "fused-ops.operators", "write a list"),
    ],
)
def test_a_fault_is_told_with_what_to_do_instead(
    tables: Mapping[Any, object], subject: str, instead: str
) -> None:
    found = findings(tables)
    assert set(found) == {subject}
    assert instead in found[subject][1]


def test_what_is_right_of_a_plan_is_read() -> None:
    plan, found = read_plan(
        {
            "swap-optimizer": {"swap_optimizer_times": 0, "master_weights": True},
            "recompute-layers": {"num_layers": "3"},
            "reuse-fp32-param": {"times": 4, "window_bytes": 4},
            "training": {"bf16": True, "fp16": 3},
        }
    )
    assert len(found) == 4
    assert plan.features == {
        "swap-optimizer": SwapOptimizerConfig(master_weights=True),
        "recompute-layers": RecomputeLayersConfig(),
        "reuse-fp32-param": ReuseParamConfig(),
    }
    assert plan.training == {"bf16": True}


def test_a_feature_is_on_with_an_empty_table_and_with_none() -> None:
    tables = {"swap-optimizer": {}, "recompute-norm": None, "fused-ops": FusedOpsConfig()}
    assert Plan.from_mapping(tables).features == {
        "swap-optimizer": SwapOptimizerConfig(),
        "recompute-norm": RecomputeNormConfig(),
        "fused-ops": FusedOpsConfig(),
    }


def test_a_table_in_python_may_hold_code() -> None:
    plan = Plan.from_mapping({"recompute-norm": {"modules": [Path], "policy": None}})
    assert plan.features["recompute-norm"].modules == (Path,)


def test_a_feature_that_is_not_installed_is_told_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = discover()
    del features["swap-optimizer"]
    monkeypatch.setattr("ascend_suite._reading.discover", lambda: features)
    assert findings({"swap-optimizer": {}}) == {
        "swap-optimizer": ("swap-optimizer is not installed.", "pip install ascend-swap")
    }


def test_the_packages_of_features_are_those_that_offer_them() -> None:
    for name, feature in discover().items():
        assert PACKAGES[name].replace("-", "_") == feature.config.__module__.partition(".")[0]


def test_a_plan_is_read_as_it_is() -> None:
    plan = Plan.of(SwapOptimizerConfig())
    assert read_plan(plan) == (plan, ())


def test_reading_a_plan_imports_no_torch() -> None:
    code = (
        "import sys; from ascend_suite import Plan;"
        "Plan.from_mapping({'swap-optimizer': {}, 'training': {'bf16': True}});"
        "Plan.from_flags('--swap-optimizer --bf16').to_toml();"
        "import ascend_suite.integrations.megatron;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# An old plan means what it meant -----------------------------------------------------------------


def test_a_plan_without_options_means_what_it_meant_in_version_1() -> None:
    """What is left out has these values: a change of a default must make a new version."""
    text = (
        "[swap-attention]\n[swap-optimizer]\n[reuse-fp32-param]\n[recompute-norm]\n"
        "[recompute-activation]\n[recompute-layers]\n[reduce-gradients]\n[shard-optimizer]\n"
        "[fused-ops]\n"
    )
    assert tomllib.loads(text).keys() == PACKAGES.keys()
    assert Plan.from_mapping(tomllib.loads(text)).to_mapping(full=True) == {
        "version": 1,
        "swap-attention": {
            "swap_modules": None,
            "recompute_num_layers": None,
            "min_bytes": 1 << 20,
            "prefetch": 1,
            "host_budget": None,
            "keep_last": None,
        },
        "swap-optimizer": {
            "swap_optimizer_times": None,
            "window_bytes": None,
            "master_weights": False,
            "release_grads": False,
            "offload_gradients": False,
            "host_budget_bytes": None,
            "disk": None,
        },
        "reuse-fp32-param": {
            "times": None,
            "window_bytes": None,
            "rounding": "nearest-even",
            "kernels": "auto",
        },
        "recompute-norm": {
            "modules": None,
            "layers": None,
            "num_layers": None,
            "policy": None,
            "verify": False,
        },
        "recompute-activation": {
            "modules": None,
            "layers": None,
            "num_layers": None,
            "policy": None,
            "verify": False,
        },
        "recompute-layers": {
            "method": "block",
            "num_layers": None,
            "layers": None,
            "stack": None,
            "context_fn": None,
            "early_stop": False,
            "verify": False,
        },
        "reduce-gradients": {
            "bucket_bytes": 25 * 2**20,
            "overlap": True,
            "mode": "all-reduce",
            "reduce_dtype": None,
            "average": True,
            "timeout_s": None,
            "sync_parameters": True,
        },
        "shard-optimizer": {"overlap_param_gather": True, "grad_scaler": False, "timeout_s": None},
        "fused-ops": {"operators": ["swiglu", "rms_norm"], "backend": None},
    }


def test_a_plan_without_a_version_is_one_of_version_1() -> None:
    tables = {"swap-optimizer": {}}
    assert Plan.from_mapping(tables) == Plan.from_mapping({"version": 1, **tables})


# There and back ----------------------------------------------------------------------------------

COUNT = st.none() | st.integers(1, 2**62)
WORDS = st.text(min_size=1)
LAYERS = st.none() | st.lists(st.integers(0, 99)).map(tuple)
CONFIGS = {
    "swap-optimizer": st.builds(
        SwapOptimizerConfig,
        window_bytes=COUNT,
        master_weights=st.booleans(),
        host_budget_bytes=COUNT,
        disk=st.none() | WORDS,
    ),
    "swap-attention": st.builds(
        SwapAttentionConfig,
        swap_modules=st.none() | st.lists(st.sampled_from("abc"), min_size=1).map(tuple),
        recompute_num_layers=COUNT,
        prefetch=st.integers(0, 3),
    ),
    "recompute-activation": st.builds(RecomputeActivationConfig, layers=LAYERS),
    "recompute-layers": st.builds(
        RecomputeLayersConfig, method=st.sampled_from(["block", "uniform"]), num_layers=COUNT
    ),
    "reduce-gradients": st.builds(
        DDPConfig, timeout_s=st.none() | st.floats(min_value=0, exclude_min=True, max_value=1e9)
    ),
}
TRAINING = {
    "bf16": st.booleans(),
    "num_layers": st.integers(min_value=0),
    "clip_grad": st.floats(min_value=0),
    "recompute_granularity": st.sampled_from([None, "full", "selective"]),
    "recompute_modules": st.none() | st.lists(st.sampled_from(["mlp", "moe"])).map(tuple),
    "optimizer": st.text(),
    "torch_npu_version": st.none() | st.text().filter(lambda text: text != "none"),
    "position_embedding_type": st.sampled_from(["rope", "none", "alibi"]),
}
PLANS = st.builds(
    Plan,
    st.fixed_dictionaries({}, optional=CONFIGS),
    st.fixed_dictionaries({}, optional=TRAINING),
    st.lists(st.text(), unique=True).map(tuple),
)


@settings(deadline=None)
@given(PLANS, st.booleans())
def test_a_plan_is_the_same_after_it_was_written_and_read(plan: Plan, full: bool) -> None:
    assert Plan.from_mapping(plan.to_mapping(full=full)) == plan
    assert Plan.from_mapping(tomllib.loads(plan.to_toml(full=full))) == plan


def test_a_plan_of_lists_and_paths_is_that_of_a_file() -> None:
    layers = [1, 2]
    configs = SwapOptimizerConfig(disk=Path("/data")), RecomputeNormConfig(layers=layers)
    plan = Plan.of(*configs, training={"recompute_modules": ["mlp"]})
    assert Plan.from_mapping(tomllib.loads(plan.to_toml())) == plan
    layers.append(3)
    assert plan.features["recompute-norm"].layers == (1, 2)


def test_equal_plans_have_one_hash() -> None:
    plans = [
        Plan.of(RecomputeNormConfig(layers=[1]), SwapOptimizerConfig(), training={"bf16": True}),
        Plan.of(SwapOptimizerConfig(), RecomputeNormConfig(layers=(1,)), training={"bf16": True}),
    ]
    assert len({*plans, Plan()}) == 2


@pytest.mark.parametrize("tables", [None, [], 3, ["swap-optimizer"]])
def test_what_is_no_table_of_tables_is_a_finding(tables: Any) -> None:
    with pytest.raises(IncompatiblePlanError, match="a table of tables"):
        Plan.from_mapping(tables)


def test_a_plan_is_written_as_people_write_it() -> None:
    plan = Plan.of(
        SwapOptimizerConfig(master_weights=True, disk=Path("/data")),
        RecomputeNormConfig(layers=range(2)),
        training={"bf16": True, "recompute_granularity": None},
        allow=["a/b"],
    )
    assert plan.to_toml() == (
        'version = 1\nallow = ["a/b"]\n\n[training]\nbf16 = true\n'
        'recompute_granularity = "none"\n\n[swap-optimizer]\nmaster_weights = true\n'
        'disk = "/data"\n\n[recompute-norm]\nlayers = [0, 1]\n'
    )


@pytest.mark.parametrize("change", [{"policy": len}, {"modules": (Path,)}])
def test_code_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which no file can hold"):
        Plan.of(RecomputeNormConfig(**change)).to_toml()


def test_every_default_of_the_vocabulary_can_be_given() -> None:
    defaults = {name: one.default for name, one in VOCABULARY.items() if one.origin != "fact"}
    assert Plan.of(training=defaults).training.keys() == defaults.keys()


def test_a_config_with_an_option_that_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Needy:
        ranks: int
        size: float = 1.0

    features = discover()
    features["fused-ops"] = dataclasses.replace(features["fused-ops"], config=Needy)
    monkeypatch.setattr("ascend_suite._reading.discover", lambda: features)
    assert findings({"fused-ops": {"size": 2}}) == {
        "fused-ops": ("fused-ops lacks ranks.", "give it.")
    }
    assert read_plan({"fused-ops": {"size": 2}})[0].features == {}
    plan = Plan.from_mapping({"fused-ops": {"size": 2, "ranks": 3}})
    assert plan.features == {"fused-ops": Needy(3, 2)}
