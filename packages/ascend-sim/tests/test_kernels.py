"""What becomes of operators: simulated, composed, kept, left to torch_npu, absent."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ascend_sim import Fate, Simulator

LEFT = "aten::nonzero_static"

Run = Callable[..., str]


def nonzero_static() -> torch.Tensor:
    return torch.nonzero_static(torch.tensor([0, 3, 0, 5], device="npu"), size=3)


@pytest.mark.skipif("ASCENDSIM_STRICT" not in os.environ, reason="nox -s npu sets it")
def test_the_session_is_strict(npu_sim: Simulator) -> None:
    assert npu_sim.config.strict
    with pytest.raises(NotImplementedError, match=f"{LEFT} has no kernel"):
        nonzero_static()


@pytest.mark.schedules("lazy")  # once
def test_operators_left_to_torch_npu_are_listed(
    npu_sim: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    left = npu_sim.operators(Fate.LEFT)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(left)} operators have a kernel for the CPU, none for the NPU:\n")
        sys.stdout.write(textwrap.fill(", ".join(left), 99, break_on_hyphens=False) + "\n")
    assert {LEFT, "aten::_fused_adagrad_", "aten::digamma.out"} <= set(left)
    assert len(left) == 227  # of torch 2.13.0 with torch-npu 2.13.0


def test_an_operator_has_one_fate(npu_sim: Simulator) -> None:
    names = [name for fate in Fate for name in npu_sim.operators(fate)]
    assert len(names) == len(set(names))


def test_an_operator_that_the_npu_lacks_is_an_error(npu_sim: Simulator) -> None:
    with npu_sim.strict(), pytest.raises(NotImplementedError, match=f"{LEFT} has no kernel"):
        nonzero_static()


def test_an_operator_composed_of_one_that_the_npu_lacks_is_an_error(npu_sim: Simulator) -> None:
    with npu_sim.strict(), pytest.raises(NotImplementedError, match=r"aten::digamma\.out"):
        torch.digamma(torch.ones(3, device="npu"))


def test_without_strict_it_runs_and_is_named_once_and_counted(npu_sim: Simulator) -> None:
    before = npu_sim.left_calls().get(LEFT, 0)
    with npu_sim.strict(False):
        if before == 0:
            with pytest.warns(UserWarning, match=LEFT):
                nonzero_static()
        found = nonzero_static()
    assert found.tolist() == [[1], [3], [-1]]
    assert npu_sim.left_calls()[LEFT] >= before + 1


def test_a_call_that_was_refused_is_not_the_first(npu_sim: Simulator) -> None:
    name, x = "aten::special_i0e.out", torch.zeros(3, device="npu")
    assert name in npu_sim.operators(Fate.LEFT)
    with npu_sim.strict(), pytest.raises(NotImplementedError, match=name):
        torch.special.i0e(x)
    assert name not in npu_sim.left_calls()
    with npu_sim.strict(False):
        with pytest.warns(UserWarning, match=name):
            torch.special.i0e(x)
        torch.special.i0e(x)
    assert npu_sim.left_calls()[name] == 2


def test_an_operator_without_a_kernel_fails_with_its_name(npu_sim: Simulator) -> None:
    assert "npu::npu_mish" in npu_sim.operators(Fate.ABSENT)
    with pytest.raises(NotImplementedError, match=r"npu::npu_mish is not simulated"):
        torch.ops.npu.npu_mish(torch.ones(2, device="npu"))


@pytest.mark.schedules("lazy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_call_of_an_operator_with_several_outputs_does_not_wait(
    dtype: torch.dtype, npu_sim: Simulator
) -> None:
    x = torch.randn(3, 5, dtype=dtype, device="npu")
    before = npu_sim.counters().tasks_pending
    torch.layer_norm(x, (5,))
    torch.topk(x, 2)
    assert npu_sim.counters().tasks_pending == before + 2


@pytest.mark.parametrize(
    "shaped_by_data",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        torch.unique,
        lambda x: torch.bincount(x.clamp_min(0)),
    ],
)
def test_a_shape_that_depends_on_data_is_right_and_counts_as_a_synchronisation(
    shaped_by_data: Callable[[torch.Tensor], torch.Tensor], npu_sim: Simulator
) -> None:
    host = torch.tensor([3, -1, 0, 7, 3])
    x = host.npu()
    x.add_(0)
    before = npu_sim.counters().synchronisations
    result = shaped_by_data(x)
    assert npu_sim.counters().synchronisations > before
    assert torch.equal(result.cpu(), shaped_by_data(host))


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i],
    "broadcast": lambda x, i: x[i[:, None], i],
    "apart": lambda x, i: x[i, :, i],
    "unsafe": lambda x, i: torch.ops.aten._unsafe_index(x, [i]),
}


@pytest.mark.parametrize("indices_on", ["npu", "cpu"])
@pytest.mark.parametrize("kind", INDEXED)
def test_indexing_by_integers_waits_for_nothing(
    kind: str, indices_on: str, npu_sim: Simulator
) -> None:
    host, where = torch.randn(4, 5, 6), torch.tensor([0, 3, 3])
    x, index = host.npu().requires_grad_(), where.to(indices_on)
    before = npu_sim.counters()
    taken = INDEXED[kind](x, index)
    after = npu_sim.counters()
    assert after.synchronisations == before.synchronisations
    if npu_sim.config.schedule == "lazy":
        assert after.tasks_pending == before.tasks_pending + 1
    assert torch.equal(taken.detach().cpu(), INDEXED[kind](host, where))
    taken.sum().backward()
    expected = host.clone().requires_grad_()
    INDEXED[kind](expected, where).sum().backward()
    assert torch.equal(x.grad.cpu(), expected.grad)


@pytest.mark.schedules("lazy")
def test_a_race_around_an_index_shows() -> None:
    table, where = torch.zeros(4, device="npu"), torch.tensor([1]).npu()
    side, host = torch.npu.Stream(), torch.full((1,), -1.0).pin_memory()
    torch.npu.synchronize()
    table.fill_(7)
    taken = table[where]
    with torch.npu.stream(side):
        host.copy_(taken, non_blocking=True)
    side.synchronize()
    assert host.item() != 7
    torch.npu.synchronize()
    assert taken.item() == 7


def test_a_repetition_of_known_size_waits_for_nothing(npu_sim: Simulator) -> None:
    counts = torch.tensor([1, 2]).npu()
    before = npu_sim.counters().synchronisations
    repeated = torch.repeat_interleave(counts, output_size=3)
    assert npu_sim.counters().synchronisations == before
    assert repeated.tolist() == [0, 1, 1]
    torch.repeat_interleave(counts)
    assert npu_sim.counters().synchronisations > before


def test_an_index_out_of_range_is_found_by_the_kernel() -> None:
    table, where = torch.zeros(3, 2).npu(), torch.tensor([0, 9]).npu()
    with pytest.raises(RuntimeError, match=r"aten::index\.Tensor: index 9 is out of bounds"):
        table[where].add_(1)
        torch.npu.synchronize()


def test_what_an_operator_writes_or_indexes_is_on_the_device() -> None:
    number, where, host = torch.tensor(1.0).npu(), torch.tensor([0]).npu(), torch.ones(3)
    for call in (
        lambda: torch.tensor(3.0).add_(number),
        lambda: torch.add(number, 1, out=torch.tensor(3.0)),
        lambda: host[where],
        lambda: host.index_put_((where,), number),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            call()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.unsqueeze(0),
        lambda x: x.squeeze(),
        lambda x: x.squeeze(1),
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x.narrow(0, 1, 1),
        lambda x: x.contiguous(),
        lambda x: x.detach(),
        lambda x: x.unfold(0, 2, 1),
    ],
)
def test_a_view_shares_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.zeros(3, 1, device="npu")
    view(x).fill_(7)
    assert x.max().item() == 7


def test_a_wrong_shape_is_an_error_at_the_call() -> None:
    x = torch.zeros(3, device="npu")
    with pytest.raises(RuntimeError, match="size"):
        x.add_(torch.zeros(4, device="npu"))
    with pytest.raises(RuntimeError, match="shape"):
        x @ torch.zeros(4, 2, device="npu")


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"on the same device.*npu:0 and cpu"):
        torch.zeros(3, device="npu") + torch.zeros(3)


@pytest.mark.schedules("eager")  # once: the program chooses its own
def test_a_task_owns_no_tensor_that_python_knows(python: Run) -> None:
    # A worker that dropped one would wait for Python's lock, which whoever waits for it may hold.
    # A kernel in Python, such as the Meta kernel of a first call, makes every argument known to it.
    shown = python(
        """
import ascend_sim; ascend_sim.start(schedule="thread")
import torch
a = torch.randn(300, 300, device="npu")
b, scale = a @ a, torch.tensor(0.5)
for _ in range(20):
    for _ in range(20):
        b = (b @ a).clamp_(-1, 1) * scale + 1
    torch.npu.empty_cache()
start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
start.record()
x = torch.full((4,), 1.0, device="npu") + 1
y = x * 2
end.record()
del x
torch.npu.empty_cache()
end.synchronize()
print(start.elapsed_time(end) >= 0, y.sum().item())
"""
    )
    assert shown.split() == ["True", "16.0"]


def test_a_scalar_of_the_cpu_is_read_at_the_call() -> None:
    scale = torch.tensor(2.0)
    doubled = torch.ones(3, device="npu") * scale
    scale.fill_(100)
    assert doubled.tolist() == [2, 2, 2]


def test_an_out_argument_takes_the_new_shape() -> None:
    out = torch.empty(0, device="npu")
    torch.add(torch.ones(2, 3, device="npu"), 1, out=out)
    assert out.tolist() == [[2, 2, 2], [2, 2, 2]]
    assert [torch.arange(n, device="npu").tolist() for n in (3, 2)] == [[0, 1, 2], [0, 1]]


def test_an_error_that_only_the_kernel_finds_comes_with_the_next_synchronisation() -> None:
    table = torch.zeros(3, 2, device="npu")
    index = torch.tensor([0, 9], device="npu")
    with pytest.raises(RuntimeError, match=r"aten::index_select: .*out of range"):
        table.index_select(0, index)
        torch.npu.synchronize()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "strided": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_values_in_every_direction_and_layout(layout: str, dtype: torch.dtype) -> None:
    host = (torch.arange(4 * 5 * 6).reshape(4, 5, 6) % 50).to(torch.float32)
    source = LAYOUTS[layout](host)
    expected = source.to(dtype)
    assert torch.equal(source.npu().to(dtype).cpu(), expected)
    there = torch.empty(expected.shape, dtype=dtype, device="npu").copy_(source)
    assert torch.equal(there.cpu(), expected)
    assert torch.equal(LAYOUTS[layout](host.npu()).cpu(), source)
    turned = torch.empty(expected.shape[::-1], dtype=dtype, device="npu").permute(2, 1, 0)
    assert torch.equal(turned.copy_(source).cpu(), expected)
    back = torch.empty(expected.shape[::-1], dtype=dtype).permute(2, 1, 0)
    assert torch.equal(back.copy_(there), expected)


def test_a_conjugated_view_is_copied_as_what_it_says() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(x.npu().conj().cpu(), x.conj())
    assert torch.equal((x.npu().conj() @ x.npu()).cpu(), x.conj() @ x)


def test_the_generator_of_the_device_decides_every_draw() -> None:
    def draws() -> list[torch.Tensor]:
        x = torch.empty(100, device="npu")
        drops = torch.nn.functional.dropout(torch.ones(100, device="npu"), 0.5)
        return [
            torch.randn(100, device="npu"),
            x.uniform_(),
            torch.randperm(100, device="npu"),
            drops,
        ]

    torch.npu.manual_seed(3)
    first = draws()
    second = draws()
    torch.npu.manual_seed(3)
    again = draws()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_generator_of_the_cpu_is_left_alone_and_refused() -> None:
    state = torch.get_rng_state()
    torch.nn.functional.dropout(torch.randn(9, device="npu"), 0.5).cpu()
    torch.randperm(9, device="npu").cpu()
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator"):
        torch.empty(3, device="npu").normal_(generator=torch.Generator())


def test_a_recomputation_draws_the_same_dropout() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin(), 0.5).cos()

    grads = []
    for recomputed in (False, True):
        torch.npu.manual_seed(5)
        x = torch.linspace(-1, 1, 64, device="npu").requires_grad_()
        y = checkpoint(region, x, use_reentrant=False) if recomputed else region(x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_private_format_is_accepted_and_stays_plain() -> None:
    import torch_npu

    weight = torch.randn(16, 32, device="npu")
    cast = torch_npu.npu_format_cast(weight, 29)  # FRACTAL_NZ
    assert torch.equal(cast, weight)
    assert torch_npu.npu_format_cast(weight, 2) is weight or torch.equal(weight, cast)
    assert torch_npu.get_npu_format(weight) == 2  # ND


def test_a_format_that_there_is_not_is_refused() -> None:
    import torch_npu

    weight = torch.randn(16, 32, device="npu")
    for cast in (torch_npu.npu_format_cast, torch_npu.npu_format_cast_):
        with pytest.raises(RuntimeError, match="there is no format 12345"):
            cast(weight, 12345)
