"""What comes back from the host is what was saved: values, layout, device, whatever was saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ascend_core.pinned import PinnedPool
from ascend_swap import AttentionSwap, SwapAttentionConfig, swap_attention

Views = Callable[[Tensor], Sequence[Tensor]]


class Save(torch.autograd.Function):
    """Saves tensors, and notes what backward is given for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.seen.extend(ctx.saved_tensors)
        given = len(ctx.saved_tensors)
        return (None, None, *[None] * given)


class Saver(nn.Module):
    """Saves views of a new tensor."""

    def __init__(self, views: Views, size: tuple[int, ...] = (4, 4)) -> None:
        super().__init__()
        self.views = views
        self.weight = nn.Parameter(torch.arange(float(torch.Size(size).numel())).reshape(size))
        self.seen: list[Tensor] = []

    def forward(self, factor: float) -> Tensor:
        made = self.weight * factor
        total: Tensor = Save.apply(made, self.seen, *self.views(made))
        return total


def swapped(model: nn.Module, *names: str, **options: Any) -> AttentionSwap:
    options = {"min_bytes": 1, "keep_last": 0, **options}
    return swap_attention(model, SwapAttentionConfig(swap_modules=names, **options))


def round_trip(views: Views, size: tuple[int, ...] = (4, 4)) -> tuple[list[Tensor], dict[str, Any]]:
    """What backward saw, and the report."""
    model = nn.Sequential(Saver(views, size))
    handle = swapped(model, "0")
    model(2.0).backward()
    saver = model[0]
    assert isinstance(saver, Saver)
    return saver.seen, handle.report()


VIEWS: dict[str, Views] = {
    "the tensor and its transpose": lambda x: (x, x.t()),  # SA-07
    "the tensor and a slice": lambda x: (x, x[1:]),  # SA-07
    "a strided slice": lambda x: (x[1:, ::2],),  # SA-04, SA-08
    "an expanded view": lambda x: (x[:1].expand(3, 4),),  # SA-08
    "a view at an offset": lambda x: (x.view(-1)[5:9],),  # SA-08
    "a scalar": lambda x: (x[2, 3],),  # SA-08
    "queries, keys and values": lambda x: x.view(-1).split([4, 4, 8]),
    "another dtype": lambda x: (x, x.detach().view(torch.int16)),
    "the lazy conjugate": lambda x: (torch.view_as_complex(x.view(2, 4, 2)).conj(),),
    "the lazy negative": lambda x: (torch.view_as_complex(x.view(2, 4, 2)).conj().imag,),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back_as_it_was(name: str) -> None:
    views = VIEWS[name]
    seen, report = round_trip(views)
    expected = views(torch.arange(16.0).view(4, 4) * 2)
    assert report["moved_bytes"] == 16 * 4  # the storage once, however many views were saved
    for found, wanted in zip(seen, expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
        assert found.dtype == wanted.dtype
        assert found.is_conj() == wanted.is_conj()
        assert found.is_neg() == wanted.is_neg()
    storages = {tensor.untyped_storage()._cdata for tensor in seen}
    assert len(storages) == 1  # nothing was gathered, and an expanded view was not made whole


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 1, 4, 1), (1, 1, 1, 1)])
def test_channels_last_and_permuted_layouts_are_kept(size: tuple[int, ...]) -> None:  # SA-09
    def views(x: Tensor) -> list[Tensor]:
        return [x.contiguous(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)]

    seen, _ = round_trip(views, size)
    expected = views(torch.arange(float(torch.Size(size).numel())).reshape(size) * 2)
    for found, wanted in zip(seen, expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
        assert found.is_contiguous(memory_format=torch.channels_last) == wanted.is_contiguous(
            memory_format=torch.channels_last
        )


def test_a_storage_at_the_address_of_a_dead_one_is_another() -> None:  # SA-06
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            total = x.new_zeros(())
            for factor in range(1, 6):  # each product dies, and its memory is the next one's
                total = total + ((self.weight * factor).exp() * 1e-3).sin().sum()
            return total

    model = nn.Sequential(Reusing())
    expected = torch.autograd.grad(model(torch.ones(1)), list(model.parameters()))
    handle = swapped(model, "0")
    found = torch.autograd.grad(model(torch.ones(1)), list(model.parameters()))
    assert torch.equal(found[0], expected[0])
    assert handle.report()["moved_bytes"] == 5 * 2 * 4000  # of exp its output, of sin its input


class Block(nn.Module):
    """Attention by hand and an MLP, in a residual stream."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(width, dtype=dtype)
        self.self_attention = Attention(width, dtype)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_norm(x))
        out: Tensor = x + self.mlp(x)
        return out


class Attention(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


def stack(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(layers)])


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def batch(number: int = 0) -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(number))


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def plain(number: int = 0) -> list[Tensor]:
    model = stack()
    return gradients(model, model(batch(number)).square().mean())


NAMES = ("input_norm", "self_attention")


def test_weights_stay_and_are_not_copied() -> None:  # SA-14, SA-15
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, weight.t())
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, weight, transposed = ctx.saved_tensors
            assert weight.main_grad is parameter.main_grad
            assert weight.data_ptr() == transposed.data_ptr() == parameter.data_ptr()
            weight.main_grad.add_(x.t() @ gradients[0])
            return gradients[0] @ transposed, None

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Reading.apply(x * 2, self.weight)
            return made

    model = nn.Sequential(Layer())
    parameter: Any = model[0].weight
    parameter.main_grad = torch.zeros(4, 4)
    handle = swapped(model, "0")
    model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert torch.equal(parameter.main_grad, torch.full((4, 4), 6.0))
    assert handle.report()["moved_bytes"] == 3 * 4 * 4  # of x * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_casts_of_weights_stay(frozen: bool) -> None:  # SA-14
    model = stack(1).requires_grad_(not frozen)
    x = batch().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.autograd.grad(model(x).square().mean(), x)[0]
        handle = swapped(model, "self_attention")
        after = torch.autograd.grad(model(x).square().mean(), x)[0]
    assert torch.equal(before, after)
    # With frozen weights the linear layers save no input; else theirs, in BF16. The output of the
    # attention is the input of the last one. Beside it are queries, keys and values in one storage,
    # and the logarithms of the sums.
    inputs = 0 if frozen else 2 * 80
    assert handle.report()["moved_bytes"] == inputs + 2 * 80 * (1 + 3) + 2 * 2 * 5 * 4


def test_frozen_weights_and_buffers_stay() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 7).requires_grad_(False)
            self.register_buffer("scale", torch.full((7,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * self.scale
            return out

    model = nn.Sequential(Layer())
    handle = swapped(model, "0")
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    assert handle.report()["moved_bytes"] == 0


@pytest.mark.parametrize("retain", [False, True])
def test_two_forwards_then_one_backward(retain: bool) -> None:  # SA-11
    expected = [plain(0), plain(1)]
    model = stack()
    swapped(model, *NAMES)
    losses = [model(batch(number)).square().mean() for number in (0, 1)]
    for number in (1, 0):
        if retain:
            first = torch.autograd.grad(losses[number], list(model.parameters()), retain_graph=True)
            assert same(first, expected[number])
        assert same(gradients(model, losses[number]), expected[number])


def test_a_branch_that_drops_out_of_the_loss_leaves_nothing_behind() -> None:  # SA-11
    model = stack()
    pool = PinnedPool()
    swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)
    dropped = model(batch(1))
    assert same(gradients(model, model(batch()).square().mean()), plain())
    assert pool.stats().in_use_bytes > 0
    del dropped
    assert pool.stats().in_use_bytes == 0


def test_nothing_is_held_once_a_graph_is_gone() -> None:  # SA-24
    model = stack()
    pool = PinnedPool()
    handle = swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)
    reserved = set()
    gc.disable()  # nothing may wait for a collection
    try:
        for number in range(20):
            loss = model(batch(number)).square().mean()
            if number % 3:
                loss.backward()
            del loss
            assert pool.stats().in_use_bytes == 0
            reserved.add(pool.stats().reserved_bytes)
    finally:
        gc.enable()
    assert len(reserved) == 1
    assert handle.report()["host_peak_bytes"] == pool.stats().peak_in_use_bytes


def test_the_model_goes_without_a_collection() -> None:
    model = stack()
    weight = weakref.ref(model[0].mlp[0].weight)
    handle = swapped(model, *NAMES)
    model(batch()).square().mean().backward()
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()
    assert handle.report()["layers"] == ["0", "1", "2"]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_no_work_without_training(mode: str) -> None:  # SA-13
    model = stack()
    pool = PinnedPool()
    handle = swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)
    if mode == "eval":
        model.eval()
        model(batch()).square().mean().backward()
        model.train()
        model.zero_grad()
    else:
        with getattr(torch, mode)():
            model(batch())
    assert pool.stats().allocations == 0
    assert handle.report()["hit_rate"] is None
    assert same(gradients(model, model(batch()).square().mean()), plain())


def test_a_forward_that_raises_leaves_nothing_behind() -> None:  # SA-13
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = stack()
    pool = PinnedPool()
    swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)
    mlp = model[1].mlp
    model[1].mlp = Failing()
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    model[1].mlp = mlp
    gc.collect()
    assert pool.stats().in_use_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert same(gradients(model, model(batch()).square().mean()), plain())


def test_a_backward_that_raises_leaves_the_rest_as_it_was() -> None:
    model = stack()
    pool = PinnedPool()
    swap_attention(model, SwapAttentionConfig(min_bytes=1), pool=pool)

    def fail(gradient: Tensor) -> Tensor:
        raise KeyError("in the middle")

    x = model[1](model[0](batch()))
    x.register_hook(fail)
    loss = model[2](x).square().mean()
    with pytest.raises(KeyError):
        loss.backward()
    del loss, x
    gc.collect()
    assert pool.stats().in_use_bytes == 0
    model.zero_grad()
    assert same(gradients(model, model(batch()).square().mean()), plain())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_checkpoints_within_and_around(reentrant: bool, outside: bool) -> None:  # SA-02, SA-27
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return out

    model = stack()
    for block in model:
        block.self_attention = Checkpointed(block.self_attention)
    handle = swapped(model, "inner" if outside else "self_attention")
    reference = stack()
    x, y = batch().requires_grad_(), batch().requires_grad_()
    model(x).square().mean().backward()
    reference(y).square().mean().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert torch.equal(x.grad, y.grad)
    moved = handle.report()["moved_bytes"]
    # Around a checkpoint its input moves, and within one nothing does.
    assert moved == (0 if outside else 3 * 2 * 5 * 8 * 4)


def test_save_on_cpu_around_it_has_what_nobody_claims() -> None:
    model = stack()
    handle = swapped(model, *NAMES)
    with torch.autograd.graph.save_on_cpu():
        loss = model(batch()).square().mean()
    assert same(gradients(model, loss), plain())
    assert handle.report()["moved_bytes"] == 0  # over somebody else's hooks it stands aside


def test_a_write_after_the_save_is_an_error_as_ever() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100))

        def forward(self, x: Tensor) -> Tensor:
            made = self.weight * 2
            out = made.sin()
            made.mul_(2)
            return out.sum()

    model = nn.Sequential(Writing())
    swapped(model, "0")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(1)).backward()


def test_each_version_of_a_storage_is_its_own() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 100))

        def forward(self, x: Tensor) -> Tensor:
            made = self.weight * 2
            self.dropped = made.sin()  # saves the storage, and no backward comes
            return made.exp_().sum()

    model = nn.Sequential(InPlace())
    expected = gradients(model, model(torch.ones(1)))
    handle = swapped(model, "0")
    assert same(gradients(model, model(torch.ones(1))), expected)
    assert handle.report()["moved_bytes"] == 2 * 400


def test_a_write_that_no_version_tells_of_is_in_the_second_copy() -> None:
    class Buffered(nn.Module):
        """Two results in one storage, each with a version counter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(1, 2, 4))

        def forward(self, x: Tensor) -> Tensor:
            buffer = torch.zeros(2, 4)
            total = x.new_zeros(())
            for number in (0, 1):
                part = buffer.data[number]
                part.fill_(number + 2.0)
                total = total + (self.weight * part).sum()
            return total

    model = nn.Sequential(Buffered())
    handle = swapped(model, "0")
    (gradient,) = gradients(model, model(torch.ones(1)))
    assert torch.equal(gradient, torch.full((4,), 5.0))
    assert handle.report()["moved_bytes"] == 2 * 32


def test_reading_what_a_node_has_saved_fetches_it() -> None:
    model = nn.Sequential(Saver(lambda x: (x,)), nn.Identity())
    handle = swapped(model, "0")
    loss = model(2.0)
    node = loss.grad_fn
    assert torch.equal(node.saved_tensors[0], model[0].weight * 2)
    loss.backward()
    assert torch.equal(model[0].seen[0], model[0].weight * 2)
    assert handle.report()["prefetch_hits"] == 1


def test_what_outlives_its_graph_is_moved_once_and_never_again() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * angles[:5].cos_()
            return out

    model = Rotated()
    angles = torch.zeros(7, 8)  # nobody's parameter, nobody's buffer
    handle = swapped(nn.ModuleList([model]), "0")
    moved = []
    for number in range(3):
        model(batch(number), angles).square().mean().backward()
        moved.append(handle.report()["moved_bytes"])
    assert moved == [320 + 224, 320, 320]  # the input is another one each time
    assert handle.report()["kept_bytes"] == 224


def test_what_somebody_else_holds_is_not_copied_back() -> None:
    model = stack(1)
    held = []
    model[0].input_norm.register_forward_hook(lambda module, args, output: held.append(output))
    handle = swapped(model, "self_attention")
    assert same(gradients(model, model(batch()).square().mean()), gradients_of_one())
    assert handle.report()["in_vain_bytes"] == held[0].nbytes


def gradients_of_one() -> list[Tensor]:
    model = stack(1)
    return gradients(model, model(batch()).square().mean())


def test_second_derivatives() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).sigmoid())
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Smooth(), Smooth())
    expected = [gradient.clone() for gradient in penalty(model)]
    model.zero_grad()
    handle = swapped(model, "0", "1")
    assert same(penalty(model), expected)
    assert handle.report()["moved_bytes"] > 0


def test_two_models_do_not_meet() -> None:
    models = stack(), stack()
    handles = [swapped(model, *NAMES) for model in models]
    loss = models[1](models[0](batch())).square().mean()
    references = stack(), stack()
    expected = references[1](references[0](batch())).square().mean()
    for model, reference in zip(models, references, strict=True):
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        wanted = torch.autograd.grad(expected, list(reference.parameters()), retain_graph=True)
        assert same(found, wanted)
    handles[0].remove()
    assert same(gradients(models[1], models[1](batch()).square().mean()), plain())


def test_tied_parameters_get_the_sum_of_their_gradients() -> None:
    def tied() -> nn.Sequential:
        model = stack()
        model[1].self_attention.qkv.weight = model[0].self_attention.qkv.weight
        model[2].self_attention = model[0].self_attention  # the whole module, twice in the model
        return model

    reference, model = tied(), tied()
    expected = gradients(reference, reference(batch()).square().mean())
    swapped(model, *NAMES)
    assert same(gradients(model, model(batch()).square().mean()), expected)


def test_removed_it_leaves_the_model_as_it_was_and_graphs_good() -> None:
    model = stack()
    kinds = [type(module) for module in model.modules()]
    handle = swapped(model, *NAMES)
    assert [type(module) for module in model.modules()] != kinds
    loss = model(batch()).square().mean()
    handle.remove()
    handle.remove()
    assert [type(module) for module in model.modules()] == kinds
    assert same(gradients(model, loss), plain())


def test_a_model_on_the_meta_device_runs_and_moves_nothing() -> None:
    with torch.device("meta"):
        model = stack(2)
        handle = swapped(model, *NAMES)
        model(torch.empty(2, 5, 8)).sum().backward()
    assert handle.report()["moved_bytes"] == 0
    model.to_empty(device="cpu")
    model(batch()).sum().backward()
    assert handle.report()["moved_bytes"] > 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA has no rule for vmap
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_of_functions_around_the_model_are_as_ever(transform: str) -> None:
    model = stack(2)
    x = batch()
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(model, weights, (x,))
        return out.square().mean()

    def run() -> list[Tensor]:
        if transform == "grad":
            return list(torch.func.grad(loss)(weights).values())
        several = {name: torch.stack([one, 2 * one]) for name, one in weights.items()}
        leaves = [one.requires_grad_() for one in several.values()]
        return list(torch.autograd.grad(torch.vmap(loss)(several).sum(), leaves))

    expected = run()
    swapped(model, *NAMES)
    assert same(run(), expected)
