"""What the plans for one shape have in common, worked out once. Imports no torch."""

from __future__ import annotations

from ascend_suite.estimation.block import TapeMaker
from ascend_suite.estimation.counts import parameters_of, stage_parameters
from ascend_suite.estimation.hardware import DeviceKind
from ascend_suite.estimation.kernels import KERNELS
from ascend_suite.estimation.layer import LayerBytes, layer_bytes
from ascend_suite.estimation.tape import Tape
from ascend_suite.estimation.treatment import Treatment
from ascend_suite.shape import ModelShape

__all__ = ["Blueprint"]


class Blueprint:
    """A shape on one kind of device: tapes, sizes, and the layers that were looked at.

    Args:
        shape: The model and its training.
        device: The kind of device.
    """

    def __init__(self, shape: ModelShape, device: DeviceKind) -> None:
        self.shape = shape
        self.device = device
        self.kernels = KERNELS[device]
        self.parameters = parameters_of(shape)
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._tapes: dict[frozenset[str], tuple[Tape, Tape, Tape]] = {}
        self._layers: dict[object, LayerBytes] = {}

    def sizes(self, stage: int) -> tuple[int, ...]:
        """Elements of each parameter of a pipeline stage."""
        if stage not in self._sizes:
            self._sizes[stage] = stage_parameters(self.shape, stage)
        return self._sizes[stage]

    def tapes(self, fused: frozenset[str]) -> tuple[Tape, Tape, Tape]:
        """The tapes of the embedding, of a block and of the head."""
        if fused not in self._tapes:
            maker = TapeMaker(self.shape, self.kernels, fused)
            self._tapes[fused] = maker.embedding(), maker.block(), maker.head()
        return self._tapes[fused]

    def layer(
        self, fused: frozenset[str], treatment: Treatment, *, ahead: int, accumulates: bool
    ) -> LayerBytes:
        """What a block holds and takes; see `layer_bytes`."""
        key = fused, treatment, ahead, accumulates
        if key not in self._layers:
            _, block, _ = self.tapes(fused)
            self._layers[key] = layer_bytes(block, treatment, ahead=ahead, accumulates=accumulates)
        return self._layers[key]
