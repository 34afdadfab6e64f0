"""The public errors. Each names what failed, the value, and what is allowed or what to do."""

from __future__ import annotations

from executors.base import ExecutorFailedError

__all__ = [
    "EngineDeadError",
    "EnginePausedError",
    "EngineRecoveredError",
    "EngineStartupError",
    "ExecutorFailedError",
    "InvalidRequestError",
    "QueueFullError",
    "RequestAbortedError",
    "RequestFailedError",
    "request_error",
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


class EnginePausedError(RuntimeError):
    """A synchronous caller waits for requests that cannot go on: the engine is paused or asleep, by its own doing."""


class EngineRecoveredError(RuntimeError):
    """The engine failed and recovered while this call to it ran: it may or may not have been carried out. Requests are
    replayed; utilities are not, since they may change something. HTTP 503."""


class RequestAbortedError(RuntimeError):
    """The request was aborted before it finished. HTTP 499."""


class RequestFailedError(RuntimeError):
    """Something went wrong inside the engine with this request alone; the others go on. HTTP 500."""


_REQUEST_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (EngineDeadError, InvalidRequestError, QueueFullError, RequestAbortedError, RequestFailedError)
}


def request_error(error_type: str | None, message: str, field: str | None = None) -> Exception:
    """The public exception for a request the engine ended with an error (`FinishedRequest.error_type`)."""
    if error_type == InvalidRequestError.__name__:
        return InvalidRequestError(message, field)
    return _REQUEST_ERRORS.get(error_type or "", RequestFailedError)(message)
