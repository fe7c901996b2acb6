"""The specs of the trainer, and swap-attention by each of the ways in which it is turned on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from tests_integration.megatron_npu.configurations import LAYERS, Configuration

OPTIONS = ("swap_modules", "recompute_num_layers")


def spec_of(configuration: Configuration) -> tuple[Any, Any]:
    """The spec of a layer, and the handle where the spec turns the feature on."""
    from ascend_swap import SwapAttentionConfig
    from ascend_swap.integrations.megatron import with_swapped_attention

    spec = _plain_spec(configuration)
    if configuration.swap != "spec":
        return spec, None
    return with_swapped_attention(spec, SwapAttentionConfig(min_bytes=1, **configuration.swapped))


def _plain_spec(configuration: Configuration) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(normalization=configuration.norm)
    if not configuration.model.get("sequence_parallel"):
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = NormOfPart
    layers = LAYERS // configuration.pipeline // (configuration.virtual or 1)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=NormOfPart)


class NormOfPart(nn.RMSNorm):
    """A norm of a part of the sequence. megatron-core has one with Transformer Engine only."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = True  # its gradients are summed over the ranks


def turn_on(configuration: Configuration, chunks: list[nn.Module]) -> Any:
    """Swap the attention of all chunks of this rank, unless that is done or not asked for."""
    from ascend_swap import SwapAttentionConfig, swap_attention
    from ascend_swap.integrations.megatron import swap_by_options

    if configuration.swap == "model":
        config = SwapAttentionConfig(min_bytes=1, **configuration.swapped)
        return _All([swap_attention(chunk, config) for chunk in chunks])
    if configuration.swap == "options":
        of_config = {k: v for k, v in configuration.swapped.items() if k not in OPTIONS}
        asked = {k: v for k, v in configuration.swapped.items() if k in OPTIONS}
        return swap_by_options(
            chunks,
            SimpleNamespace(swap_attention=True, **asked),
            config=SwapAttentionConfig(min_bytes=1, **of_config),
        )
    return None


class _All:
    """Several handles as one."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def report(self) -> dict[str, Any]:
        """What they report: the sum of what is counted."""
        reports = [handle.report() for handle in self._handles]
        return {
            key: sum(report[key] for report in reports)
            for key, value in reports[0].items()
            if isinstance(value, int)
        }
