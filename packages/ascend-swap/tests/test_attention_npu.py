"""swap-attention on the simulated NPU: loss, gradients and weights are the plain run's bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import ascend_sim
from ascend_core.pinned import PinnedPool
from ascend_core.testing import assert_bitwise_equal, record_run
from ascend_swap import SwapAttentionConfig, swap_attention

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Where races are traced (ASCENDSIM_TRACE=1), a test in which there is one fails."""
    yield
    running = ascend_sim.current()
    if running is not None and running.config.trace:
        assert running.races() == []


STEPS = 5
SHAPE = (2, 16, 32)
EVERYTHING = SwapAttentionConfig(min_bytes=1, keep_last=0)


def batch(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """x_BSD on the CPU."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@dataclasses.dataclass
class Recorded:
    """Two kinds of runs that `record_run` makes, which differ in nothing but the feature."""

    make: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, config: SwapAttentionConfig | None = None) -> Any:
        apply = None if config is None else (lambda model, _: swap_attention(model, config))
        return record_run(
            lambda: self.make().to(self.dtype),
            lambda number: batch(number, self.dtype),
            steps=STEPS,
            apply=apply,
            device="npu",
            **self.options,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_the_plain_run(dtype: torch.dtype, decoder: Any) -> None:
    recorded = Recorded(decoder, dtype)
    plain = recorded.run()
    for keep_last in (None, 0, 1, 2):
        for prefetch in (0, 1, 2) if dtype is torch.float32 else (1,):
            config = SwapAttentionConfig(min_bytes=1, keep_last=keep_last, prefetch=prefetch)
            swapped = recorded.run(config)
            assert_bitwise_equal(plain, swapped)
            moved = swapped.report["moved_bytes_by_layer"].values()
            if keep_last is not None:
                assert [nbytes > 0 for nbytes in moved] == [n < 3 - keep_last for n in range(3)]
            assert (swapped.report["prefetch_hits"] > 0) is (prefetch > 0), config


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"autocast": torch.bfloat16}, {"accumulate": 2, "autocast": torch.float16}],
    ids=str,
)
def test_with_micro_batches_and_autocast(options: dict[str, Any], decoder: Any) -> None:
    recorded = Recorded(decoder, options=options)
    plain = recorded.run()
    swapped = recorded.run(EVERYTHING)
    assert_bitwise_equal(plain, swapped)
    assert swapped.report["moved_bytes"] > 0


def test_the_mask_of_causal_attention_moves_too(decoder: Any) -> None:
    recorded = Recorded(lambda: decoder(causal=True), torch.bfloat16)
    plain = recorded.run()
    swapped = recorded.run(EVERYTHING)
    assert_bitwise_equal(plain, swapped)
    assert swapped.report["moved_bytes"] > 3 * 2048 * 2048


@pytest.mark.parametrize("count", [1, 3])
def test_recomputed_mlps_save_inputs_that_move(count: int, decoder: Any) -> None:
    recorded = Recorded(decoder)
    plain = recorded.run()
    config = SwapAttentionConfig(min_bytes=1, keep_last=0, recompute_num_layers=count)
    swapped = recorded.run(config)
    assert_bitwise_equal(plain, swapped)
    normed = 2 * 16 * 32 * 4  # what the MLP is given
    moved = swapped.report["moved_bytes_by_layer"]
    without = recorded.run(EVERYTHING).report["moved_bytes_by_layer"]
    more = [moved[name] - without[name] for name in moved]
    assert more == [normed if layer < count else 0 for layer in range(3)]


class Checkpointed(nn.Module):
    """Calls another module within a checkpoint."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_with_checkpoints_inside_and_outside(
    inside: bool, use_reentrant: bool, decoder: Any
) -> None:
    def make() -> nn.Module:
        model = decoder()
        for layer in (0, 1):  # not the last: both kinds in one run
            if inside:
                attention = model.layers[layer].self_attention
                attention.output = Checkpointed(attention.output, use_reentrant=use_reentrant)
                attention.qkv = Checkpointed(attention.qkv, use_reentrant=use_reentrant)
            else:
                model.layers[layer] = Checkpointed(model.layers[layer], use_reentrant=use_reentrant)
        return model

    recorded = Recorded(make)
    plain = recorded.run()
    swapped = recorded.run(EVERYTHING)
    assert_bitwise_equal(plain, swapped)
    moved = list(swapped.report["moved_bytes_by_layer"].values())
    # Under somebody else's hooks, and in a backward, it stands aside.
    assert [nbytes > 0 for nbytes in moved] == [inside, inside, True]


# Programs of their own: what one step does, from the batches of that step. Nothing in them, and
# nothing between the steps, waits for the device.

Program = Callable[[Any, list[Tensor]], list[Tensor]]


def trained(
    make: Callable[[], nn.Module], program: Program, config: SwapAttentionConfig | None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Losses, gradients and weights of all steps, on the CPU, and the report of the feature."""
    torch.manual_seed(0)
    model = make().to("npu")
    handle = None if config is None else swap_attention(model, config)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    batches = [[batch(8 * step + micro).npu() for micro in range(4)] for step in range(3)]
    seen = []
    for of_step in batches:
        optimizer.zero_grad()
        seen += [loss.detach() for loss in program(model, of_step)]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    report = {} if handle is None else handle.report()
    return [tensor.cpu() for tensor in seen], report


def retained(model: Any, batches: list[Tensor]) -> list[Tensor]:
    loss = loss_of(model, batches[0])
    loss.backward(retain_graph=True)
    after = loss_of(model, batches[1])
    after.backward()
    loss.backward()
    return [loss, after]


def two_forwards(model: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = [loss_of(model, x) for x in batches[:2]]
    torch.stack(losses).sum().backward()
    return losses


def in_order_of_forward(model: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = [loss_of(model, x) for x in batches]
    for loss in losses:
        loss.backward()
    return losses


def one_forward_one_backward(model: Any, batches: list[Tensor]) -> list[Tensor]:
    waiting, losses = [], []
    for micro, x in enumerate(batches):
        waiting.append(loss_of(model, x))
        losses.append(waiting[-1])
        if micro >= 2:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return losses


def dropped(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """A forward that no backward follows, and a layer of which nothing is used."""
    loss_of(model, batches[1])
    x = model.entry(batches[0])
    unused = model.layers[1](x)
    loss = model.head(model.layers[0](x) + model.layers[2](x)).square().mean()
    loss.backward()
    del unused
    return [loss]


def by_autograd_grad(model: Any, batches: list[Tensor]) -> list[Tensor]:
    loss = loss_of(model, batches[0])
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=False)
    loss = loss_of(model, batches[1])
    loss.backward()
    return [loss, *first]


def raising(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """A user's error in forward and one in backward, and then a step as ever."""
    stop = model.layers[1].register_forward_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        loss_of(model, batches[1])
    stop.remove()
    x = model.layers[0](model.entry(batches[1]))
    x.register_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model.layers[2](model.layers[1](x)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    loss = loss_of(model, batches[0])
    loss.backward()
    return [loss]


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def on_a_side_stream(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """Forward and backward of one on a stream of the user's, of the other on the usual one."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    side.wait_stream(main)
    with torch.npu.stream(side):
        loss = loss_of(model, batches[0])
        loss.backward()
        first = loss.detach()
        del loss  # autograd's own nodes belong to the stream on which they were made
    main.wait_stream(side)
    first.record_stream(main)
    read_on(main, model)
    second = loss_of(model, batches[1])
    second.backward()
    return [first, second]


def a_layer_on_a_side_stream(model: Any, batches: list[Tensor]) -> list[Tensor]:
    """The middle layer's tensors are packed on a side stream, and autograd asks for them there."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = model.layers[0](model.entry(batches[0]))
    side.wait_stream(main)
    x.record_stream(side)
    with torch.npu.stream(side):
        y = model.layers[1](x)
    main.wait_stream(side)
    y.record_stream(main)
    loss = model.head(model.layers[2](y)).square().mean()
    loss.backward()
    read_on(main, model)
    return [loss]


def read_on(stream: Any, model: Any) -> None:
    """Say of gradients that a side stream made that the optimizer reads them on another one."""
    for parameter in model.parameters():
        parameter.grad.record_stream(stream)


PROGRAMS = [
    retained, two_forwards, in_order_of_forward, one_forward_one_backward, dropped,
    by_autograd_grad, raising, on_a_side_stream, a_layer_on_a_side_stream,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_train_as_without_it(program: Program, decoder: Any, same: Any) -> None:
    plain, _ = trained(decoder, program, None)
    for config in (EVERYTHING, SwapAttentionConfig(min_bytes=1, prefetch=2)):
        swapped, report = trained(decoder, program, config)
        assert same(swapped, plain), config
        assert config.keep_last is None or report["moved_bytes"] > 0


def test_the_order_of_a_pipeline_is_learnt(decoder: Any) -> None:
    """From the second step on all but what the first backward of a step asks for comes in time."""
    _, report = trained(decoder, one_forward_one_backward, EVERYTHING)
    assert report["hit_rate"] > 0.8


def test_two_models_share_a_pool_and_nothing_else(decoder: Any, same: Any) -> None:
    def both(pool: PinnedPool | None) -> list[Tensor]:
        torch.manual_seed(0)
        models = [decoder().to("npu"), decoder(2).to("npu")]
        if pool is not None:
            handles = [swap_attention(model, EVERYTHING, pool=pool) for model in models]
        batches = [batch(number).npu() for number in range(STEPS)]
        for x in batches:
            first, second = (loss_of(model, x) for model in models)
            first.backward()
            second.backward()
        if pool is not None:
            assert all(handle.report()["in_vain_bytes"] == 0 for handle in handles)
        return [p.grad.cpu() for model in models for p in model.parameters()]

    assert same(both(PinnedPool()), both(None))


class Odd(torch.autograd.Function):
    """Saves views with strides and offsets, and a tensor of the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_cpu: Tensor) -> Tensor:
        strided, transposed = x[:, 1:, ::2], x.transpose(0, 2)
        ctx.save_for_backward(strided, transposed, x[1, 3], on_cpu, x.expand(3, *x.shape))
        ctx.on_cpu = on_cpu
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        strided, transposed, row, on_cpu, expanded = ctx.saved_tensors
        assert on_cpu.device.type == "cpu"  # SA-10
        assert on_cpu.data_ptr() == ctx.on_cpu.data_ptr()
        assert strided.stride()[1:] == (32, 2)  # SA-04
        assert expanded.stride()[0] == 0
        gradient = gradient.clone()
        gradient[:, 1:, ::2] += strided
        gradient += transposed.transpose(0, 2) * row + expanded.sum(0)
        return gradient * on_cpu.item(), None


class OddAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.factor = torch.tensor(1.5)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x)
        return Odd.apply(mixed * 3, self.factor)  # type: ignore[no-untyped-call]


def test_strided_saves_and_tensors_of_the_cpu(decoder: Any, same: Any) -> None:
    def make() -> nn.Module:
        model = decoder()
        for layer in model.layers:
            layer.self_attention = OddAttention(layer.self_attention)
        return model

    def program(model: Any, batches: list[Tensor]) -> list[Tensor]:
        return two_forwards(model, batches)

    plain, _ = trained(make, program, None)
    swapped, _ = trained(make, program, EVERYTHING)
    assert same(swapped, plain)
