"""One streaming request to an OpenAI-compatible server, timed. Used by load.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


@dataclass(frozen=True)
class BenchRequest:
    """What to ask.

    Attributes:
        prompt: Token ids or text; for chat, the text of one user message.
        num_prompt_tokens: Its length, where the server does not report it.
        max_tokens: Output length.
    """

    prompt: str | list[int]
    num_prompt_tokens: int
    max_tokens: int


@dataclass
class BenchResult:
    """What came. Times are seconds; `started_s` is of `time.perf_counter`.

    Attributes:
        ttft_s: From sending to the first chunk with a choice.
        itl_s: Between chunks with a choice.
        latency_s: From sending to the last of them.
        error: Empty when the request succeeded.
    """

    started_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True)
class Target:
    """A server's endpoint.

    Attributes:
        url: Of the endpoint.
        model: Sent as `model`.
        extra: More fields of each body.
    """

    url: str
    model: str
    is_chat: bool = False
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def body(self, request: BenchRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return msgspec.json.encode(body)


async def send_request(session: aiohttp.ClientSession, target: Target, request: BenchRequest) -> BenchResult:
    """Send one request and read its stream. Never raises: what went wrong is in `error`."""
    result = BenchResult(num_prompt_tokens=request.num_prompt_tokens)
    body = target.body(request)
    result.started_s = last_s = time.perf_counter()
    decoder = msgspec.json.Decoder(_Chunk)
    text: list[str] = []
    try:
        async with session.post(target.url, data=body, headers=target.headers) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {(await response.text())[:500]}"
                return result
            incomplete = b""
            # By what arrives, not by lines: a line costs a call, and the client shares the server's processors.
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                *lines, incomplete = (incomplete + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    chunk = decoder.decode(line[6:])
                    if chunk.error is not None:
                        result.error = f"error in the stream: {chunk.error}"
                        return result
                    if chunk.choices:
                        if not result.ttft_s:
                            result.ttft_s = now_s - result.started_s
                        else:
                            result.itl_s.append(now_s - last_s)
                        last_s = now_s
                        choice = chunk.choices[0]
                        text.append((choice.delta.content if choice.delta else choice.text) or "")
                    if chunk.usage is not None:
                        result.num_output_tokens = chunk.usage.completion_tokens
                        result.num_prompt_tokens = chunk.usage.prompt_tokens or result.num_prompt_tokens
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        result.error = f"{type(error).__name__}: {error}"
        return result
    if not result.ttft_s:
        result.error = "the stream had no token"
    result.text = "".join(text)
    result.latency_s = last_s - result.started_s
    result.num_output_tokens = result.num_output_tokens or len(result.itl_s) + 1
    return result
