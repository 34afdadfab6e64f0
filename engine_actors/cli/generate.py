"""`engine-actors generate`: complete prompts, or answer them as chat messages, and print the texts."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from engine_actors.cli.common import (
    DtypeOption,
    EngineOptions,
    MaxModelLenOption,
    ModelArgument,
    PipelineParallelOption,
    QuantizationOption,
    TensorParallelOption,
    errors_for_people,
    parse_options,
)

EXAMPLES = """
Examples:

  engine-actors generate path/to/model --prompt "The capital of France is"

  engine-actors generate path/to/model --chat -p "Who are you?" --temperature 0.7 --seed 1

  engine-actors generate path/to/model -tp 2 -p "One prompt" -p "Another" --max-tokens 64

  cat prompts.txt | engine-actors generate path/to/model      (one prompt a line)
"""


def generate_command(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; may be repeated. Without any, each line of stdin is one."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages, put into the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the model's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest tokens of this total probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    n: Annotated[int, typer.Option("-n", help="Completions of each prompt.")] = 1,
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    max_model_len: MaxModelLenOption = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run everything in this process, without Ray. One worker only.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the texts alone: no progress, no figures.")
    ] = False,
    option: EngineOptions = None,
) -> None:
    """Generate text for prompts, through Ray actors unless told otherwise."""
    from engine_actors import LLM, EngineDeadError, EngineStartupError

    with errors_for_people(ValueError, TypeError, EngineStartupError, EngineDeadError):
        prompts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not prompts:
            raise ValueError("no prompt: give --prompt, or lines on stdin")
        options: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
        }
        if in_process:
            options |= {"engine_core": "inproc", "distributed_executor_backend": "uni"}
        with LLM(model, **{**options, **parse_options(option)}) as llm:
            sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "stop": stop}
            params = llm.get_default_sampling_params().clone(
                max_tokens=max_tokens, n=n, **{name: value for name, value in sampling.items() if value is not None}
            )
            started_s = time.perf_counter()
            if chat:
                conversations = [[{"role": "user", "content": text}] for text in prompts]
                outputs = llm.chat(conversations, params, use_tqdm=not quiet)
            else:
                outputs = llm.generate(prompts, params, use_tqdm=not quiet)
            elapsed_s = time.perf_counter() - started_s
    num_tokens = 0
    for text, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            if quiet:
                typer.echo(completion.text)
                continue
            typer.secho(f"\n> {text}", bold=True)
            typer.echo(completion.text)
    if not quiet:
        typer.echo(f"\n{num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.1f} tokens/s", err=True)


generate_command.__doc__ = f"{generate_command.__doc__}\n{EXAMPLES}"
