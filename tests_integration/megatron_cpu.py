"""Real megatron-core on the CPU: it asks for CUDA by name in some places, which are answered here.

For tests only. `megatron_on_cpu` stands in for a few functions of `torch.cuda` while its context is
open. megatron-core has several generators of random numbers on the device; here they take turns on
the CPU's only one, which is torch's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, SEQUENCE, BATCH, HIDDEN, HEADS, INNER, LAYERS = 64, 16, 2, 32, 4, 128, 4
POSITIONS = torch.arange(SEQUENCE).expand(BATCH, -1)
MASK = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

Tokens = tuple[Tensor, Tensor]


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Import megatron-core and form the groups of one process."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for place, name, stand_in in stand_ins():
            patch.setattr(place, name, stand_in)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
            from megatron.core import parallel_state
            from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401 (warns at import)
        # The trackers of random states notice that the generators of CPU and device are one.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1
        )
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def gpt(
    *,
    swiglu: bool = False,
    change_spec: Callable[[Any], Any] = lambda spec: spec,
    **options: Any,
) -> nn.Module:
    """A GPTModel of modules that need no Transformer Engine, with random numbers begun anew."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    options = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "ffn_hidden_size": INNER, "use_cpu_initialization": True, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "gated_linear_unit": swiglu,
        "activation_func": F.silu if swiglu else F.gelu, **options,
    }  # fmt: skip
    norm = options.get("normalization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that megatron-core itself finds outdated
        spec = change_spec(get_gpt_layer_local_spec(normalization=norm))
        config = TransformerConfig(**options)
        return GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")


def tokens(_: int = 0) -> Tokens:
    drawn = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(model: nn.Module, batch: Tokens) -> Tensor:
    loss: Tensor = model(batch[0], POSITIONS, MASK, labels=batch[1]).float().mean()
    return loss


def stand_ins() -> list[tuple[Any, str, Any]]:
    """Places, names there, and what stands in for them."""
    cuda, generator = torch.cuda, torch.default_generator
    found = [
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "default_generators", _Same(generator)),
        (cuda, "_lazy_call", lambda call, **_: call()),
        (cuda, "manual_seed", lambda seed: generator.manual_seed(int(seed))),
        (cuda, "get_rng_state", lambda device=None: generator.get_state()),
        (cuda.random, "get_rng_state", lambda device=None: generator.get_state()),
        # megatron-core compiles its fused functions, which needs a compiler and takes long.
        (torch, "compile", lambda function: function),
    ]
    factories = ("tensor", "zeros", "ones", "empty")
    return found + [(torch, name, _on_cpu(getattr(torch, name))) for name in factories]


class _Same:
    """As many generators as anybody asks for, all the same."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getitem__(self, index: object) -> torch.Generator:
        return self._generator


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make
