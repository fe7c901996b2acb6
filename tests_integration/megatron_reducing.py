"""What the ranks of test_ddp_megatron.py do: train a tiny GPT, and write down what travels when.

The model, and what stands in for CUDA, are those of `megatron_npu`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_ddp import DDPConfig
from ascend_ddp._ranks import Ranks
from tests_integration.megatron_cpu import stand_ins
from tests_integration.megatron_npu import trainer
from tests_integration.megatron_npu.configurations import (
    SEQUENCE,
    UNIFORM,
    VOCABULARY,
    Configuration,
)
from tests_integration.megatron_npu.worker import type_of_cuda

STEPS, MICRO_BATCHES = 4, 4
BUCKET_BYTES = 80_000  # of a stage's gradients, which are about ten times as many

# An entry: what happened, in which chunk, and the number of the micro-batch or the bucket. Where
# something is waited for it is unknown by whom: ("wait", -1, -1).
Entry = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How one model is trained.

    Attributes:
        configuration: The model, and how it is cut.
        overlap: Send while backward runs.
        align: Let all stages send at one time.
        per_token: Divide by the number of tokens instead of the number of sequences.
        syncs_always: Do without megatron-core's `no_sync_func`, which is wrong.
    """

    configuration: Configuration
    overlap: bool = True
    align: bool = False
    per_token: bool = False
    syncs_always: bool = False

    @property
    def ranks(self) -> int:
        """On two replicas."""
        return 2 * self.configuration.pipeline * self.configuration.tensor


VIRTUAL = Configuration(pipeline=2, virtual=2)
VARIANTS = {
    "no pipeline": Variant(Configuration()),
    "no pipeline, tied embedding, per token": Variant(
        Configuration(tied=True, model={"calculate_per_token_loss": True}), per_token=True
    ),
    "pp2, tied embedding": Variant(Configuration(pipeline=2, tied=True)),
    "pp2, aligned": Variant(Configuration(pipeline=2), align=True),
    "pp2, vpp2": Variant(VIRTUAL),
    "pp2, vpp2, bf16": Variant(dataclasses.replace(VIRTUAL, dtype="bf16")),
    "pp2, vpp2, tied embedding, aligned": Variant(
        dataclasses.replace(VIRTUAL, tied=True), align=True
    ),
    "pp2, vpp2, no overlap": Variant(VIRTUAL, overlap=False),
    "pp2, vpp2, recompute": Variant(dataclasses.replace(VIRTUAL, model=UNIFORM)),
    "pp2, vpp2, syncs always": Variant(VIRTUAL, syncs_always=True),
    "tp2, sequence parallel": Variant(Configuration(tensor=2, model={"sequence_parallel": True})),
}


@dataclasses.dataclass
class Trained:
    """What came of it, on one rank.

    Attributes:
        tensors: By name: losses, gradients of each step, and weights at the end.
        log: Of each step what happened, in order; none for megatron-core's own.
        buckets: Of each chunk, how many.
        parameters: Of each chunk, how many.
    """

    tensors: dict[str, Tensor]
    log: list[list[Entry]]
    buckets: list[int]
    parameters: list[int]


def train_all(rank: int, names: Sequence[str]) -> dict[str, tuple[Trained, Trained | None]]:
    """Train variants with our reduction and with megatron-core's DistributedDataParallel."""
    logging.disable(logging.WARNING)
    found: dict[str, tuple[Trained, Trained | None]] = {}
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        for name in names:
            variant = VARIANTS[name]
            ours = train(variant, Ours)
            found[name] = ours, None if variant.syncs_always else train(variant, Theirs)
    return found


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Stand in for what megatron-core asks of CUDA by name."""
    warnings.simplefilter("ignore")  # megatron-core warns of itself
    more = [
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", type_of_cuda("torch.")),
    ]
    for place, name, stand_in in [*stand_ins(), *more]:
        patch.setattr(place, name, stand_in)


class Theirs:
    """megatron-core's DistributedDataParallel, with overlap: the incumbent.

    Args:
        variant: How the model is trained.
        config: megatron-core's, of the chunks.
        chunks: Of this rank.
    """

    def __init__(self, variant: Variant, config: Any, chunks: list[nn.Module]) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20_000)
        self.chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
        functions = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
        config.finalize_model_grads_func = finalize_model_grads
        self.log: list[Entry] = []
        self.buckets: list[int] = []

    def gradient(self, parameter: Any) -> Tensor:
        grad: Tensor = parameter.main_grad
        return grad

    def remove(self) -> None:
        """Nothing is left."""


class Ours:
    """reduce_gradients, which writes down what happens.

    Args:
        variant: How the model is trained.
        config: megatron-core's, of the chunks.
        chunks: Of this rank.
    """

    def __init__(self, variant: Variant, config: Any, chunks: list[nn.Module]) -> None:
        from ascend_ddp.integrations.megatron import with_reduced_gradients

        self.log: list[Entry] = []
        self._config = config
        for number, chunk in enumerate(chunks):
            self._watch(number, chunk)
        options = DDPConfig(
            bucket_bytes=BUCKET_BYTES, overlap=variant.overlap, average=not variant.per_token
        )
        self.handle: Any = None
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Ranks, "all_reduce", self._telling_of_launches(Ranks.all_reduce))
        self._patch.setattr(Ranks, "wait", self._telling_of_waits(Ranks.wait))
        config.finalize_model_grads_func = None
        self.chunks, self.handle = with_reduced_gradients(
            chunks, options, align_grad_reduce=variant.align
        )
        if variant.syncs_always:
            config.no_sync_func = None

    @property
    def buckets(self) -> list[int]:
        return [len(reducer.buckets) for reducer in self.handle.reduction.reducers]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def remove(self) -> None:
        """And see that megatron-core's options are as before."""
        self._patch.undo()
        self.handle.remove()
        for name in ("grad_sync_func", "finalize_model_grads_func", "no_sync_func"):
            assert getattr(self._config, name) is None, name

    def _watch(self, number: int, chunk: nn.Module) -> None:
        """Write down when a backward begins, and when a gradient is there, before it is taken."""
        calls = 0

        def called(module: nn.Module, args: Any, output: Tensor) -> None:
            nonlocal calls
            micro, calls = calls % MICRO_BATCHES, calls + 1
            output.register_hook(lambda grad: self.log.append(("backward", number, micro)))

        chunk.register_forward_hook(called)
        for parameter in chunk.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: self.log.append(("gradient", number, 0))
            )

    def _telling_of_launches(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Write down when a bucket is sent; what else ranks say to one another does not count."""

        def all_reduce(ranks: Ranks, tensor: Tensor, *more: Any) -> Any:
            reducers = self.handle.reduction.reducers if self.handle is not None else ()
            for chunk, reducer in enumerate(reducers):
                for number, bucket in enumerate(reducer.buckets):
                    if tensor is bucket.flat:
                        self.log.append(("launch", chunk, number))
            return real(ranks, tensor, *more)

        return all_reduce

    def _telling_of_waits(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Write down when a bucket is waited for."""

        def wait(ranks: Ranks, work: Any, what: str, names: str) -> None:
            if what.startswith("bucket "):
                self.log.append(("wait", -1, -1))
            real(ranks, work, what, names)

        return wait


def train(variant: Variant, kind: type[Ours] | type[Theirs]) -> Trained:
    """Train in the groups of this process; all ranks call this together."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    configuration = variant.configuration
    parallel_state.initialize_model_parallel(
        configuration.tensor, configuration.pipeline, configuration.virtual
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    config, chunks = model(configuration)
    reduction = kind(variant, config, chunks)
    optimizer = optimizer_of(configuration, reduction.chunks)
    found, log = dict[str, Tensor](), list[list[Entry]]()
    for step in range(STEPS):
        for chunk in reduction.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduction.log.clear()
        mine = sequences(step)
        losses = get_forward_backward_func()(
            forward_step_func=forward_step_per_token if variant.per_token else forward_step,
            data_iterator=per_chunk([batches(mine) for _ in chunks]),
            model=per_chunk(reduction.chunks),
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        log.append(list(reduction.log))
        note(found, f"step {step}", reduction, chunks)
        for micro, loss in enumerate(losses):
            found[f"loss {step} {micro}"] = loss["loss"]
        good, norm, _ = optimizer.step()
        assert good
        found[f"norm {step}"] = torch.as_tensor(norm)
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found[f"weight {number} {name}"] = parameter.detach().clone()
    counts = [len(list(chunk.parameters())) for chunk in chunks]
    trained = Trained(found, log, reduction.buckets, counts)
    reduction.remove()
    torch.distributed.barrier()  # the others may still be sending
    trainer.leave_groups()
    return trained


def note(
    found: dict[str, Tensor], step: str, reduction: Ours | Theirs, chunks: list[nn.Module]
) -> None:
    """Keep the gradients of a step."""
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found[f"{step} {number} {name}"] = reduction.gradient(parameter).clone()


def model(configuration: Configuration) -> tuple[Any, list[nn.Module]]:
    """The config and the chunks of this rank."""
    from megatron.core.transformer.module import Float16Module

    config = trainer._transformer_config(configuration)
    spec, _ = trainer.swapping.spec_of(configuration)
    chunks: list[nn.Module] = []
    for stage in range(configuration.virtual or 1):
        vp_stage = stage if configuration.virtual else None
        chunk = trainer._gpt(configuration, config, spec, vp_stage)
        trainer._set_weights(chunk, configuration)
        chunks.append(chunk if configuration.dtype == "fp32" else Float16Module(config, chunk))
    return config, chunks


def optimizer_of(configuration: Configuration, chunks: list[Any]) -> Any:
    """Megatron-core's, with clipping."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = trainer.DTYPES[configuration.dtype]
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=1.0,
        bf16=configuration.dtype == "bf16", params_dtype=dtype,
    )  # fmt: skip
    return get_megatron_optimizer(options, chunks)


def per_chunk(found: list[Any]) -> Any:
    return found if len(found) > 1 else found[0]


def sequences(step: int) -> Tensor:
    """The part of a step's batch that this rank's replica of the model trains on."""
    from megatron.core import parallel_state

    replicas: int = parallel_state.get_data_parallel_world_size()
    replica: int = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 + step)
    shape = replicas * MICRO_BATCHES, SEQUENCE + 1
    return torch.randint(VOCABULARY, shape, generator=generator).chunk(replicas)[replica]


def batches(mine: Tensor) -> Iterator[Any]:
    return trainer._batches(mine, torch.device("cpu"))


def forward_step(batches: Iterator[Any], chunk: nn.Module) -> Any:
    return trainer._forward_step(batches, chunk)


def forward_step_per_token(batches: Iterator[Any], chunk: nn.Module) -> Any:
    losses, _ = trainer._forward_step(batches, chunk)

    def loss(losses: Tensor) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"loss": total.detach().clone()}

    return losses, loss
