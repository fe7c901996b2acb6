"""A model of a step's time: operations and bytes over rates. Imports no torch.

Nothing here was measured. It orders plans, which is what `suggest` needs of it; what a plan costs
on your machine, `ascend-suite demo` and the benchmarks measure.
"""

from __future__ import annotations

from ascend_suite.estimation.counts import matrix_parameters
from ascend_suite.estimation.hardware import Hardware
from ascend_suite.estimation.memory import StageMemory
from ascend_suite.estimation.optimizer import moments
from ascend_suite.estimation.pipeline import bubble
from ascend_suite.estimation.result import StepTime
from ascend_suite.shape import ModelShape

__all__ = ["layer_flops", "step_time"]

BACKWARD = 2
"""Backward computes two matrix products for each of forward's (Narayanan et al. 2021, 3.3)."""


def layer_flops(shape: ModelShape) -> float:
    """Operations of one block's forward on one device, for a micro-batch.

    2 for each element of a matrix and each token, and 4 `s` `h` for each token's scores and their
    sum: `24 b s h^2 + 4 b s^2 h` where F = 4 h (Narayanan et al. 2021, equation 3).
    """
    tokens = shape.micro_batch * shape.seq / shape.cp
    scores = 4 * shape.seq * shape.query_size / shape.tp
    return tokens * (2 * matrix_parameters(shape) + scores)


def step_time(memory: StageMemory, plain: StageMemory, hardware: Hardware) -> StepTime:
    """Estimate a step's time.

    Args:
        memory: What the stage's layers hold, rebuild and move, with the features.
        plain: The same without.
        hardware: The machine's rates.
    """
    parts = _parts(memory, hardware)
    without = _parts(plain, hardware)
    return StepTime(sum(parts.values()), sum(without.values()), parts)


def _parts(memory: StageMemory, hardware: Hardware) -> dict[str, float]:
    shape = memory.shape
    forward, elementwise = _forward(memory, hardware)
    backward = BACKWARD * forward + elementwise
    count = len(memory.layers)
    replayed = sum(treatment.replays for treatment in memory.treatments)
    mlps = sum(treatment.replays_mlp for treatment in memory.treatments)
    share = _mlp_share(shape)
    rebuilt = sum(layer.rebuilt for layer in memory.layers)
    # A rebuilt value is read from what it is made of, and written.
    recompute = (replayed + share * mlps) * (forward + elementwise)
    recompute += 2 * rebuilt / hardware.memory_bytes
    waiting = sum(
        max(0.0, layer.moved / hardware.link_bytes - forward - elementwise)
        + max(0.0, layer.moved / hardware.link_bytes - backward)
        for layer in memory.layers
    )
    head = (1 + BACKWARD) * _head_flops(memory) / hardware.flops
    compute = count * (forward + elementwise + backward) + head
    each = {"compute": compute, "recompute": recompute, "waiting for copies": waiting}
    parts = {name: shape.micro_batches * seconds for name, seconds in each.items()}
    parts["pipeline bubble"] = bubble(shape) * sum(parts.values())
    parts["communication"] = _communication(memory, hardware, backward * count)
    parts["optimizer step"] = _optimizer(memory, hardware)
    return parts


def _forward(memory: StageMemory, hardware: Hardware) -> tuple[float, float]:
    """Seconds of a layer's matrix products, and of its other operators.

    What the others make is what is saved, and it is read once: twice those bytes cross the memory.
    """
    made = sum(value.bytes for value in memory.tape.saved().values())
    return layer_flops(memory.shape) / hardware.flops, 2 * made / hardware.memory_bytes


def _mlp_share(shape: ModelShape) -> float:
    matrices = 3 if shape.activation == "swiglu" else 2
    mlp = matrices * shape.hidden * shape.ffn_size / shape.tp
    return mlp / matrix_parameters(shape)


def _head_flops(memory: StageMemory) -> float:
    shape = memory.shape
    if memory.stage != shape.pp - 1:
        return 0.0
    tokens = shape.micro_batch * shape.seq / shape.cp
    return 2 * tokens * shape.hidden * shape.vocab / shape.tp


def _communication(memory: StageMemory, hardware: Hardware, backward: float) -> float:
    """What of a ring's all-reduce the last micro-batch's backward does not hide.

    `2 (N - 1) / N` of the gradients cross each link; a reduce-scatter and a gather of weights are
    as much.
    """
    ranks = memory.shape.dp
    if ranks == 1:
        return 0.0
    nbytes = memory.shape.item_bytes * sum(memory.sizes)
    seconds = 2 * (ranks - 1) / ranks * nbytes / hardware.network_bytes
    return max(0.0, seconds - backward)


def _optimizer(memory: StageMemory, hardware: Hardware) -> float:
    """State is read and written once, through device memory or over the link."""
    shape, features = memory.shape, memory.plan.features
    count = sum(memory.sizes) / (shape.dp if "shard-optimizer" in features else 1)
    half = shape.item_bytes == 2
    masters = half and (shape.masters or "reuse-fp32-param" in features)
    state = (moments(shape) + masters) * (4 if masters else shape.item_bytes)
    on_device = count * (2 * state + 3 * shape.item_bytes) / hardware.memory_bytes
    if "reuse-fp32-param" in features:
        # Masters are joined before the step and split after it: 4 bytes written and read, twice.
        on_device += count * 16 / hardware.memory_bytes
    if memory.optimizer.host:
        # Both directions at a time; a step is never shorter than its copies.
        return max(on_device, memory.optimizer.host / hardware.link_bytes)
    return on_device
