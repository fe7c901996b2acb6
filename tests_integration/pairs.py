"""Features together, on the demo's model: what the tests of pairs and triples run.

[Note: what a combination is held to]
The run without any of its features, bit for bit, but for three things. fused-ops rounds otherwise,
so a combination with it is held to fused-ops alone. reuse-fp32-param steps BF16 weights, so it is
held to BF16 weights with FP32 masters beside. reduce-gradients and shard-optimizer need ranks: two,
with batches and dropout of their own, that are held to ranks which add up their gradients by hand.
Each feature has to have done something, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import traceback
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim

import ascend_ops.apply  # noqa: F401  registers operators
from ascend_core import windowed
from ascend_core.testing import RunRecord, compare_runs, record_run
from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_ops.config import FusedOpsConfig
from ascend_recompute import policy
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_recompute.norm import DEFAULT as NORMS
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite.applying import apply
from ascend_suite.check import check
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.finding import errors_of
from ascend_suite.plan import Plan
from ascend_suite.session import Session
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

SEQ, BATCH, STEPS, RANKS = 16, 3, 3, 2
MODEL = GPTConfig(layers=3, hidden=32, heads=2, seq=SEQ)
BETWEEN_RANKS = frozenset({"reduce-gradients", "shard-optimizer"})

_ops = torch.ops.ascend_ops
CONFIGS: Mapping[str, Any] = {
    "fused-ops": FusedOpsConfig(),
    # One layer: the others are left for what works on layers.
    "recompute-layers": RecomputeLayersConfig(num_layers=1),
    "recompute-activation": RecomputeActivationConfig(
        policy=dataclasses.replace(policy.DEFAULT, min_bytes=0).extended(
            _ops.swiglu.default, _ops.swiglu_pair.default
        )
    ),
    "recompute-norm": RecomputeNormConfig(
        policy=dataclasses.replace(NORMS, min_bytes=0).extended(_ops.rms_norm.default)
    ),
    "swap-attention": SwapAttentionConfig(min_bytes=1, keep_last=0),
    "reduce-gradients": DDPConfig(bucket_bytes=1 << 14),
    "shard-optimizer": ShardedConfig(),
    "swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=3),
    "reuse-fp32-param": ReuseParamConfig(times=3),
}
"""How the features are on here, so that each of them finds something to do in a small model."""

EFFECTS = {
    "fused-ops": "operators",
    "recompute-layers": "saved_bytes",
    "recompute-activation": "saved_bytes",
    "recompute-norm": "saved_bytes",
    "swap-attention": "moved_bytes",
    "reduce-gradients": "collectives",
    "shard-optimizer": "gathers",
    "swap-optimizer": "host_state_bytes",
    "reuse-fp32-param": "residual_bytes",
}
"""What of a feature's report is not nothing when it has done something."""


def plan_of(
    names: Iterable[str], allow: tuple[str, ...] = (), configs: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of these features. What shards the optimizer has a reduction that scatters."""
    features = {name: CONFIGS[name] for name in names}
    if "shard-optimizer" in features:
        scattering = dataclasses.replace(CONFIGS["reduce-gradients"], mode="reduce-scatter")
        features["reduce-gradients"] = scattering
    features.update(configs or {})
    return Plan(features, {"num_layers": MODEL.layers}, allow)


def combinations(size: int, *, ranks: bool) -> list[tuple[str, ...]]:
    """Every so many features of the table, and whether one of them needs ranks."""
    every = itertools.combinations(CONFIGS, size)
    return [names for names in every if bool(BETWEEN_RANKS & set(names)) is ranks]


def difference(plan: Plan, device: str, may_idle: Collection[str] = ()) -> str | None:
    """What a combination does otherwise than it should; None where all is well.

    Args:
        plan: The combination.
        device: Where it is trained.
        may_idle: Features that need not do anything.
    """
    ours = trained(plan, device)
    wanted = reference(
        device,
        fused="fused-ops" in plan.features,
        bf16="reuse-fp32-param" in plan.features,
        ranks=bool(BETWEEN_RANKS & set(plan.features)),
    )
    if "shard-optimizer" in plan.features:  # whole gradients are nowhere
        ours, wanted = _without_gradients(ours), _without_gradients(wanted)
    found = compare_runs(wanted, ours)
    does = {name: bool(ours.report[name].get(EFFECTS[name])) for name in plan.features}
    idle = [name for name, did in does.items() if not did and name not in may_idle]
    if found is None and idle:
        return f"{', '.join(idle)} did nothing"
    return None if found is None else str(found)


@functools.cache
def reference(device: str, *, fused: bool, bf16: bool, ranks: bool) -> RunRecord:
    """What combinations are held to; see [Note: what a combination is held to]."""
    plan = plan_of(["fused-ops"] if fused else [])

    def make_optimizer(model: nn.Module) -> optim.Optimizer:
        if ranks:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_average)
        return windowed(_adamw(model), master_weights=True) if bf16 else _adamw(model)

    return _record(
        device, bf16=bf16, ranks=ranks, make_optimizer=make_optimizer,
        turn_on=lambda model, _: apply(plan, model),
    )  # fmt: skip


def trained(plan: Plan, device: str) -> RunRecord:
    """Train with a plan; the record's report is that of each feature, by name."""
    sessions: list[Session] = []

    def make_optimizer(model: nn.Module) -> Any:
        sessions.append(apply(plan, model, _adamw(model)))
        return sessions[0].optimizer

    return _record(
        device,
        bf16="reuse-fp32-param" in plan.features,
        ranks=bool(BETWEEN_RANKS & set(plan.features)),
        make_optimizer=make_optimizer,
        turn_on=lambda *_: Handle(sessions[0]),
    )


def turned_on(plan: Plan) -> Session:
    """Turn a plan on, for a model on the CPU."""
    model = GPT(MODEL)
    if "reuse-fp32-param" in plan.features:
        model.bfloat16()
    return apply(plan, model, _adamw(model))


class Handle:
    """A session as the harness knows handles."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def report(self) -> dict[str, Mapping[str, Any]]:
        return {row.feature: row.values for row in self.session.report().features}

    def remove(self) -> None:
        self.session.remove()


def on_ranks(rank: int, combinations: Collection[tuple[str, ...]], device: str) -> dict[str, str]:
    """What goes wrong, by combination, when they run on this rank; for `run_ranks`."""
    found: dict[str, str] = {}
    for names in combinations:
        try:
            wrong = difference(plan_of(names), device)
        except Exception:
            wrong = traceback.format_exc()
        if wrong is not None:
            found[" + ".join(names)] = wrong
    return found


def pairs_on_npu(rank: int, world_size: int) -> dict[str, str]:
    """The same for the pairs that are not refused, on simulated NPUs, for `launch_ranks.py`."""
    return on_ranks(rank, permitted(2, ranks=True), f"npu:{rank}")


def triples_on_npu(rank: int, world_size: int) -> dict[str, str]:
    """As `pairs_on_npu`, of triples."""
    return on_ranks(rank, permitted(3, ranks=True), f"npu:{rank}")


def permitted(size: int, *, ranks: bool) -> list[tuple[str, ...]]:
    """The combinations against which no rule speaks."""
    every = combinations(size, ranks=ranks)
    return [names for names in every if not errors_of(check(plan_of(names)))]


def _record(
    device: str, *, bf16: bool, ranks: bool, make_optimizer: Any, turn_on: Any
) -> RunRecord:
    def make_model() -> nn.Module:
        torch.manual_seed(0)  # the same weights on every rank
        model = GPT(MODEL)
        torch.manual_seed(1 + (distributed.get_rank() if ranks else 0))
        return model.bfloat16() if bf16 else model

    return record_run(
        make_model, _batch, forward=_loss_of, steps=STEPS, accumulate=1 if ranks else 2,
        make_optimizer=make_optimizer, apply=turn_on, device=device,
    )  # fmt: skip


def _adamw(model: nn.Module) -> optim.Optimizer:
    # The kernel that rounds the ends of its slices otherwise, where it is there.
    fused = next(model.parameters()).device.type == "cpu"
    return optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def _batch(_: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (BATCH, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _loss_of(model: nn.Module, tokens: tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(model, GPT)
    return model.loss(*tokens)


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    distributed.all_reduce(parameter.grad)
    parameter.grad.div_(distributed.get_world_size())


def _without_gradients(run: RunRecord) -> RunRecord:
    steps = (dataclasses.replace(step, gradients={}) for step in run.steps)
    return dataclasses.replace(run, steps=tuple(steps))
