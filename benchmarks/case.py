"""What a benchmark declares: cases, each with variants of the same work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from ascend_core.errors import ConfigError

__all__ = ["Case", "Variant"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do a case's work.

    Attributes:
        step: Does the work once; this is what is timed. It must leave things as it found them
            (drop gradients, for one), since it runs many times.
        measure_bytes: Measures the bytes that belong to this variant, e.g. with
            `ascend_core.testing.held_bytes`; runs once, after the timing.
    """

    step: Callable[[], object]
    measure_bytes: Callable[[], int] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work and the ways to do it.

    Attributes:
        name: Unique within its benchmark, e.g. `"gelu MLP 512/2048"`.
        setup: Builds the variants by name, the baseline among them. Called when the case's turn
            has come, so that only one case's tensors are there at a time.
        baseline: Name of the variant that the others are compared with.
        rounds: How often each variant runs; quick runs cap it.
        warmup: How often each variant runs before, untimed.
        bytes_are: What the bytes mean.
        around: Makes a context that is open while the case is set up and runs.
    """

    name: str
    setup: Callable[[], Mapping[str, Variant]]
    baseline: str = "plain"
    rounds: int = 25
    warmup: int = 2
    bytes_are: str = "held between forward and backward"
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def build(self) -> dict[str, Variant]:
        """Build the variants, the baseline first.

        Raises:
            ConfigError: When the baseline is not among them.
        """
        variants = dict(self.setup())
        if self.baseline not in variants:
            raise ConfigError(
                f"the case {self.name!r} has no variant called {self.baseline!r}.",
                why=f"that is its baseline; it has {', '.join(variants) or 'none'}.",
                instead="name one of them as the baseline.",
            )
        return {self.baseline: variants.pop(self.baseline), **variants}
