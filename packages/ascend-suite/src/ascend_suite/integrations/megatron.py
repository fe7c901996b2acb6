"""The flags of all features for megatron-core's training scripts. Imports neither it nor torch.

[Note: who adds a flag]
A flag that the parser has is left as it is, so that this may be called after megatron-core's own
arguments and MindSpeed's, as scripts do with their `extra_args_provider`.
"""

from __future__ import annotations

import argparse

from ascend_suite.flags import FEATURE_FLAGS, FeatureFlag

__all__ = ["add_arguments"]

_POSITIONS = "--position-embedding-type"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features that the parser does not have.

    And `alibi` to the choices of `--position-embedding-type`, where the parser has that option. It
    is an `extra_args_provider` of Megatron-LM's scripts: `pretrain(..., extra_args_provider=
    add_arguments)`. `Plan.from_namespace(get_args())` is then the plan.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("ascend-suite")
    known = parser._option_string_actions  # argparse has no other way to ask for an option
    for row in FEATURE_FLAGS:
        names = [name for name in (row.flag, *row.aliases) if name not in known]
        # What has a framework is a flag of megatron-core's own.
        if row.framework is None and names:
            _add(group, row, names)
    positions = known.get(_POSITIONS)
    choices = None if positions is None else positions.choices
    if positions is not None and choices is not None and "alibi" not in choices:
        positions.choices = [*choices, "alibi"]
    return parser


def _add(group: argparse._ArgumentGroup, row: FeatureFlag, names: list[str]) -> None:
    dest, text = row.attribute, row.meaning
    if row.type is None:
        group.add_argument(*names, dest=dest, action="store_true", help=text)
    else:
        group.add_argument(*names, dest=dest, type=row.type, default=None, help=text)
