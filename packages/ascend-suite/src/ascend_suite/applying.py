"""The verb: a plan is checked, and turned on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn, optim

from ascend_core.errors import ConfigError
from ascend_core.feature import Feature, get_feature
from ascend_suite._facts import contradictions, found_facts, told_by_config
from ascend_suite._order import in_order, takes_chunks
from ascend_suite.check import check
from ascend_suite.finding import Finding, IncompatiblePlanError, errors_of
from ascend_suite.plan import Plan
from ascend_suite.session import Session
from ascend_suite.shape import ModelShape

__all__ = ["apply"]


def apply(
    plan: Plan,
    model: nn.Module | Sequence[nn.Module],
    optimizer: optim.Optimizer | None = None,
    *,
    shape: ModelShape | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
) -> Session:
    """Check a plan on the training that it meets, and turn its features on.

    Nothing is turned on unless the plan may be. What the model, the optimizer and the process tell
    of the training (its dtype and device, ranks, versions, DTensors, ...) is checked with the plan;
    where the plan says otherwise, that is an error. What a config of megatron-core in the model
    says (its recompute, captured graphs, ...) is checked where the plan says nothing. Features come
    on in the order that fits them; when one of them cannot, those before it are turned off again.

        with apply(plan, model, optimizer) as session:
            for batch in batches:
                model(batch).backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
        print(session.report())

    Args:
        plan: The features with their options.
        model: The model; or, where all features for models take that, the list of model chunks of
            a pipeline stage.
        optimizer: What steps its parameters. From now on `session.optimizer` does.
        shape: Of the model and its training, for what is said when the device is out of memory;
            read off the model where it can be when left out.
        arguments: Keyword arguments of verbs beside their config, by the feature's name:
            `{"reduce-gradients": {"group": group}}`.

    Returns:
        The session: a context manager, with `optimizer`, `report()`, `metrics()` and `remove()`.

    Raises:
        IncompatiblePlanError: When the plan cannot work here, with all that is wrong with it.
        FeatureNotFoundError: When no installed package offers a feature.
        ConfigError: When there is no optimizer for a feature that works on one, the model is a list
            for a feature that takes none, a feature refuses what it is given, or something else
            stands where the plan, the model, the optimizer or the shape is to be.
    """
    _check_kinds(plan, optimizer, shape)
    chunks = _chunks(model)
    features = in_order(get_feature(name) for name in plan.features)
    plan, findings = _checked(plan, chunks, optimizer)
    _check_targets(features, model, optimizer)
    _check_arguments(features, arguments or {})
    session = Session(plan, findings, model, optimizer, shape)
    try:
        session.turn_on(features, arguments or {})
    except BaseException as error:
        session.give_up(error)
        raise
    return session


def _check_kinds(plan: object, optimizer: object, shape: object) -> None:
    """Refuse what stands at another's place, before anything is looked up in it."""
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"apply was given a {type(plan).__name__} as its plan.",
            instead="build one: Plan.of(configs...), Plan.from_file(path) or Plan.from_mapping.",
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"apply was given a {type(optimizer).__name__} as its optimizer.",
            instead="pass the optimizer that steps the model: apply(plan, model, optimizer).",
        )
    if not isinstance(shape, ModelShape | None):
        raise ConfigError(
            f"apply was given a {type(shape).__name__} as its shape.",
            instead="build one: ModelShape(layers=..., hidden=..., ...).",
        )


def _chunks(model: object) -> Sequence[nn.Module]:
    """The model, or the chunks that it consists of."""
    chunks = [model] if isinstance(model, nn.Module) or not isinstance(model, Iterable) else model
    found = []
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise ConfigError(
                f"apply was given a {type(chunk).__name__} as a model.",
                instead="pass the model, an nn.Module, or the list of its chunks.",
            )
        found.append(chunk)
    if not found:
        raise ConfigError("apply was given no model chunk.", instead="pass the model.")
    return found


def _checked(
    plan: Plan, chunks: Sequence[nn.Module], optimizer: optim.Optimizer | None
) -> tuple[Plan, tuple[Finding, ...]]:
    """The plan with what was found, and what is to be said about it."""
    found = found_facts(chunks, optimizer)
    wrong = contradictions(plan.training, found)
    told = told_by_config(chunks)
    unsaid = {name: value for name, value in told.items() if plan.training.get(name) is None}
    whole = dataclasses.replace(plan, training={**plan.training, **unsaid, **found})
    findings = (*wrong, *check(whole))
    if errors_of(findings):
        raise IncompatiblePlanError(findings)
    return whole, findings


def _check_targets(
    features: Sequence[Feature],
    model: nn.Module | Sequence[nn.Module],
    optimizer: optim.Optimizer | None,
) -> None:
    for feature in features:
        if feature.target == "optimizer" and optimizer is None:
            raise ConfigError(
                f"{feature.name} is in the plan, and apply was given no optimizer.",
                why="it works on the optimizer.",
                instead="build the optimizer first: apply(plan, model, optimizer).",
            )
        of_model = feature.target == "model" and not takes_chunks(feature.name)
        if of_model and not isinstance(model, nn.Module):
            raise ConfigError(
                f"{feature.name} is in the plan, and the model is a list of chunks.",
                why="it counts the layers of one model.",
                instead="apply a plan of the features for models to each chunk, and another one "
                "of reduce-gradients and the features for the optimizer to the list.",
            )


def _check_arguments(
    features: Sequence[Feature], arguments: Mapping[str, Mapping[str, Any]]
) -> None:
    known = [feature.name for feature in features]
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"arguments has some for {name!r}, which is not in the plan.",
                why=f"the plan has: {', '.join(known) or 'no feature'}.",
                instead="use the names of features of the plan.",
            )
