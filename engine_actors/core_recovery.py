"""Recovery of the workers of one EngineCore: new ones are started in a thread while the actor's loop goes on.

Owned by `EngineCoreActor`, with `recovery="replay"`. Each failure is an ExecutorFailedError; the scheduler keeps every
request and replays it (`Scheduler.restart`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine_actors.config import EngineConfig
from engine_actors.core import EngineCore, NewWorkers
from engine_actors.recovery_limits import RecoveryLimits
from executors.base import ExecutorFailedError

logger = logging.getLogger(__name__)

ABANDON_S = 10.0
"""How long the end of the engine waits for a start of workers under way."""


class WorkerRecovery:
    """At most one recovery at a time.

    Args:
        on_done: Called on the event loop when a start under way has ended, well or not.
    """

    def __init__(self, core: EngineCore, config: EngineConfig, on_done: Callable[[], None]) -> None:
        self._core = core
        self._config = config
        self._on_done = on_done
        self._task: asyncio.Task[NewWorkers] | None = None
        self._limits = RecoveryLimits(config)
        self._began_s = 0.0
        self.cause = ""

    @property
    def under_way(self) -> bool:
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """The start under way has ended; call `finish`."""
        return self._task is not None and self._task.done()

    def note_progress(self) -> None:
        """A step has finished."""
        self._limits.note_progress()

    def begin(self, error: ExecutorFailedError) -> None:
        """Start new workers.

        Raises:
            ExecutorFailedError: `error`, when the engine is not to recover here, or recovers for nothing. A worker in
                this process cannot be killed if it hangs, so the client starts a new process instead.
        """
        if not self._config.replays or self._core.runs_worker_in_process:
            raise error
        self._limits.check(error)
        logger.warning("The workers failed; others are started and requests replayed. The cause: %s", error)
        self.cause, self._began_s = str(error), time.monotonic()
        start = asyncio.to_thread(self._limits.try_start, error, "new workers", self._core.start_new_workers)
        self._task = asyncio.create_task(start)
        self._task.add_done_callback(lambda _: self._on_done())

    def finish(self) -> float:
        """Let the core go on with the new workers. Returns the seconds lost.

        Raises:
            RecoveryFailedError: There are none.
        """
        task, self._task = self._task, None
        assert task is not None
        self._core.go_on_with(task.result(), self.cause)
        return time.monotonic() - self._began_s

    async def abandon(self) -> None:
        """The engine ends: stop what was started, as far as it can be waited for."""
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=ABANDON_S)
        if self._task.done() and self._task.exception() is None:
            await asyncio.to_thread(self._task.result().executor.shutdown)
