"""Every error a client can see: one envelope, `{"error": {"message", "type", "param", "code"}}`, with an honest status.

Raised by the request checks of this package; engine errors are mapped by `to_api_error`. A failure that would repeat is
never 5xx (clients retry those), and one that a retry can cure always is, or is 429, with `Retry-After`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_actors.errors import (
    EngineDeadError,
    EngineStartupError,
    ExecutorFailedError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
)

logger = logging.getLogger(__name__)

ERROR_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "BadRequestError",
    422: "BadRequestError",
    429: "RateLimitError",
    499: "RequestAbortedError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
RETRY_AFTER_S: Mapping[int, int] = {429: 1, 503: 5}
"""Seconds after which a client may try again. A dead engine's actors need a few to come back."""
MAX_VALUE_CHARS = 120
_PATHS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+")
_ADDRESSES = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class APIError(Exception):
    """An error with its HTTP status, ready to be sent.

    Attributes:
        status: HTTP status, also `error.code`.
        param: The request field at fault; None where no field is.
        headers: Extra response headers.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = dict(headers or {})
        if status in RETRY_AFTER_S:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S[status]))

    def envelope(self) -> dict[str, Any]:
        """The JSON body."""
        error_type = ERROR_TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {
            "error": {"message": scrub(str(self)), "type": error_type, "param": self.param, "code": self.status},
        }

    def encode(self) -> bytes:
        return msgspec.json.encode(self.envelope())


class BadRequest(APIError):
    """The request can never be served as asked."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, param)


def bad_value(param: str, value: Any, allowed: str) -> BadRequest:
    """A 400 that names the field, its value and what is allowed."""
    return BadRequest(f"{param} must be {allowed}, got {shown(value)}", param)


def shown(value: Any) -> str:
    """`value` for an error text: never longer than a line."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def scrub(message: str) -> str:
    """One line without file paths and object addresses."""
    line = " ".join(message.split())
    return _ADDRESSES.sub("0x…", _PATHS.sub("<path>", line))


def to_api_error(error: BaseException, request_id: str, params: Mapping[str, str] | None = None) -> APIError:
    """The HTTP face of any exception.

    Args:
        error: What was raised while a request was served.
        request_id: Named in 5xx texts, so that the log can be searched for it.
        params: Engine field name → the request's own name for it ("structured_outputs" → "response_format").
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequestError):
        field = error.field
        return BadRequest(str(error), (params or {}).get(field, field) if field else None)
    if isinstance(error, QueueFullError):
        return APIError(429, str(error) or "too many requests are waiting; try again later")
    if isinstance(error, (EngineDeadError, EngineStartupError, ExecutorFailedError)):
        logger.error("request %s: the engine is down: %s", request_id, error)
        return APIError(503, f"The engine is unavailable and restarting; try again (request {request_id})")
    if isinstance(error, RequestAbortedError):
        return APIError(499, str(error) or f"request {request_id} was aborted")
    if isinstance(error, TimeoutError):
        return APIError(408, f"request {request_id} took longer than the server allows")
    logger.error("request %s failed", request_id, exc_info=error)
    return APIError(500, f"Internal server error (request {request_id}, {type(error).__name__})")


def generation_failed(request_id: str) -> APIError:
    """An output with finish_reason "error": the engine has logged why."""
    return APIError(500, f"The engine failed to process the request (request {request_id})")
