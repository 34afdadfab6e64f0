"""Utility calls at EngineCoreActor: those that wait run one after another, beside the steps. Owned by the actor.

The actor calls `turn` from its busy loop; everything here happens on its event loop, but for calls that wait for
workers, which get a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine_actors.core_utilities import CoreUtilities, OnWorkers, Until, UtilityFlow
from engine_actors.messages import UtilityMessage, UtilityOutput
from engine_actors.ray_utilities import utility_arguments, utility_failure, utility_result
from executors.base import ExecutorFailedError

Answer = Callable[[int, UtilityOutput], None]


@dataclass(slots=True)
class _Call:
    client_index: int
    message: UtilityMessage


@dataclass(slots=True)
class _Running:
    """A flow, what it waits for, and the thread that waits for workers."""

    call: _Call
    flow: UtilityFlow
    wait: Until | OnWorkers
    on_workers: asyncio.Task[Any] | None = None


class UtilityQueue:
    """
    Args:
        refusal: Why no utility is run now, e.g. while the engine shuts down; None where they are.
        on_lost_workers: The exception for a call during which workers died.
        answer: Sends an answer to a client.
        wake: Has the busy loop call `turn` again.
    """

    def __init__(
        self,
        utilities: CoreUtilities,
        *,
        refusal: Callable[[str], Exception | None],
        on_lost_workers: Callable[[str, ExecutorFailedError], Exception],
        answer: Answer,
        wake: Callable[[], None],
    ) -> None:
        self._utilities = utilities
        self._refusal = refusal
        self._on_lost_workers = on_lost_workers
        self._answer = answer
        self._wake = wake
        self._waiting: deque[_Call] = deque()
        self._running: _Running | None = None

    @property
    def blocks_steps(self) -> bool:
        """A call waits for workers, or for the steps in flight before it can: none may begin."""
        return self._running is not None and isinstance(self._running.wait, OnWorkers)

    def has_calls_of(self, client_index: int) -> bool:
        """Whether the client waits for an answer."""
        calls = [*self._waiting, self._running.call] if self._running is not None else self._waiting
        return any(call.client_index == client_index for call in calls)

    def put(self, client_index: int, message: UtilityMessage) -> None:
        """Run a utility that does not wait, now; queue another."""
        call = _Call(client_index, message)
        try:
            self._check_refusal(message.name)
            function, waits = self._utilities.find(message.name)
            if waits:
                self._waiting.append(call)
                return
            args, kwargs = utility_arguments(message)
            result = function(*args, **kwargs)
        except Exception as error:
            self._answer(client_index, utility_failure(message.call_id, error))
        else:
            self._answer(client_index, utility_result(message.call_id, result))

    def turn(self, has_steps_in_flight: bool) -> None:
        """Go on with the running call as far as it comes, then with the next."""
        while True:
            if self._running is None and not self._start_next():
                return
            running = self._running
            if running is None:
                continue
            if isinstance(running.wait, Until):
                if not running.wait.condition():
                    return
                self._advance(running, partial(running.flow.send, None))
            elif running.on_workers is None:
                if has_steps_in_flight:
                    return
                running.on_workers = asyncio.create_task(asyncio.to_thread(running.wait.call))
                running.on_workers.add_done_callback(self._on_workers_done)
                return
            elif running.on_workers.done():
                done, running.on_workers = running.on_workers, None
                error = done.exception()
                if error is None:
                    self._advance(running, partial(running.flow.send, done.result()))
                else:
                    self._advance(running, partial(running.flow.throw, error))
            else:
                return

    def _on_workers_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # Marks it as seen: if the engine has died meanwhile, nobody asks.
        self._wake()

    def _start_next(self) -> bool:
        """False: nothing waits to be started."""
        if not self._waiting:
            return False
        call = self._waiting.popleft()
        try:
            self._check_refusal(call.message.name)
            function, _ = self._utilities.find(call.message.name)
            args, kwargs = utility_arguments(call.message)
            flow = function(*args, **kwargs)
        except Exception as error:
            self._answer(call.client_index, utility_failure(call.message.call_id, error))
            return True
        running = _Running(call, flow, Until(lambda: True))
        self._running = running
        self._advance(running, partial(next, flow))
        return True

    def _advance(self, running: _Running, step: Callable[[], Until | OnWorkers]) -> None:
        """Run the flow to where it waits next, or to its end, which is the answer."""
        call_id = running.call.message.call_id
        try:
            running.wait = step()
            return
        except StopIteration as end:
            output = utility_result(call_id, end.value)
        except ExecutorFailedError as error:
            output = utility_failure(call_id, self._on_lost_workers(running.call.message.name, error))
        except Exception as error:
            output = utility_failure(call_id, error)
        self._running = None
        self._answer(running.call.client_index, output)

    def _check_refusal(self, name: str) -> None:
        error = self._refusal(name)
        if error is not None:
            raise error
