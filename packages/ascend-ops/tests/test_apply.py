"""fused-ops on a model in training: the verb and its handle."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.metadata
import io
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import AscendError, ConfigError, NothingToDoError
from ascend_core.feature import Feature, Handle
from ascend_core.testing import assert_bitwise_equal, held_bytes, record_run
from ascend_ops import FusedOpsConfig, apply_fused_ops, features
from ascend_ops.nn import RMSNorm

WIDTH, INNER, TOKENS, LAYERS = 16, 24, 6, 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class PackedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.RMSNorm(WIDTH), mlp(), nn.Dropout(0.1)
        self.reentrant: bool | None = None

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.mlp(self.norm(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.compute(x)
        out: Tensor = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return out


def make() -> nn.Sequential:
    return nn.Sequential(*(Layer(PackedMLP if n % 2 else MLP) for n in range(LAYERS)))


def batch(_: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH)


def fuse(model: nn.Module, _: object = None) -> Any:
    return apply_fused_ops(model)


def swiglu_alone(model: nn.Module, _: object = None) -> Any:
    return apply_fused_ops(model, FusedOpsConfig(operators=("swiglu",), backend="eager"))


def test_the_feature_is_what_a_feature_is() -> None:
    feature = features.FUSED_OPS
    assert isinstance(feature, Feature) and not feature.bitwise
    handle = feature.apply(make())
    assert isinstance(handle, Handle)
    project = Path(__file__).parents[1] / "pyproject.toml"
    with project.open("rb") as file:
        entries = tomllib.load(file)["project"]["entry-points"]["ascend.features"]
    entry = importlib.metadata.EntryPoint("fused-ops", entries["fused-ops"], "ascend.features")
    assert entry.load() is feature and list(entries) == [feature.name]


def test_swiglu_by_torchs_operators_trains_to_the_same_bits() -> None:
    plain = record_run(make, batch, accumulate=2)
    ours = record_run(make, batch, accumulate=2, apply=swiglu_alone)
    assert_bitwise_equal(plain, ours)
    assert ours.report["operators"] == {"swiglu_pair": 2, "swiglu": 1}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_a_run_is_the_plain_one_but_for_rounding(autocast: torch.dtype | None) -> None:
    plain = record_run(make, batch, steps=1, accumulate=2, autocast=autocast)
    ours = record_run(make, batch, steps=1, accumulate=2, autocast=autocast, apply=fuse)
    eps = torch.finfo(autocast or torch.float32).eps
    for step, other in zip(ours.steps, plain.steps, strict=True):
        assert step.gradients.keys() == other.gradients.keys()
        for name, gradient in step.gradients.items():
            size = other.gradients[name].abs().max().item()
            torch.testing.assert_close(
                gradient, other.gradients[name], rtol=16 * eps, atol=16 * eps * size
            )
        assert step.random_states.keys() == other.random_states.keys()
        for device, state in step.random_states.items():
            assert torch.equal(state, other.random_states[device])


@pytest.mark.parametrize("apply", [fuse, swiglu_alone])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_it_changes_no_bit(reentrant: bool, apply: Any) -> None:
    def checkpointed() -> nn.Module:
        model = make()
        for layer in model:
            layer.reentrant = reentrant
        return model

    def embedded(n: int) -> Tensor:
        return batch(n).requires_grad_()

    without = record_run(make, embedded, apply=apply)
    assert_bitwise_equal(without, record_run(checkpointed, embedded, apply=apply))


def test_remove_gives_everything_back_and_can_be_repeated() -> None:
    model, x = make().eval(), batch()
    kinds, before = [type(module) for module in model.modules()], model(x)
    keys, shown = list(model.state_dict()), repr(model)
    handle = fuse(model)
    assert [type(module) for module in model.modules()] != kinds
    assert (list(model.state_dict()), repr(model)) == (keys, shown)
    assert all(map(isinstance, model.modules(), kinds))
    handle.remove()
    handle.remove()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(x), before)
    fuse(model)  # which it may be once more


def test_a_second_time_is_refused_and_changes_nothing() -> None:
    model = make()
    handle = fuse(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match="fused-ops is on for this Sequential already"):
        fuse(model)
    assert [type(module) for module in model.modules()] == kinds
    handle.remove()
    assert type(model[0].norm) is nn.RMSNorm


def test_what_is_left_may_be_taken_by_a_second_handle() -> None:
    model = make()
    first = apply_fused_ops(model[0])
    second = apply_fused_ops(model)
    assert list(second.report()["left"]) == ["0.norm", "0.mlp"]
    assert "0.norm" not in second.report()["fused"] and "1.norm" in second.report()["fused"]
    second.remove()
    assert type(model[0].norm) is not nn.RMSNorm and type(model[1].norm) is nn.RMSNorm
    first.remove()
    assert type(model[0].norm) is nn.RMSNorm


def test_two_models_in_one_process_do_not_meet() -> None:
    one, other = make(), make()
    kept = apply_fused_ops(other, FusedOpsConfig(operators=("rms_norm",)))
    fuse(one).remove()
    assert type(one[0].mlp) is MLP and type(other[0].mlp) is MLP
    assert type(other[0].norm) is not nn.RMSNorm
    assert kept.report()["operators"] == {"rms_norm": LAYERS}


def test_the_handle_stays_valid_when_a_forward_fails() -> None:
    model = make().eval()
    handle = fuse(model)
    expected = model(batch().zero_())
    hook = model[1].mlp.down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    hook.remove()
    with pytest.raises(RuntimeError):
        model(torch.randn(2, WIDTH + 2))
    assert torch.equal(model(batch().zero_()), expected)
    handle.remove()
    assert type(model[1].mlp) is PackedMLP


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    model, x = make().eval(), batch()
    fuse(model)
    expected = model(x)
    with mode():
        assert torch.equal(model(x), expected)


def test_frozen_and_tied_weights() -> None:
    def build() -> nn.Module:
        model = make()
        model[0].norm.weight.requires_grad_(False)
        model[1].norm.weight = model[2].norm.weight
        model[1].mlp = model[0].mlp
        model[0].mlp.up.weight.requires_grad_(False)
        return model

    plain = record_run(build, batch, apply=None)
    assert_bitwise_equal(plain, record_run(build, batch, apply=swiglu_alone))
    ours = record_run(build, batch, steps=1, apply=fuse)
    assert ours.steps[0].gradients.keys() == plain.steps[0].gradients.keys()
    assert ours.report["operators"] == {"rms_norm": LAYERS, "swiglu_pair": 2}


def test_one_graph_is_compiled_and_remove_is_noticed() -> None:
    model, x = make().eval(), batch()
    plain = model(x)
    handle = fuse(model)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    handle.remove()
    assert torch.equal(compiled(x), plain)


class NamedMLP(MLP):
    """Its activation is a module, and may be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = nn.Sequential(nn.SiLU(), nn.Dropout(0.0))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x) * self.factor)
        return out


def set_epsilon(model: nn.Sequential) -> None:
    model[1].norm.eps = 0.5


def replace_the_activation(model: nn.Sequential) -> None:
    model[1].mlp.act = nn.Tanh()


def replace_a_part_of_it(model: nn.Sequential) -> None:
    model[1].mlp.act[0] = nn.GELU()


def scale_the_product(model: nn.Sequential) -> None:
    model[1].mlp.factor = 2.0


def drop_some(model: nn.Sequential) -> None:
    model[1].mlp.act[1].p = 0.5


def watch(model: nn.Sequential) -> None:
    model[1].mlp.act[0].register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (set_epsilon, {"1.norm": "its eps has changed since"}),
        (replace_the_activation, {"1.mlp": "its act has changed since"}),
        (replace_a_part_of_it, {"1.mlp": "its act.0 has changed since"}),
        (scale_the_product, {"1.mlp": "its factor has changed since"}),
        (drop_some, {"1.mlp": "its act.1 has changed since"}),
        (watch, {"1.mlp": "somebody watches the calls of its act.0 since"}),
    ],
)
def test_what_changes_afterwards_computes_itself(
    change: Callable[[nn.Sequential], None], left: dict[str, str], *, compiled: bool
) -> None:
    if compiled and change is watch:
        pytest.skip("torch.compile does not look whether hooks are added to a compiled module")
    plain = nn.Sequential(Layer(NamedMLP), Layer(NamedMLP))
    model, x = copy.deepcopy(plain), batch()
    handle = fuse(model)
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(x)
    for one in (plain, model):
        change(one)
    results = []
    for one in (plain, run):
        torch.manual_seed(1)
        results.append(one(x))
    torch.testing.assert_close(results[1], results[0])
    assert handle.report()["left"] == left
    assert handle.report()["operators"] == {
        "rms_norm": 2 - ("1.norm" in left),
        "swiglu_pair": 1 + ("1.norm" in left),
    }


def test_a_model_is_cast_after_it_was_applied() -> None:
    model = make().eval()
    fuse(model)
    again = make().eval()
    again.load_state_dict(model.state_dict())
    fuse(again.bfloat16())
    x = batch().bfloat16()
    assert torch.equal(model.bfloat16()(x), again(x))


def test_copies_and_pickles_are_plain() -> None:
    model = make()
    handle = fuse(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(copied[0].norm) is nn.RMSNorm and type(copied[0].mlp) is MLP
    handle.remove()


def test_the_handle_keeps_no_model_alive() -> None:
    model = make()
    handle = fuse(model)
    dead = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert all(ref() is None for ref in dead)
    handle.remove()


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [MLP, PackedMLP])
def test_an_mlp_no_longer_holds_silus_output(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Of gate, up, silu(gate) and the product, all of INNER wide, three are left."""
    mlp, x = kind().to(dtype), torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    result, one = TOKENS * WIDTH * dtype.itemsize, TOKENS * INNER * dtype.itemsize
    assert held_bytes(lambda: mlp(x)) == result + 4 * one
    handle = apply_fused_ops(mlp)
    assert held_bytes(lambda: mlp(x)) == result + 3 * one
    handle.remove()
    assert held_bytes(lambda: mlp(x)) == result + 4 * one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_holds_nothing_but_its_result(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(WIDTH, dtype=dtype)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    result = TOKENS * WIDTH * dtype.itemsize
    assert held_bytes(lambda: norm(x)) >= 2 * result
    apply_fused_ops(norm)
    assert held_bytes(lambda: norm(x)) == result


# What cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"operators": ()}, r"operators is \(\)"),
        ({"operators": "swiglu"}, "operators is 'swiglu'"),
        ({"operators": {"swiglu"}}, "operators is {'swiglu'}"),
        ({"operators": ("rotary",)}, "operators holds 'rotary'"),
        ({"backend": 1}, "backend is 1"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        FusedOpsConfig(**options)
    assert error.value.instead


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FusedOpsConfig().backend = "eager"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (None, "was given a NoneType"),
        (nn.Linear(2, 2), "nothing of this Linear"),
        (nn.Sequential(RMSNorm(4)), "nothing of this Sequential"),
    ],
)
def test_what_has_nothing_to_fuse_is_refused(model: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        apply_fused_ops(model)
    assert isinstance(error.value, NothingToDoError) is (model is not None)
    assert error.value.why and error.value.instead


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="was given a dict as its config"):
        apply_fused_ops(make(), {})  # type: ignore[arg-type]


def test_a_backend_that_cannot_be_is_refused_before_anything_changes() -> None:
    model = make()
    kinds = [type(module) for module in model.modules()]
    for name in ("nonsense", "npu"):
        with pytest.raises(AscendError):
            apply_fused_ops(model, FusedOpsConfig(backend=name))
    assert [type(module) for module in model.modules()] == kinds


def test_a_forward_of_the_module_itself_is_left_alone() -> None:
    model = make()
    model[0].norm.forward = lambda x: x
    report = fuse(model).report()
    assert "its forward was set on the module itself" in report["left"]["0.norm"]


def test_config_and_features_import_no_torch() -> None:
    for module in ("config", "features"):
        code = f"import sys, ascend_ops.{module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
