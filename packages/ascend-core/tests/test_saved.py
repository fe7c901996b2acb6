"""The saved-tensor dispatcher: who decides, what is restored, and that nothing leaks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ascend_core.layout import Layout
from ascend_core.saved import Claim, Frame, Region, StorageRecord, StorageTable, region
from ascend_core.saved._parameters import is_weight
from ascend_core.storage import release
from ascend_core.testing import Growth, alive_after, held_bytes

pytestmark = pytest.mark.usefixtures("default_device")


class Copies:
    """A claim that gives back a copy made when the tensor was saved."""

    def __init__(self, tensor: Tensor, asked: list[Tensor]) -> None:
        self._storage = tensor.untyped_storage().clone()
        self._asked = asked

    def value(self, layout: Layout) -> Tensor:
        whole = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        self._asked.append(layout.look_at(whole.set_(self._storage)))
        return self._asked[-1]


class CopyKeeper:
    """Claims every saved tensor of at least `smallest` elements, as a moving keeper would."""

    def __init__(self, *, moves: bool = True, smallest: int = 1) -> None:
        self.moves = moves
        self.smallest = smallest
        self.offered: list[torch.Size] = []
        self.asked: list[Tensor] = []
        self.opened = 0
        self.closed = 0

    def open(self, frame: Frame) -> CopyKeeper:
        self.opened += 1
        return self

    def claim(self, tensor: Tensor, record: StorageRecord) -> Claim | None:
        self.offered.append(tensor.size())
        if is_weight(tensor) or tensor.numel() < self.smallest:
            return None
        return Copies(tensor, self.asked)

    def close(self) -> None:
        self.closed += 1


class Indifferent(CopyKeeper):
    """Claims nothing."""

    def __init__(self) -> None:
        super().__init__(moves=False, smallest=2**62)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradients of all parameters after one backward of `run`."""
    device = next(model.parameters()).device
    x_BH = torch.linspace(-1, 1, 30, device=device).view(5, 6)
    model.zero_grad()
    run(x_BH).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(map(torch.equal, left, right))
    assert len(left) == len(right)


@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper(), CopyKeeper(moves=False)])
def test_gradients_equal_plain(keeper: CopyKeeper) -> None:
    model = mlp()
    plain = gradients(model, model)

    def kept(x_BH: Tensor) -> Tensor:
        with region(keeper):
            return model(x_BH)

    assert_same(gradients(model, kept), plain)


def test_claims_are_asked_once_per_save() -> None:
    keeper, model = CopyKeeper(), mlp()
    with region(keeper):
        y = model(torch.ones(5, 6))
    y.sum().backward()
    # x; tanh's output for tanh and for the norm; the norm's mean, deviation and output.
    sizes = [(5, 6), (5, 16), (5, 16), (5, 1), (5, 1), (5, 16)]
    assert sorted(tuple(tensor.size()) for tensor in keeper.asked) == sorted(sizes)


def test_inner_keeper_is_asked_before_the_outer_one() -> None:
    outer, inner, model = CopyKeeper(), CopyKeeper(), mlp()
    with region(outer), region(inner):
        model(torch.ones(5, 6)).sum().backward()
    assert inner.asked
    assert not outer.asked


def test_keepers_of_one_region_are_asked_in_order() -> None:
    first, second = CopyKeeper(), CopyKeeper()
    with region(first, second):
        mlp()(torch.ones(5, 6)).sum().backward()
    assert first.asked
    assert not second.asked


@pytest.mark.parametrize("inside", [True, False])
def test_who_moves_is_asked_last_wherever_it_was_entered(*, inside: bool) -> None:
    moving, rebuilding = CopyKeeper(moves=True), CopyKeeper(moves=False)
    outer, inner = (rebuilding, moving) if inside else (moving, rebuilding)
    with region(outer), region(inner):
        mlp()(torch.ones(5, 6)).sum().backward()
    assert rebuilding.asked
    assert not moving.asked


def test_what_the_inner_keeper_leaves_goes_to_the_outer_one() -> None:
    outer, inner = CopyKeeper(), Indifferent()
    with region(outer), region(inner):
        mlp()(torch.ones(5, 6)).sum().backward()
    assert inner.offered
    assert outer.asked


def test_a_keeper_entered_twice_is_asked_once_and_stays_until_the_last_leave() -> None:
    keeper = Indifferent()
    x = torch.ones(4, requires_grad=True)
    with region(keeper):
        with region(keeper):
            x.exp()
        assert len(keeper.offered) == 1
        x.exp()
        assert len(keeper.offered) == 2
    x.exp()
    assert len(keeper.offered) == 2
    assert (keeper.opened, keeper.closed) == (1, 1)


def test_one_pair_of_hooks_per_thread_however_many_regions() -> None:
    with region(Indifferent()) as outer:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with region(Indifferent()) as inner:
            assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is top[0]
            assert inner.frame is outer.frame
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# Parameters, and tensors of which nothing is known


class ReadsAttributes(torch.autograd.Function):
    """As megatron's fused gradient accumulation: reads and writes attributes of a saved weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(x.t() @ grad)
        weight.grad_added_to_main_grad = True
        return grad @ weight.t(), x.t() @ grad


@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper()])
def test_sa_15_attributes_of_a_saved_parameter_are_there_in_backward(keeper: CopyKeeper) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    weight.main_grad = torch.zeros(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with region(keeper):
        y = ReadsAttributes.apply(x, weight)
    y.sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert torch.equal(weight.main_grad, weight.grad)


def test_sa_14_parameters_and_their_views_keep_their_storage() -> None:
    layer = nn.Linear(8, 8)
    seen: list[int] = []

    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            seen.extend(t.untyped_storage().data_ptr() for t in ctx.saved_tensors)
            return (grad, *[None] * len(ctx.saved_tensors))

    weight = layer.weight
    with region(CopyKeeper()):
        y = Peek.apply(weight.sum(), weight, weight.t(), weight[2:], weight.view(-1))
    y.backward()
    assert seen == [weight.untyped_storage().data_ptr()] * 4


def test_is_weight_sees_through_views_casts_and_autocast() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    assert is_weight(weight)
    assert is_weight(weight.t()[1:].bfloat16())
    assert not is_weight(weight * 2)
    assert not is_weight(torch.randn(3))
    keeper, x = CopyKeeper(), torch.randn(3, 6, requires_grad=True)
    with region(keeper), torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = nn.functional.linear(x * 1, weight)
    y.sum().backward()
    assert {tuple(t.size()) for t in keeper.asked} == {(3, 6)}


def test_sa_10_tensors_that_nobody_claims_pass_through_where_they_are() -> None:
    devices: list[torch.device] = []

    class SavesIndex(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            ctx.save_for_backward(index)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (index,) = ctx.saved_tensors
            devices.append(index.device)
            assert index.data_ptr() == pointer
            return grad, None

    index = torch.arange(4)
    pointer = index.data_ptr()
    with region(Indifferent()):
        y = SavesIndex.apply(torch.ones(3, requires_grad=True), index)
    y.sum().backward()
    assert devices == [torch.get_default_device()]


@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper()])
def test_sa_08_every_view_comes_back_as_it_was(keeper: CopyKeeper) -> None:
    base = torch.randn(6, 8)
    views = [
        base.t(),
        base[1:, ::2],
        base[0].expand(5, 8),
        base[2, 3],
        base[:0],
        torch.randn(2, 4, 5, 3).permute(0, 3, 1, 2),  # channels last
        torch.randn(2, 1, 4).transpose(0, 2),
    ]
    seen: list[Tensor] = []

    class SaveAll(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            seen.extend(ctx.saved_tensors)
            return (grad, *[None] * len(seen))

    with region(keeper):
        y = SaveAll.apply(torch.ones((), requires_grad=True), *views)
    y.backward()
    for before, after in zip(views, seen, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()


@pytest.mark.parametrize("default_device", ["cpu"], indirect=True)  # torch_npu has none
def test_sparse_and_nested_tensors_are_kept() -> None:
    weight = torch.randn(3, 3).to_sparse()
    x = torch.randn(3, 2, requires_grad=True)
    keeper = CopyKeeper()
    with region(keeper):
        y = torch.sparse.mm(weight, x)
    y.sum().backward()
    plain = x.grad.clone()
    x.grad = None
    torch.sparse.mm(weight, x).sum().backward()
    assert torch.equal(plain, x.grad)


# The version check that hooks take away


def test_a_write_after_the_save_raises_as_in_plain_autograd() -> None:
    def run(write: Callable[[Tensor], object], keeper: CopyKeeper | None) -> str:
        lin, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        c = x * 1
        with Region(*([keeper] if keeper else [])):
            y = lin(c)
        write(c)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            y.sum().backward()
        return str(caught.value).partition("]")[0]

    for write in (lambda c: c.mul_(2), lambda c: c.detach().zero_(), lambda c: c[1:].add_(1)):
        expected = run(write, None)
        assert run(write, Indifferent()) == expected
        assert run(write, CopyKeeper()) == expected


@pytest.mark.parametrize("dropped", [True, False], ids=["and dropped", "and held"])
def test_what_a_claim_brings_back_may_be_released_after_the_save(*, dropped: bool) -> None:
    lin, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(lin(x * 2).square().sum(), lin.weight)[0]
    made = x * 2
    with Region(CopyKeeper()):
        y = lin(made)
    release(made)
    held = None if dropped else made
    del made
    ours = torch.autograd.grad(y.square().sum(), lin.weight)[0]
    assert torch.equal(expected, ours)
    assert (held is None) is dropped


def test_a_parameter_written_to_after_the_save_raises() -> None:
    lin = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with region(Indifferent()):
        y = nn.functional.layer_norm(x, (4,), lin.weight[0], lin.bias).mul(lin.bias)
    with torch.no_grad():
        lin.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_writes_between_two_saves_give_each_save_its_own_version() -> None:
    x = torch.randn(4, requires_grad=True)
    c = x * 1
    with region(CopyKeeper()):
        first = c.square()
        c.mul_(2)
        second = c.square()
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


# Lifetimes


def test_sa_06_a_storage_is_known_by_its_lifetime_not_its_address() -> None:
    table, addresses = StorageTable(), set()
    for i in range(50):
        tensor = torch.full((1000,), float(i))
        record = table.track(tensor)
        assert record.made is None, "a record of a dead storage at the same address"
        record.made = i
        addresses.add(tensor.untyped_storage()._cdata)
        del tensor
        assert len(table) == 0
    assert len(addresses) < 50, "the allocator never used an address again: nothing was tested"


def test_sa_11_tensors_that_are_never_unpacked_leave_nothing(no_gc: None) -> None:
    keeper, model = CopyKeeper(), mlp()
    x = torch.randn(5, 6, requires_grad=True)
    died: list[str] = []
    with region(keeper):
        used, inner = model(x * 1), (x * 2).exp()
        dropped = model(inner)
        weakref.finalize(inner.untyped_storage(), died.append, "dropped branch")
        weakref.finalize(used.untyped_storage(), died.append, "used branch")
    del dropped, inner
    assert died == ["dropped branch"]
    used.sum().backward()
    del used
    assert died == ["dropped branch", "used branch"]


@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper()])
@pytest.mark.parametrize("backward", [True, False])
def test_a_nodes_own_output_does_not_leak(keeper: CopyKeeper, backward: bool, no_gc: None) -> None:
    x = torch.randn(1000, requires_grad=True)
    with region(keeper):
        y = x.exp()
    died = []
    weakref.finalize(y.untyped_storage(), died.append, True)
    if backward:
        y.sum().backward()
    keeper.asked.clear()
    del y
    assert died


def test_an_exception_in_forward_leaves_the_stack_as_it_was() -> None:
    keeper = Indifferent()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), region(keeper):
            torch.ones(3, requires_grad=True).exp()
            raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert keeper.opened == keeper.closed == 3


@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper()])
def test_nothing_grows_over_many_steps(keeper: CopyKeeper) -> None:
    model = mlp()

    def step() -> None:
        with region(keeper):
            y = model(torch.randn(5, 6))
        y.sum().backward()
        keeper.asked.clear()
        keeper.offered.clear()

    assert alive_after(step, steps=20) == Growth(nbytes=0, storages=0)


def test_ar_21_inputs_of_a_checkpoint_around_a_region_die_with_its_backward(no_gc: None) -> None:
    model, keeper = mlp(), Indifferent()
    died: list[int] = []

    def inside(x: Tensor) -> Tensor:
        with region(keeper):
            return model(x)

    def step(wrapped: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(5, 6, requires_grad=True) * 1
        for number in range(3):
            weakref.finalize(x.untyped_storage(), died.append, number)
            x = nn.functional.pad(checkpoint(wrapped, x, use_reentrant=False), (0, 3))
        loss = x.square().sum()
        del x
        loss.backward()

    step(model)  # what PyTorch sets up at the first use holds on to a frame
    died.clear()
    step(inside)
    assert sorted(died) == [0, 1, 2]


# Where nothing is saved


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sa_13_bypassed_where_grad_is_off(mode: Callable[[], torch.no_grad]) -> None:
    keeper, model = CopyKeeper(), mlp()
    with mode(), region(keeper) as entered:
        assert entered.frame is None
        model(torch.randn(5, 6))
    assert keeper.opened == 0
    with region(keeper):
        model(torch.randn(5, 6)).sum().backward()
    assert keeper.opened == 1


def test_torch_func_transforms_run_as_without_a_region() -> None:
    model = mlp()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        with region(CopyKeeper()):
            return torch.func.functional_call(model, parameters, (x,)).sum()

    grads = torch.func.grad(loss)(parameters, torch.ones(5, 6))
    model(torch.ones(5, 6)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


# Somebody else's hooks


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", ["around", "inside", "both"])
@pytest.mark.parametrize("keeper", [Indifferent(), CopyKeeper(), CopyKeeper(moves=False)])
def test_sa_27_composes_with_checkpoint(reentrant: bool, order: str, keeper: CopyKeeper) -> None:
    model = mlp()
    plain = gradients(model, model)

    def inside(x_BH: Tensor) -> Tensor:
        if order == "around":
            return model(x_BH)
        with region(keeper):
            return model(x_BH)

    def run(x_BH: Tensor) -> Tensor:
        x_BH.requires_grad_()
        if order == "inside":
            return checkpoint(inside, x_BH, use_reentrant=reentrant)
        with region(keeper):
            return checkpoint(inside, x_BH, use_reentrant=reentrant)

    assert_same(gradients(model, run), plain)


def test_a_region_inside_a_checkpoint_does_not_defeat_it() -> None:
    model = mlp()

    def inside(x: Tensor) -> Tensor:
        with region(Indifferent()):
            return model(x)

    x = torch.randn(50, 6, requires_grad=True)
    bare = held_bytes(
        lambda: checkpoint(model, x, use_reentrant=False), device=torch.get_default_device()
    )
    assert (
        held_bytes(
            lambda: checkpoint(inside, x, use_reentrant=False), device=torch.get_default_device()
        )
        == bare
    )
    assert bare < held_bytes(lambda: model(x), device=torch.get_default_device())


def test_moving_keepers_stand_aside_in_backward_and_over_foreign_hooks() -> None:
    model, moving, still = mlp(), CopyKeeper(), CopyKeeper(moves=False)

    def inside(x: Tensor) -> Tensor:
        with region(moving, still):
            return model(x)

    x = torch.randn(5, 6, requires_grad=True)
    checkpoint(inside, x, use_reentrant=True).sum().backward()
    checkpoint(inside, x, use_reentrant=False).sum().backward()
    assert not moving.offered
    assert still.offered


def test_unclaimed_tensors_go_to_the_users_own_pair_below() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.size())
        return tensor.detach().clone()

    model = mlp()
    plain = gradients(model, model)

    def run(x_BH: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda t: t), region(Indifferent()):
            return model(x_BH)

    assert_same(gradients(model, run), plain)
    assert len(packed) == 9


def test_save_on_cpu_outside_and_inside() -> None:
    model = mlp()
    plain = gradients(model, model)

    def outside(x_BH: Tensor) -> Tensor:
        with save_on_cpu(), region(CopyKeeper(moves=False, smallest=40)):
            return model(x_BH)

    def inside(x_BH: Tensor) -> Tensor:
        with region(CopyKeeper()), save_on_cpu():
            return model(x_BH)

    assert_same(gradients(model, outside), plain)
    assert_same(gradients(model, inside), plain)


# Threads


def test_regions_of_two_threads_do_not_meet() -> None:
    keepers = [CopyKeeper(), CopyKeeper()]
    models = [mlp(), mlp()]  # made here: threads that seed and draw share one generator
    results: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        model = models[number]

        def run(x_BH: Tensor) -> Tensor:
            with region(keepers[number]):
                barrier.wait()
                return model(x_BH)

        results[number] = gradients(model, run)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = mlp()
    plain = gradients(model, model)
    assert_same(results[0], plain)
    assert_same(results[1], plain)
    assert len(keepers[0].asked) == len(keepers[1].asked)


def test_backward_on_another_thread() -> None:
    model, keeper = mlp(), CopyKeeper()
    plain = gradients(model, model)
    model.zero_grad()
    with region(keeper):
        y = model(torch.linspace(-1, 1, 30).view(5, 6))
    thread = threading.Thread(target=lambda: y.square().sum().backward())
    thread.start()
    thread.join()
    assert_same([p.grad for p in model.parameters()], plain)


def test_around_a_compiled_module() -> None:
    model = mlp()
    plain = gradients(model, model)
    compiled = torch.compile(model, backend="aot_eager")

    def run(x_BH: Tensor) -> Tensor:
        with region(CopyKeeper(moves=False)):
            return compiled(x_BH)

    for left, right in zip(gradients(model, run), plain, strict=True):
        # aot_eager decomposes layer norm's backward, in another order of additions than eager.
        torch.testing.assert_close(left, right)


# Reuse of saved values


def test_double_backward_and_retained_graphs_equal_plain() -> None:
    def grads(keeper: CopyKeeper | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        with Region(*([keeper] if keeper else [])):
            y = (x.tanh() @ x.exp()).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x)
        return [first.detach(), second, again]

    plain = grads(None)
    assert_same(grads(Indifferent()), plain)
    assert_same(grads(CopyKeeper()), plain)


def test_regions_are_left_also_where_python_drops_assertions() -> None:
    code = (
        "import torch\n"
        "from torch.autograd.graph import saved_tensors_hooks\n"
        "from ascend_core.saved import Region\n"
        "with Region() as outer:\n"
        "    with saved_tensors_hooks(lambda t: t, lambda t: t), Region():\n"
        "        pass\n"
        "    with Region() as inner:\n"
        "        raise SystemExit(inner.frame is not outer.frame)\n"
    )
    assert subprocess.run([sys.executable, "-O", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("moment", ["open", "leave"])
def test_an_interrupt_while_a_region_is_entered_or_left_leaves_no_hooks(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *((CopyKeeper, "open") if moment == "open" else (Frame, "leave")), interrupted
    )
    with pytest.raises(KeyboardInterrupt), Region(CopyKeeper()):
        pass
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    monkeypatch.undo()
    with Region(CopyKeeper()) as after:
        assert after.frame is not None
        assert not after.frame.over_foreign
