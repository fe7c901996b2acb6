"""SwiGLU in C, held to the bits of torch's operators."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops import reference

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
SHAPES = [(1,), (3,), (0, 4), (5, 0), (2, 1, 3), (6, 42, 123, 431)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Outside its vectors, 3 in a million of torch's FP16 gradients of silu have other bits."""
    torch.manual_seed(0)


def _torchs(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _leaves(*shape: int, dtype: torch.dtype, number: int = 2) -> list[Tensor]:
    return [torch.randn(*shape).to(dtype).requires_grad_() for _ in range(number)]


def _all_patterns(dtype: torch.dtype) -> Tensor:
    """Every number that a dtype of two bytes has, in the order of their bits."""
    return torch.arange(1 << 16).to(torch.int16).view(dtype)


# As torch.equal, but NaN equals NaN.
_assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
# FP32: what torch computes outside its vectors has another last bit for 2 in 1000 numbers.
_assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)


def test_it_is_the_backend_of_a_cpu() -> None:
    for dtype in FLOATS:
        assert ascend_ops.backend_of("swiglu", torch.randn(2, 4, dtype=dtype)) == "cpu"


@pytest.mark.parametrize("dtype", HALVES)
def test_every_gate_has_torchs_bits(dtype: torch.dtype) -> None:
    gate = _all_patterns(dtype)
    for factor in (1.0, -0.7109375, 3e4):
        up = torch.full_like(gate, factor)
        _assert_equal(ascend_ops.swiglu_pair(gate, up, backend="cpu"), _torchs(gate, up))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [1.0, -0.37, 1e-5, 3e4, float("inf")])
def test_every_gates_gradient_has_torchs_bits(dtype: torch.dtype, factor: float) -> None:
    gate = _all_patterns(dtype).requires_grad_()
    up = torch.randn(1 << 16).to(dtype).requires_grad_()
    grad = torch.full_like(gate, factor).detach()
    expected = torch.autograd.grad(_torchs(gate, up), (gate, up), grad)
    ours = torch.autograd.grad(ascend_ops.swiglu_pair(gate, up, backend="cpu"), (gate, up), grad)
    _assert_equal(ours[0], expected[0])
    _assert_equal(ours[1], expected[1])


def test_fp32_has_the_bits_of_torchs_vectors() -> None:
    """Of 1 in 512 of all patterns: sizes are multiples of torch's vectors, and so they are full."""
    for start in range(-(1 << 31), 1 << 31, 1 << 28):
        patterns = torch.arange(start, start + (1 << 28), 509)[: 1 << 19]
        gate = patterns.to(torch.int32).view(torch.float32).requires_grad_()
        up = torch.randn(gate.shape).requires_grad_()
        expected, ours = _torchs(gate, up), ascend_ops.swiglu_pair(gate, up, backend="cpu")
        _assert_equal(ours, expected)
        grad = torch.randn(gate.shape)
        expected_grads = torch.autograd.grad(expected, (gate, up), grad)
        for one, other in zip(
            torch.autograd.grad(ours, (gate, up), grad), expected_grads, strict=True
        ):
            _assert_equal(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = _leaves(*shape, dtype=dtype)
    x = torch.cat((gate, up), -1).detach().requires_grad_()
    expected, ours = _torchs(gate, up), ascend_ops.swiglu(x, backend="cpu")
    grad = torch.randn(shape).to(dtype)
    expected_grads = torch.autograd.grad(expected, (gate, up), grad)
    grads = torch.autograd.grad(ours, x, grad)[0].chunk(2, -1)
    for one, other in zip((ours, *grads), (expected, *expected_grads), strict=True):
        (_assert_close if dtype == torch.float32 else _assert_equal)(one, other)


def _strided(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    x = torch.randn(4, 6, 10).to(dtype)
    yield x, 0
    yield x, 1
    yield x.transpose(0, 1), -1
    yield x.transpose(1, 2), -1
    yield x[:, 1:5], -1
    yield x[:, :, ::2][..., :4], -1
    yield x[:, ::2], -1
    yield x[:1].expand(4, 6, 10), -1
    yield x[..., :1].expand(4, 6, 10), 1


@pytest.mark.parametrize("dtype", HALVES)
def test_any_strides_and_dimensions(dtype: torch.dtype) -> None:
    """SG-09."""
    for given, dim in _strided(dtype):
        x = given.requires_grad_()
        expected, ours = _torchs(*x.chunk(2, dim)), ascend_ops.swiglu(x, dim, backend="cpu")
        assert torch.equal(ours, expected)
        for grad in (
            torch.randn(ours.shape).to(dtype),
            torch.ones((), dtype=dtype).expand(ours.shape),
            torch.randn(ours.shape[1:]).to(dtype).expand(ours.shape),
            torch.randn(ours.mT.shape).to(dtype).mT,
        ):
            of_x = torch.autograd.grad(ours, x, grad, retain_graph=True)[0]
            expected_grad = torch.autograd.grad(expected, x, grad, retain_graph=True)[0]
            assert torch.equal(of_x, expected_grad)


def test_strided_pair() -> None:
    """SG-09: views of one tensor, and one that is contiguous beside one that is not."""
    h = torch.randn(5, 7, 24).to(torch.bfloat16)
    pairs = (h.chunk(2, -1), (h[..., ::2], h[..., 1::2]), (h[0].expand(5, 7, 24), h), (h.mT, h.mT))
    for gate, up in pairs:
        assert torch.equal(ascend_ops.swiglu_pair(gate, up, backend="cpu"), _torchs(gate, up))


def test_a_number_without_dimensions() -> None:
    gate, up = torch.randn(2).to(torch.bfloat16).unbind()
    assert torch.equal(ascend_ops.swiglu_pair(gate, up, backend="cpu"), _torchs(gate, up))


@pytest.mark.parametrize("of_bias", [torch.float64, *FLOATS])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [1, 2])
def test_bias(dim: int, dtype: torch.dtype, of_bias: torch.dtype) -> None:
    x = torch.randn(5, 6, 70).to(dtype).requires_grad_()
    bias = torch.randn(x.shape[dim], dtype=torch.float64).to(of_bias).requires_grad_()
    grad = torch.randn(ascend_ops.swiglu(x, dim).shape).to(dtype)
    given = [
        torch.autograd.grad(ascend_ops.swiglu(x, dim, bias=bias, backend=name), (x, bias), grad)
        for name in ("cpu", "eager")
    ]
    assert torch.equal(given[0][0], given[1][0])
    assert torch.equal(given[0][1], given[1][1])
    by_hand = (x + bias.view(-1, *[1] * (2 - dim))).to(dtype).chunk(2, dim)
    assert torch.equal(ascend_ops.swiglu(x, dim, bias=bias, backend="cpu"), _torchs(*by_hand))


def test_nan_of_a_bias_stays() -> None:
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    assert ascend_ops.swiglu(x, bias=odd, backend="cpu").isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_clamped_gets_no_gradient(dtype: torch.dtype) -> None:
    """SG-06: at the limit itself it passes, and NaN stays NaN."""
    limit = 1.3
    at = float(torch.tensor(limit, dtype=dtype))
    values = [at, -at, 0.5, 2 * at, -2 * at, float("inf"), -5.0, 0.0]
    gate, up = torch.cartesian_prod(*[torch.tensor(values, dtype=dtype)] * 2).unbind(-1)
    gate, up = gate.contiguous().requires_grad_(), up.contiguous().requires_grad_()
    expected = _torchs(gate.clamp(max=limit), up.clamp(-limit, limit))
    ours = ascend_ops.swiglu_pair(gate, up, limit=limit, backend="cpu")
    assert torch.equal(ours, expected)
    grads = torch.autograd.grad(ours.sum(), (gate, up))
    expected_grads = torch.autograd.grad(expected.sum(), (gate, up))
    assert torch.equal(grads[0], expected_grads[0])
    assert torch.equal(grads[1], expected_grads[1])
    assert (grads[0][gate > at] == 0).all() and (grads[1][up.abs() > at] == 0).all()
    nan = torch.full((8,), float("nan"), dtype=dtype)
    assert ascend_ops.swiglu_pair(nan, nan, limit=limit, backend="cpu").isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_gates_are_as_torchs(dtype: torch.dtype) -> None:
    """SG-08: NaN only where torch has it, and -0 for the gradient at -200."""
    special = torch.tensor([-200.0, -90.0, -88.7, 0.0, -0.0, 90.0, float("inf"), -float("inf")])
    gate = torch.cat((special, torch.tensor([float("nan")]))).to(dtype)
    gate = gate.repeat(64).requires_grad_()  # so that torch's vectors are full
    up = torch.ones_like(gate, requires_grad=True)
    ours, expected = ascend_ops.swiglu_pair(gate, up, backend="cpu"), _torchs(gate, up)
    _assert_equal(ours, expected)
    grads = torch.autograd.grad(ours.sum(), (gate, up))
    for one, other in zip(grads, torch.autograd.grad(expected.sum(), (gate, up)), strict=True):
        _assert_equal(one, other)
    at_minus_200 = grads[0][0]
    assert at_minus_200 == 0 and at_minus_200.signbit()


def test_inputs_stay_as_they_are() -> None:
    """SG-01: what is given may be what another operator saved."""
    t = torch.randn(4, 64, requires_grad=True)
    x = t.exp()
    before = x.detach().clone()
    ascend_ops.swiglu_pair(x, x, backend="cpu").sum().backward()
    assert torch.equal(x, before)
    expected = torch.autograd.grad(reference.swiglu_pair(t.exp(), t.exp()).sum(), t)[0]
    torch.testing.assert_close(t.grad, expected)
    tanh = t.tanh()
    of_tanh = torch.autograd.grad(ascend_ops.swiglu_pair(tanh, t, backend="cpu").sum(), t)[0]
    expected = torch.autograd.grad(reference.swiglu_pair(t.tanh(), t).sum(), t)[0]
    torch.testing.assert_close(of_tanh, expected)


def test_a_second_backward_gives_the_same() -> None:
    """SG-02."""
    x = torch.randn(4, 64, requires_grad=True)
    y = ascend_ops.swiglu(x, backend="cpu").sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


def test_halves_are_not_swapped() -> None:
    """SG-05."""
    x = torch.tensor([[1.0, 2.0, 10.0, 20.0]], requires_grad=True)
    y = ascend_ops.swiglu(x, backend="cpu")
    torch.testing.assert_close(y, torch.tensor([[7.310586, 35.23188]]))
    grad = torch.autograd.grad(y, x, torch.tensor([[1.0, 0.0]]))[0]
    torch.testing.assert_close(grad, torch.tensor([[9.276705, 0.0, 0.7310586, 0.0]]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    x = torch.randn(37, 2 * 4999).to(dtype).requires_grad_()
    computed = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            y = ascend_ops.swiglu(x, backend="cpu")
            computed.append((y, torch.autograd.grad(y, x, torch.ones_like(y))[0]))
    finally:
        torch.set_num_threads(threads)
    for y, grad in computed[1:]:
        assert torch.equal(y, computed[0][0])
        assert torch.equal(grad, computed[0][1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "columns"), [(4099, 2053), (131_073, 64), (17, 500_007)])
def test_results_of_fresh_memory_are_those_of_small_ones(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Pages are asked for ahead: of some rows, of many, and of a part of a row."""
    x = torch.randn(rows, 2 * columns).to(dtype)
    grad = torch.randn(rows, columns).to(dtype)

    def computed(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        gate, up = (half.detach().clone().requires_grad_() for half in x.chunk(2, -1))
        y = ascend_ops.swiglu(x, backend="cpu")
        of_pair = ascend_ops.swiglu_pair(gate, up, backend="cpu")
        packed = torch.autograd.grad(y, x, grad)[0]
        return y, of_pair, packed, *torch.autograd.grad(of_pair, (gate, up), grad)

    of_rows = zip(*map(computed, x.split(rows // 8), grad.split(rows // 8)), strict=True)
    for large, small in zip(computed(x, grad), of_rows, strict=True):
        assert torch.equal(large, torch.cat(small))


def test_fp64_is_computed_by_torch_without_a_word() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    assert ascend_ops.backend_of("swiglu", x) == "eager"  # a warning would be an error
    with pytest.raises(ConfigError, match="it computes in FP32"):
        ascend_ops.swiglu(x, backend="cpu")


def _python(code: str, folder: Path, **environment: str) -> str:
    """What code says in a process of its own, which compiles into `folder`."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "XDG_CACHE_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


FALLS_BACK = """
    import warnings
    import torch
    import ascend_ops
    x = torch.randn(2, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ascend_ops.backend_of("swiglu", x) == "eager"
        y = ascend_ops.swiglu(x)
    assert torch.equal(y, ascend_ops.swiglu(x, backend="eager"))
    for warning in caught:
        if warning.category is UserWarning and "ascend_ops" in str(warning.message):
            print(warning.message)
"""


def test_without_a_compiler_torch_computes(tmp_path: Path) -> None:
    said = _python(FALLS_BACK, tmp_path, PATH=str(tmp_path), CC="")
    assert said.count("ascend_ops.swiglu is computed by torch's operators") == 1
    assert "there is no C compiler" in said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one build of torch")
def test_where_torch_has_other_bits_torch_computes(tmp_path: Path) -> None:
    """Torch for processors without FMA rounds the gradient of silu once more."""
    said = _python(FALLS_BACK, tmp_path, ATEN_CPU_CAPABILITY="default")
    assert said.count("ascend_ops.swiglu is computed by torch's operators") == 1
    assert "it would not equal torch's operators" in said
