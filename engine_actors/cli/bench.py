"""`engine-actors bench`: serve (any OpenAI-compatible server), throughput and latency (an engine started here)."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_actors.cli.common import (
    DtypeOption,
    EngineOptions,
    MaxModelLenOption,
    PipelineParallelOption,
    TensorParallelOption,
    errors_for_people,
    parse_options,
)

app = typer.Typer(
    help="Measure a server, or an engine. The JSON has the keys of `vllm bench`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ModelOption = Annotated[str, typer.Option(help="A model directory, or a hub id.")]
InputLenOption = Annotated[int, typer.Option(help="Tokens of each prompt.")]
OutputLenOption = Annotated[int, typer.Option(help="Tokens generated for each.")]
LOAD, REQUESTS, RESULT = "Load", "Requests", "Result"

SERVE_EXAMPLES = """
Examples:

  engine-actors bench serve --num-prompts 100 --max-concurrency 8

  engine-actors bench serve --base-url http://host:9000 --request-rate 4 --save-result

  engine-actors bench serve --request-rate 1,2,4,8,16 --num-prompts 64 --plot latency.png
"""


@app.command("serve")
def serve_command(
    base_url: Annotated[str | None, typer.Option(help="Of the server; or --host and --port.")] = None,
    host: Annotated[str, typer.Option(help="Of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the server.")] = 8000,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    endpoint: Annotated[str | None, typer.Option(help="Default: the backend's.")] = None,
    model: Annotated[str | None, typer.Option(help="Name at the server. Default: its first.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Directory or hub id. Default: the model's root.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's.", envvar="ENGINE_ACTORS_API_KEY")] = None,
    dataset_name: Annotated[str, typer.Option(help="random, or custom.", rich_help_panel=REQUESTS)] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help='For custom: lines of {"prompt": ...}.', rich_help_panel=REQUESTS)
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", rich_help_panel=REQUESTS)] = 1000,
    random_input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-len", help="Tokens of a prompt.", rich_help_panel=REQUESTS)
    ] = 1024,
    random_output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-len", help="Tokens of an answer.", rich_help_panel=REQUESTS)
    ] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary by this share, 0 to 1.", rich_help_panel=REQUESTS)
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts begin with.", rich_help_panel=REQUESTS)
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate the whole length (random prompts always do).", rich_help_panel=REQUESTS)
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", rich_help_panel=REQUESTS)] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object added to each request.", rich_help_panel=REQUESTS)
    ] = None,
    request_rate: Annotated[
        str,
        typer.Option(
            help="Requests a second, or inf; several, with commas, are measured in turn.", rich_help_panel=LOAD
        ),
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="1 is a Poisson process, less is burstier.", rich_help_panel=LOAD)
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at once.", rich_help_panel=LOAD)] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests sent before.", rich_help_panel=LOAD)] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.", rich_help_panel=LOAD)] = 0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(help="Wait so long for the server.", rich_help_panel=LOAD)
    ] = 60.0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, e2el.", rich_help_panel=RESULT)
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(help="E.g. 50,90,99.", rich_help_panel=RESULT)] = "99",
    goodput: Annotated[
        list[str] | None, typer.Option(help="METRIC:MS, a limit for goodput; repeat it.", rich_help_panel=RESULT)
    ] = None,
    save_result: Annotated[bool, typer.Option(help="Write the figures as JSON.", rich_help_panel=RESULT)] = False,
    save_detailed: Annotated[bool, typer.Option(help="With those of each request.", rich_help_panel=RESULT)] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to.", rich_help_panel=RESULT)] = Path(),
    result_filename: Annotated[str | None, typer.Option(help="Default: by the date.", rich_help_panel=RESULT)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG of latency against request rate.", rich_help_panel=RESULT)
    ] = None,
    disable_tqdm: Annotated[bool, typer.Option(help="No progress bar.", rich_help_panel=RESULT)] = False,
) -> None:
    """Send requests to a server at a rate, and measure what comes back."""
    from engine_actors.bench.client import Target
    from engine_actors.bench.datasets import random_prompts, read_prompts
    from engine_actors.bench.figures import METRICS, figures_table, load_figures
    from engine_actors.bench.load import LoadPlan, run_load
    from engine_actors.bench.server_facts import served_model

    with errors_for_people(ValueError, OSError, TimeoutError):
        if backend not in ("openai", "vllm", "openai-chat"):
            raise ValueError(f"--backend must be openai or openai-chat, got {backend!r}")
        metrics = _choices("--percentile-metrics", percentile_metrics, METRICS)
        percentiles = _numbers("--metric-percentiles", metric_percentiles)
        rates = _numbers("--request-rate", request_rate)
        limits = _limits(goodput or [], METRICS)
        url = (base_url or f"http://{host}:{port}").rstrip("/").removesuffix("/v1")
        facts = asyncio.run(served_model(url, api_key, model, ready_check_timeout_sec))
        is_chat = backend == "openai-chat"
        source = tokenizer or facts.root
        if dataset_name == "random":
            requests = random_prompts(
                source, num_prompts, random_input_len, random_output_len, random_range_ratio, random_prefix_len, seed,
                as_text=is_chat,
            )  # fmt: skip
        elif dataset_name == "custom" and dataset_path is not None:
            requests = read_prompts(dataset_path, source, num_prompts, random_output_len)
        else:
            raise ValueError(f"--dataset-name must be random, or custom with --dataset-path, got {dataset_name!r}")
        extra = {"temperature": temperature, **json.loads(extra_body or "{}")}
        if ignore_eos or dataset_name == "random":
            extra["ignore_eos"] = True
        path = endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
        target = Target(url + path, facts.name, is_chat, api_key, extra)
        if num_warmups:
            asyncio.run(run_load(target, (requests * num_warmups)[:num_warmups], LoadPlan()))
        rows: list[dict[str, Any]] = []
        for rate in rates:
            plan = LoadPlan(rate, burstiness, max_concurrency, seed)
            with _progress(len(requests), disable_tqdm) as bar:
                report = asyncio.run(run_load(target, requests, plan, bar.update))
            figures = load_figures(report, metrics=metrics, percentiles=percentiles, goodput_ms=limits)
            rows.append({
                "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "backend": backend, "endpoint_type": backend,
                "label": None, "model_id": facts.name, "tokenizer_id": source, "num_prompts": len(requests),
                "request_rate": rate if rate != float("inf") else "inf", "burstiness": burstiness,
                "max_concurrency": max_concurrency, **figures,
            })  # fmt: skip
            typer.echo(figures_table(figures))
            if figures["failed"]:
                first = next(error for error in figures["errors"] if error)
                typer.secho(f"{figures['failed']} requests failed, the first with: {first}", err=True, fg="red")
            if save_result:
                _save(rows[-1], result_dir, result_filename, save_detailed)
        if plot is not None:
            from engine_actors.bench.plot import plot_latency

            plot_latency(rows, plot)
            typer.echo(f"Wrote {plot}")
        if any(row["failed"] for row in rows):
            raise typer.Exit(1)


@app.command("throughput")
def throughput_command(
    model: ModelOption,
    num_prompts: Annotated[int, typer.Option(help="Requests, all queued at once.")] = 1000,
    input_len: InputLenOption = 1024,
    output_len: OutputLenOption = 128,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLenOption = None,
    option: EngineOptions = None,
) -> None:
    """Tokens a second when everything is there at once."""
    from engine_actors import LLM, EngineStartupError, SamplingParams
    from engine_actors.bench.datasets import random_prompts

    with errors_for_people(ValueError, TypeError, EngineStartupError):
        options = _engine_options(tensor_parallel_size, pipeline_parallel_size, dtype, max_model_len, option)
        requests = random_prompts(model, num_prompts, input_len, output_len, 0.0, 0, seed, as_text=False)
        params = SamplingParams(n=n, temperature=1.0, max_tokens=output_len, ignore_eos=True)
        with LLM(model, **options) as llm:
            started_s = time.perf_counter()
            outputs = llm.generate([list(request.prompt) for request in requests], params)  # type: ignore[arg-type]
            elapsed_s = time.perf_counter() - started_s
        num_out = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        total = num_out + sum(request.num_prompt_tokens for request in requests)
        typer.echo(
            f"Throughput: {len(requests) / elapsed_s:.2f} requests/s, {total / elapsed_s:.2f} total tokens/s, "
            f"{num_out / elapsed_s:.2f} output tokens/s"
        )
        _write_json(output_json, {
            "model_id": model, "elapsed_time": elapsed_s, "num_requests": len(requests), "total_num_tokens": total,
            "requests_per_second": len(requests) / elapsed_s, "tokens_per_second": total / elapsed_s,
        })  # fmt: skip


@app.command("latency")
def latency_command(
    model: ModelOption,
    input_len: InputLenOption = 32,
    output_len: OutputLenOption = 128,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.")] = 8,
    num_iters: Annotated[int, typer.Option(help="Batches measured.")] = 30,
    num_iters_warmup: Annotated[int, typer.Option(help="Batches before.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    disable_tqdm: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    tensor_parallel_size: TensorParallelOption = 1,
    pipeline_parallel_size: PipelineParallelOption = 1,
    dtype: DtypeOption = "auto",
    max_model_len: MaxModelLenOption = None,
    option: EngineOptions = None,
) -> None:
    """Seconds that one batch takes from prompts to last tokens."""
    import numpy as np

    from engine_actors import LLM, EngineStartupError, SamplingParams
    from engine_actors.bench.datasets import random_prompts

    with errors_for_people(ValueError, TypeError, EngineStartupError):
        if num_iters < 1:
            raise ValueError(f"--num-iters must be at least 1, got {num_iters}")
        options = _engine_options(tensor_parallel_size, pipeline_parallel_size, dtype, max_model_len, option)
        options.setdefault("enable_prefix_caching", False)  # or only the first batch would compute its prompts
        requests = random_prompts(model, batch_size, input_len, output_len, 0.0, 0, seed, as_text=False)
        prompts: Any = [list(request.prompt) for request in requests]
        params = SamplingParams(temperature=1.0, max_tokens=output_len, ignore_eos=True)
        latencies = []
        with LLM(model, **options) as llm, _progress(num_iters_warmup + num_iters, disable_tqdm) as bar:
            for iteration in range(num_iters_warmup + num_iters):
                started_s = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if iteration >= num_iters_warmup:
                    latencies.append(time.perf_counter() - started_s)
                bar.update()
        percentages = [10, 25, 50, 75, 90, 99]
        percentiles = dict(zip(map(str, percentages), np.percentile(latencies, percentages).tolist(), strict=True))
        average = float(np.mean(latencies))
        typer.echo(f"Avg latency: {average} seconds")
        for percentage, value in percentiles.items():
            typer.echo(f"{percentage}% percentile latency: {value} seconds")
        _write_json(output_json, {
            "model_id": model, "avg_latency": average, "latencies": latencies, "percentiles": percentiles,
        })  # fmt: skip


def _engine_options(
    tp: int, pp: int, dtype: str, max_model_len: int | None, option: list[str] | None
) -> dict[str, Any]:
    given = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "dtype": dtype, "max_model_len": max_model_len}
    return {**given, **parse_options(option)}


def _progress(total: int, disable: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=disable)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} must be numbers with commas between them, got {text!r}") from None


def _choices(flag: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for part in chosen:
        if part not in allowed:
            raise ValueError(f"{flag} must be of {', '.join(allowed)}, got {part!r}")
    return chosen


def _limits(goodput: list[str], allowed: tuple[str, ...]) -> dict[str, float]:
    limits = {}
    for text in goodput:
        name, separator, limit = text.partition(":")
        if name not in allowed or name == "itl" or not separator:
            raise ValueError(f"--goodput must be METRIC:MS with ttft, tpot or e2el, got {text!r}")
        limits[name] = _numbers("--goodput", limit)[0]
    return limits


def _save(row: dict[str, Any], folder: Path, name: str | None, detailed: bool) -> None:
    detail = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors")
    kept = row if detailed else {key: value for key, value in row.items() if key not in detail}
    rate = row["request_rate"]
    file = folder / (name or f"{row['backend']}-{rate}qps-{Path(str(row['model_id'])).name}-{row['date']}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept))
    typer.echo(f"Wrote {file}")


def _write_json(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=4))


serve_command.__doc__ = f"{serve_command.__doc__}\n{SERVE_EXAMPLES}"
