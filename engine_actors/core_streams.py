"""One client's two directions at EngineCoreActor: messages put in order, outputs gathered into batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from engine_actors.messages import OutputBatch, RecoveryNotice, UtilityOutput, encode_batch
from scheduler.output import EngineCoreOutputs

LINGER_S = 0.5
"""How long a client's stream stays open after its last request or utility."""


PATIENCE_S = 0.1
"""How long tokens wait for company where the client reads nothing before a request's end. An item of a stream costs
both processes some 0.4 ms, as much as many a step."""


class Inbox:
    """Puts a client's calls into the order they were made in: Ray may start calls of an asyncio actor in any order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    @property
    def num_handled(self) -> int:
        """Calls that have been handed on."""
        return self._next

    def accept(self, sequence: int, data: bytes) -> list[bytes]:
        """What can be handled now, in order: nothing while an earlier call is missing."""
        self._early[sequence] = data
        ready: list[bytes] = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class Outbox:
    """What waits to be sent to a client; sent as soon as its stream asks, everything gathered so far in one batch."""

    def __init__(self) -> None:
        self._batch = OutputBatch()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def put_outputs(self, outputs: EngineCoreOutputs, *, may_wait: bool = False) -> None:
        """
        Args:
            may_wait: Tokens may be sent up to PATIENCE_S later, together with others. A request's first ones, which
                tell when it began to answer, and its end never wait.
        """
        if self._ended:
            return
        self._batch.outputs.append(outputs)
        if not may_wait or outputs.started or outputs.finished:
            self._changed.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._changed.set)

    def put_utility(self, output: UtilityOutput) -> None:
        if not self._ended:
            self._batch.utilities.append(output)
            self._changed.set()

    def put_recovery(self, notice: RecoveryNotice) -> None:
        if not self._ended:
            self._batch.recoveries.append(notice)
            self._changed.set()

    def die(self, cause: str, may_replay: bool = False) -> None:
        """End the stream, after what was put before, with ENGINE_CORE_DEAD."""
        if not self._ended:
            self._batch.engine_core_dead = cause
            self._batch.may_replay = may_replay
            self._end()

    def stop(self) -> None:
        """End the stream in order, after what was put before."""
        if not self._ended:
            self._batch.stopped = True
            self._end()

    def close(self) -> None:
        """The client is gone: drop everything."""
        self._batch = OutputBatch(stopped=True)
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()

    @property
    def is_empty(self) -> bool:
        """Nothing waits to be sent."""
        return not self._changed.is_set() and self._timer is None

    async def batches(self, is_idle: Callable[[], bool], inbox: Inbox) -> AsyncIterator[tuple[bytes, bool]]:
        """The stream: (encoded OutputBatch, whether it is the last one).

        It ends with the engine, or when the client has had nothing under way for `LINGER_S`: a call that stays pending
        would keep the client's process from leaving Ray gracefully. The client's next call opens another.
        """
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), LINGER_S if is_idle() else None)
            except TimeoutError:
                if is_idle():
                    yield encode_batch(OutputBatch(paused_after=inbox.num_handled)), True
                    return
                continue
            self._changed.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            batch, self._batch = self._batch, OutputBatch()
            yield encode_batch(batch), batch.is_last
            if batch.is_last:
                return
