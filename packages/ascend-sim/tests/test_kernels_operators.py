"""torch's own samples of its operators: the device gives the CPU's bits."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

# torch's samples import expecttest, for a base class of torch's tests alone.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

SAMPLES = 2  # of each operator

# What is not compared, and why.
DRAWS = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
    *("nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "uniform"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.rrelu", "pca_lowrank", "rand_like", "randint", "randint_like", "randn"),
    *("nn.functional.multi_head_attention_forward", "randn_like", "svd_lowrank"),
    "nn.functional.scaled_dot_product_attention",  # drops; compared in test_fused_attention
}
UNINITIALISED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
}
# torch_npu itself refuses: no memory formats but the contiguous one, sections on the host only.
REFUSED_BY_TORCH_NPU = {
    *("bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "double", "float"),
    *("half", "int", "long", "short", "tensor_split"),
}
# A composite that cuts its work by what it knows of the CPU.
CUT_BY_DEVICE = {"nn.functional.linear_cross_entropy"}
SKIPPED = DRAWS | UNINITIALISED | REFUSED_BY_TORCH_NPU | CUT_BY_DEVICE


def is_compared(op: Any) -> bool:
    other_layouts = "sparse" in op.name or op.name.startswith(("jiterator", "masked."))
    larger_storage = op.variant_test_name == "partial_views"  # samples lose it on their way
    return not other_layouts and not larger_storage and op.name not in SKIPPED


COMPARED = [op for op in op_db if is_compared(op)]


def on(device: str, value: Any) -> Any:
    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().to(device).requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, move, value)


def call(op: Any, sample: Any, device: str) -> list[Any]:
    kwargs = on(device, sample.kwargs)
    if "device" in kwargs:
        kwargs["device"] = device
    outputs, _ = tree_flatten(op(on(device, sample.input), *on(device, sample.args), **kwargs))
    return outputs


def same(device: torch.Tensor, host: torch.Tensor) -> bool:
    """Compare bits, with any NaN equal to any other."""
    mine = device.detach().cpu()
    if mine.dtype != host.dtype or mine.shape != host.shape:
        return False
    equal = mine.eq(host.detach()) | (mine.ne(mine) & host.detach().ne(host.detach()))
    return bool(equal.all())


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    grad = op.supports_autograd and dtype.is_floating_point
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.schedules("lazy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", COMPARED, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_an_operator_gives_the_bits_of_the_cpu(op: Any, dtype: torch.dtype) -> None:
    if dtype not in op.supported_dtypes("cpu"):
        return
    for sample in samples_of(op, dtype):
        expected = call(op, sample, "cpu")
        try:
            outputs = call(op, sample, "npu")
        except NotImplementedError as error:
            assert "has no kernel for the NPU in torch_npu" in str(error)  # strict
            return
        torch.npu.synchronize()  # a sample of `to` copies to the CPU without waiting
        for mine, host in zip(outputs, expected, strict=True):
            assert not isinstance(host, torch.Tensor) or same(mine, host)
