"""`RequestStream`: what `AsyncLLM` hands out for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine_actors.input_processor import ProcessedRequest
from engine_actors.outputs import RequestOutput


class RequestStream:
    """The outputs of one request, as they come. Those nobody has read yet are merged: a slow reader costs no memory.

    An async iterator for one reader. Ends after the finished output; raises the request's error, and EngineDeadError.
    """

    def __init__(self, request: ProcessedRequest) -> None:
        self.request_id = request.parent.request_id
        self._kind = request.parent.params.output_kind
        self._unread: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._error: Exception | None = None
        request.parent.sink = self._put

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._unread is None:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"the stream of request {self.request_id} is being read by another task")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._unread = self._unread, None
        if output.error is not None:
            self._error = output.error
            raise output.error
        return output

    @property
    def finished(self) -> bool:
        return self._finished

    def fail(self, error: Exception) -> None:
        self._error, self._finished = error, True
        self._wake()

    def _put(self, output: RequestOutput) -> None:
        if self._unread is None:
            self._unread = output
        else:
            self._unread.merge(output, self._kind)
        self._finished = output.finished
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
