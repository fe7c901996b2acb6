"""What one layer holds between forward and backward, and takes in backward. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ascend_suite.estimation.tape import (
    Node,
    Peak,
    Tape,
    Value,
    by_origin,
    walk_backward,
    walk_forward,
)
from ascend_suite.estimation.treatment import Treatment

__all__ = ["LayerBytes", "layer_bytes"]


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """One layer under one treatment.

    Attributes:
        held: Bytes on the device between forward and backward, by origin.
        moved: Bytes on the host meanwhile.
        rebuilt: Bytes that are made again in backward, value by value.
        forward: The highest point of its forward.
        peak: The highest point of its backward, what it holds included, when nothing is fetched
            ahead for other layers.
        parameters: Bytes of the gradients of its parameters.
    """

    held: Mapping[str, int]
    moved: int
    rebuilt: int
    forward: Peak
    peak: Peak
    parameters: int

    @property
    def held_bytes(self) -> int:
        """All that it holds."""
        return sum(self.held.values())


def layer_bytes(
    tape: Tape, treatment: Treatment, *, ahead: int = 0, accumulates: bool = False
) -> LayerBytes:
    """Say what a layer holds and takes.

    Args:
        tape: Its operators.
        treatment: What is done to what they save.
        ahead: Bytes that are fetched for the layers before it, once backward asks for what
            moved: after the MLP, or where its norm is rebuilt from what moved, once the MLP asks
            for that.
        accumulates: Whether gradients of parameters are there already.
    """
    saved = tape.saved()
    others = treatment.depth * sum(value.bytes for value in saved.values())

    readers = [index for index, node in enumerate(tape.nodes) if "n2" in node.saves]
    rebuilds_norm = "recompute-norm" in treatment.rebuilds
    early = tape.nodes[: readers[-1] + 1] if rebuilds_norm else []

    def extra(node: Node) -> int:
        return others + (ahead if node.part != "mlp" or node in early else 0)

    if treatment.replays:
        first = {"x0": tape.values["x0"]}
        held = {} if treatment.depth else first
        present: Mapping[str, Value] = {**first, **saved}
        moved: dict[str, Value] = {}
        rebuilt = 0
    else:
        dropped = {name for name, value in saved.items() if value.rebuilt_by in treatment.rebuilds}
        present = {name: value for name, value in saved.items() if name not in dropped}
        inside = _inside_mlp(present) if treatment.replays_mlp else set()
        moved = {
            name: value
            for name, value in present.items()
            if value.bytes >= treatment.min_bytes and _moves(name, value, treatment)
        }
        gone = {*moved, *inside}
        held = {name: value for name, value in present.items() if name not in gone}
        rebuilt = sum(saved[name].bytes for name in dropped)
    walked = walk_backward(tape, present, accumulates=accumulates, extra=extra)
    return LayerBytes(
        held=by_origin(held.values()),
        moved=sum(value.bytes for value in moved.values()),
        rebuilt=rebuilt,
        forward=walk_forward(tape, held if treatment.replays else present),
        peak=_in_backward(tape, treatment, walked, others),
        parameters=tape.parameters,
    )


def _in_backward(tape: Tape, treatment: Treatment, walked: Peak, others: int) -> Peak:
    """The highest point of a backward: before it, a layer that runs again is in its forward."""
    if not treatment.replays:
        return walked
    again = walk_forward(tape, tape.saved())
    gradient = tape.values[tape.nodes[-1].output].bytes
    replay = Peak(again.saved, again.working + gradient + others, 0)
    return max(replay, walked, key=lambda peak: peak.total)


def _inside_mlp(saved: Mapping[str, Value]) -> set[str]:
    return {name for name, value in saved.items() if value.module == "mlp"}


def _moves(name: str, value: Value, treatment: Treatment) -> bool:
    """Whether a value is saved in a module that moves; the second norm's output is the MLP's."""
    return "mlp input" in treatment.moves if name == "n2" else value.module in treatment.moves
