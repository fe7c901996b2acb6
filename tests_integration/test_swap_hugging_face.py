"""Swap-attention on models as Hugging Face's, with adapters, wrappers, compilers and shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ascend_core.testing import RunRecord, assert_bitwise_equal, record_run, run_ranks
from ascend_core.transfer import HostCopy, Transfer
from ascend_swap import SwapAttentionConfig, swap_attention
from tests_integration.hugging_face import (
    BATCH,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    SEQUENCE,
    Model,
    loss_of,
    tokens,
)

ALL = SwapAttentionConfig(min_bytes=1, keep_last=0)
ONE = BATCH * SEQUENCE * HIDDEN * 4  # bytes of one hidden state in FP32

Make = Callable[[], nn.Module]


def turn_on(model: nn.Module, _: Any) -> Any:
    return swap_attention(model, ALL)


def trained(make: Make, apply: Any = None, **options: Any) -> RunRecord:
    return record_run(make, tokens, forward=loss_of, apply=apply, **options)


@functools.cache
def plain(kind: str) -> RunRecord:
    return trained(lambda: Model(kind))


# Layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize("mlps", [None, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_five_steps(kind: str, mlps: int | None, reentrant: bool | None) -> None:
    def make() -> nn.Module:
        model = Model(kind)
        if reentrant is not None:
            model.gradient_checkpointing_enable(use_reentrant=reentrant)
        return model

    def both(model: nn.Module, _: Any) -> Any:
        config = SwapAttentionConfig(min_bytes=1, keep_last=0, recompute_num_layers=mlps)
        return swap_attention(model, config)

    ours = trained(make, both)
    assert_bitwise_equal(plain(kind), ours)
    assert ours.report["modules"] == [f"layers.{n}.self_attn" for n in range(LAYERS)]
    # What a checkpoint computes again, is not saved.
    assert (ours.report["moved_bytes"] == 0) is (reentrant is not None)


@pytest.mark.parametrize("where", ["attention", "layer", "model"])
def test_checkpoints_as_wrappers(where: str) -> None:
    def make() -> nn.Module:
        model = Model("llama")
        wrap = wrappers.checkpoint_wrapper
        if where == "model":
            return wrap(model)
        for layer in model.layers:
            if where == "attention":
                layer.self_attn = wrap(layer.self_attn)
        if where == "layer":
            model.layers = nn.ModuleList(wrap(layer) for layer in model.layers)
        return model

    ours = trained(make, turn_on)
    assert_bitwise_equal(trained(make), ours)
    # Around a checkpoint its input moves.
    moved = LAYERS * ONE if where == "attention" else 0
    assert ours.report["moved_bytes"] == moved
    assert len(ours.report["layers"]) == LAYERS


def test_one_attention_by_its_whole_name() -> None:
    config = SwapAttentionConfig(min_bytes=1, keep_last=0, swap_modules="layers.1.self_attn")
    ours = trained(lambda: Model("llama"), lambda model, _: swap_attention(model, config))
    assert_bitwise_equal(plain("llama"), ours)
    assert list(ours.report["moved_bytes_by_layer"]) == ["layers.1"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def test_an_encoder_of_torchs_own() -> None:
    def make_batch(number: int) -> Tensor:
        return torch.randn(BATCH, SEQUENCE, HIDDEN)

    ours = record_run(Encoder, make_batch, apply=turn_on)
    assert_bitwise_equal(record_run(Encoder, make_batch), ours)
    assert ours.report["modules"] == [f"encoder.layers.{n}.self_attn" for n in range(LAYERS)]
    assert ours.report["moved_bytes"] >= LAYERS * 4 * ONE


# Frozen weights ----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank beside it, as LoRA has them."""

    def __init__(self, base: nn.Module, width_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 4, bias=False)
        self.up = nn.Linear(4, width_out, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))
        return out


def adapted() -> nn.Module:
    model = Model("llama").requires_grad_(False)
    for layer in model.layers:
        attention = layer.self_attn
        attention.qkv = Adapted(attention.qkv, 3 * HIDDEN)
        attention.o_proj = Adapted(attention.o_proj, HIDDEN)
    return model


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
def test_adapters_on_frozen_weights(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    original = Transfer.to_host

    def noting(self: Transfer, tensor: Tensor, **options: Any) -> HostCopy:
        stored = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        sent.append(stored.detach().clone())
        return original(self, tensor, **options)

    monkeypatch.setattr(Transfer, "to_host", noting)
    expected = trained(adapted, autocast=autocast)
    ours = trained(adapted, turn_on, autocast=autocast)
    assert_bitwise_equal(expected, ours)
    assert ours.report["moved_bytes"] > 0
    assert sent
    for weight in ours.steps[0].weights.values():
        for dtype in (torch.float32, torch.bfloat16):
            bits = weight.to(dtype).flatten()
            transposed = weight.to(dtype).t().flatten() if weight.dim() == 2 else bits
            for moved in (one for one in sent if one.dtype == dtype):
                assert not torch.equal(moved, bits)
                assert not torch.equal(moved, transposed)


# Compilers ---------------------------------------------------------------------------------------


# Dynamo looks at `.grad` of what is no leaf, and silences torch's warning in its own way.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("where", ["around the model", "around the attention", "in the attention"])
def test_beside_a_compiler(where: str) -> None:
    def make() -> nn.Module:
        model = Model("llama", dropout=0.0)
        for layer in model.layers:
            if where == "around the attention":
                layer.self_attn = torch.compile(layer.self_attn, backend="aot_eager")
            elif where == "in the attention":
                layer.self_attn.o_proj = torch.compile(layer.self_attn.o_proj, backend="aot_eager")
        return model

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        if where == "around the model":
            model = torch.compile(model, backend="aot_eager")
        return loss_of(model, batch)

    def run(apply: Any = None) -> RunRecord:
        torch._dynamo.reset()
        return record_run(make, tokens, steps=3, forward=forward, apply=apply)

    try:
        ours = run(turn_on)
        assert_bitwise_equal(run(), ours)
    finally:
        torch._dynamo.reset()
    assert (ours.report["moved_bytes"] > 0) is (where != "around the model")


# Ranks -------------------------------------------------------------------------------------------


def wrapped_in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module, *, units: tuple[str, ...], **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for name, module in reversed(list(model.named_modules())):
        if name.rpartition(".")[2] in units or (name.rpartition(".")[0] == "layers" and units):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": wrapped_in_ddp,
    "layers": functools.partial(sharded, units=("layer",)),
    "attention too": functools.partial(sharded, units=("self_attn",)),
    "not resharded": functools.partial(sharded, units=("layer",), reshard_after_forward=False),
}


class Case(NamedTuple):
    """How a model is trained on two ranks."""

    wrap: str
    frozen: bool = False
    before: bool = False  # swap-attention is turned on before the model is wrapped
    autocast: bool = False


CASES = (
    Case("ddp"),
    Case("ddp", before=True),
    Case("layers"),
    Case("layers", before=True),
    Case("layers", frozen=True),
    Case("attention too", frozen=True),
    Case("attention too", frozen=True, autocast=True),
    Case("not resharded", before=True),
)


def on_a_rank(rank: int, case: Case) -> tuple[bool, int, int]:
    """Train with and without. Whether they are equal, bytes that moved, and those in vain."""

    def run(*, swap: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = adapted() if case.frozen else Model("llama")
        handle = swap_attention(model, ALL) if swap and case.before else None
        model = WRAPS[case.wrap](model)
        if swap and not case.before:
            handle = swap_attention(model, ALL)
        mine = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(mine, lr=1e-2)
        found = []
        torch.manual_seed(rank)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = loss_of(model, tokens())
            loss.backward()
            found += [loss.detach().clone(), *(local(weight.grad) for weight in mine)]
            optimizer.step()
            optimizer.zero_grad()
        found += [local(value) for value in model.state_dict().values()]
        return found, handle and handle.report()

    (expected, _), (ours, report) = run(swap=False), run(swap=True)
    equal = all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))
    return equal, report["moved_bytes"], report["in_vain_bytes"]


def local(tensor: Any) -> Tensor:
    whole = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return whole.detach().clone()


def all_on_a_rank(rank: int) -> list[tuple[bool, int, int]]:
    return [on_a_rank(rank, case) for case in CASES]


def moved_on_one(case: Case) -> int:
    model = adapted() if case.frozen else Model("llama")
    handle = swap_attention(model, ALL)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        loss_of(model, tokens())
    moved: int = handle.report()["moved_bytes"]
    return moved


def test_shards_and_replicas() -> None:
    """What moves is what moves on one rank: no weight, however it was gathered."""
    expected = [(True, moved_on_one(case), 0) for case in CASES]
    for found in run_ranks(all_on_a_rank, 2, timeout_s=500):
        assert found == expected


def test_a_checkpoint_by_hand_in_a_layer_that_moves() -> None:
    class Half(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = checkpoint(self.attention, x, use_reentrant=False)
            return first + self.attention(x)

    def make() -> nn.Module:
        model = Model("llama")
        for layer in model.layers:
            layer.self_attn = Half(layer.self_attn)
        return model

    ours = trained(make, turn_on)
    assert_bitwise_equal(trained(make), ours)
    assert ours.report["moved_bytes"] > 0
