"""How many micro-batches a pipeline stage holds at once. Imports no torch."""

from __future__ import annotations

from ascend_suite.shape import ModelShape

__all__ = ["bubble", "chunks_in_flight"]


def chunks_in_flight(shape: ModelShape, stage: int) -> int:
    """Forwards of a model chunk whose backward is still to come, at most.

    1F1B: stage `i` of `p` holds `p - i` micro-batches. Interleaved over `v` chunks it holds
    `2 (p - i - 1) + (v - 1) p + 1` of `1 / v` of its layers each (Narayanan et al. 2021, section
    2.2, as megatron-core schedules it): on the first stage `1 + (p - 1) / (p v)` times what `p` of
    them would be (Korthikanti et al. 2022, section 4.2.3).
    """
    p, v = shape.pp, shape.vpp
    rest = p - stage - 1
    wanted = rest + 1 if v == 1 else 2 * rest + (v - 1) * p + 1
    return min(wanted, shape.micro_batches * v)


def bubble(shape: ModelShape) -> float:
    """Time of the step that a stage waits, as a part of its computing (Narayanan et al. 2021)."""
    return (shape.pp - 1) / (shape.micro_batches * shape.vpp)
