"""Every generation request the server is working on: for /load, /abort_requests and the status page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class InflightRequest:
    """One HTTP request being served.

    Attributes:
        request_id: As the client sees it, "chatcmpl-…".
        external_id: The client's own X-Request-Id, or the one made for it.
        engine_ids: Of its prompts in the engine.
        num_generated: Tokens so far; a request that does not stream learns it at its end.
    """

    request_id: str
    external_id: str
    kind: str
    model: str
    is_stream: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    started_s: float = field(default_factory=time.monotonic)
    first_output_s: float | None = None
    engine_ids: list[str] = field(default_factory=list)
    llm: Any = None

    def describe(self, now_s: float) -> dict[str, Any]:
        """A row of the status page. Ages are seconds."""
        waiting = self.first_output_s is None
        return {
            "id": self.request_id,
            "kind": self.kind,
            "model": self.model,
            "stream": self.is_stream,
            "state": "waiting for first token" if waiting and self.is_stream else "running",
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "generated_tokens": self.num_generated,
            "age_s": round(now_s - self.started_s, 3),
            "ttft_s": None if self.first_output_s is None else round(self.first_output_s - self.started_s, 4),
        }


class InflightRequests:
    """The set of `InflightRequest`s of one server."""

    def __init__(self) -> None:
        self._requests: dict[int, InflightRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InflightRequest]:
        return iter(list(self._requests.values()))

    @contextmanager
    def tracked(self, request: InflightRequest) -> Iterator[InflightRequest]:
        """`request` is in flight inside the `with` block."""
        self._requests[id(request)] = request
        try:
            yield request
        finally:
            del self._requests[id(request)]

    async def abort(self, ids: Iterable[str] | None) -> list[str]:
        """Abort the requests of these ids (either kind), or all; the ids found, as clients see them."""
        wanted = None if ids is None else set(ids)
        found = [
            request
            for request in self
            if wanted is None or request.request_id in wanted or request.external_id in wanted
        ]
        await asyncio.gather(*(request.llm.abort(request.engine_ids) for request in found if request.engine_ids))
        return [request.request_id for request in found]
