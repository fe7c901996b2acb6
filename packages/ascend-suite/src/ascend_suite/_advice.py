"""What to say when a device is out of memory: the plan that would fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["is_out_of_memory", "plan_that_fits"]

_MIB = 2**20
_SEGMENTS = 24 * _MIB
_UNUSABLE = 0.03
"""The part of a device that lies between blocks that are in use."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device's want of memory is what an error comes from."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in _causes(error))


def plan_that_fits(
    shape: ModelShape | tuple[str, ...], device: torch.device, plan: Plan | None = None
) -> str:
    """Say which plan would fit the device, or why that cannot be said.

    Args:
        shape: Of the model; or the names of what is not known of it.
        device: The one that is out of memory.
        plan: The one that is on, which does not.

    Returns:
        A note for the error. Never raises: it is made while another error is under way.
    """
    if not isinstance(shape, ModelShape):
        return (
            f"ascend-suite: which plan would fit cannot be said, since the model does not tell its "
            f"{', '.join(shape)}. Pass apply(..., shape=ModelShape(...)), or ask "
            "`ascend-suite suggest`."
        )
    try:
        return f"ascend-suite: {_suggested(shape, device, plan or Plan())}"
    except Exception as error:
        return f"ascend-suite: no plan could be suggested ({type(error).__name__}: {error})"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _suggested(shape: ModelShape, device: torch.device, plan: Plan) -> str:
    from ascend_suite.estimation.estimate import estimate
    from ascend_suite.suggestion import suggest

    kind: Any = device.type
    total, room = _room(device)
    memory = f"{total / _MIB:,.0f} MiB"
    now = estimate(shape, plan, device=kind).peak_bytes
    # By the estimate it may fit; that it does not is a fact.
    found = suggest(shape, hbm=max(1, min(room, now - 1)), device=kind)
    shown = [found.chosen, *found.runners_up] if found.chosen else found.runners_up
    less = [named(one.estimate.plan) for one in shown if one and one.estimate.peak_bytes < now]
    if now <= room:
        others = f"Less take: {'; '.join(less)}" if less else "No plan takes less"
        return (
            f"by the estimate this fits {memory}, so that something else takes memory, too: other "
            "models, other processes, blocks between those in use (fewer with "
            f"PYTORCH_{kind.upper()}_ALLOC_CONF=expandable_segments:True). {others}."
        )
    if found.chosen is None:
        advice = " ".join(found.advice)
        return (
            f"of the plans that go together none would fit {memory}: the smallest takes "
            f"{found.short_by / _MIB:,.0f} MiB more. {advice}".rstrip()
        )
    also = f" Also: {'; '.join(less[1:])}." if less[1:] else ""
    return f"in {memory} would fit: {less[0]}. {found.chosen.why}{also}"


def _room(device: torch.device) -> tuple[int, int]:
    """Bytes of a device, and those of them that an estimate may fill.

    Not what others hold (processes, libraries, the device's context), nor what the allocator cannot
    hand out: it takes segments of 20 MiB from the device, and of 2 MiB for small tensors.
    """
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    others = max(0, total - free - module.memory_reserved(device))
    return int(total), int(total - others - _SEGMENTS - _UNUSABLE * total)


def named(plan: Plan) -> str:
    """A plan's features, with those options that are not their defaults."""
    return " + ".join(_with_options(*item) for item in plan.features.items()) or "plain"


def _with_options(feature: str, config: Any) -> str:
    default = type(config)()
    options = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    return f"{feature}({', '.join(options)})" if options else feature
