"""The options of the feature, as a frozen dataclass. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_core.errors import ConfigError
from ascend_core.options import check_count, check_one_of

__all__ = ["DTYPES", "MODES", "DDPConfig", "ShardedConfig"]

MODES = ("all-reduce", "reduce-scatter")
DTYPES = ("float32", "bfloat16", "float16")

_LONGEST_S = 2.0**31


@dataclasses.dataclass(frozen=True)
class DDPConfig:
    """Options of `reduce_gradients`.

    Attributes:
        bucket_bytes: How many bytes of gradients travel together. Smaller buckets leave earlier,
            larger ones travel faster; a parameter that is larger is a bucket by itself.
        overlap: Send a bucket as soon as it is full, while backward goes on. Otherwise all of them
            when backward has ended.
        mode: "all-reduce" leaves the whole gradients on every rank, "reduce-scatter" on each rank
            its own part alone, for `ShardedOptimizer`.
        reduce_dtype: The dtype in which gradients are added up, over micro-batches and over ranks:
            "float32", "bfloat16" or "float16". That of each parameter when left out.
        average: Divide by the number of ranks. Otherwise drop gradients (`zero_grad()`) between two
            backwards, or steps, that send: what is a sum already would be added up again.
        timeout_s: Seconds that a reduction may take until it is an error; as the process group has
            it when left out.
        sync_parameters: Give all ranks the parameters and buffers of the first one, when the
            feature is turned on.
    """

    bucket_bytes: int = 25 * 2**20
    overlap: bool = True
    mode: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    reduce_dtype: str | None = None
    average: bool = True
    timeout_s: float | None = None
    sync_parameters: bool = True

    def __post_init__(self) -> None:
        check_count("bucket_bytes", self.bucket_bytes)
        for name in ("overlap", "average", "sync_parameters"):
            _check_flag(name, getattr(self, name))
        check_one_of("mode", self.mode, MODES)
        if self.reduce_dtype is not None:
            check_one_of("reduce_dtype", self.reduce_dtype, DTYPES)
        _check_timeout(self.timeout_s)


@dataclasses.dataclass(frozen=True)
class ShardedConfig:
    """Options of `shard_optimizer`.

    Attributes:
        overlap_param_gather: Let `step()` return while the weights are still gathered: each bucket
            of them is waited for by the first forward, or anything else, that reads one.
        grad_scaler: Show the gradients of this rank's part in `p.grad` after a backward, and a NaN
            on every rank where one rank has an inf or a NaN: for `torch.amp.GradScaler`. Costs one
            collective of four bytes for each backward, and one pass over the gradients.
        timeout_s: Seconds that a gather may take until it is an error; as the process group has it
            when left out.
    """

    overlap_param_gather: bool = True
    grad_scaler: bool = False
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("overlap_param_gather", "grad_scaler"):
            _check_flag(name, getattr(self, name))
        _check_timeout(self.timeout_s)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}.", instead="use True or False.")


def _check_timeout(seconds: object) -> None:
    if seconds is None:
        return
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds <= _LONGEST_S
    ):
        raise ConfigError(
            f"timeout_s is {seconds!r}.",
            instead=f"use a number of seconds above 0, at most {_LONGEST_S:.0f}, or leave it out.",
        )
