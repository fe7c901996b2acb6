"""The specs of the trainer with fused operators, and what tells that they were called."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests_integration.megatron_npu.configurations import Configuration

# Those that kernels of ascend_ops call.
OF_NPU = (
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_fusion_attention_v2",
    "npu_fusion_attention_grad_v2",
)


def spec_of(configuration: Configuration, config: Any) -> Any:
    """The spec of a block of this rank's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from ascend_ops.integrations.megatron import with_fused_ops

    layer = get_gpt_layer_local_spec(normalization=configuration.norm)
    return with_fused_ops(layer, config, configuration.fused)


class Watch:
    """Counts operators from now on.

    Args:
        chunks: The model's.
    """

    def __init__(self, chunks: list[nn.Module]) -> None:
        self._chunks = chunks
        self._calls: collections.Counter[str] = collections.Counter()
        self._open = contextlib.ExitStack()
        on_npu = next(chunks[0].parameters()).device.type == "npu"
        self._open.enter_context(self._npu_counted() if on_npu else self._profiled())

    def report(self) -> dict[str, Any]:
        """How often each operator was called, and a digest of the gradients of the norms."""
        self._open.close()
        found = hashlib.sha256()
        for name, parameter in self._parameters():
            if "norm" in name:
                found.update(parameter.main_grad.float().cpu().numpy().tobytes())
        return {"calls": dict(self._calls), "norms": found.hexdigest()}

    def _parameters(self) -> Iterable[tuple[str, Any]]:
        return (named for chunk in self._chunks for named in chunk.named_parameters())

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        with torch.autograd.profiler.profile() as profile:
            yield
        names = (event.name for event in profile.function_events)
        self._calls.update(name for name in names if name.startswith("ascend_ops::"))

    @contextlib.contextmanager
    def _npu_counted(self) -> Iterator[None]:
        """Count calls where kernels find the operators: torch_npu's profiler is not torch's."""

        def counted(name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
            self._calls[f"npu::{name}"] += 1
            return operator(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            for name in OF_NPU:
                stand_in = functools.partial(counted, name, getattr(torch.ops.npu, name))
                stack.enter_context(mock.patch.object(torch.ops.npu, name, stand_in))
            yield
