"""The options of megatron-core that a plan may name are those of the real megatron-core."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any

import pytest

from ascend_suite.vocabulary import VOCABULARY, TrainingOption

pytestmark = pytest.mark.usefixtures("megatron")  # who imports megatron-core, once it can run here

OPTIONS = [option for option in VOCABULARY.values() if option.holder is not None]


def alternatives(kind: Any) -> frozenset[Any]:
    """A type as a set, so that spellings of the same are equal: a list is a sequence."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*map(alternatives, arguments))
    if origin in (list, collections.abc.Sequence):
        return frozenset({("sequence", *map(alternatives, arguments))})
    if origin is typing.Literal:
        return frozenset(("word", word) for word in arguments)
    return frozenset({kind})


def holders() -> dict[str, type[Any]]:
    """The classes of megatron-core that hold options, by name."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kinds: tuple[type[Any], ...] = (
        DistributedDataParallelConfig,
        ModelParallelConfig,
        OptimizerConfig,
        TransformerConfig,
    )
    return {kind.__name__: kind for kind in kinds}


def test_options_of_megatron_core_are_there() -> None:
    assert len(OPTIONS) > 50


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_is_megatron_cores(option: TrainingOption) -> None:
    holder = holders()[option.holder or ""]
    fields = {field.name: field for field in dataclasses.fields(holder)}
    assert option.name in fields
    theirs = fields[option.name]
    kinds = typing.get_type_hints(holder)
    assert alternatives(option.type) == alternatives(kinds[option.name])
    if theirs.default_factory is not dataclasses.MISSING:
        assert list(option.default) == theirs.default_factory()
    else:
        assert option.default == theirs.default
