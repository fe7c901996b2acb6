"""A plan: the features that are to be on, and what is known of the training that they meet.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ascend_suite.finding import Finding, IncompatiblePlanError, errors_of

if TYPE_CHECKING:
    import argparse

__all__ = ["FORMAT", "Plan", "read_plan"]

FORMAT = 1
"""The version of the form in which plans are written and read."""

Framework = Literal["megatron-core", "pytorch"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen features with their options.

    `Plan.of` and `Plan.from_*` check what they are given; this constructor takes it as it is.

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

    def __hash__(self) -> int:
        parts = (frozenset(each.items()) for each in (self.features, self.training))
        return hash((*parts, self.allow))

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, (dict(self.features), dict(self.training), self.allow)

    @classmethod
    def of(
        cls,
        *configs: object,
        training: Mapping[str, object] | None = None,
        allow: Sequence[str] = (),
    ) -> Plan:
        """Make a plan of configs.

        Args:
            configs: One for each feature that is to be on: `SwapOptimizerConfig()`.
            training: What is known of the training, by the names of the vocabulary.
            allow: Ids of rules that are not to refuse the plan.

        Raises:
            IncompatiblePlanError: When a config is no feature's, or given twice, or an option of
                training is unknown or of the wrong type; it tells of all of them.
        """
        from ascend_suite._reading import PlanReader

        reader = PlanReader()
        plan = cls(reader.configs(configs), reader.training(training or {}), reader.allow(allow))
        return _sound(plan, reader.found)

    @classmethod
    def from_mapping(cls, tables: Mapping[str, object]) -> Plan:
        """Make a plan of tables: one for each feature, `training`, and the list `allow`.

        Raises:
            IncompatiblePlanError: When anything in it is unknown or wrong; it tells of all of it.
        """
        return _sound(*read_plan(tables))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file of TOML, YAML or JSON, which its ending tells.

        Raises:
            IncompatiblePlanError: When anything in it is unknown or wrong; it tells of all of it.
            UnavailableError: When YAML cannot be read here.
        """
        return _sound(*read_plan(path))

    @classmethod
    def from_flags(
        cls, argv: Sequence[str] | str, *, framework: Framework = "megatron-core"
    ) -> Plan:
        """Read the flags of a training script as megatron-core and MindSpeed have them.

        Args:
            argv: The flags, or a command line of them. Those that are no feature's and that no rule
                reads are left alone, unless they look like a feature's.
            framework: Whose training loop it is. With "pytorch" gradient reduction and the
                recompute of whole layers are ours, and megatron-core's own otherwise.

        Raises:
            IncompatiblePlanError: When a flag is wrong or misspelt; it tells of all of them.
        """
        from ascend_suite._reading_flags import read_flags

        return _sound(*read_flags(argv, framework=framework))

    @classmethod
    def from_namespace(
        cls, args: argparse.Namespace, *, framework: Framework = "megatron-core"
    ) -> Plan:
        """Take a plan from the parsed arguments of a training script, as `get_args()` has them.

        Args:
            args: Those that it lacks are not known, and those that no rule reads are left alone.
            framework: As in `from_flags`.

        Raises:
            IncompatiblePlanError: When an argument is wrong; it tells of all of them.
            ConfigError: When what is given has no attributes.
        """
        from ascend_suite._reading_flags import read_namespace

        return _sound(*read_namespace(args, framework=framework))

    def to_mapping(self, *, full: bool = False) -> dict[str, Any]:
        """Return the plan as tables of plain values, which `from_mapping` reads.

        Args:
            full: Also what options have by default, so that the plan is the same under a later
                version that has other defaults.

        Raises:
            ConfigError: When an option is code: a function, or a type.
        """
        from ascend_suite._writing import as_mapping

        return as_mapping(self, FORMAT, full=full)

    def to_toml(self, *, full: bool = False) -> str:
        """Return the plan as the text of a file, which `from_file` reads.

        Args:
            full: As in `to_mapping`.

        Raises:
            ConfigError: When an option is code: a function, or a type.
        """
        from ascend_suite._writing import as_toml

        return as_toml(self.to_mapping(full=full))


def read_plan(
    source: Plan | Mapping[Any, object] | str | os.PathLike[str],
) -> tuple[Plan, tuple[Finding, ...]]:
    """Read a plan, and tell what is wrong with it instead of raising.

    Args:
        source: Tables, or the path of a file; a plan is itself.

    Returns:
        The plan of what is right, and a finding for each thing that is not.

    Raises:
        UnavailableError: When YAML cannot be read here.
    """
    if isinstance(source, Plan):
        return source, ()
    from ascend_suite._reading import PlanReader
    from ascend_suite._reading_files import read_file

    reader = PlanReader()
    tables: Mapping[Any, object] = {}
    if isinstance(source, Mapping):
        tables = source
    elif isinstance(source, str | os.PathLike):
        tables, found = read_file(Path(source))
        reader.found += found
    else:
        what = f"a plan was given {source!r} as its tables."
        why, instead = "a plan is a table of tables.", "give a mapping, or the path of a file."
        reader.error("plan", what, why, instead)
    return reader.plan(tables), tuple(reader.found)


def _sound(plan: Plan, found: Sequence[Finding]) -> Plan:
    if errors_of(found):
        raise IncompatiblePlanError(found)
    return plan
