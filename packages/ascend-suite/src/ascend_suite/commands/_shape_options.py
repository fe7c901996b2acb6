"""Options that are the fields of a dataclass: the shape of a model, the rates of a machine.

[Note: one table of options]
What a model's shape is stands in `ModelShape`, with the meaning of each field. Options of the same
names are made of it, so a field that is added there can be given here, and is described once. All
are None when left out, so that what a file says counts, and then the field's default.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ascend_core.errors import ConfigError
from ascend_suite._reading_files import read_file
from ascend_suite._suggestion import nearest
from ascend_suite.commands._describe import described_fields
from ascend_suite.estimation.hardware import Hardware
from ascend_suite.finding import IncompatiblePlanError, errors_of
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["ModelFile", "hardware_of", "shape_of", "with_options_of"]

ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="A file with a table `[model]` of the options below; each option counts more than it.",
        show_default=False,
        rich_help_panel="Model",
    ),
]

_PANELS: Mapping[type[Any], str] = types.MappingProxyType(
    {ModelShape: "Model", Hardware: "Machine"}
)

# Fields of a shape, by the option of training that says the same.
_OF_TRAINING = types.MappingProxyType(
    {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_query_groups",
        "head_size": "kv_channels",
        "ffn": "ffn_hidden_size",
        "seq": "seq_length",
        "micro_batch": "micro_batch_size",
        "micro_batches": "num_microbatches",
        "tp": "tensor_model_parallel_size",
        "sequence_parallel": "sequence_parallel",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "dp": "data_parallel_size",
        "cp": "context_parallel_size",
    }
)


def with_options_of(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of dataclasses.

    Args:
        kinds: The dataclasses. The command takes the values as `**fields`, None where not given.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [parameter for kind in kinds for parameter in _parameters(kind)]
        taken: Any = command
        taken.__signature__ = signature.replace(parameters=[*own, *added])
        taken.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return command

    return add


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(kind)
    meanings = described_fields(kind)
    found = []
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING
        option = typer.Option(
            help=meanings[field.name],
            show_default=False if required or field.default is None else _default(field.default),
            rich_help_panel=_PANELS[kind],
        )
        # Not by brackets: those are for type checkers, which cannot know this type.
        annotation = operator.getitem(Annotated, (hints[field.name] | None, option))
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    return found


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def shape_of(file: Path | None, fields: Mapping[str, Any], plan: Plan) -> ModelShape:
    """Build a shape of options, a file, and what a plan knows of its training, in this order.

    Raises:
        ConfigError: When the file cannot be read, or a value is missing, unknown or wrong.
    """
    known = [field.name for field in dataclasses.fields(ModelShape)]
    values = {
        **_of_training(plan.training),
        **({} if file is None else _of_file(file, known)),
        **{name: fields[name] for name in known if fields.get(name) is not None},
    }
    missing = [
        field.name
        for field in dataclasses.fields(ModelShape)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        flags = " ".join(f"--{name} N" for name in missing)
        raise ConfigError(
            f"the model's {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not known.",
            why="an estimate is of a model, whose shape is given by options, or by a file.",
            instead=f"add {flags}; or write them into the table [model] of a file for --model.",
        )
    return ModelShape(**values)


def hardware_of(fields: Mapping[str, Any]) -> Hardware | None:
    """Return the rates that were given, with the defaults for the others; None for no rate."""
    known = [field.name for field in dataclasses.fields(Hardware)]
    given = {name: fields[name] for name in known if fields.get(name) is not None}
    return Hardware(**given) if given else None


def _of_training(training: Mapping[str, object]) -> dict[str, Any]:
    """What is said of a training in a plan, as far as a shape has it."""
    values: dict[str, Any] = {
        field: training[option]
        for field, option in _OF_TRAINING.items()
        if training.get(option) is not None
    }
    if training.get("bf16"):
        values["dtype"] = "bfloat16"
    elif training.get("fp16"):
        values["dtype"] = "float16"
    if "normalization" in training:
        values["norm"] = "rms" if training["normalization"] == "RMSNorm" else "layer"
    if "untie_embeddings_and_output_weights" in training:
        values["tied"] = not training["untie_embeddings_and_output_weights"]
    return values


def _of_file(path: Path, known: list[str]) -> dict[str, Any]:
    content, found = read_file(path)
    if errors_of(found):
        raise IncompatiblePlanError(found)
    table = content.get("model", content)
    if not isinstance(table, Mapping):
        raise ConfigError(f"model in {path} is {table!r}.", instead="write a table, [model].")
    for name in table:
        if name not in known:
            near = nearest(str(name), known)
            raise ConfigError(
                f"{path}: a model has no {name!r}.",
                why=f"it has {', '.join(known)}.",
                instead=f"did you mean {near}?" if near else "leave it out.",
            )
    return dict(table)
