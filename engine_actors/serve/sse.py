"""Server-sent events: the response that streams them, and the bytes of an event. Used by the generation endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from engine_actors.serve.errors import APIError

Send = Callable[[dict[str, Any]], Any]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of nginx's kind must pass each event on at once
)


def event(data: Any) -> bytes:
    """One event holding `data` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: APIError) -> bytes:
    """How a stream tells of an error: openai's client raises on it."""
    return b"data: " + error.encode() + b"\n\n"


class EventStream:
    """Sends an iterator's events.

    Args:
        events: Encoded events; what it raises after the first output is `to_error`'s to map, and ends the stream.
        first_output_wait_s: The 200 waits for the first event so long, so that an error before it keeps its status.
        keep_alive_s: Silence after which a comment is sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        to_error: Callable[[Exception], APIError],
        first_output_wait_s: float,
        keep_alive_s: float | None,
    ) -> None:
        self._events = events
        self._to_error = to_error
        self._first_output_wait_s = first_output_wait_s
        self._keep_alive_s = keep_alive_s
        self._last_sent_s = 0.0

    async def run(self, send: Send) -> None:
        """Send the whole response.

        Raises:
            Exception: What `events` raised before the 200 was sent.
        """
        async with aclosing(self._events):
            first = asyncio.ensure_future(self._next())
            try:
                await asyncio.wait({first}, timeout=self._first_output_wait_s)
                if first.done():
                    first.result()  # an error keeps its status
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                self._last_sent_s = time.monotonic()
                await self._send_all(first, send)
            finally:
                if not first.done():
                    first.cancel()
                    with suppress(asyncio.CancelledError):
                        await first

    async def _next(self) -> bytes | None:
        return await anext(self._events, None)

    async def _send_all(self, first: asyncio.Future[bytes | None], send: Send) -> None:
        keeper = None
        if self._keep_alive_s is not None:
            keeper = asyncio.create_task(self._keep_alive(send, self._keep_alive_s))
        try:
            data = await first
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._last_sent_s = time.monotonic()
                data = await anext(self._events, None)
        except Exception as error:
            await send({"type": "http.response.body", "body": error_event(self._to_error(error)), "more_body": True})
        finally:
            if keeper is not None:
                keeper.cancel()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _keep_alive(self, send: Send, interval_s: float) -> None:
        while True:
            await asyncio.sleep(max(0.001, self._last_sent_s + interval_s - time.monotonic()))
            if time.monotonic() - self._last_sent_s >= interval_s:
                with suppress(OSError):  # the client has gone; the stream itself will notice
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_sent_s = time.monotonic()
