"""The suite's table of flags and the arguments that the packages add themselves say the same."""

from __future__ import annotations

import argparse

import pytest

from ascend_suite import Plan
from ascend_suite.flags import FEATURE_FLAGS
from ascend_suite.integrations.megatron import add_arguments

pytestmark = pytest.mark.usefixtures("megatron")  # who imports megatron-core, once it can run here


def theirs() -> argparse.ArgumentParser:
    from ascend_ops.integrations.megatron import add_ops_arguments
    from ascend_swap.integrations.megatron import add_swap_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--position-embedding-type", choices=["rope"])
    parser.add_argument("--recompute-num-layers", type=int)
    return add_ops_arguments(add_swap_arguments(parser))


def test_the_packages_flags_are_in_the_table() -> None:
    rows = {name: row for row in FEATURE_FLAGS for name in (row.flag, *row.aliases)}
    known = {*rows, "--position-embedding-type", "--recompute-num-layers", "-h", "--help"}
    actions = theirs()._option_string_actions
    assert len(actions) > 6
    assert actions.keys() <= known
    for flag, action in actions.items():
        if flag in rows:
            assert action.dest == rows[flag].attribute
            assert action.type is (int if rows[flag].type is int else None)
            assert (action.nargs == 0) is rows[flag].is_switch


def test_they_may_both_be_added() -> None:
    parser = add_arguments(theirs())
    args = parser.parse_args(["--swap-attention", "--swap-modules", "a", "--used-fused-swiglu"])
    assert args.swap_optimizer is False
    assert Plan.from_namespace(args).features.keys() == {"swap-attention", "fused-ops"}


@pytest.mark.parametrize("flag", ["--use-fused-swiglu", "--used-fused-swiglu"])
def test_a_parser_of_ours_reads_what_theirs_reads(flag: str) -> None:
    ours = add_arguments(argparse.ArgumentParser()).parse_args([flag])
    assert ours.use_fused_swiglu is theirs().parse_args([flag]).use_fused_swiglu is True
