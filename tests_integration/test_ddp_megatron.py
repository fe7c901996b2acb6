"""reduce_gradients under megatron-core's real schedules, against its own DistributedDataParallel.

Both add up the gradients of two replicas, of which there is one order: all are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.testing import run_ranks
from ascend_ddp import DDPConfig
from tests_integration.megatron_cpu import gpt, loss_of, tokens
from tests_integration.megatron_reducing import MICRO_BATCHES, VARIANTS, Entry, Trained, train_all

pytestmark = [
    pytest.mark.timeout(1200),  # the first test waits for all variants of its ranks
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
]

EQUAL = [name for name, variant in VARIANTS.items() if not variant.syncs_always]
# With grad_sync_func, all stages but the last to come send when their last backward is over.
EARLY = [name for name in EQUAL if VARIANTS[name].overlap and not VARIANTS[name].align]


ByRank = Callable[[str], list[tuple[Trained, Trained | None]]]


@pytest.fixture(scope="module")
def by_rank() -> ByRank:
    """What each rank of a variant has found. All variants of so many ranks train one by one."""
    found = {}
    for ranks in sorted({variant.ranks for variant in VARIANTS.values()}):
        names = [name for name, variant in VARIANTS.items() if variant.ranks == ranks]
        found[ranks] = run_ranks(train_all, ranks, names, timeout_s=500)
    return lambda name: [of_rank[name] for of_rank in found[VARIANTS[name].ranks]]


@pytest.mark.parametrize("name", EQUAL)
def test_equals_megatrons_own(name: str, by_rank: ByRank) -> None:
    for ours, theirs in by_rank(name):
        assert theirs is not None
        assert ours.tensors.keys() == theirs.tensors.keys()
        different = [
            key
            for key, wanted in theirs.tensors.items()
            if not torch.equal(ours.tensors[key], wanted)
        ]
        assert different == []
        first, last = (
            next(value for key, value in ours.tensors.items() if key.startswith(f"step {step} "))
            for step in (0, 3)
        )
        assert not torch.equal(first, last)


# What travels when -------------------------------------------------------------------------------


def sent(log: Sequence[Entry], chunk: int) -> list[int]:
    return [number for what, where, number in log if (what, where) == ("launch", chunk)]


def place_of_last_backward(log: Sequence[Entry], chunk: int) -> int:
    return log.index(("backward", chunk, MICRO_BATCHES - 1))


def faults(found: Trained, *, early: bool) -> list[str]:
    """What is wrong with when the buckets of a rank have left."""
    faults = []
    for step, log in enumerate(found.log):
        for chunk, buckets in enumerate(found.buckets):
            if step and sent(log, chunk) != list(range(buckets)):
                faults.append(f"step {step}, chunk {chunk}: sent {sent(log, chunk)}")
            if len(set(sent(log, chunk))) != len(sent(log, chunk)):
                faults.append(f"step {step}, chunk {chunk}: sent twice")
            places = [at for at, entry in enumerate(log) if entry[:2] == ("launch", chunk)]
            if places[0] < place_of_last_backward(log, chunk):
                faults.append(f"step {step}, chunk {chunk}: before the last micro-batch")
            gradients = [at for at, entry in enumerate(log) if entry[:2] == ("gradient", chunk)]
            if early and places[0] > gradients[-1]:
                faults.append(f"step {step}, chunk {chunk}: after the last gradient")
    return faults


@pytest.mark.parametrize("name", EQUAL)
def test_each_bucket_is_sent_once_and_in_the_last_micro_batch(name: str, by_rank: ByRank) -> None:
    for ours, _ in by_rank(name):
        assert all(count > 2 for count in ours.buckets)
        assert faults(ours, early=name in EARLY) == []
        for log in ours.log:
            backwards = [entry for entry in log if entry[0] == "backward"]
            assert len(backwards) == MICRO_BATCHES * len(ours.buckets)


@pytest.mark.parametrize("name", [name for name in EARLY if "vpp2" in name])
def test_a_chunk_travels_beside_the_backwards_of_the_other(name: str, by_rank: ByRank) -> None:
    for ours, _ in by_rank(name):
        for log in ours.log:
            last = max(at for at, entry in enumerate(log) if entry[0] == "gradient")
            assert sent(log[:last], 1)
            assert ("wait", -1, -1) not in log[:last]
            assert log.count(("wait", -1, -1)) == sum(ours.buckets)


def test_without_no_sync_that_would_show(by_rank: ByRank) -> None:
    for ours, _ in by_rank("pp2, vpp2, syncs always"):
        assert any("before the last micro-batch" in fault for fault in faults(ours, early=True))


# On and off --------------------------------------------------------------------------------------


def test_it_trains_alone_and_leaves_nothing_behind(megatron: None) -> None:
    from ascend_ddp.integrations.megatron import with_reduced_gradients

    model = gpt(hidden_dropout=0.0, attention_dropout=0.0)
    (chunk,), handle = with_reduced_gradients(model)
    assert list(chunk.state_dict()) == list(model.state_dict())
    batch = tokens()
    loss_of(chunk, batch).backward()
    chunk.finish_grad_sync()
    assert handle.report()["backwards"] == 1
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    chunk.scale_gradients(2.0)
    assert all(map(torch.equal, [2 * one for one in found], [p.grad for p in model.parameters()]))
    chunk.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    handle.remove()
    loss_of(model, batch).backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))
    assert model.config.no_sync_func is None
    assert model.config.finalize_model_grads_func is None


def test_what_others_have_set_stays(megatron: None) -> None:
    from ascend_ddp.integrations.megatron import with_reduced_gradients

    model = gpt()
    model.config.finalize_model_grads_func = finalize = lambda *args, **kwargs: None
    _, handle = with_reduced_gradients(model)
    assert model.config.finalize_model_grads_func is finalize
    model.config.no_sync_func = other = lambda: None
    handle.remove()
    assert model.config.finalize_model_grads_func is finalize
    assert model.config.no_sync_func is other


def refusal(model: nn.Module, config: DDPConfig | None = None) -> str:
    from ascend_ddp.integrations.megatron import with_reduced_gradients

    with pytest.raises(ConfigError) as caught:
        with_reduced_gradients(model, config)
    return str(caught.value)


def test_what_reduces_elsewhere_is_refused(megatron: None) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = gpt()
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    assert "has a main_grad." in refusal(wrapped)
    model = gpt()
    model.config.no_sync_func = lambda: None
    assert "no_sync_func of the chunks' config is set already." in refusal(model)
    model = gpt()
    next(model.parameters()).allreduce = False  # type: ignore[attr-defined]
    assert "belongs to an expert." in refusal(model)


def test_gradients_that_would_be_wrong_are_refused(megatron: None) -> None:
    model = gpt()
    model.config.gradient_accumulation_fusion = True
    assert "with_reduced_gradients and gradient_accumulation_fusion" in refusal(model)
    assert "mode='reduce-scatter'" in refusal(gpt(), DDPConfig(mode="reduce-scatter"))
    per_token = gpt(calculate_per_token_loss=True)
    assert "calculate_per_token_loss and average=True" in refusal(per_token)
    with pytest.raises(ConfigError, match="without parameters"):
        from ascend_ddp.integrations.megatron import with_reduced_gradients

        with_reduced_gradients([])
