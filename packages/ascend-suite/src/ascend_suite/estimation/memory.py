"""The bytes of one device over a step. Imports no torch.

[Note: where a step can be highest]
Activations pile up in forward and fall in backward, while gradients rise; the optimizer's
temporaries come when activations are gone. So memory is highest at one of six points: when the
last layer runs, or the loss has been computed; in the loss's backward; in that of one of the
layers; in that of the embedding; or in the optimizer's step. Each is added up, and the peak is the
largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate

from ascend_suite.estimation.blueprint import Blueprint
from ascend_suite.estimation.layer import LayerBytes
from ascend_suite.estimation.optimizer import OptimizerBytes, optimizer_bytes
from ascend_suite.estimation.pipeline import chunks_in_flight
from ascend_suite.estimation.result import Moment
from ascend_suite.estimation.tape import Peak, Tape, Value, by_origin, walk_backward
from ascend_suite.estimation.treatment import Treatment, treatments
from ascend_suite.plan import Plan
from ascend_suite.shape import ITEM_BYTES

__all__ = ["StageMemory"]


class StageMemory:
    """The memory of a device in one pipeline stage.

    Args:
        blueprint: The shape, and the kind of device.
        plan: The features that are on.
        stage: The pipeline stage, from 0.
    """

    def __init__(self, blueprint: Blueprint, plan: Plan, stage: int) -> None:
        shape = self.shape = blueprint.shape
        self.plan, self.stage = plan, stage
        self.kernels = blueprint.kernels
        self.sizes = blueprint.sizes(stage)
        self.accumulates = shape.micro_batches > 1 or self._in_buckets
        self._blueprint = blueprint
        self._fused = _fused_operators(plan)
        self._embedding, self.tape, self._head = blueprint.tapes(self._fused)
        count, device = shape.layers // shape.pp, blueprint.device
        self.treatments = treatments(plan, count, device, pipeline=shape.pp > 1)
        self.layers = [self._profile(treatment) for treatment in self.treatments]
        shard = _shard(self.sizes, shape.dp) if "shard-optimizer" in plan.features else self.sizes
        self.optimizer: OptimizerBytes = optimizer_bytes(
            shape, plan, self.kernels, shard, on_host=device != "cpu"
        )

    def moments(self) -> tuple[Moment, ...]:
        """The six points, as far as this stage has them, in the order of the step."""
        return tuple(self._moments())

    @property
    def moved(self) -> int:
        """Activations on the host, at most."""
        forwards = self.shape.vpp
        return sum(layer.moved for layer in self.layers) * self._in_flight // forwards

    @cached_property
    def fixed(self) -> dict[str, int]:
        """What is there all the time, by kind."""
        tokens = self.shape.micro_batch * self.shape.seq // self.shape.cp
        inputs = 2 * self.shape.micro_batches * self.kernels.block(8 * tokens)
        gradients = self._sum(self._gradient_item) if self.accumulates else 0
        reduced = gradients // self.shape.dp if "shard-optimizer" in self.plan.features else 0
        return {
            "weights": self._sum(self.shape.item_bytes),
            "gradients": gradients,
            "reduced gradients": reduced,
            "DDP buckets": self._ddp_buckets,
            **self.optimizer.kept,
            "inputs": inputs,
        }

    # What follows adds up one point each.

    def _moments(self) -> Iterator[Moment]:
        last = self.stage == self.shape.pp - 1
        head = self._head
        held = self._held(len(self.layers))
        forward = self.layers[-1].forward
        yield self._moment("layer forward", self._held(len(self.layers) - 1), forward)
        if last:
            saved = self._left_in(head)
            point = Peak(by_origin(saved.values()), self._beside_loss(head, saved), 0)
            yield self._moment("loss", held, point)
            walked = walk_backward(head, saved, accumulates=self.accumulates)
            yield self._moment("loss backward", held, walked)
        done = 0 if self.accumulates or not last else head.parameters
        yield self._highest_layer(done)
        if self.stage == 0:
            embedding = self._embedding
            walked = walk_backward(embedding, embedding.saved(), accumulates=self.accumulates)
            total = self._sum(self._gradient_item) - (embedding.parameters)
            before = 0 if self.accumulates else total
            yield self._moment("embedding backward", self._others(), walked, before)
        everything = 0 if self.accumulates else self._sum(self._gradient_item)
        yield self._moment("optimizer step", {}, Peak({}, self.optimizer.working, everything))

    def _highest_layer(self, done: int) -> Moment:
        """The worst of all layers' backwards: what those before it hold, and its own peak."""
        each = 0 if self.accumulates else self.tape.parameters
        before = list(accumulate((layer.held_bytes for layer in self.layers), initial=0))
        count = len(self.layers)
        highest, number = 0, 0
        for index in reversed(range(count)):
            peak = self._in_backward(index).peak
            total = before[index] + peak.total + each * (count - index - 1)
            if total > highest:
                highest, number = total, index
        complete = done + each * (count - number - 1)
        peak = self._in_backward(number).peak
        return self._moment("layer backward", self._held(number), peak, complete)

    def _in_backward(self, number: int) -> LayerBytes:
        return self._profile(self.treatments[number], self._ahead(number))

    def _beside_loss(self, head: Tape, saved: Mapping[str, Value]) -> int:
        """Logits; and beside them what the loss saves, or what their own product is made of."""
        values = head.values
        logits, loss = values["logits"].bytes, values["log_softmax"].bytes
        copies = 2 * logits if self.kernels.half_in_fp32 and self.shape.item_bytes == 2 else 0
        given = sum(values[name].bytes for name in ("x", "n") if name not in saved)
        return logits + max(0, copies + given - loss)

    def _left_in(self, head: Tape) -> dict[str, Value]:
        """What the head holds; recompute-norm takes its norm where it takes those of all layers."""
        config = self.plan.features.get("recompute-norm")
        everywhere = config is not None and config.layers is None and config.num_layers is None
        features = {"recompute-norm"} if everywhere else set[str]()
        return {k: v for k, v in head.saved().items() if v.rebuilt_by not in features}

    def _held(self, layers: int) -> Counter[str]:
        """Activations of the embedding and the first layers, and of other micro-batches."""
        held = self._others()
        for layer, times in Counter(self.treatments[:layers]).items():
            held.update({k: times * n for k, n in self._profile(layer).held.items()})
        if self.stage == 0:
            held.update(by_origin(self._embedding.saved().values()))
        return held

    def _others(self) -> Counter[str]:
        """What forwards beside the one that is looked at hold."""
        others = self._in_flight - self.shape.vpp
        chunk = Counter[str]()
        for layer in self.layers if others > 0 else []:
            chunk.update(layer.held)
        return Counter({k: n * others // self.shape.vpp for k, n in chunk.items()})

    def _ahead(self, number: int) -> int:
        """What is fetched while a layer's backward runs, for the layers before it."""
        config = self.plan.features.get("swap-attention")
        if config is None:
            return 0
        before = self.layers[max(0, number - config.prefetch) : number]
        return sum(layer.moved for layer in before)

    def _profile(self, treatment: Treatment, ahead: int = 0) -> LayerBytes:
        return self._blueprint.layer(
            self._fused, treatment, ahead=ahead, accumulates=self.accumulates
        )

    def _moment(
        self, name: str, held: Mapping[str, int], point: Peak, gradients: int = 0
    ) -> Moment:
        kinds: Counter[str] = Counter(self.fixed)
        for origin, number in (*held.items(), *point.saved.items()):
            kinds[f"activations: {origin}"] += number
        kinds["gradients"] += gradients + point.gradients
        kinds[f"working: {name}"] += point.working
        return Moment(name, kinds)

    @property
    def _in_flight(self) -> int:
        return max(chunks_in_flight(self.shape, self.stage), self.shape.vpp)

    @property
    def _in_buckets(self) -> bool:
        return "reduce-gradients" in self.plan.features

    @property
    def _gradient_item(self) -> int:
        config = self.plan.features.get("reduce-gradients")
        chosen = None if config is None else config.reduce_dtype
        return self.shape.item_bytes if chosen is None else ITEM_BYTES[chosen]

    @property
    def _ddp_buckets(self) -> int:
        """DistributedDataParallel, as it comes, has gradients and buckets."""
        plain = self.shape.dp > 1 and not self._in_buckets
        return self._sum(self.shape.item_bytes) if plain else 0

    def _sum(self, item: int) -> int:
        counted = Counter(self.sizes)
        return sum(times * self.kernels.block(size * item) for size, times in counted.items())


def _fused_operators(plan: Plan) -> frozenset[str]:
    """The operators that fused-ops replaces."""
    config = plan.features.get("fused-ops")
    return frozenset() if config is None else frozenset(config.operators)


def _shard(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """One rank's part of each parameter (ZeRO stage 1, Rajbhandari et al. 2020)."""
    return tuple(-(-size // ranks) for size in sizes)
