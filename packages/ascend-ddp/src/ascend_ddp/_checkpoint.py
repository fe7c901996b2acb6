"""The state of a sharded optimizer as the whole one would save it, and back.

[Note: the order of elements]
A piece is a range of its parameter's memory. State of the whole parameter has the parameter's shape
but may have other strides, as a checkpoint of another layout does. It is brought to the parameter's
strides before it is cut, and is put together in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from ascend_core.errors import ConfigError
from ascend_ddp._bucket import view_of
from ascend_ddp._owned import Chunk, Owned, flattened

__all__ = ["State", "consolidated", "cut", "joined"]

State = dict[str, Any]
"""What is kept for one parameter, by name."""

Scalars = Callable[[int], Collection[str]]
"""By the id of a parameter, the names of what is no tensor of its shape."""


def cut(state: Mapping[str, Any], owned: Owned, scalars: Collection[str], name: str) -> State:
    """The part of a parameter's state that belongs to a piece of it.

    Raises:
        ConfigError: When something has another shape than the parameter.
    """
    found: State = {}
    for key, value in state.items():
        if key in scalars or not isinstance(value, Tensor):
            found[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        if value.shape != owned.whole.shape:
            raise ConfigError(
                f"the checkpoint's {key} of {name} is {list(value.shape)}, and the parameter is "
                f"{list(owned.whole.shape)}.",
                instead="build the optimizer over the same parameters as when it was saved.",
            )
        form = torch.empty_like(owned.whole, dtype=value.dtype, device=value.device)
        whole = value if value.stride() == form.stride() else form.copy_(value)
        found[key] = flattened(whole)[owned.piece.start : owned.piece.stop].clone()
    return found


def consolidated(
    chunk: Chunk, states: Mapping[int, Mapping[str, Any]], scalars: Scalars
) -> dict[int, State]:
    """Put the state of all ranks together, bucket by bucket. A collective.

    Args:
        chunk: The model chunk.
        states: What this rank keeps, by the id of the model's parameter.
        scalars: What of it is no tensor of the parameter's shape.

    Returns:
        On every rank the state of each parameter that has any, by its id, on the host.
    """
    parameters = chunk.reducer.parameters
    kept = {
        owned.piece.parameter: states[key] for key, owned in chunk.owned.items() if key in states
    }
    mine = {
        index: {
            key: _told(value, key in scalars(id(parameters[index]))) for key, value in state.items()
        }
        for index, state in kept.items()
    }
    told: list[Any] = [None] * chunk.ranks
    distributed.all_gather_object(told, mine, group=chunk.reducer.group)
    merged: dict[int, dict[str, Any]] = {}
    for one in told:
        for index, entries in one.items():
            merged.setdefault(index, entries)
    found = {
        id(parameters[index]): {
            key: None if isinstance(value, torch.dtype) else value for key, value in entries.items()
        }
        for index, entries in merged.items()
    }
    for number in range(len(chunk.weights.buckets)):  # those of gradients may be gone
        _gather_elements(chunk, number, kept, merged, found)
    return found


def _told(value: Any, is_scalar: bool) -> Any:
    """What other ranks are told of an entry: its dtype where each has elements of its own."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone() if is_scalar else value.dtype
    return value


def _gather_elements(
    chunk: Chunk,
    number: int,
    kept: Mapping[int, Mapping[str, Any]],
    merged: Mapping[int, Mapping[str, Any]],
    found: Mapping[int, State],
) -> None:
    """Gather each entry of the parameters of a bucket, as one flat tensor of its dtype."""
    weights, parameters = chunk.weights.buckets[number], chunk.reducer.parameters
    slots = {slot.parameter: slot for slot in weights.plan.slots if slot.parameter in merged}
    entries = dict.fromkeys(
        (key, value)
        for index in slots
        for key, value in merged[index].items()
        if isinstance(value, torch.dtype)
    )
    for key, dtype in entries:
        own = torch.zeros(weights.own.shape, dtype=dtype, device=weights.own.device)
        for piece, _, _ in chunk.owned.values():
            if piece.bucket == number and merged.get(piece.parameter, {}).get(key) == dtype:
                own[piece.begin : piece.end].copy_(kept[piece.parameter][key])
        flat = torch.empty_like(weights.flat, dtype=dtype)
        if flat.numel():
            distributed.all_gather_single(flat, own, group=chunk.reducer.group)
        for index, slot in slots.items():
            if merged[index].get(key) == dtype:
                parameter = parameters[index]
                view = view_of(flat, slot, parameter)
                found[id(parameter)][key] = view.to("cpu", copy=True)


def joined(parts: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one checkpoint of those of all ranks, without a process group.

    Args:
        parts: What `local_state_dict()` returned on each rank, in any order.

    Returns:
        What `state_dict()` would have: the form of the optimizer that was sharded.

    Raises:
        ConfigError: When one is missing, or parameters were divided otherwise in another.
    """
    found = sorted(parts, key=lambda part: int(part["rank"]))
    ranks = [int(part["rank"]) for part in found]
    wanted = int(found[0]["ranks"]) if found else 0
    is_whole = all(part["ranks"] == wanted for part in found) and _is_whole(found)
    if not found or ranks != list(range(wanted)) or not is_whole:
        raise ConfigError(
            f"the parts are those of ranks {ranks}, of {wanted}, or do not make a whole.",
            why="each rank saves what it keeps: together, each element once.",
            instead="give the local_state_dict() of each rank once, all of one step.",
        )
    state: dict[Any, State] = {}
    for part in found:
        for key, piece in part["state"].items():
            _fill(state.setdefault(key, {}), piece)
    return {"state": state, "param_groups": found[0]["param_groups"]}


def _is_whole(parts: Collection[Mapping[str, Any]]) -> bool:
    """Whether the ranges of each parameter follow on one another, and all end where it ends."""
    ranges: dict[Any, list[tuple[int, int]]] = {}
    for part in parts:
        for key, range_ in part["ranges"].items():
            ranges.setdefault(key, []).append(tuple(range_))
    sizes = {key: piece["size"].numel() for part in parts for key, piece in part["state"].items()}
    for key, own in ranges.items():
        own.sort()
        ends = [0, *(stop for _, stop in own)]
        if [start for start, _ in own] != ends[:-1] or ends[-1] != sizes.get(key, ends[-1]):
            return False
    return True


def _fill(whole: State, piece: Mapping[str, Any]) -> None:
    start, stop = piece["range"]
    for key, value in piece["state"].items():
        if key in piece["scalars"] or not isinstance(value, Tensor):
            whole[key] = value
            continue
        if key not in whole:
            form = torch.empty_strided(piece["size"], piece["stride"], dtype=value.dtype)
            whole[key] = form
        flattened(whole[key])[start:stop].copy_(value)
