"""What several commands share: errors for people, and engine options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

ModelArgument = Annotated[str, typer.Argument(help="A Hugging Face model directory, or a hub id.", show_default=False)]
TensorParallelOption = Annotated[
    int, typer.Option("--tensor-parallel-size", "-tp", help="Worker actors that share each layer.")
]
PipelineParallelOption = Annotated[
    int, typer.Option("--pipeline-parallel-size", "-pp", help="Consecutive groups of layers, each on its own workers.")
]
DtypeOption = Annotated[str, typer.Option(help="Of weights and activations: auto, float32, bfloat16 or float16.")]
QuantizationOption = Annotated[
    str | None, typer.Option(help="Round weights while loading, on the CPU in bfloat16: int8 or int4.")
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and output together, in tokens; -1 fits it to memory. Default: the model's limit."
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Any other engine option, e.g. -o max_num_seqs=64 -o enable_prefix_caching=false. May be repeated.",
    ),
]


def parse_options(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON if it can be read as such, else a string."""
    parsed: dict[str, Any] = {}
    for option in options or []:
        name, separator, text = option.partition("=")
        if not separator or not name:
            raise ValueError(f"--option needs NAME=VALUE, got {option!r}")
        try:
            parsed[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            parsed[name.replace("-", "_")] = text
    return parsed


@contextmanager
def errors_for_people(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds end the command with one line on stderr and status 1, without a traceback."""
    try:
        yield
    except kinds as error:
        typer.secho(f"Error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("Interrupted", err=True)
        raise typer.Exit(130) from None
