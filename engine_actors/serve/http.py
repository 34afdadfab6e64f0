"""ASGI small change: bodies with a cap, JSON responses, clients that go away. Used by all ASGI code of serve/."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from engine_actors.serve.errors import APIError, BadRequest

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client went away before its body was complete. There is nobody to answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a header, by its lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def check_json_content_type(scope: Scope) -> None:
    """Refuse a body that does not say it is JSON.

    Raises:
        BadRequest: Always for other types, as vLLM's server.
    """
    given = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise BadRequest(f"Unsupported Media Type: Only 'application/json' is allowed, got {given[:80]!r}")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
        APIError: 413, it is longer than `max_bytes`; told from Content-Length before any of it is read.
        ClientDisconnected: It never became complete.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes, int(declared))
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes, num_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_json(send: Send, data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    await send_bytes(send, msgspec.json.encode(data), "application/json", status, headers)


async def send_error(send: Send, error: APIError) -> None:
    await send_bytes(send, error.encode(), "application/json", error.status, error.headers)


async def send_bytes(
    send: Send, body: bytes, content_type: str | None, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """A whole response."""
    fields = [(b"content-length", str(len(body)).encode())]
    if content_type is not None:
        fields.append((b"content-type", content_type.encode()))
    fields += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; cancel it when the client goes away. False when that happened.

    The request's body must have been read: what comes next from `receive` is the disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        if watching.exception() is not None:
            logger.warning(
                "cannot tell whether the client is still there; its request ends", exc_info=watching.exception()
            )
        return False
    finally:
        for task in (watching, working):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int, num_bytes: int) -> APIError:
    # What is left of the body is not read, so the connection cannot be used again.
    return APIError(
        413,
        f"the request body must be at most {max_bytes} bytes, got {num_bytes} or more",
        headers={"Connection": "close"},
    )
