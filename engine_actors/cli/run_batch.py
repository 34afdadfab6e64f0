"""`engine-actors run-batch`: the requests of an OpenAI batch file, answered by an engine or a server. Resumable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from engine_actors.cli.common import errors_for_people, parse_options

PATHS = ("/v1/completions", "/v1/chat/completions")
EXAMPLES = """
Each line of the input is a request: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}};
each line of the output its answer: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}.
Answers are written as they come. Started again with the same output file, only what is missing is done.

Examples:

  engine-actors run-batch -i in.jsonl -o out.jsonl --model path/to/model

  engine-actors run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000
"""
Ask = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]
"""(path, body, request id) → status and body."""


@dataclass(frozen=True)
class BatchLine:
    """A request of the file; `problem` says why it cannot be one."""

    custom_id: str | None
    path: str = ""
    body: Any = None
    problem: str | None = None


def run_batch_command(
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, a JSON object a line.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Answers; lines it has already are kept.")],
    model: Annotated[str | None, typer.Option(help="A model directory or hub id to load here.")] = None,
    url: Annotated[str | None, typer.Option(help="A server to ask instead, e.g. http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's.", envvar="ENGINE_ACTORS_API_KEY")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the requests, may be repeated. Default: any is taken for MODEL.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(help="Requests under way at once.")] = 256,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An engine option with --model; may be repeated."),
    ] = None,
) -> None:
    """Answer the requests of an OpenAI batch file."""
    from engine_actors.errors import EngineDeadError, EngineStartupError

    with errors_for_people(ValueError, TypeError, OSError, EngineStartupError, EngineDeadError):
        if (model is None) == (url is None):
            raise ValueError("give either --model, to load it here, or --url of a server")
        if max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}")
        lines = list(read_batch(input_file))
        done = finished_ids(output_file)
        todo = [line for line in lines if line.custom_id is None or line.custom_id not in done]
        typer.echo(f"{len(lines)} requests, {len(lines) - len(todo)} of them answered before", err=True)
        if todo:
            run = _through_server(url, api_key) if url else _through_engine(model or "", served_model_name, option)
            asyncio.run(run(todo, output_file, max_concurrency))


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The requests of a file; blank lines are skipped."""
    seen: set[str] = set()
    with path.open() as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                line = parse_line(text, number)
                if line.custom_id is not None and line.custom_id in seen:
                    line = BatchLine(
                        line.custom_id, problem=f"line {number}: custom_id {line.custom_id!r} is used twice"
                    )
                elif line.custom_id is not None:
                    seen.add(line.custom_id)
                yield line


def parse_line(text: str, number: int) -> BatchLine:
    """One line; what is wrong with it becomes its answer."""
    try:
        data = json.loads(text)
    except ValueError as error:
        return BatchLine(None, problem=f"line {number} is no JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("custom_id"), str):
        return BatchLine(None, problem=f"line {number} needs a custom_id, a string")
    custom_id = data["custom_id"]
    if data.get("method", "POST") != "POST":
        return BatchLine(custom_id, problem=f"line {number}: method must be 'POST', got {data.get('method')!r}")
    if data.get("url") not in PATHS:
        return BatchLine(custom_id, problem=f"line {number}: url must be one of {PATHS}, got {data.get('url')!r}")
    if not isinstance(data.get("body"), dict):
        return BatchLine(custom_id, problem=f"line {number}: body must be an object, got {data.get('body')!r}")
    if data["body"].get("stream"):
        return BatchLine(custom_id, problem=f"line {number}: body.stream must be false or left out in a batch")
    return BatchLine(custom_id, data["url"], data["body"])


def finished_ids(output_file: Path) -> set[str]:
    """custom_ids with a final answer in the output; a half-written last line is cut off."""
    if not output_file.exists():
        return set()
    data = output_file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        output_file.write_bytes(whole)
    answers = [json.loads(line) for line in whole.splitlines() if line.strip()]
    return {answer["custom_id"] for answer in answers if answer.get("custom_id") and not _is_passing(answer)}


def _is_passing(answer: dict[str, Any]) -> bool:
    """Whether asking again may do better: the server was overloaded or down."""
    status = (answer.get("response") or {}).get("status_code", 0)
    return status == 429 or status >= 500


async def answer_all(lines: list[BatchLine], output_file: Path, ask: Ask, max_concurrency: int) -> None:
    """Ask for all lines and append the answers as they come."""
    from tqdm import tqdm

    limit = asyncio.Semaphore(max_concurrency)
    with output_file.open("a") as file, tqdm(total=len(lines), unit="request") as progress:

        async def one(line: BatchLine) -> None:
            async with limit:
                answer = await _answer(line, ask)
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            file.flush()
            progress.update()

        async with asyncio.TaskGroup() as group:
            for line in lines:
                group.create_task(one(line))


async def _answer(line: BatchLine, ask: Ask) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": f"batch-{uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if line.problem is not None:
        return {**answer, "error": {"code": "invalid_request", "message": line.problem}}
    request_id = uuid4().hex
    status, body = await ask(line.path, json.dumps(line.body).encode(), request_id)
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = body.decode(errors="replace")
    answer["response"] = {"status_code": status, "request_id": request_id, "body": parsed}
    if status != 200:
        message = parsed["error"]["message"] if isinstance(parsed, dict) and "error" in parsed else str(parsed)
        answer["error"] = {"code": str(status), "message": message}
    return answer


Run = Callable[[list[BatchLine], Path, int], Awaitable[None]]


def _through_server(url: str, api_key: str | None) -> Callable[[list[BatchLine], Path, int], Any]:
    async def run(lines: list[BatchLine], output_file: Path, max_concurrency: int) -> None:
        import aiohttp

        from engine_actors.bench.load import make_session

        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        base = url.rstrip("/").removesuffix("/v1")
        async with make_session() as session:

            async def ask(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
                sent = {**headers, "X-Request-Id": request_id}
                try:
                    async with session.post(base + path, data=body, headers=sent) as response:
                        return response.status, await response.read()
                except aiohttp.ClientError as error:  # another run asks again
                    return 503, f"the server cannot be reached: {error}".encode()

            await answer_all(lines, output_file, ask, max_concurrency)

    return run


def _through_engine(
    model: str, names: list[str] | None, option: list[str] | None
) -> Callable[[list[BatchLine], Path, int], Any]:
    async def run(lines: list[BatchLine], output_file: Path, max_concurrency: int) -> None:
        from engine_actors.async_llm import AsyncLLM
        from engine_actors.serve import ServedModel, create_app
        from engine_actors.serve.asgi_call import post_scope, whole_answer
        from engine_actors.serve.options import sort_options

        options = sort_options(parse_options(option), "--option")
        llm = await asyncio.to_thread(AsyncLLM, model, **options.engine)
        try:
            asked = {line.body.get("model") for line in lines if line.body is not None}
            served = names or sorted({name for name in asked if isinstance(name, str) and name} | {model})
            served_model = ServedModel.from_async_llm(llm, served, options.settings, options.chat_template)
            app = create_app([served_model], options.settings)

            async def ask(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
                headers = {"X-Request-Id": request_id}
                if options.settings.api_keys:
                    headers["Authorization"] = f"Bearer {options.settings.api_keys[0]}"
                status, _, answer = await whole_answer(app, post_scope(path, headers), body)
                return status, answer

            await answer_all(lines, output_file, ask, max_concurrency)
        finally:
            await llm.shutdown_async(0.0)

    return run


run_batch_command.__doc__ = f"{run_batch_command.__doc__}\n{EXAMPLES}"
