"""`ascend-suite demo`: a small language model, plain and once per feature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ascend_core.errors import ConfigError
from ascend_suite.commands._completion import complete_feature_list
from ascend_suite.demo.choice import choose_features
from ascend_suite.demo.settings import DemoSettings

__all__ = ["demo"]

_DEFAULT = DemoSettings()


def demo(
    features: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Features to show, separated by commas.",
            show_default="all",
            autocompletion=complete_feature_list,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Decoder blocks of the model.")] = _DEFAULT.layers,
    hidden: Annotated[int, typer.Option(help="Model width.")] = _DEFAULT.hidden,
    seq: Annotated[int, typer.Option(help="Bytes in a sequence.")] = _DEFAULT.seq,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = _DEFAULT.batch,
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULT.steps,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = _DEFAULT.dropout,
    activation: Annotated[
        Literal["swiglu", "gelu"], typer.Option(help="Feed-forward layer.")
    ] = _DEFAULT.activation,
    norm: Annotated[Literal["rms", "layer"], typer.Option(help="Normalisation.")] = _DEFAULT.norm,
    seed: Annotated[
        int, typer.Option(help="Decides weights, batches and dropout.")
    ] = _DEFAULT.seed,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, npu, or cuda:1.", show_default="the best one present"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where demo.png goes.")] = Path(),
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON, too.")
    ] = None,
) -> None:
    """Train a small GPT on real text, once plain and once per installed feature, and compare.

    Peak memory is the most that was in use at once in the first steps, weights and optimizer
    state included. Step times are measured apart from it, in rounds in which the runs take turns.
    A run is identical when all losses, the last gradients and the final weights are the plain
    run's, bit for bit. A run that is out of memory is a row, too, and the others go on.

    Exit code 0: all is well, also when plain is out of memory and a feature is not. 1: a feature
    broke its promise of identical bits, a loss did not fall, a feature ran out of memory where the
    plain run did not, or no run finished. 2: the command was given a wrong value, or cannot run
    here.
    """
    settings = DemoSettings(
        layers=layers,
        hidden=hidden,
        seq=seq,
        batch=batch,
        steps=steps,
        dropout=dropout,
        activation=activation,
        norm=norm,
        seed=seed,
    )
    chosen = choose_features(None if features is None else _names(features))
    from ascend_suite.demo.show import show_demo

    raise typer.Exit(show_demo(settings, chosen, device=device, folder=out, json_file=json))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(
            f"--features {text!r} names a feature that has no name.",
            why="it is a list of names with commas between them.",
            instead="write --features recompute-activation,recompute-norm, or leave it out for "
            "all features.",
        )
    return list(dict.fromkeys(names))
