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
from executors.base import ExecutorFailedError

logger = logging.getLogger(__name__)

FRUITLESS_PER_ATTEMPT = 4
"""Recoveries in a row without a finished step that end the engine, as a multiple of max_recovery_attempts: enough for
a few requests that crash the workers to be found one after another."""
ABANDON_S = 10.0
"""How long the end of the engine waits for a start of workers under way."""


class RecoveryFailedError(ExecutorFailedError):
    """The workers failed and could not be replaced. The text has both causes."""


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
        self._num_fruitless = 0
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
        self._num_fruitless = 0

    def begin(self, error: ExecutorFailedError) -> None:
        """Start new workers.

        Raises:
            ExecutorFailedError: `error`, when the engine is not to recover here, or recovers for nothing. A worker in
                this process cannot be killed if it hangs, so the client starts a new process instead.
        """
        if not self._config.replays or self._core.runs_worker_in_process:
            raise error
        self._num_fruitless += 1
        limit = FRUITLESS_PER_ATTEMPT * self._config.max_recovery_attempts
        if self._num_fruitless > limit:
            raise RecoveryFailedError(f"{error}; this was failure {limit + 1} without one finished step in between")
        logger.warning("The workers failed; others are started and requests replayed. The cause: %s", error)
        self.cause, self._began_s = str(error), time.monotonic()
        self._task = asyncio.create_task(self._start(error))
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

    async def _start(self, error: ExecutorFailedError) -> NewWorkers:
        deadline_s = self._began_s + self._config.recovery_timeout_s
        attempts = self._config.max_recovery_attempts
        for attempt in range(1, attempts + 1):
            try:
                return await asyncio.to_thread(self._core.start_new_workers, max(1.0, deadline_s - time.monotonic()))
            except Exception as failure:
                if attempt == attempts or time.monotonic() >= deadline_s:
                    lost_s = time.monotonic() - self._began_s
                    raise RecoveryFailedError(
                        f"{error}; no workers could be started in its place, {attempt} times in {lost_s:.0f} s "
                        f"(max_recovery_attempts {attempts}, recovery_timeout_s {self._config.recovery_timeout_s:g}): "
                        f"{failure}"
                    ) from failure
                logger.warning("Start %d of %d of new workers failed: %s", attempt, attempts, failure)
        raise AssertionError("unreachable: the last attempt returns or raises")
