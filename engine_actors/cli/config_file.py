"""`--config file.yaml`: flags of a command from a file. What the command line says wins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine_actors.serve.options import check_key


def load_config_file(context: typer.Context, path: str | None) -> str | None:
    """A typer callback: put the file's entries where the command looks for defaults.

    Raises:
        typer.BadParameter: The file cannot be read, is no mapping, or has a key that is no flag.
    """
    if path is None or context.resilient_parsing:
        return path
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise typer.BadParameter(f"{path!r} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path!r} is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise typer.BadParameter(f"{path!r} must map flags to values, got {type(data).__name__}")
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    defaults: dict[str, Any] = {}
    for name, value in data.items():
        flag = str(name).replace("-", "_")
        try:
            check_key(flag, known, path)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        defaults[flag] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=load_config_file,
        help="YAML file with flags, e.g. `max-num-seqs: 64`. Flags given besides win.",
    ),
]
