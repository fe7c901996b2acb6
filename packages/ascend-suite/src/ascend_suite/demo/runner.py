"""Runs the demo: the same training plain and with each feature, measured three ways.

[Note: three parts, one training alive at a time]
Measuring memory slows a step down, and a second model beside the first would be in its figure. So
each run is trained from its seed in three separate parts, and only one training exists at a time:

    memory    a few steps, measured by `measure_peak`, the model's construction included
    training  all steps, unmeasured: losses, last gradients and final weights are compared
    time      rounds of a few steps, in which the runs take turns, because machines have slow
              minutes; the ratio to the plain run is taken within a round, where both met the same
              machine, and every other round goes backwards, so that no run always goes first

What needs BF16 weights is compared with BF16 weights that have FP32 masters beside, over fewer
steps: a CPU is slow at them. What needs ranks gets a group of one: it is compared with the plain
run, and shows what it costs, since there is nothing to average or to divide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ascend_core.device import Backend, backend_of, current_backend, device_of
from ascend_core.errors import NothingToDoError, UnavailableError
from ascend_core.feature import Feature
from ascend_core.memory import MemoryTimeline, measure_peak
from ascend_core.rng import RngState
from ascend_suite._order import in_order
from ascend_suite.demo.best import best_combination
from ascend_suite.demo.choice import choose_features
from ascend_suite.demo.corpus import Batch, corpus, draw_batches
from ascend_suite.demo.result import BEST, PLAIN, DemoResult, Run, Status
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.training import Outcome, Training
from ascend_suite.demo.variants import (
    Variant,
    named,
    of_plain,
    steps_for_best,
    variants_of,
)

__all__ = ["OnSteps", "run_demo"]

OnSteps = Callable[[str, str, int], None]
"""Called with a run's name, the part it is in, and the number of steps that have just been done."""


def run_demo(
    settings: DemoSettings | None = None,
    *,
    features: Mapping[str, Feature] | None = None,
    device: str | None = None,
    on_steps: OnSteps | None = None,
) -> DemoResult:
    """Train plain and once per feature, and compare.

    The random state and the determinism setting of PyTorch are those of before afterwards.

    Args:
        settings: What is trained and measured; the defaults when left out.
        features: The features to show, by name; see `choose_features`.
        device: Where to train, such as `"cpu"` or `"cuda:1"`; the best device that is present
            (npu, cuda, cpu) when left out.
        on_steps: Told about progress; all runs report `planned_steps` steps together.

    Returns:
        The runs, plain first, and the best combination behind the features that it is of. A run
        that ran out of memory, or whose feature finds nothing to do in the model or lacks something
        on this machine, is among them with that status.

    Raises:
        AscendError: When the device or a feature cannot be had or turned on.
    """
    settings = settings or DemoSettings()
    chosen = choose_features() if features is None else features
    place = current_backend().device() if device is None else device_of(device)
    batches = _draw(settings, place)
    lab = _Lab(settings, backend_of(place), place, batches, on_steps or (lambda *_: None))
    variants = variants_of(settings, chosen)
    with _reproducible(place):
        for variant in variants:
            lab.attempt(variant, lab.measure_memory)
        variants = lab.with_best(variants, chosen)
        for variant in variants:
            lab.attempt(variant, lab.train)
        for number in range(settings.time_rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                if number < variant.settings.time_rounds:
                    lab.attempt(variant, lab.time_round)
    return DemoResult(
        settings=settings,
        device=str(place),
        torch_version=torch.__version__,
        parameters=max(variant.parameters for variant in variants),
        runs=tuple(_as_run(variant, named(variants, variant.against)) for variant in variants),
        timelines=_timelines(variants),
    )


class _Lab:
    """Where the parts of a run are carried out; see [Note: three parts, one training at a time]."""

    def __init__(
        self,
        settings: DemoSettings,
        backend: Backend,
        device: torch.device,
        batches: Sequence[Batch],
        on_steps: OnSteps,
    ) -> None:
        self.settings = settings
        self.backend = backend
        self.device = device
        self.batches = batches
        self.on_steps = on_steps

    def attempt(self, variant: Variant, part: Callable[[Variant], None]) -> None:
        """Carry out one part of a run, unless an earlier one could not be.

        It begins without anything that an earlier part left, be it that one's error or the blocks
        that the device's allocator keeps.
        """
        if variant.status is not Status.FINISHED:
            return
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        try:
            part(variant)
        except Exception as error:
            status = _status_of(error)
            if status is None:
                raise
            variant.status, variant.reason = status, str(error)
            self._advance(variant, status.value, variant.steps_left)

    def with_best(
        self, variants: Sequence[Variant], features: Mapping[str, Feature]
    ) -> list[Variant]:
        """The runs, with that of the best combination behind the features that it is of."""
        candidates = of_plain(features)
        ran = (Status.FINISHED, Status.OUT_OF_MEMORY)
        peaks = {v.name: _peak_of(v) for v in variants if v.status in ran}
        alone = {name: peak for name, peak in peaks.items() if name in candidates}
        tried: list[Variant] = []

        def measure(together: Sequence[Feature]) -> int | None:
            ordered = tuple(in_order(together))
            steps = self.settings.memory_steps
            tried.append(Variant(BEST, self.settings, ordered, steps_left=steps))
            self.attempt(tried[-1], self.measure_memory)
            return _peak_of(tried[-1])

        layers = self.settings.layers
        chosen = best_combination(alone, candidates, peaks.get(PLAIN), layers, measure)
        best = [one for one in tried if set(one.features) == set(chosen)]
        left = steps_for_best(self.settings, candidates) - len(tried) * self.settings.memory_steps
        for variant in best:
            variant.steps_left = self.settings.steps_per_run - self.settings.memory_steps
            left -= variant.steps_left
        if left:  # of combinations that were not tried
            self.on_steps(BEST, "choice", left)
        place = 1 + len(candidates)
        return [*variants[:place], *best, *variants[place:]]

    def measure_memory(self, variant: Variant) -> None:
        """Measure the peak of the first steps, from before the model exists."""
        with measure_peak(self.device) as variant.memory, self._training(variant) as training:
            for batch in self.batches[: variant.settings.memory_steps]:
                self._step(training, batch, variant, "memory")

    def train(self, variant: Variant) -> None:
        """Train all steps, and keep what they came to."""
        with self._training(variant) as training:
            losses = [
                self._step(training, batch, variant, "training")
                for batch in self.batches[: variant.settings.steps]
            ]
            variant.outcome = Outcome.of(losses, training.model)
            variant.report = training.report()
            variant.parameters = sum(p.numel() for p in training.model.parameters())

    def time_round(self, variant: Variant) -> None:
        """Time a few steps, after one that makes the optimizer's state and warms up."""
        seconds = []
        with self._training(variant) as training:
            self._step(training, self.batches[0], variant, "time")
            for batch in self.batches[1 : 1 + variant.settings.timed_steps]:
                self.backend.synchronize(self.device)
                begin = time.perf_counter()
                training.step(batch)
                self.backend.synchronize(self.device)
                seconds.append(time.perf_counter() - begin)
                self._advance(variant, "time", 1)
        variant.round_seconds.append(statistics.median(seconds))

    def _training(self, variant: Variant) -> Training:
        return Training(
            variant.settings, self.device, variant.features, variant.configs, bf16=variant.bf16
        )

    def _step(self, training: Training, batch: Batch, variant: Variant, part: str) -> float:
        loss = training.step(batch)
        self._advance(variant, part, 1)
        return loss

    def _advance(self, variant: Variant, part: str, steps: int) -> None:
        variant.steps_left -= steps
        self.on_steps(variant.name, part, steps)


def _peak_of(variant: Variant) -> int | None:
    if variant.status is not Status.FINISHED or variant.memory is None:
        return None
    return variant.memory.peak_bytes


def _draw(settings: DemoSettings, device: torch.device) -> list[Batch]:
    try:
        return draw_batches(
            corpus(),
            count=settings.batches,
            batch=settings.batch,
            seq=settings.seq,
            seed=settings.seed,
            device=device,
        )
    except Exception as error:
        if _status_of(error) is not Status.OUT_OF_MEMORY:
            raise
        raise UnavailableError(
            f"{device} has no memory for the batches, let alone for a model.",
            why=str(error),
            instead="choose a smaller --batch or --seq, or a device with more memory.",
        ) from error


def _as_run(variant: Variant, plain: Variant) -> Run:
    run = Run(
        feature=variant.name,
        against=variant.against,
        features=tuple(feature.name for feature in variant.features),
        status=variant.status,
        bitwise_promised=all(feature.bitwise for feature in variant.features),
        reason=variant.reason,
        report=variant.report,
    )
    if variant.status is not Status.FINISHED:
        return run
    assert variant.memory is not None and variant.outcome is not None
    run = dataclasses.replace(
        run,
        peak_bytes=variant.memory.peak_bytes,
        step_seconds=statistics.median(variant.round_seconds),
        losses=variant.outcome.losses,
    )
    if plain.status is not Status.FINISHED:
        return run
    assert plain.memory is not None and plain.outcome is not None
    ours, theirs = variant.outcome, plain.outcome
    if any(feature.wraps for feature in variant.features):  # whole gradients are nowhere
        ours, theirs = (dataclasses.replace(one, gradients={}) for one in (ours, theirs))
    difference = ours.difference_from(theirs)
    ratios = [a / b for a, b in zip(variant.round_seconds, plain.round_seconds, strict=False)]
    return dataclasses.replace(
        run,
        saved_bytes=plain.memory.peak_bytes - variant.memory.peak_bytes,
        step_time_ratio=statistics.median(ratios),
        bitwise_equal=difference is None,
        difference=difference,
        loss_difference=variant.outcome.loss_difference_from(plain.outcome),
    )


def _timelines(variants: Sequence[Variant]) -> dict[str, MemoryTimeline]:
    """Name the timelines; that of a run that broke off for want of memory says so."""
    found = {}
    for variant in variants:
        if variant.memory is None or variant.status in (Status.NOT_AVAILABLE, Status.NOTHING_TO_DO):
            continue
        finished = variant.status is Status.FINISHED
        title = variant.name if finished else f"{variant.name}, {variant.status.value}"
        found[title] = variant.memory.timeline
    return found


def _status_of(error: Exception) -> Status | None:
    """Tell the errors that make a row of the table from those that end the demo."""
    if isinstance(error, UnavailableError):
        return Status.NOT_AVAILABLE
    if isinstance(error, NothingToDoError):
        return Status.NOTHING_TO_DO
    cpu_full = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if cpu_full or isinstance(error, torch.OutOfMemoryError):
        return Status.OUT_OF_MEMORY
    return None


@contextlib.contextmanager
def _reproducible(device: torch.device) -> Iterator[None]:
    """Let PyTorch choose deterministic kernels where it has them, and undo that at the end.

    Without filling fresh memory, as PyTorch would do by default then: it costs time, and hides
    nothing here, since every run is compared with another one.
    """
    mode = torch.get_deterministic_debug_mode()
    options: Any = torch.utils.deterministic  # a module whose attributes torch's types do not know
    fill = options.fill_uninitialized_memory
    with RngState.capture([device]).replaying():
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            options.fill_uninitialized_memory = False
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            options.fill_uninitialized_memory = fill
