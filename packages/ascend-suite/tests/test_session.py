"""A plan that is turned on, and off again, whatever happens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core.errors import (
    BudgetExceededError,
    ConfigError,
    FeatureError,
    FeatureNotFoundError,
)
from ascend_core.feature import discover
from ascend_core.testing import bitwise_equal
from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_recompute.config import RecomputeLayersConfig, RecomputeNormConfig
from ascend_suite._order import ORDER, in_order
from ascend_suite.applying import apply
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.finding import IncompatiblePlanError
from ascend_suite.plan import Plan
from ascend_suite.session import Session
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

SHAPE = GPTConfig(layers=2, hidden=32, heads=2, seq=16)
SHARDED = {
    "reduce-gradients": DDPConfig(mode="reduce-scatter", bucket_bytes=1 << 14),
    "shard-optimizer": ShardedConfig(),
}
EVERYTHING = {
    "swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=3),
    "swap-attention": SwapAttentionConfig(min_bytes=1, keep_last=0),
    "recompute-norm": RecomputeNormConfig(),
    "recompute-layers": RecomputeLayersConfig(num_layers=1),
}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def adamw(of: nn.Module) -> optim.Optimizer:
    return optim.AdamW(of.parameters(), lr=1e-2, foreach=True)


def train(of: GPT, optimizer: Any, steps: range = range(3)) -> list[Tensor]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(256, (3, 17))
        loss = of.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(bitwise_equal, ours.state_dict().values(), theirs.state_dict().values()))


# The order ---------------------------------------------------------------------------------------


def test_features_come_on_in_their_order_and_go_off_in_the_reverse(
    session_features: ModuleType,
) -> None:
    options = session_features.Options()
    plan = Plan({"test-late": options, "test-early": options, "test-middle": options})
    theirs = model()
    given = adamw(theirs)
    with apply(plan, theirs, given) as session:
        assert list(session) == ["test-early", "test-middle", "test-late"]
        assert session.optimizer is session["test-late"]
        assert "test-early" in session and "recompute-norm" not in session
    assert session.optimizer is given
    assert session_features.HAPPENED == [
        "early on", "middle on", "late on", "late off", "middle off", "early off"
    ]  # fmt: skip
    session.remove()
    assert len(session_features.HAPPENED) == 6


def test_every_feature_of_ours_has_a_place_and_each_place_a_feature() -> None:
    assert {place.feature for place in ORDER} == {
        name for name, feature in discover().items() if feature.verb.startswith("ascend_")
    }
    assert all(place.because.endswith(".") for place in ORDER)


def test_the_order_is_that_of_the_table_whatever_order_was_given() -> None:
    features = discover()
    names = [place.feature for place in ORDER]
    for turned in range(len(names)):
        given = [features[name] for name in (*names[turned:], *names[:turned])]
        assert [feature.name for feature in in_order(given)] == names


def test_what_is_taken_comes_before_and_what_is_wrapped_behind() -> None:
    """The order serves what features say of themselves."""
    features = discover()
    names = [place.feature for place in ORDER]
    for name in names:
        feature = features[name]
        if feature.takes is not None:
            assert names.index(feature.takes) < names.index(name)
        if feature.wraps:
            behind = names[names.index(name) + 1 :]
            assert behind and all(features[one].target == "optimizer" for one in behind)


# Failures ----------------------------------------------------------------------------------------


def test_a_feature_that_cannot_come_on_leaves_none_on(session_features: ModuleType) -> None:
    fine, broken = session_features.Options(), session_features.Options(on=KeyError("broken"))
    plan = Plan({"test-early": fine, "test-middle": fine, "test-late": broken})
    with pytest.raises(KeyError, match="broken") as caught:
        apply(plan, theirs := model(), adamw(theirs))
    assert session_features.HAPPENED == ["early on", "middle on", "middle off", "early off"]
    assert not hasattr(caught.value, "__notes__")


def test_an_undo_that_fails_hides_no_error_and_stops_no_other(session_features: ModuleType) -> None:
    options = session_features.Options
    plan = Plan(
        {
            "test-early": options(),
            "test-middle": options(off=(OSError("stuck"),)),
            "test-late": options(on=KeyError("broken")),
        }
    )
    with pytest.raises(KeyError, match="broken") as caught:
        apply(plan, theirs := model(), adamw(theirs))
    assert session_features.HAPPENED[-1] == "early off"
    [note] = caught.value.__notes__
    assert "a feature could not be turned off: OSError: stuck" in note


def test_the_error_of_a_training_is_the_one_that_is_seen(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options(off=(OSError("stuck"),))})
    with pytest.raises(ZeroDivisionError) as caught, apply(plan, model()):
        raise ZeroDivisionError
    assert "OSError: stuck" in caught.value.__notes__[0]


def test_one_failure_of_the_way_back_is_raised_as_it_is(session_features: ModuleType) -> None:
    options = session_features.Options
    plan = Plan({"test-early": options(), "test-middle": options(off=(OSError("stuck"),))})
    session = apply(plan, model())
    with pytest.raises(OSError, match="stuck"):
        session.remove()
    assert session_features.HAPPENED[-1] == "early off"
    assert list(session) == ["test-middle"]
    session.remove()
    assert session_features.HAPPENED[-2:] == ["early off", "middle off"]


def test_several_failures_of_the_way_back_are_raised_together(
    session_features: ModuleType,
) -> None:
    options = session_features.Options
    plan = Plan(
        {
            "test-early": options(off=(OSError("first"),)),
            "test-middle": options(off=(KeyError("second"),)),
        }
    )
    with pytest.raises(ExceptionGroup) as caught:
        apply(plan, model()).remove()
    assert [type(error) for error in caught.value.exceptions] == [KeyError, OSError]


def test_an_interrupt_on_the_way_back_stops_no_other(session_features: ModuleType) -> None:
    options = session_features.Options
    plan = Plan({"test-early": options(), "test-middle": options(off=(KeyboardInterrupt(),))})
    with pytest.raises(KeyboardInterrupt):
        apply(plan, model()).remove()
    assert session_features.HAPPENED[-1] == "early off"


def test_a_real_feature_with_nothing_to_do_leaves_the_others_off() -> None:
    theirs = model()
    theirs.final_norm = nn.Identity()
    for block in theirs.blocks:
        block.input_norm = block.post_attention_norm = nn.Identity()
    kinds = [type(module) for module in theirs.modules()]
    plan = Plan({name: EVERYTHING[name] for name in ("recompute-layers", "recompute-norm")})
    with pytest.raises(ConfigError, match="norm"):
        apply(plan, theirs)
    assert [type(module) for module in theirs.modules()] == kinds


def test_a_shard_that_fails_half_way_gives_weights_and_state_back(one_rank: None) -> None:
    """What is to be inside of it finds no room on the host."""
    ours, theirs = model(), model()
    mine, others = adamw(ours), adamw(theirs)
    train(ours, mine), train(theirs, others)
    plan = Plan({**SHARDED, "swap-optimizer": SwapOptimizerConfig(host_budget_bytes=1)})
    with pytest.raises(BudgetExceededError):
        apply(plan, ours, mine)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in ours.parameters())
    train(ours, mine, range(3, 5)), train(theirs, others, range(3, 5))
    assert equal(ours, theirs)


# What is refused before anything is on ------------------------------------------------------------


def test_an_unknown_feature_is_refused_before_anything_is_on(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options(), "test-nothing": None})
    with pytest.raises(FeatureNotFoundError, match="test-nothing"):
        apply(plan, model())
    assert session_features.HAPPENED == []


def test_a_feature_for_an_optimizer_needs_one(session_features: ModuleType) -> None:
    options = session_features.Options()
    with pytest.raises(ConfigError, match=r"test-late is in the plan.*no optimizer"):
        apply(Plan({"test-early": options, "test-late": options}), model())
    assert session_features.HAPPENED == []


def test_chunks_are_refused_where_layers_are_counted(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options()})
    with pytest.raises(ConfigError, match="the model is a list of chunks"):
        apply(plan, [model(), model()])
    with pytest.raises(ConfigError, match="no model chunk"):
        apply(plan, [])


def test_what_stands_at_anothers_place_is_named() -> None:
    norms: Any = {"recompute-norm": RecomputeNormConfig()}
    whole, nothing = model(), Plan()
    with pytest.raises(ConfigError, match=r"a dict as its plan[\s\S]*Plan\.of"):
        apply(norms, whole)
    for wrong in (None, "model", [whole, "model"], {"model": whole}):
        with pytest.raises(ConfigError, match="as a model"):
            apply(nothing, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a list as its optimizer"):
        apply(nothing, whole, list(whole.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a dict as its shape"):
        apply(nothing, whole, shape={"layers": 2})  # type: ignore[arg-type]


def test_what_the_plan_says_of_the_training_must_be_so(session_features: ModuleType) -> None:
    plan = Plan(
        {"test-early": session_features.Options()},
        training={"bf16": True, "world_size": 1, "device": "npu", "num_layers": 7},
    )
    with pytest.raises(IncompatiblePlanError) as caught:
        apply(plan, model())
    found = {finding.subject for finding in caught.value.findings}
    assert {"training.bf16", "training.device"} <= found
    assert "training.world_size" not in found
    assert "the plan says that bf16 is True, and it is False." in str(caught.value)
    assert session_features.HAPPENED == []


def test_arguments_of_verbs_reach_them(session_features: ModuleType) -> None:
    plan = Plan({"test-early": session_features.Options()})
    with apply(plan, model(), arguments={"test-early": {"pool": 3}}) as session:
        handle: Any = session["test-early"]
        assert handle.arguments == {"pool": 3}
    with pytest.raises(ConfigError, match=r"'test-late', which is not in the plan"):
        apply(plan, model(), arguments={"test-late": {}})


def test_a_feature_that_is_not_on_is_said_to_be_so(session_features: ModuleType) -> None:
    session = apply(Plan({"test-early": session_features.Options()}), model())
    with pytest.raises(FeatureError, match=r"test-late is not on[\s\S]*test-early"):
        session["test-late"]
    session.remove()
    with pytest.raises(FeatureError, match="the session is over"):
        session["test-early"]


# Training -----------------------------------------------------------------------------------------


def on(plan: Plan, of: nn.Module) -> Session:
    return apply(plan, of, adamw(of))


def test_two_sessions_of_two_models_never_meet() -> None:
    ours, theirs, plain = model(), model(), model()
    wanted = train(plain, adamw(plain), range(4))
    first, second = on(Plan(EVERYTHING), ours), on(Plan(EVERYTHING), theirs)
    losses: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    for step in range(4):
        if step == 2:
            moved = second.metrics()["ascend/swap-attention/moved_bytes"]
            state = first.optimizer
            first.remove()
            assert second.metrics()["ascend/swap-attention/moved_bytes"] == moved > 0
            assert len(list(second)) == 4 and state is not first.optimizer
        losses["ours"] += train(ours, first.optimizer, range(step, step + 1))
        losses["theirs"] += train(theirs, second.optimizer, range(step, step + 1))
    second.remove()
    assert all(map(torch.equal, losses["ours"], wanted))
    assert all(map(torch.equal, losses["theirs"], wanted))
    assert equal(ours, plain) and equal(theirs, plain)


def test_a_shard_has_the_other_features_inside(one_rank: None) -> None:
    ours, plain = model(), model()
    train(plain, adamw(plain))
    given = adamw(ours)
    plan = Plan({**EVERYTHING, **SHARDED})
    with apply(plan, ours, given) as session:
        assert session.optimizer is session["shard-optimizer"]
        assert session["swap-optimizer"] is not session.optimizer
        train(ours, session.optimizer)
        inner = session["shard-optimizer"].report()["inner"]
        assert inner["host_state_bytes"] > 0
        assert inner == session["swap-optimizer"].report()
        assert equal(ours, plain)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in ours.parameters())
    assert len(given.state) == len(list(ours.parameters()))
    train(ours, given, range(3, 4))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_scheduler_that_was_made_before_goes_on(one_rank: None, sharded: bool) -> None:
    ours, plain = model(), model()
    losses = []
    for of in (ours, plain):
        given = adamw(of)
        schedule = optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
        features = {**EVERYTHING, **(SHARDED if sharded else {})} if of is ours else {}
        with apply(Plan(features), of, given) as session:
            for step in range(3):
                losses += train(of, session.optimizer, range(step, step + 1))
                schedule.step()
    assert all(map(torch.equal, losses[:3], losses[3:]))
    assert equal(ours, plain)


def test_chunks_are_reduced_together(one_rank: None) -> None:
    chunks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizer = optim.AdamW([p for chunk in chunks for p in chunk.parameters()])
    plan = Plan({**SHARDED, "swap-optimizer": SwapOptimizerConfig()})
    with apply(plan, chunks, optimizer) as session:
        chunks[1](chunks[0](torch.ones(1, 3))).sum().backward()
        assert session.optimizer is not None
        session.optimizer.step()
        assert session["reduce-gradients"].report()["parameters"] == 4
