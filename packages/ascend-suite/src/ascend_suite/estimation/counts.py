"""The parameters of a decoder, tensor by tensor. Imports no torch.

Under tensor parallelism matrices are cut over the ranks: of qkv, gate and up the rows, of
projection and down the columns, of the embedding and the head the vocabulary (Shoeybi et al. 2019,
section 3). What is added after a cut matrix, norms and position embeddings are whole on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from ascend_suite.shape import ModelShape

__all__ = ["layer_parameters", "matrix_parameters", "parameters_of", "stage_parameters"]


def norm_parameters(shape: ModelShape) -> tuple[int, ...]:
    """Elements of a norm's parameters: a weight, and for LayerNorm a bias."""
    return (shape.hidden,) if shape.norm == "rms" else (shape.hidden, shape.hidden)


def layer_parameters(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """Elements of the parameters of one block on one tensor-parallel rank, by operator."""
    h, f, t = shape.hidden, shape.ffn_size, shape.tp
    qkv = shape.query_size + 2 * shape.key_size
    on_attention, on_mlp = shape.attention_biases, shape.mlp_biases
    up = (h * f // t, *([f // t] if on_mlp else []))
    return {
        "norm 1": norm_parameters(shape),
        "qkv": (h * qkv // t, *([qkv // t] if on_attention else [])),
        "projection": (shape.query_size * h // t, *([h] if on_attention else [])),
        "norm 2": norm_parameters(shape),
        **({"gate": up} if shape.activation == "swiglu" else {}),
        "up": up,
        "down": (f * h // t, *([h] if on_mlp else [])),
    }


def matrix_parameters(shape: ModelShape) -> int:
    """Elements of the matrices of one block on one tensor-parallel rank."""
    return sum(sizes[0] for name, sizes in layer_parameters(shape).items() if "norm" not in name)


def stage_parameters(shape: ModelShape, stage: int) -> tuple[int, ...]:
    """Elements of each parameter on one rank of a pipeline stage, in the order of the model.

    A tied embedding lies on the first stage and on the last.
    """
    return tuple(_stage_parameters(shape, stage))


def _stage_parameters(shape: ModelShape, stage: int) -> Iterator[int]:
    first, last = stage == 0, stage == shape.pp - 1
    table = shape.vocab * shape.hidden // shape.tp
    if first:
        yield table
        if shape.positions == "learned":
            yield shape.seq * shape.hidden
    layer = [size for sizes in layer_parameters(shape).values() for size in sizes]
    for _ in range(shape.layers // shape.pp):
        yield from layer
    if last:
        yield from norm_parameters(shape)
        if not (shape.tied and first):
            yield table


def parameters_of(shape: ModelShape) -> int:
    """Elements of all parameters of the model."""
    whole = dataclasses.replace(shape, tp=1, pp=1, vpp=1)
    return sum(stage_parameters(whole, 0))
