"""SwiGLU, RMSNorm and rotary embedding by torch_npu's operators, on the simulated NPU.

The simulated operators compute in FP32 with torch's own functions for the CPU, and round once. So a
forward pass is equal to the reference there to the bit, and so is a gradient that the reference's
autograd adds up in the same order.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_ops
import ascend_sim
from ascend_core.errors import ConfigError
from ascend_ops import _backends, reference

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Values up to 5, and sums of up to 431 of them. FP32: autograd multiplies and adds the reference's
# gradient in another order, some units in the last place. BF16 and FP16: that may round to the
# neighbour, and the largest gradients of a weight, above 32, are 0.25 and 0.03 apart.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    grad: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The result and the gradients on the device and by the reference on the CPU."""
    found = []
    for run, device in ((function, "npu"), (formula, "cpu")):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
        result = run(*leaves)
        arriving = torch.ones((), dtype=result.dtype) if grad is None else grad
        arriving = arriving.to(device).expand(result.shape)
        grads = torch.autograd.grad(result, leaves, arriving)
        assert all(one.is_contiguous() for one in (result, *grads) if device == "npu")
        found.append([one.detach().cpu() for one in (result, *grads)])
    return found[0], found[1]


def equal(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(ours, expected, strict=True)
    )


def close(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        bound = TOLERANCE[one.dtype]
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def falls_to_eager(function: str, match: str, *args: Any, **options: Any) -> Any:
    """Assert that a call is computed by torch's operators and says so once; return the result."""
    _backends._say.cache_clear()
    with pytest.warns(UserWarning, match=match):
        result = getattr(ascend_ops, function)(*args, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(ascend_ops, function)(*args, **options)
        assert ascend_ops.backend_of(function, *args, **options) == "eager"
    with pytest.raises(ConfigError, match=match):
        getattr(ascend_ops, function)(*args, **options, backend="npu")
    return result


# SwiGLU ------------------------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize(
    "options", [{}, {"limit": 0.5}, {"bias": True}, {"bias": True, "limit": 0.5}], ids=str
)
def test_swiglu_is_the_reference(dtype: torch.dtype, options: dict[str, Any]) -> None:
    tensors = [random(3, 5, 42, dtype=dtype)]
    limit = options.get("limit")
    if options.get("bias"):
        tensors.append(random(42, dtype=dtype, seed=1))
    # The sum with a bias is rounded to the dtype of x, as that of any layer is.
    rounded = dict(zip(("x", "bias"), tensors, strict=False))

    def ours(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ascend_ops.swiglu(x, bias=bias, limit=limit)

    def formula(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.swiglu(x if bias is None else x + bias, limit=limit)

    mine, expected = both(ours, formula, list(rounded.values()), random(3, 5, 21, seed=2).to(dtype))
    if limit is None:
        assert equal(mine[:2], expected[:2])
    # Of the bias, rows are added in another order. And the reference's clamped halves lie apart,
    # ours side by side, where torch takes vectors of other elements: a unit in the last place.
    close(mine, expected)


@pytest.mark.parametrize(
    ("shape", "dim"), [((1, 2), -1), ((6, 42, 3, 86), 0), ((2, 4, 3), 1), ((2,) * 8, -1), ((2,), 0)]
)
def test_swiglu_of_odd_shapes(shape: tuple[int, ...], dim: int) -> None:
    mine, expected = both(
        lambda x: ascend_ops.swiglu(x, dim), lambda x: reference.swiglu(x, dim), [random(*shape)]
    )
    assert equal(mine, expected)


def test_swiglu_of_strided_and_of_no_rows() -> None:
    x = random(4, 6, 8)
    views = [x.transpose(0, 1), x[..., ::2], x[:, 1:3], x[:0]]
    for view in views:
        device = x.npu().as_strided(view.shape, view.stride(), view.storage_offset())
        assert torch.equal(ascend_ops.swiglu(device).cpu(), reference.swiglu(view))
    empty = torch.empty(0, 8, device="npu", requires_grad=True)
    ascend_ops.swiglu(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 8)


def test_swiglu_of_extreme_values() -> None:  # SG-08, SG-06
    gate = torch.tensor([-torch.inf, -200.0, -90.0, 0.0, 90.0, torch.inf, torch.nan])
    x = torch.cat((gate, torch.ones(7)))
    for limit in (None, 7.0):
        mine, expected = both(
            lambda x, limit=limit: ascend_ops.swiglu(x, limit=limit),
            lambda x, limit=limit: reference.swiglu(x, limit=limit),
            [x],
        )
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_swiglu_calls_the_operators_and_saves_its_input_alone(
    called: Any, saved_bytes: Any
) -> None:
    x = random(16, 64, dtype=torch.bfloat16).npu().requires_grad_()

    def step() -> None:
        ascend_ops.swiglu(x).sum().backward()

    assert called(step) == ["swiglu", "swiglu_backward"]
    assert ascend_ops.backend_of("swiglu", x) == "npu"
    assert saved_bytes(lambda: ascend_ops.swiglu(x)) == 16 * 64 * 2
    before = x.detach().clone()
    step()
    assert torch.equal(x.detach(), before)


def test_what_swiglu_leaves_to_torchs_operators() -> None:
    x = random(4, 8).npu()
    gate, up = x.chunk(2, -1)
    paired = falls_to_eager("swiglu_pair", "takes gate and up in one tensor", gate, up)
    torch.testing.assert_close(paired, ascend_ops.swiglu(x), rtol=1e-6, atol=1e-6)
    falls_to_eager("swiglu", "x has 9 dimensions", x[(None,) * 7])


# RMSNorm -----------------------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_is_the_reference(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, unit_offset: bool
) -> None:
    tensors = [random(3, 5, 43, dtype=dtype)]
    if weight_dtype is not None:
        tensors.append(random(43, dtype=weight_dtype, seed=1))

    def ours(*tensors: Tensor) -> Tensor:
        return ascend_ops.rms_norm(*tensors, eps=1e-5, unit_offset=unit_offset)

    def formula(*tensors: Tensor) -> Tensor:
        return reference.rms_norm(*tensors, eps=1e-5, unit_offset=unit_offset)

    mine, expected = both(ours, formula, tensors, random(3, 5, 43, seed=2).to(dtype))
    assert equal(mine[:1], expected[:1])
    close(mine[1:], expected[1:])


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (6, 42, 3, 43), (2,) * 8 + (3,), (0, 8)])
def test_rms_norm_of_odd_shapes(shape: tuple[int, ...]) -> None:
    weight = random(shape[-1], seed=1)
    mine, expected = both(ascend_ops.rms_norm, reference.rms_norm, [random(*shape), weight])
    assert equal(mine[:1], expected[:1])
    close(mine[1:], expected[1:])


def test_rms_norm_of_strided_and_extreme_values() -> None:  # RN-02, RN-10
    x = random(4, 6, 8)
    for view in (x.transpose(0, 1), x[..., ::2], x[:, 1:3]):
        device = x.npu().as_strided(view.shape, view.stride(), view.storage_offset())
        assert torch.equal(ascend_ops.rms_norm(device).cpu(), reference.rms_norm(view))
    rows = torch.tensor([0.0, 300.0, 6e4], dtype=torch.float16)[:, None].expand(3, 64)
    found = ascend_ops.rms_norm(rows.npu()).cpu()
    assert torch.equal(found, torch.tensor([0.0, 1, 1]).half()[:, None].expand(3, 64))


def test_one_is_added_to_the_weight_in_fp32() -> None:  # RN-04
    x = random(4, 64, dtype=torch.bfloat16)
    weight = torch.full((64,), 2.0**-8, dtype=torch.bfloat16)
    found = ascend_ops.rms_norm(x.npu(), weight.npu(), unit_offset=True).cpu()
    assert torch.equal(found, reference.rms_norm(x, weight, unit_offset=True))
    assert not torch.equal(found, reference.rms_norm(x, 1 + weight))


def test_rms_norm_calls_the_operators_and_saves_its_input_alone(
    called: Any, saved_bytes: Any
) -> None:
    x = random(16, 64, dtype=torch.bfloat16).npu().requires_grad_()
    weight = random(64, dtype=torch.bfloat16).npu().requires_grad_()
    assert called(lambda: ascend_ops.rms_norm(x, weight).sum().backward()) == [
        "rms_norm",
        "rms_norm",  # again, for the factor of each row
        "rms_norm_backward",
    ]
    assert ascend_ops.backend_of("rms_norm", x, weight) == "npu"
    assert saved_bytes(lambda: ascend_ops.rms_norm(x, weight)) == (16 * 64 + 64) * 2


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = random(4, 8).npu().requires_grad_(), random(8).npu()
    ascend_ops.rms_norm(x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None


def test_what_rms_norm_leaves_to_torchs_operators() -> None:
    with ascend_sim.current().strict(False):  # the NPU itself leaves much of FP64 to the host
        x = random(4, 8).npu()
        falls_to_eager("rms_norm", "weight is torch.float64", x, x[0].double())


# Rotary embedding --------------------------------------------------------------------------------


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    phase = 9 * random(*shape, seed=3)
    return phase.cos().to(dtype), phase.sin().to(dtype)


def compare_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    mine, expected = both(
        lambda x: ascend_ops.rotary(x, cos.to(x.device), sin.to(x.device), interleaved=interleaved),
        lambda x: reference.rotary(x, cos, sin, interleaved=interleaved),
        [x],
        random(*x.shape, seed=4).to(x.dtype),
    )
    close(mine, expected)  # a product and a sum: fused or not, a unit in the last place


@by_dtype
@pytest.mark.parametrize("angle_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_rotary_is_the_reference(
    dtype: torch.dtype, angle_dtype: torch.dtype, interleaved: bool
) -> None:
    cos, sin = angles(5, 4, dtype=angle_dtype)
    compare_rotary(random(2, 3, 5, 8, dtype=dtype), cos, sin, interleaved=interleaved)


LAYOUTS = {
    "BNSD": [(2, 3, 5), (1, 1, 5), (2, 1, 5), (2, 3, 5)],
    "BSND": [(2, 5, 3), (1, 5, 1), (2, 5, 1), (2, 5, 3)],
    "SBND": [(5, 2, 3), (5, 1, 1), (5, 2, 1), (5, 2, 3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_of_rotary(layout: str, called: Any) -> None:
    x_shape, *shapes = LAYOUTS[layout]
    x = random(*x_shape, 8)
    for shape in shapes:
        cos, sin = angles(*shape, 4)
        compare_rotary(x, cos, sin, interleaved=False)
        device = x.npu(), cos.npu(), sin.npu()
        assert called(lambda device=device: ascend_ops.rotary(*device)) == ["rotary_mul"]
    cos, sin = angles(*shapes[0], 4)
    compare_rotary(x, cos, sin, interleaved=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_rotary_of_a_part_and_of_fewer_dimensions(interleaved: bool) -> None:
    for pairs in (0, 1, 3):
        cos, sin = angles(5, pairs)
        compare_rotary(random(2, 3, 5, 7), cos, sin, interleaved=interleaved)
    compare_rotary(random(5, 3, 8), *angles(5, 1, 4), interleaved=interleaved)
    compare_rotary(random(5, 8), *angles(5, 4), interleaved=interleaved)
    compare_rotary(random(0, 3, 5, 8), *angles(5, 4), interleaved=interleaved)
    packed = random(2, 5, 3, 24)  # RO-02
    cos, sin = (one.npu() for one in angles(5, 1, 4))
    for part, whole in zip(packed.npu().chunk(3, -1), packed.chunk(3, -1), strict=True):
        found = ascend_ops.rotary(part, cos, sin, interleaved=interleaved).cpu()
        expected = reference.rotary(whole, cos.cpu(), sin.cpu(), interleaved=interleaved)
        close([found], [expected])


def test_rotary_calls_the_operator_and_saves_the_angles_alone(
    called: Any, saved_bytes: Any
) -> None:
    x = random(2, 3, 5, 8, dtype=torch.bfloat16).npu().requires_grad_()
    cos, sin = (one.npu() for one in angles(5, 4, dtype=torch.bfloat16))

    def step() -> None:
        ascend_ops.rotary(x, cos, sin).sum().backward()

    assert called(step) == ["rotary_mul", "rotary_mul"]
    assert saved_bytes(lambda: ascend_ops.rotary(x, cos, sin)) == 2 * 5 * 4 * 2


@pytest.mark.parametrize(
    ("x_shape", "angle_shape", "interleaved", "match"),
    [
        ((1, 2, 3, 5, 8), (5, 4), False, "x has 5 dimensions"),
        ((1, 1, 2, 896), (2, 448), False, "896 elements of a head are turned"),
        ((2, 3, 5, 8), (1, 4), False, "takes angles that differ by position"),
        ((2, 3, 5, 8), (1, 3, 5, 4), False, "takes angles that differ by position"),
        ((2, 3, 5, 8), (2, 1, 5, 4), True, "takes angles that differ by position"),
        ((1000, 2, 2, 4), (1, 1, 2, 2), False, "batch and heads below 1000"),
        ((40, 25, 2, 4), (1, 1, 2, 2), True, "batch and heads below 1000"),
    ],
)
def test_what_rotary_leaves_to_torchs_operators(
    x_shape: tuple[int, ...], angle_shape: tuple[int, ...], interleaved: bool, match: str
) -> None:
    x, (cos, sin) = random(*x_shape), angles(*angle_shape)
    device = x.npu(), cos.npu(), sin.npu()
    found = falls_to_eager("rotary", match, *device, interleaved=interleaved)
    close([found.cpu()], [reference.rotary(x, cos, sin, interleaved=interleaved)])


@pytest.mark.parametrize(
    ("shape", "interleaved"),
    [((999, 2, 2, 4), False), ((37, 27, 2, 4), True), ((1, 1, 2, 894), False)],
)
def test_what_is_just_within_the_limits_is_taken(
    shape: tuple[int, ...], interleaved: bool, called: Any
) -> None:
    device = [one.npu() for one in (random(*shape), *angles(2, shape[-1] // 2))]
    run = functools.partial(ascend_ops.rotary, *device, interleaved=interleaved)
    assert called(run) == ["rotary_mul"]


# All ---------------------------------------------------------------------------------------------


def test_without_gradients_and_under_autocast(called: Any) -> None:
    x = random(2, 5, 3, 8).npu().requires_grad_()
    cos, sin = (one.npu() for one in angles(5, 1, 4))
    calls = {
        "swiglu": lambda: ascend_ops.swiglu(x),
        "rms_norm": lambda: ascend_ops.rms_norm(x, torch.ones(8, device="npu")),
        "rotary_mul": lambda: ascend_ops.rotary(x, cos, sin),
    }
    for name, call in calls.items():
        expected = call().detach()
        with torch.no_grad():
            assert not call().requires_grad
            assert called(call) == [name]
        with torch.autocast("npu", torch.bfloat16):  # as the dtype of what is given says
            assert torch.equal(call().detach(), expected)


def test_fp64_is_left_to_torchs_operators_without_a_word() -> None:
    with ascend_sim.current().strict(False):
        x = random(5, 8).double().npu()
        angles64 = [one.double().npu() for one in angles(5, 4)]
        for name, args in (("swiglu", [x]), ("rms_norm", [x]), ("rotary", [x, *angles64])):
            assert getattr(ascend_ops, name)(*args).dtype == torch.float64
            assert ascend_ops.backend_of(name, *args) == "eager"
            with pytest.raises(ConfigError, match=r"x is torch\.float64"):
                getattr(ascend_ops, name)(*args, backend="npu")


def test_tensors_of_the_cpu_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="x is on cpu, which is no NPU"):
        ascend_ops.swiglu(random(4, 8), backend="npu")
