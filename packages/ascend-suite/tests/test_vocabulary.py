"""The options of training that a plan may name."""

from __future__ import annotations

import subprocess
import sys
import types
import typing

import pytest

from ascend_core.feature import discover
from ascend_suite._core_options import CORE_OPTIONS
from ascend_suite._other_options import FACTS, MINDSPEED_OPTIONS, SCRIPT_OPTIONS
from ascend_suite.vocabulary import VOCABULARY, TrainingOption

ROWS = (*CORE_OPTIONS, *SCRIPT_OPTIONS, *MINDSPEED_OPTIONS, *FACTS)


def test_each_option_is_listed_once() -> None:
    assert len({option.name for option in ROWS}) == len(ROWS) == len(VOCABULARY)
    flags = [flag for option in ROWS for flag in (option.flag, option.off) if flag is not None]
    assert len(set(flags)) == len(flags)
    assert len({option.attribute for option in ROWS}) == len(ROWS)


def test_no_option_has_the_name_of_a_feature() -> None:
    assert not {name.replace("-", "_") for name in discover()} & VOCABULARY.keys()


@pytest.mark.parametrize("option", ROWS, ids=lambda option: option.name)
def test_an_option_is_described(option: TrainingOption) -> None:
    assert option.name.isidentifier()
    assert option.meaning.endswith((".", ")."))
    assert (option.holder is not None) is (option.origin == "megatron-core")


def _admits_none(kind: object) -> bool:
    return isinstance(kind, types.UnionType | typing._UnionGenericAlias) and (  # type: ignore[attr-defined]
        type(None) in typing.get_args(kind)
    )


@pytest.mark.parametrize("option", ROWS, ids=lambda option: option.name)
def test_only_what_may_be_none_is_none_by_default(option: TrainingOption) -> None:
    if option.origin != "fact" and option.default is None:
        assert _admits_none(option.type)


def test_flags_are_spelt_as_a_training_script_has_them() -> None:
    assert VOCABULARY["use_distributed_optimizer"].flag == "--use-distributed-optimizer"
    assert VOCABULARY["num_moe_experts"].flag == "--num-experts"
    assert VOCABULARY["fp8"].flag == "--fp8-format"
    assert VOCABULARY["add_bias_linear"].flag is None
    assert VOCABULARY["add_bias_linear"].off == "--disable-bias-linear"
    assert VOCABULARY["torch_version"].flag is None


def test_reading_it_imports_no_torch() -> None:
    code = "import sys, ascend_suite.vocabulary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
