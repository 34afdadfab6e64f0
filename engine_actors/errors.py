"""The public errors. Each names what failed, the value, and what is allowed or what to do."""

from __future__ import annotations

from executors.base import ExecutorFailedError

__all__ = [
    "EngineDeadError",
    "EngineStartupError",
    "ExecutorFailedError",
    "InvalidRequestError",
    "QueueFullError",
    "RequestAbortedError",
]


class InvalidRequestError(ValueError):
    """The request can never be served as asked. HTTP 400.

    Attributes:
        field: The request field at fault, e.g. "prompt" or "max_tokens".
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str | None]]:
        return type(self), (str(self), self.field)


class QueueFullError(RuntimeError):
    """`max_num_queued_requests` are already waiting; try again later. HTTP 429."""


class EngineStartupError(RuntimeError):
    """The engine could not start. The text holds the root cause, and the rank and node where it arose."""


class EngineDeadError(RuntimeError):
    """The engine has failed; every pending and later call raises this. The text holds the cause. HTTP 503."""


class RequestAbortedError(RuntimeError):
    """The request was aborted before it finished. HTTP 499."""
