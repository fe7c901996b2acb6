"""What operators save in forward and take in backward: autograd, of sizes alone. Imports no torch.

[Note: a tape of sizes]
Saved tensors are the smaller part of the story: how high memory goes depends on what is alive
*together*. A node of backward holds its output's gradient and what it saved, makes the gradients of
its inputs, and only then lets go of the first two. A rebuilt value is there for the one node that
asks for it. So the operators of a block are written down once, with what each saves, and the walk
below runs their backward over bytes instead of numbers. What it says of the tensors that are *held*
is what closed formulae say: `docs/estimate.md` has them, and the tests compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

__all__ = ["Node", "Peak", "Tape", "Value", "walk_backward", "walk_forward"]


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of activations.

    Attributes:
        bytes: Its size.
        origin: What it is counted as when it is held: "norm", "qkv" and so on.
        module: The module in which it is saved first.
        recipe: The values that it is made of when it is rebuilt, from the first; empty when no
            feature rebuilds it.
        rebuilt_by: The feature that rebuilds it.
        view: Whether it is another value's memory; its gradient is not.
    """

    bytes: int
    origin: str
    module: str = ""
    rebuilt_by: str | None = None
    recipe: tuple[str, ...] = ()
    view: bool = False


@dataclasses.dataclass(frozen=True)
class Node:
    """An operator.

    Attributes:
        part: The module that it is in.
        inputs: The values whose gradients its backward makes.
        output: The value that it made.
        saves: The values that it keeps for backward.
        parameters: Bytes of the gradients of its parameters.
        working: Bytes of temporaries in its backward.
        making: Bytes of temporaries in its forward.
        passes: Whether it hands on its output's gradient instead of making new ones.
    """

    part: str
    inputs: tuple[str, ...]
    output: str
    saves: tuple[str, ...] = ()
    parameters: int = 0
    working: int = 0
    making: int = 0
    passes: bool = False


@dataclasses.dataclass
class Tape:
    """The operators of a part of the model, in the order of forward.

    Attributes:
        values: All tensors, by name.
        nodes: The operators.
    """

    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    nodes: list[Node] = dataclasses.field(default_factory=list)

    def saved(self) -> dict[str, Value]:
        """The values that are kept for backward, in the order in which they are saved first."""
        return {name: self.values[name] for node in self.nodes for name in node.saves}

    @property
    def parameters(self) -> int:
        """Bytes of the gradients of all parameters."""
        return sum(node.parameters for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where a walk over backward was highest.

    Attributes:
        saved: Bytes of what is still held, by origin.
        working: Bytes of gradients of activations, rebuilt values and temporaries.
        gradients: Bytes of gradients of parameters that are complete.
    """

    saved: Mapping[str, int]
    working: int
    gradients: int

    @property
    def total(self) -> int:
        """All bytes together."""
        return sum(self.saved.values()) + self.working + self.gradients


def by_origin(values: Iterable[Value]) -> dict[str, int]:
    """Add up bytes by what they are counted as."""
    sums: dict[str, int] = {}
    for value in values:
        sums[value.origin] = sums.get(value.origin, 0) + value.bytes
    return sums


def walk_forward(tape: Tape, kept: Mapping[str, Value]) -> Peak:
    """Run forward over a tape.

    Args:
        tape: The operators.
        kept: The values that are held once they have been saved.

    Returns:
        The highest point.
    """
    saved: dict[str, Value] = {}
    highest = Peak({}, 0, 0)
    for node in tape.nodes:
        saved |= {name: kept[name] for name in node.saves if name in kept}
        alive = {name for name in (*node.inputs, node.output) if name in tape.values}
        unsaved = [tape.values[name] for name in alive - saved.keys()]
        working = sum(value.bytes for value in unsaved if not value.view)
        point = Peak(by_origin(saved.values()), working + node.making, 0)
        highest = max(highest, point, key=lambda peak: peak.total)
    return highest


def walk_backward(
    tape: Tape,
    present: Mapping[str, Value],
    *,
    accumulates: bool = False,
    extra: Callable[[Node], int] = lambda _: 0,
) -> Peak:
    """Run backward over a tape, from the gradient of its last output.

    Args:
        tape: The operators.
        present: The saved values that are on the device when it begins. Others that a node saved
            are rebuilt for it, with what they are made of.
        accumulates: Whether the gradients of parameters are there already, and what is made is
            added to them.
        extra: Bytes that are on the device beside, while a node runs.

    Returns:
        The highest point.
    """
    values = tape.values
    left = dict(present)
    uses: dict[str, int] = {}
    for node in tape.nodes:
        for name in node.saves:
            uses[name] = uses.get(name, 0) + 1
    # Values share a gradient where an addition handed it on: each gradient knows its readers.
    gradients = {tape.nodes[-1].output: tape.nodes[-1].output}
    complete = 0
    highest = Peak({}, 0, 0)
    for node in reversed(tape.nodes):
        incoming = gradients.pop(node.output)
        made = [] if node.passes else [name for name in node.inputs if name in values]
        alive = {incoming, *gradients.values()}
        working = sum(values[name].bytes for name in alive)
        working += sum(values[name].bytes for name in made) + node.working + extra(node)
        working += sum(values[name].bytes for name in _rebuilt(node, values, left))
        new = node.parameters
        point = Peak(
            by_origin(left.values()),
            working + (new if accumulates else 0),
            complete + (0 if accumulates else new),
        )
        highest = max(highest, point, key=lambda peak: peak.total)
        complete += 0 if accumulates else new
        for name in node.saves:
            uses[name] -= 1
            if not uses[name]:
                left.pop(name, None)
        for name in node.inputs:
            # Where one is there already the new one is added into it, and is gone.
            gradients.setdefault(name, incoming if node.passes else name)
    return highest


def _rebuilt(node: Node, values: Mapping[str, Value], left: Mapping[str, Value]) -> set[str]:
    """What has to be made again for a node."""
    missing = [name for name in node.saves if name not in left]
    made_of = [part for name in missing for part in values[name].recipe if part not in left]
    return {*missing, *made_of}
