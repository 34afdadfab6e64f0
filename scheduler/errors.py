"""Why a request is not taken. Raised by `Scheduler.add_request`; EngineCore turns them into an end of that request."""

from __future__ import annotations


class RequestRefusedError(ValueError):
    """The request can never be served as asked; the text names the value and the limit."""


class QueueFullError(RuntimeError):
    """`max_num_queued_requests` are waiting already; the same request may be taken later."""
