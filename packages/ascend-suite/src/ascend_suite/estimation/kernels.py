"""How devices differ in what their operators save and take. Imports no torch."""

from __future__ import annotations

import dataclasses

from ascend_suite.estimation.hardware import DeviceKind

__all__ = ["KERNELS", "Kernels"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """What PyTorch's operators on one kind of device save and take.

    Read off the tensors that autograd saved and the allocator's figures, with torch 2.13 and with
    torch_npu over a simulated NPU; of cuda, off PyTorch's source alone.

    Attributes:
        rms_in_one: Whether RMSNorm is one operator. Elsewhere it is several, in FP32, which save
            the input and the normalised value.
        attention_copies: Whether fused attention saves its result beside the contiguous copy that
            the projection is given.
        query_bytes: What fused attention saves for each query of each head.
        mask_bytes: The causal mask that fused attention makes, of another one, and saves, in each
            layer.
        dropout_in_one: Whether dropout saves a mask of one byte for each element. Elsewhere it
            saves a factor for each, in the dtype of its input.
        half_in_fp32: Whether a matrix product of two-byte numbers has an FP32 copy of its result
            while it runs, as on a CPU without such instructions.
        foreach: Whether torch's optimizers step all parameters at once by default, with temporaries
            of all of them.
        unit: The allocator's grid in bytes.
        padding: What the allocator adds to each tensor before it rounds up.
    """

    rms_in_one: bool
    attention_copies: bool
    query_bytes: int
    mask_bytes: int
    dropout_in_one: bool
    half_in_fp32: bool
    foreach: bool
    unit: int
    padding: int = 0

    def block(self, size: int) -> int:
        """What the allocator takes for a tensor of `size` bytes."""
        return -(-(size + self.padding) // self.unit) * self.unit if size else 0


KERNELS: dict[DeviceKind, Kernels] = {
    "cpu": Kernels(
        rms_in_one=False,
        attention_copies=False,
        query_bytes=4,
        mask_bytes=0,
        dropout_in_one=False,
        half_in_fp32=True,
        foreach=False,
        unit=1,
    ),
    "cuda": Kernels(
        rms_in_one=True,
        attention_copies=False,
        query_bytes=4,
        mask_bytes=0,
        dropout_in_one=True,
        half_in_fp32=False,
        foreach=True,
        unit=512,
    ),
    "npu": Kernels(
        rms_in_one=False,
        attention_copies=True,
        query_bytes=2 * 8 * 4,
        mask_bytes=2048 * 2048,
        dropout_in_one=True,
        half_in_fp32=False,
        foreach=True,
        unit=512,
        padding=32,
    ),
}
