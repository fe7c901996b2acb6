"""torch_npu's fused operators against plain torch on the CPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(mine: Tensor, expected: Tensor) -> bool:
    """Whether the bits are those of `expected`, once rounded to the dtype."""
    return torch.equal(mine.detach().cpu(), expected.detach().to(mine.dtype))


def compare(
    fused: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    computes_in: torch.dtype = torch.float32,
    gradient_ulps: float = 0,
) -> None:
    """Compare outputs and gradients bit by bit with a reference on the CPU.

    Args:
        computes_in: What the reference is computed in, from the values that `dtype` holds.
        gradient_ulps: By how many units in the last place gradients may differ, of the largest.
    """
    mine = [x.to(dtype).npu().requires_grad_() for x in inputs]
    theirs = [x.to(dtype).to(computes_in).requires_grad_() for x in inputs]
    output, expected = fused(*mine), reference(*theirs)
    assert output.dtype == dtype
    assert same(output, expected)
    grad = torch.randn(expected.shape).to(dtype)
    output.backward(grad.npu())
    expected.backward(grad.to(computes_in))
    for x, y in zip(mine, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        if gradient_ulps:
            most = gradient_ulps * torch.finfo(dtype).eps * y.grad.abs().max().item()
            torch.testing.assert_close(x.grad.cpu().float(), y.grad, rtol=0, atol=most)
        else:
            assert same(x.grad, y.grad)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim: int, dtype: torch.dtype) -> None:
    def reference(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim)
        return F.silu(a) * b

    compare(lambda x: torch_npu.npu_swiglu(x, dim), reference, [torch.randn(3, 6, 10)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, dtype: torch.dtype) -> None:
    compare(
        lambda x: torch_npu.npu_gelu(x, approximate=approximate),
        lambda x: F.gelu(x, approximate=approximate),
        [torch.randn(5, 7)],
        dtype,
        computes_in=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9,), (4, 9)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # The backward is torch_npu's formula, which adds in another order than autograd does for the
    # reference: a few roundings of fp32, or another rounding to the dtype.
    compare(
        lambda x, w: torch_npu.npu_rms_norm(x, w, epsilon=1e-5)[0],
        lambda x, w: F.rms_norm(x, shape, w, 1e-5),
        [torch.randn(2, 3, 4, 9), torch.randn(shape)],
        dtype,
        gradient_ulps=4,
    )


def test_rms_norm_returns_the_reciprocal_of_the_norm() -> None:
    x = torch.randn(2, 5, 8).npu()
    _, rstd = torch_npu.npu_rms_norm(x, torch.ones(8).npu(), epsilon=1e-6)
    assert rstd.shape == (2, 5, 1)
    assert same(rstd, (x.cpu().square().mean(-1, keepdim=True) + 1e-6).rsqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x1, x2, w = (torch.randn(s).to(dtype) for s in ((4, 16), (4, 16), (16,)))
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), w.npu(), 1e-6)
    assert torch.equal(total.cpu(), x1 + x2)
    assert rstd.dtype == torch.float32
    assert same(y, F.rms_norm((x1 + x2).float(), (16,), w.float(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str, dtype: torch.dtype) -> None:
    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if mode == "half":
            a, b = x.chunk(2, -1)
            turned = torch.cat((-b, a), -1)
        else:
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin

    inputs = [torch.randn(2, 3, 5, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)]
    compare(lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, mode), reference, inputs, dtype)


def test_rotary_mul_names_what_it_lacks() -> None:
    x = torch.randn(1, 2, 3, 8).npu()
    with pytest.raises(RuntimeError, match="rotary_mode 'quarter' is not simulated"):
        torch_npu.npu_rotary_mul(x, x, x, "quarter").cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("amsgrad", "maximize"), [(False, False), (True, False), (False, True)])
def test_apply_adam_w(amsgrad: bool, maximize: bool, dtype: torch.dtype) -> None:
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.99, 1e-6, 0.1
    start = torch.randn(33).to(dtype)
    expected = start.float().requires_grad_()
    optimizer = torch.optim.AdamW(
        [expected], lr, (beta1, beta2), eps, decay, amsgrad=amsgrad, maximize=maximize
    )
    var = start.npu()
    m, v, largest = (torch.zeros_like(var) for _ in range(3))
    for step in range(3):
        grad = torch.randn(33).to(dtype)
        expected.grad = grad.float()
        optimizer.step()
        powers = (beta1**step, beta2**step)
        rest = (lr, decay, beta1, beta2, eps, grad.npu(), largest, amsgrad, maximize)
        out = torch_npu.npu_apply_adam_w(*powers, *rest, out=(var, m, v))
        assert [t.data_ptr() for t in out] == [t.data_ptr() for t in (var, m, v)]
    # The weight is rounded to the dtype in each of the three steps, where the reference stays in
    # fp32: half a unit in the last place each. So are the moments, which move three updates of
    # about lr by a few units. In fp32 torch multiplies in another order, which rounds as much.
    eps_of_dtype = torch.finfo(dtype).eps
    torch.testing.assert_close(
        var.cpu().float(), expected.detach(), rtol=1.5 * eps_of_dtype, atol=12 * eps_of_dtype * lr
    )


@pytest.mark.parametrize("place", ["var", "m", "v", "grad", "largest"])
def test_apply_adam_w_refuses_a_tensor_of_the_cpu(place: str) -> None:
    given = {name: torch.ones(3).npu() for name in ("var", "m", "v", "grad", "largest")}
    given[place] = given[place].cpu()
    rest = (1e-2, 0.1, 0.9, 0.99, 1e-6, given["grad"], given["largest"], True, False)
    with pytest.raises(RuntimeError, match=r"on the same device.*npu_apply_adam_w"):
        torch_npu.npu_apply_adam_w(1.0, 1.0, *rest, out=(given["var"], given["m"], given["v"]))


FUSED: dict[str, tuple[Callable[..., object], int]] = {
    "npu_swiglu_backward": (torch.ops.npu.npu_swiglu_backward, 2),
    "npu_rms_norm": (lambda x, w: torch_npu.npu_rms_norm(x, w[0]), 2),
    "npu_add_rms_norm": (lambda x, y, w: torch_npu.npu_add_rms_norm(x, y, w[0]), 3),
    "npu_rotary_mul": (torch.ops.npu.npu_rotary_mul, 3),
    "npu_grouped_matmul": (
        lambda x, w: torch_npu.npu_grouped_matmul([x], [w], split_item=0, group_type=-1),
        2,
    ),
    "npu_reshape": (lambda x, y: torch.ops.npu.npu_reshape.out(x, [8, 8], out=y), 2),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operators_refuse_a_tensor_of_the_cpu(name: str) -> None:
    operator, arguments = FUSED[name]
    for place in range(arguments):
        given = [torch.ones(8, 8).npu() for _ in range(arguments)]
        given[place] = given[place].cpu()
        with pytest.raises(RuntimeError, match=rf"on the same device.*npu::{name}"):
            operator(*given)


def test_apply_adam_w_needs_out_as_the_real_one() -> None:
    with pytest.raises(RuntimeError, match="not implemented for Tensor"):
        grad = torch.ones(3).npu()
        torch_npu.npu_apply_adam_w(1, 1, 0.1, 0, 0.9, 0.99, 1e-8, grad, None, False, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_grouped_matmul_by_rows(stacked: bool, counts: bool, dtype: torch.dtype) -> None:
    sizes = [3, 0, 5]
    x = torch.randn(8, 6).to(dtype)
    weight = torch.randn(3, 6, 4).to(dtype)
    groups = torch.tensor(sizes) if counts else torch.tensor(sizes).cumsum(0)
    weights = [weight.npu()] if stacked else [w.npu() for w in weight]
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        weights,
        group_list=groups.npu(),
        split_item=3,
        group_type=0,
        group_list_type=int(counts),
    )
    parts = [a @ w for a, w in zip(x.split(sizes), weight, strict=True)]
    assert same(y, torch.cat(parts))


def test_grouped_matmul_by_the_inner_dimension() -> None:
    sizes = [2, 4]
    x, weight = torch.randn(5, 6), torch.randn(6, 3)
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu()], group_list=torch.tensor([2, 6]).npu(), split_item=3, group_type=2
    )
    pairs = zip(x.split(sizes, 1), weight.split(sizes), strict=True)
    assert same(y, torch.stack([a @ w for a, w in pairs]))


def test_grouped_matmul_of_pairs() -> None:
    xs = [torch.randn(2, 3), torch.randn(4, 5)]
    weights = [torch.randn(3, 6), torch.randn(5, 7)]
    bias = [torch.randn(6), torch.randn(7)]
    lists = [[t.npu() for t in tensors] for tensors in (xs, weights, bias)]
    ys = torch_npu.npu_grouped_matmul(
        lists[0], lists[1], bias=lists[2], split_item=0, group_type=-1
    )
    for y, x, w, b in zip(ys, xs, weights, bias, strict=True):
        assert same(y, x @ w + b)


@pytest.mark.parametrize(("group_type", "what"), [(0, "4 rows"), (2, "6 columns")])
@pytest.mark.parametrize("ends", [[2, 9], [3, 2], [-1, 2]])
def test_grouped_matmul_refuses_groups_that_are_not_there(
    ends: list[int], group_type: int, what: str
) -> None:
    x, weight = torch.randn(4, 6).npu(), torch.randn(6, 3).npu()
    weights = weight if group_type else torch.stack([weight, weight])
    with pytest.raises(RuntimeError, match=f"group_list must be growing ends .* {what} of x"):
        torch_npu.npu_grouped_matmul(
            [x], [weights], group_list=torch.tensor(ends).npu(), split_item=3, group_type=group_type
        )
        torch.npu.synchronize()


def test_grouped_matmul_names_what_it_lacks() -> None:
    x, weight = torch.randn(2, 3).npu(), torch.randn(3, 4).npu()
    with pytest.raises(RuntimeError, match="npu_grouped_matmul: quantisation is not simulated"):
        torch_npu.npu_grouped_matmul(
            [x], [weight], scale=[torch.ones(4).npu()], split_item=0, group_type=-1
        )
        torch.npu.synchronize()
