"""The options of training that a plan may name beside the features. Imports no torch.

They are named as megatron-core or MindSpeed names them, with underscores. Rules read them; a plan
that names another is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ascend_suite._core_options import CORE_OPTIONS
from ascend_suite._other_options import FACTS, MINDSPEED_OPTIONS, SCRIPT_OPTIONS
from ascend_suite._training_option import TrainingOption

__all__ = ["VOCABULARY", "TrainingOption"]

VOCABULARY: Mapping[str, TrainingOption] = MappingProxyType(
    {option.name: option for option in (*CORE_OPTIONS, *SCRIPT_OPTIONS, *MINDSPEED_OPTIONS, *FACTS)}
)
"""All of them, by name."""
