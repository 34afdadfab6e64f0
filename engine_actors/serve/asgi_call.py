"""Calling an ASGI app in this process, as a client would: one request, its answer as messages. Used by deployment.py
(for ModelRouter) and by run-batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers, body."""


async def call_app(app: Any, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[dict[str, Any]], None]:
    """The app's answer, as lists of the ASGI messages there are. Closing it is a client that leaves."""
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    working = asyncio.create_task(_run(app, scope, body, messages))
    try:
        while (message := await messages.get()) is not None:
            batch = [message]
            while not messages.empty():
                later = messages.get_nowait()
                if later is None:
                    messages.put_nowait(None)
                    break
                batch.append(later)
            yield batch
        await working
    finally:
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working


async def whole_answer(app: Any, scope: Mapping[str, Any], body: bytes) -> Answer:
    """Same, when all has come."""
    status, headers, parts = 500, [], []
    async with aclosing(call_app(app, scope, body)) as batches:
        async for batch in batches:
            for message in batch:
                if message["type"] == "http.response.start":
                    status, headers = message["status"], message["headers"]
                else:
                    parts.append(message.get("body", b""))
    return status, headers, b"".join(parts)


def post_scope(path: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The scope of a POST of JSON."""
    fields = {"content-type": "application/json", **(headers or {})}
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in fields.items()],
        "client": None,
        "server": ("in-process", 0),
    }


async def _run(app: Any, scope: Mapping[str, Any], body: bytes, messages: asyncio.Queue[dict[str, Any] | None]) -> None:
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # a client that leaves cancels this call
        raise AssertionError("never reached")

    async def send(message: Any) -> None:
        messages.put_nowait(message)

    try:
        await app({**scope, "asgi": {"version": "3.0"}, "root_path": "", "state": {}}, receive, send)
    finally:
        messages.put_nowait(None)
