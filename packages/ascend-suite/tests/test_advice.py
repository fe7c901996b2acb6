"""What is said when a device is out of memory, and the shape that it is said of."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_recompute.config import RecomputeLayersConfig
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite import estimate, suggest
from ascend_suite._advice import is_out_of_memory, named, plan_that_fits
from ascend_suite._shape_reading import SeenTokens, read_shape
from ascend_suite.applying import apply
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape
from ascend_swap.config import SwapOptimizerConfig

CONFIG = GPTConfig(layers=3, hidden=32, heads=2, seq=16, dropout=0.0)
NOTHING = Plan()


def test_the_shape_of_the_demos_model_is_read_off() -> None:
    model = GPT(CONFIG)
    seen = SeenTokens(model)
    model(torch.zeros(5, 12, dtype=torch.int64))
    seen.remove()
    model(torch.zeros(2, 3, dtype=torch.int64))
    found = read_shape(model, optim.AdamW(model.parameters()), NOTHING, seen)
    wanted = ModelShape(
        layers=3, hidden=32, heads=2, seq=12, vocab=256, ffn=128, micro_batch=5, tied=False
    )
    assert found == wanted


def test_what_is_not_known_is_named() -> None:
    assert read_shape(nn.Linear(2, 2), None, NOTHING, None) == (
        "layers", "hidden", "heads", "seq", "vocab"
    )  # fmt: skip


class Tied(nn.Module):
    """As Hugging Face names it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=2, hidden_size=8, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=24, vocab_size=50,
        )  # fmt: skip
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gate_proj, self.norm, self.drop = nn.Linear(8, 24), nn.LayerNorm(8), nn.Dropout(0.1)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight


def test_the_shape_of_others_and_of_their_training() -> None:
    model = Tied().bfloat16()
    plan = Plan(
        {"reuse-fp32-param": ReuseParamConfig()},
        training={"tensor_model_parallel_size": 2, "num_microbatches": 4},
    )
    seen = SimpleNamespace(batch=1, seq=16)
    sgd = optim.SGD(model.parameters(), momentum=0.9)
    found: Any = read_shape(model, sgd, plan, seen)  # type: ignore[arg-type]
    wanted = ModelShape(
        layers=2, hidden=8, heads=4, kv_heads=2, ffn=24, vocab=50, seq=16, micro_batches=4, tp=2,
        norm="layer", tied=True, dropout=True, dtype="bfloat16", optimizer="momentum",
        masters=True,
    )  # fmt: skip
    assert found == wanted


def test_a_plan_is_named_with_the_options_that_are_not_their_defaults() -> None:
    plan = Plan({"swap-optimizer": SwapOptimizerConfig(window_bytes=5), "b": ReuseParamConfig()})
    assert named(plan) == "swap-optimizer(window_bytes=5) + b"
    assert named(NOTHING) == "plain"


def test_the_want_of_memory_is_seen_behind_another_error() -> None:
    failed = RuntimeError("the step failed")
    failed.__cause__ = torch.OutOfMemoryError("full")
    assert is_out_of_memory(failed) and is_out_of_memory(failed.__cause__)
    assert not is_out_of_memory(RuntimeError("else")) and not is_out_of_memory(None)


def test_without_a_shape_the_note_says_what_to_do(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options()})
    with pytest.raises(torch.OutOfMemoryError) as caught, apply(plan, nn.Linear(2, 2)):
        raise torch.OutOfMemoryError("full")
    [note] = caught.value.__notes__
    assert "does not tell its layers, hidden, heads, seq, vocab" in note
    assert "shape=ModelShape(...)" in note


def test_another_error_gets_no_note(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options()})
    with pytest.raises(ValueError, match="else") as caught, apply(plan, nn.Linear(2, 2)):
        raise ValueError("else")
    assert not hasattr(caught.value, "__notes__")


def test_what_cannot_be_suggested_hides_nothing() -> None:
    shape = ModelShape(layers=1, hidden=8, heads=1, seq=4, vocab=16)
    note = plan_that_fits(dataclasses.replace(shape), torch.device("meta"))
    assert note.startswith("ascend-suite: no plan could be suggested (")


SHAPE = ModelShape(layers=8, hidden=1024, heads=16, seq=2048, vocab=1024, micro_batch=8)
MIB = 2**20


def note(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, total: int, others: int = 0, kind: str = "cuda"
) -> str:
    """What is said of a device of which others hold some, and this process the rest."""
    reserved = total - others
    device = SimpleNamespace(mem_get_info=lambda _: (0, total), memory_reserved=lambda _: reserved)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return plan_that_fits(SHAPE, torch.device(kind), plan)


def peak(plan: Plan) -> int:
    return estimate(SHAPE, plan, device="cuda").peak_bytes


def again(layers: int) -> Plan:
    return Plan({"recompute-layers": RecomputeLayersConfig(num_layers=layers)})


def test_more_of_a_feature_that_is_on_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names do not make the same plan."""
    said = note(monkeypatch, again(1), peak(again(1)))
    assert "by the estimate this fits" not in said
    assert "would fit: " in said and "recompute-layers(num_layers=1)" not in said


def test_the_suggested_plan_leaves_room_for_the_allocator_and_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = int(1.1 * peak(again(4)))
    alone, beside = note(monkeypatch, NOTHING, total), note(monkeypatch, NOTHING, total, total // 4)
    assert alone != beside
    for said, others in ((alone, 0), (beside, total // 4)):
        chosen = suggest(SHAPE, hbm=int(0.97 * total - others - 24 * MIB), device="cuda").chosen
        assert chosen is not None
        assert f" MiB would fit: {named(chosen.estimate.plan)}. " in said


def test_what_fits_by_the_estimate_and_does_not_is_told_what_takes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a plan that the estimate finds cheaper takes more."""
    plan = Plan({"swap-optimizer": SwapOptimizerConfig(), **again(6).features})
    said = note(monkeypatch, plan, 4 * peak(NOTHING))
    assert "by the estimate this fits" in said and "Less take: " in said
    assert "plain" not in said
    last = Plan(
        {"swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=128), **again(8).features}
    )
    assert "No plan takes less." in note(monkeypatch, last, 4 * peak(NOTHING))


def test_where_no_plan_fits_the_note_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    said = note(monkeypatch, NOTHING, 64 * MIB)
    assert "none would fit 64 MiB" in said and "a micro-batch half as large: " in said
    assert ".;" not in said


def test_a_model_that_fails_when_it_is_asked_hides_no_error(session_features: ModuleType) -> None:
    class Failing(nn.Linear):
        @property
        def config(self) -> Any:
            raise RuntimeError("no config yet")

    plan = Plan({"test-early": session_features.Options()})
    with pytest.raises(torch.OutOfMemoryError) as caught, apply(plan, Failing(2, 2)):
        raise torch.OutOfMemoryError("full")
    assert session_features.HAPPENED == ["early on", "early off"]
    assert len(caught.value.__notes__) == 1
