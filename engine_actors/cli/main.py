"""`engine-actors`: the command line. Each command lives in a module of its own; this one only puts them together."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from engine_actors.cli.bench import app as bench_app
from engine_actors.cli.chat import chat_command
from engine_actors.cli.collect_env import collect_env_command
from engine_actors.cli.fetch_model import fetch_model_command
from engine_actors.cli.generate import generate_command
from engine_actors.cli.run_batch import run_batch_command
from engine_actors.cli.serve import serve

app = typer.Typer(
    name="engine-actors",
    help="Engine Actors: an LLM inference engine whose parts are Ray actors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.add_typer(bench_app, name="bench")
app.command("run-batch")(run_batch_command)
app.command("fetch-model")(fetch_model_command)
app.command("collect-env")(collect_env_command)


@app.callback()
def configure(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the engine logs.")] = False,
) -> None:
    """Set up logging for every command."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
