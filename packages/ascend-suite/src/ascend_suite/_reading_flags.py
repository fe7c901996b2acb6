"""A plan from the flags or the parsed arguments of a training script. Imports no torch.

[Note: who does it]
Some flags name what megatron-core does itself: recompute of whole layers, gradient reduction, the
distributed optimizer. In a training loop of megatron-core they say how it trains, and are options
of training. In one of plain PyTorch they ask for our features.

[Note: what is not given]
A command line of megatron-core's is complete: a flag that is not there has its default, which is
then known. Of MindSpeed's options those are known that are off by default: without MindSpeed they
are off as well. Of parsed arguments what is there is known, and nothing else; so it is with flags
of plain PyTorch's loops, which have other defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ascend_core.errors import ConfigError
from ascend_suite._flag_parser import FlagParser
from ascend_suite._kinds import fits
from ascend_suite._reading import PlanReader
from ascend_suite._tokens import attribute_of
from ascend_suite.finding import Finding
from ascend_suite.flags import FEATURE_FLAGS, FeatureFlag
from ascend_suite.plan import Plan
from ascend_suite.vocabulary import VOCABULARY, TrainingOption

__all__ = ["read_flags", "read_namespace"]

Framework = Literal["megatron-core", "pytorch"]

_ROTARY = ("rope", "mrope")

# Facts that megatron-core's scripts add to their arguments.
_COUNTED = ("world_size", "data_parallel_size")


def read_flags(
    argv: Sequence[str] | str, *, framework: Framework = "megatron-core"
) -> tuple[Plan, tuple[Finding, ...]]:
    """Read flags, and tell what is wrong with them instead of raising.

    Args:
        argv: The flags, or a command line of them.
        framework: Whose training loop it is.

    Returns:
        The plan of what is right, and a finding for each thing that is not.
    """
    parser = FlagParser()
    given = parser.parse(argv)
    if framework == "megatron-core":
        given = _defaults() | given
    plan, found = _plan(given, framework)
    return plan, (*parser.found, *found)


def read_namespace(
    args: argparse.Namespace, *, framework: Framework = "megatron-core"
) -> tuple[Plan, tuple[Finding, ...]]:
    """Read parsed arguments, and tell what is wrong with them instead of raising.

    Args:
        args: Has the arguments as attributes.
        framework: Whose training loop it is.

    Returns:
        The plan of what is right, and a finding for each thing that is not.

    Raises:
        ConfigError: When it has no attributes.
    """
    if not hasattr(args, "__dict__"):
        raise ConfigError(
            f"from_namespace was given a {type(args).__name__}.",
            why="it takes what a parser of arguments returns, with an attribute for each.",
            instead="pass that, or argparse.Namespace(**arguments).",
        )
    return _plan(vars(args), framework)


def _defaults() -> dict[str, object]:
    return {
        option.attribute: option.default if option.off is None else True
        for option in VOCABULARY.values()
        if option.origin != "fact" and not option.required
        if option.origin != "mindspeed" or not option.default
    }


def _plan(given: Mapping[str, object], framework: Framework) -> tuple[Plan, tuple[Finding, ...]]:
    reader = PlanReader()
    training = _derived(reader.training({"framework": framework, **_options(given)}))
    tables = _Tables(reader, given, framework)
    tables.read()
    if framework == "pytorch":
        _take_over(training, tables.features, reader)
    if "swap-attention" in tables.features and training.get("recompute_granularity") != "full":
        number = training.get("recompute_num_layers")
        if number is not None:
            tables.features["swap-attention"]["recompute_num_layers"] = number
    features = reader.plan(tables.features).features
    return Plan(features, training), tuple(reader.found)


def _options(given: Mapping[str, object]) -> dict[str, object]:
    """What of the arguments is an option of training, by its name there."""
    return {
        option.name: given[option.attribute]
        for option in VOCABULARY.values()
        if option.attribute in given and _tells(option, given[option.attribute])
    }


def _tells(option: TrainingOption, value: object) -> bool:
    """Whether an argument of that name is the option, and not one that nobody has set."""
    is_argument = option.origin != "fact" or option.name in _COUNTED
    return is_argument and (value is not None or fits(None, option.type))


def _derived(training: dict[str, object]) -> dict[str, object]:
    """What megatron-core's scripts make of the arguments."""
    if training.get("recompute_activations") and not training.get("recompute_granularity"):
        training["recompute_granularity"] = "selective"
    if training.get("bf16") and training.get("grad_reduce_in_fp32") is False:
        training["grad_reduce_in_fp32"] = not training.get("grad_reduce_in_bf16")
    offloaded = training.get("cpu_offloading_num_layers")
    if isinstance(offloaded, int) and offloaded > 0:
        training["cpu_offloading"] = True
    gated = training.get("gated_linear_unit")
    fusion = "bias_swiglu_fusion" if gated else "bias_gelu_fusion"
    if gated is not None and fusion in training:
        training["bias_activation_fusion"] = training[fusion]
    if training.get("position_embedding_type", "rope") not in _ROTARY:
        training.pop("apply_rope_fusion", None)  # on by default, and of no meaning
    split = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    _divide(training, "data_parallel_size", "world_size", split)
    shares = ("micro_batch_size", "data_parallel_size")
    _divide(training, "num_microbatches", "global_batch_size", shares)
    return training


def _divide(training: dict[str, object], name: str, whole: str, parts: Sequence[str]) -> None:
    """Say what the quotient is, where all of it is known and it is a whole number."""
    rest: Any = training.get(whole)
    for part in parts:
        divisor: Any = training.get(part)
        if rest is None or not divisor or rest % divisor:
            return
        rest //= divisor
    training.setdefault(name, rest)


def _take_over(
    training: dict[str, object], features: dict[str, dict[str, Any]], reader: PlanReader
) -> None:
    """What megatron-core would do itself, by our features: see the note above."""
    if training.get("recompute_granularity") == "full":
        names = {"method": "recompute_method", "num_layers": "recompute_num_layers"}
        table = {ours: training.pop(theirs, None) for ours, theirs in names.items()}
        features["recompute-layers"] = {k: v for k, v in table.items() if v is not None}
        del training["recompute_granularity"]
    if "shard-optimizer" in features:
        gather = training.get("overlap_param_gather")
        features["shard-optimizer"]["overlap_param_gather"] = bool(gather)
        reduce = features.setdefault("reduce-gradients", {"overlap": False})
        reduce["mode"] = "reduce-scatter"
    elif training.get("overlap_param_gather"):
        reader.error(
            "overlap_param_gather",
            "--overlap-param-gather is given, and --use-distributed-optimizer is not.",
            "weights are gathered where the optimizer is divided among the ranks.",
            "give --use-distributed-optimizer too, or leave --overlap-param-gather out.",
        )


class _Tables:
    """The options of the features that flags turn on.

    Attributes:
        features: By the feature's name.
    """

    def __init__(
        self, reader: PlanReader, given: Mapping[str, object], framework: Framework
    ) -> None:
        self.features: dict[str, dict[str, Any]] = {}
        self._reader = reader
        self._given = given
        self._rows = [row for row in FEATURE_FLAGS if row.framework in (None, framework)]

    def read(self) -> None:
        """Read the rows of all flags: the switches first."""
        for row in self._rows:
            if row.is_switch and self._is_on(row):
                self._turn_on(row)
        for row in self._rows:
            value = self._value(row)
            if not row.is_switch and value is not None and value != row.unset:
                self._set(row, value)

    def _value(self, row: FeatureFlag) -> object:
        """What the row's flag was given; None where it was not."""
        names = (row.flag, *row.aliases)
        values = [self._given.get(attribute_of(name)) for name in names]
        return next((value for value in values if value), values[0])

    def _is_on(self, row: FeatureFlag) -> bool:
        value = self._value(row)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._reader.error(
            row.feature,
            f"{row.attribute} is {value!r}.",
            f"{row.flag} is on or off.",
            "use True or False.",
        )
        return False

    def _turn_on(self, row: FeatureFlag) -> None:
        options = self.features.setdefault(row.feature, {})
        if row.item is not None and row.option is not None:
            options.setdefault(row.option, []).append(row.item)
        if row.implies is not None:
            name, value = row.implies
            options[name] = value

    def _set(self, row: FeatureFlag, value: object) -> None:
        assert row.option is not None
        counts_layers = row.option == "num_layers"
        if row.feature not in self.features:
            if not (counts_layers and value == 0):
                switch = next(r.flag for r in self._rows if r.feature == row.feature)
                self._reader.error(
                    f"{row.feature}.{row.option}",
                    f"{row.flag} is {value}, and {switch} is not given.",
                    f"{switch} turns the feature on that {row.flag} is an option of.",
                    f"give {switch} too, or leave {row.flag} out.",
                )
        elif counts_layers and value == 0:
            del self.features[row.feature]  # in no layer
        else:
            self.features[row.feature][row.option] = value
