"""A streaming HTTP client that costs little: for benchmarks/serving.py, whose client shares processors with the server.

It looks for events in the bytes as they arrive and decodes none. A general client (aiohttp, see engine_actors/bench)
takes several times the processor time for each token, as much as a server's whole front.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from engine_actors.bench.client import BenchRequest, BenchResult, Target
from engine_actors.bench.load import LoadReport

EVENT = b'"choices":[{'
"""In each chunk with a token, and in no other, of servers that write JSON without spaces."""
USAGE = re.compile(rb'"completion_tokens":(\d+)')
DONE = b"data: [DONE]"
TAIL_BYTES = 2048
"""Kept of what has come: an event that two reads share, and at the end the usage."""


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, head_and_body: bytes, result: BenchResult) -> None:
        self._request = head_and_body
        self._result = result
        self._last_s = 0.0
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s, result = time.perf_counter(), self._result
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            result.error = data[:500].decode(errors="replace")
        num_events = (self._tail[1 - len(EVENT) :] + data).count(EVENT)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        for _ in range(num_events):
            if result.ttft_s:
                result.itl_s.append(now_s - self._last_s)
            else:
                result.ttft_s = now_s - result.started_s
            self._last_s = now_s

    def connection_lost(self, error: Exception | None) -> None:
        result = self._result
        usage = USAGE.findall(self._tail)
        result.latency_s = max(0.0, self._last_s - result.started_s)
        if usage:
            result.num_output_tokens = int(usage[-1])
        if DONE not in self._tail or not usage or not result.ttft_s:
            result.error = result.error or f"the stream ended early: {error or self._tail[-500:]!r}"
        self.ended.set_result(None)


async def run_streams(target: Target, requests: Sequence[BenchRequest], max_concurrency: int) -> LoadReport:
    """Send all requests, so many at once."""
    url = urlsplit(target.url)
    limit = asyncio.Semaphore(max_concurrency)
    loop = asyncio.get_running_loop()

    async def one(request: BenchRequest) -> BenchResult:
        async with limit:
            result = BenchResult(num_prompt_tokens=request.num_prompt_tokens)
            body = target.body(request)
            fields = {**target.headers, "Host": url.netloc, "Content-Length": len(body), "Connection": "close"}
            head = f"POST {url.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            result.started_s = time.perf_counter()
            stream = _Stream(head.encode() + b"\r\n" + body, result)
            try:
                await loop.create_connection(lambda: stream, url.hostname, url.port)
                await stream.ended
            except OSError as error:
                result.error = f"{type(error).__name__}: {error}"
            return result

    started_s = time.perf_counter()
    results = await asyncio.gather(*map(one, requests))
    return LoadReport(list(results), time.perf_counter() - started_s)
