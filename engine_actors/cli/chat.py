"""`engine-actors chat`: talk to a model, the answer coming word by word. The model is on a server, or loaded here."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Annotated, Any, Protocol

import typer

from engine_actors.cli.common import EngineOptions, errors_for_people, parse_options

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit ends. Ctrl-C stops an answer."
TIMEOUT_S = 600.0

EXAMPLES = """
Examples:

  engine-actors chat                         (the server at http://127.0.0.1:8000)

  engine-actors chat --url http://host:9000/v1 --api-key SECRET

  engine-actors chat path/to/model           (loads it here)

  engine-actors chat -q "Write a haiku about rivers" --stats
"""
Message = dict[str, str]


class ChatError(Exception):
    """The answer did not come; the text says why."""


class Answerer(Protocol):
    """Where answers come from."""

    model: str

    def answer(self, messages: list[Message]) -> Generator[str, None, None]:
        """The pieces of the answer, as they come."""

    def close(self) -> None: ...


class ServerChat:
    """Answers of an OpenAI-compatible server.

    Args:
        url: Up to and including /v1.
        model: None takes the server's first.
        options: More fields of each request.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, options: dict[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._options = options
        self.model = model or self._first_model()

    def answer(self, messages: list[Message]) -> Generator[str, None, None]:
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        with self._open("/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ChatError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""

    def close(self) -> None:
        """Nothing is kept open."""

    def _first_model(self) -> str:
        with self._open("/models") as response:
            return str(json.load(response)["data"][0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise ChatError(f"the server answered {error.code}: {text}") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ChatError(
                f"no server at {self._url}: {reason}; start one with `engine-actors serve MODEL`, or give MODEL here"
            ) from error


class LocalChat:
    """Answers of an engine that this process starts, through Ray actors."""

    def __init__(self, model: str, engine_options: dict[str, Any], sampling: dict[str, Any]) -> None:
        from engine_actors.async_llm import AsyncLLM
        from scheduler.sampling_params import RequestOutputKind

        self.model = model
        self._llm = AsyncLLM(model, **engine_options)
        self._loop = asyncio.new_event_loop()
        default = self._llm.get_default_sampling_params()
        self._params = default.clone(**{"max_tokens": None, **sampling}, output_kind=RequestOutputKind.DELTA)

    def answer(self, messages: list[Message]) -> Generator[str, None, None]:
        text = self._llm.render_chat(messages)
        stream = self._loop.run_until_complete(self._llm.add_request(text, self._params, add_special_tokens=False))
        try:
            while True:
                try:
                    output = self._loop.run_until_complete(anext(stream))
                except StopAsyncIteration:
                    return
                yield output.outputs[0].text
        finally:
            self._llm.drop(stream)

    def close(self) -> None:
        self._loop.run_until_complete(self._llm.shutdown_async(0.0))
        self._loop.close()


def chat_command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model directory to load here. Default: ask the server at --url.", show_default=False),
    ] = None,
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server.")] = "http://127.0.0.1:8000/v1",
    model_name: Annotated[str | None, typer.Option(help="Model at the server. Default: its first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's.", envvar="ENGINE_ACTORS_API_KEY")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    quick: Annotated[
        str | None, typer.Option("--quick", "-q", help="Send this message, print the answer, end.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer. Default: what the context has room for.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print time to first token and tokens per second.")] = False,
    option: EngineOptions = None,
) -> None:
    """Talk to a model; answers come word by word."""
    from engine_actors.errors import EngineDeadError, EngineStartupError, InvalidRequestError

    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    kinds = (ValueError, TypeError, ChatError, EngineStartupError, EngineDeadError, InvalidRequestError)
    with errors_for_people(*kinds):
        answerer: Answerer = (
            LocalChat(model, parse_options(option), sampling)
            if model is not None
            else ServerChat(url, model_name, api_key, sampling)
        )
        try:
            conversation = Conversation(answerer, system_prompt, stats)
            if quick is not None:
                conversation.say(quick)
                return
            typer.secho(f"Talking to {answerer.model}. {HELP}", dim=True)
            talk(conversation, lambda: input("> "))
        finally:
            answerer.close()


class Conversation:
    """The messages so far."""

    def __init__(self, answerer: Answerer, system: str | None, stats: bool) -> None:
        self._answerer = answerer
        self._system = system
        self._stats = stats
        self.messages: list[Message] = []
        self.reset()

    def reset(self, system: str | None = None) -> None:
        self._system = system or self._system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> None:
        """Send `text` and print the answer; what came before Ctrl-C is kept."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        times_s = [time.perf_counter()]
        answer = self._answerer.answer(self.messages)
        try:
            for piece in answer:
                if piece:
                    pieces.append(piece)
                    times_s.append(time.perf_counter())
                    typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            typer.echo(" …", nl=False)
        finally:
            answer.close()
        typer.echo()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if self._stats and len(times_s) > 2:
            ttft_s, rest_s = times_s[1] - times_s[0], times_s[-1] - times_s[1]
            rate = (len(times_s) - 2) / rest_s
            typer.secho(f"first token after {ttft_s * 1000:.0f} ms, then {rate:.1f} chunks/s", dim=True)


def talk(conversation: Conversation, read: Callable[[], str]) -> None:
    """Read and answer until the end of input."""
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/system "):
            conversation.reset(line.removeprefix("/system "))
        elif line.startswith("/"):
            typer.secho(HELP, dim=True)
        elif line:
            try:
                conversation.say(line)
            except ChatError as error:
                conversation.messages.pop()
                typer.secho(f"Error: {error}", err=True, fg="red")


chat_command.__doc__ = f"{chat_command.__doc__}\n{EXAMPLES}"
