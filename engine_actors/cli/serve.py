"""`engine-actors serve`: an OpenAI-compatible server on Ray Serve, from one command."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_actors.cli.common import EngineOptions, errors_for_people, parse_options
from engine_actors.cli.config_file import ConfigOption
from engine_actors.cli.serve_flags import COUNTS, FLAGS, human_int

POLL_S = 2.0
SERVER, SCALING = "Server", "Replicas"

EXAMPLES = """
Examples:

  engine-actors serve path/to/model

  engine-actors serve path/to/model --port 9000 --api-key SECRET --max-num-seqs 64

  engine-actors serve path/to/model -tp 2 --served-model-name my-model

  engine-actors serve path/to/model --host 0.0.0.0 --ray-address auto --max-replicas 4

  engine-actors serve --config server.yaml      (model: path/to/model, port: 9000, ...)

Then, from anywhere an OpenAI client runs: base_url http://127.0.0.1:8000/v1.
"""


def serve_command(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face model directory, or a hub id.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", rich_help_panel=SERVER)] = 8000,
    root_path: Annotated[str, typer.Option(help="Prefix of all paths.", rich_help_panel=SERVER)] = "/",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name in requests, may be repeated: the first is reported. Default: MODEL.", rich_help_panel=SERVER
        ),
    ] = None,
    proxy: Annotated[
        str,
        typer.Option(
            help="auto; haproxy hands connections to the replica itself; ray is Serve's own, slower per token.",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="At Ctrl-C, let requests go on for so many seconds; 0 ends them.", rich_help_panel=SERVER),
    ] = 0.0,
    startup_timeout: Annotated[
        float, typer.Option(help="Seconds the model may take to load.", rich_help_panel=SERVER)
    ] = 1800.0,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to join: auto, or host:port. Default: $RAY_ADDRESS, else Ray starts here.",
            rich_help_panel=SCALING,
        ),
    ] = None,
    app_name: Annotated[str, typer.Option(help="Of the Serve application.", rich_help_panel=SCALING)] = "llm",
    num_replicas: Annotated[
        int, typer.Option(help="Engines that share the load; the least, with --max-replicas.", rich_help_panel=SCALING)
    ] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Scale up to so many when batches are full.", rich_help_panel=SCALING)
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running in the cluster and return.", rich_help_panel=SCALING)
    ] = False,
    option: EngineOptions = None,
    **flags: Any,
) -> None:
    """Serve a model over an OpenAI-compatible API, on Ray Serve. Ctrl-C ends it."""
    from engine_actors.serve.launch import LaunchError, LaunchOptions, launch
    from engine_actors.serve.llm_config import LLMConfig

    with errors_for_people(ValueError, TypeError, LaunchError):
        if model is None:
            raise ValueError(
                "MODEL is missing: a model directory or a hub id (`engine-actors fetch-model` fetches one)"
            )
        if proxy not in ("auto", "haproxy", "ray"):
            raise ValueError(f"--proxy must be auto, haproxy or ray, got {proxy!r}")
        if detach and not (ray_address or os.environ.get("RAY_ADDRESS")):
            raise ValueError(
                "--detach needs a cluster to leave it in: start one (ray start --head), give --ray-address"
            )
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        for name in COUNTS:
            if name in given:
                given[name] = _count(name, given[name])
        tokenizer = given.pop("tokenizer", None)
        key = os.environ.get("ENGINE_ACTORS_API_KEY")
        if key and "api_key" not in given:
            given["api_key"] = [key]
        names = served_model_name or [model, *([Path(model).name] if os.path.isdir(model) else [])]
        deployment: dict[str, Any] = {"num_replicas": num_replicas}
        if max_replicas is not None:
            scaling = {"min_replicas": num_replicas, "max_replicas": max_replicas}
            deployment = {"autoscaling_config": scaling}
        loading = {
            "model_id": names[0],
            "model_source": model,
            "tokenizer_source": tokenizer,
            "aliases": list(dict.fromkeys(names[1:])),
        }
        llm_config = LLMConfig.from_dict(
            {
                "model_loading_config": loading,
                "engine_kwargs": {**given, **parse_options(option)},
                "deployment_config": deployment,
            }
        )
        options = LaunchOptions(
            host=host, port=port, app_name=app_name, route_prefix=root_path, ray_address=ray_address, proxy=proxy,
            startup_timeout_s=startup_timeout,
        )  # fmt: skip
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        app = launch([llm_config], options, lambda text: typer.echo(text, err=True))
        facts = app.handle.describe.remote().result(timeout_s=60)
        typer.echo(_welcome(app.url, facts, needs_key=bool(given.get("api_key"))))
        if detach:
            return
        _wait_for_the_end(app)
        typer.echo("Stopping", err=True)
        app.stop(shutdown_timeout)


def _welcome(url: str, facts: dict[str, Any], needs_key: bool) -> str:
    """What a newcomer needs next."""
    message = {"role": "user", "content": "Who are you?"}
    body = json.dumps({"model": facts["names"][0], "messages": [message], "max_tokens": 64})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    return (
        f"\nServing {', '.join(facts['names'])} at {url}/v1, status page at {url}/\n"
        f"{facts['kv_capacity']}\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )


def _wait_for_the_end(app: Any) -> None:
    """Until SIGINT or SIGTERM; tells when Serve finds the application unwell and well again."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    last = "RUNNING"
    while not ended.wait(POLL_S):
        state = app.status()
        if state != last:
            typer.echo(f"The application is {state}", err=True)
            last = state
        if state == "DELETED":
            return


def _count(name: str, value: Any) -> int:
    try:
        return human_int(value)
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')} {error}") from None


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the table's flags as parameters, in place of its `**flags`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    for flag in FLAGS:
        kind: Any = list[str] if flag.kind is list else str if flag.option in COUNTS else flag.kind
        option = typer.Option(*flag.names, help=flag.text, rich_help_panel=flag.panel, show_default=False)
        annotation = Annotated[kind | None, option]
        parameters.append(
            inspect.Parameter(flag.option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    parameters.sort(key=lambda parameter: parameter.kind)

    def run(**values: Any) -> None:
        command(**values)

    run.__doc__ = f"{command.__doc__}\n{EXAMPLES}"
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


serve = _with_flags(serve_command)
