"""A plan: the features that are to be on, and what is known of the training that they meet.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen features with their options.

    Attributes:
        features: For each feature that is on its frozen config, by the feature's name.
        training: What is known of the training, by the name of the option: what megatron-core
            calls `tensor_model_parallel_size`, and so on. What is not named is not known, and no
            rule fires for it.
        allow: Ids of rules that are not to refuse this plan; only for rules that say that they can
            be allowed.
    """

    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Mapping[str, object] = dataclasses.field(default_factory=dict)
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("features", "training"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
