"""What holds for every request: its id, the API key, and errors in the one envelope. Wraps the whole app."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

from engine_actors.metrics import HttpMetrics
from engine_actors.serve.endpoints import is_usable_id
from engine_actors.serve.errors import APIError, to_api_error
from engine_actors.serve.http import Message, Receive, Scope, Send, header, send_error

logger = logging.getLogger(__name__)

App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/metrics/", "/version", "/"})
"""Served without an API key: probes and scrapers have none. The status page at / holds no data, only asks for it."""
UNMEASURED_PATHS = frozenset({"/health", "/ping", "/metrics", "/metrics/", "/version", "/load", "/status", "/"})


class ApiKeys:
    """Bearer tokens, compared in constant time.

    Args:
        keys: Accepted tokens; none switches the check off.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, scope: Scope, path: str) -> None:
        """Refuse a request without an accepted key.

        Raises:
            APIError: 401.
        """
        if not self._digests or path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        # Every key is compared, so that the time tells nothing about which of them came close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise APIError(401, "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip


class ServerMiddleware:
    """See the module's docstring.

    Args:
        app: The app it wraps.
        api_keys: Accepted bearer tokens.
        metrics: Where requests are counted.
        paths: Known paths, the only ones that become metric labels.
        echo_request_id: Send X-Request-Id back. Ray Serve does so itself: a second one would spoil the first.
    """

    def __init__(
        self,
        app: App,
        api_keys: Sequence[str],
        metrics: HttpMetrics,
        paths: Sequence[str],
        echo_request_id: bool = True,
    ) -> None:
        self._app = app
        self._keys = ApiKeys(api_keys)
        self._metrics = metrics
        self._measured = frozenset(paths) - UNMEASURED_PATHS
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        given = header(scope, b"x-request-id")
        state = scope.setdefault("state", {})
        state["request_id"] = given if given and is_usable_id(given) else None
        status = 0
        started_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = state["request_id"] = state["request_id"] or uuid4().hex
                if self._echo_request_id:
                    echo = (b"x-request-id", request_id.encode("latin-1"))
                    message["headers"] = [*message.get("headers", ()), echo]
            await send(message)

        try:
            self._keys.check(scope, path)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise  # the response has begun: the server can only cut the connection
            state["request_id"] = state["request_id"] or uuid4().hex
            await send_error(send_with_id, to_api_error(error, state["request_id"]))
        finally:
            if path not in UNMEASURED_PATHS:
                handler = path if path in self._measured else "none"
                # Without a response the client had gone, which proxies write as 499.
                self._metrics.observe(scope["method"], handler, status or 499, time.monotonic() - started_s)
