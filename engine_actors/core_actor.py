"""`EngineCoreActor`: EngineCore in an asyncio Ray actor. Clients (`ray_core_link.py`) send messages and read a stream.

Methods only put messages on the input queue; the busy loop alone touches EngineCore. The event loop is never blocked:
start-up and utilities that wait for workers run in threads, steps are awaited, and an idle loop sleeps on its event.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine_actors.config import EngineConfig
from engine_actors.core import YIELD_S, CoreInfo, EngineCore, OutputsByClient, PendingStep
from engine_actors.core_recovery import WorkerRecovery
from engine_actors.core_streams import Inbox, Outbox
from engine_actors.core_utilities import UtilityCall
from engine_actors.errors import EngineDeadError, EngineRecoveredError
from engine_actors.messages import (
    AbortMessage,
    AddMessage,
    DisconnectMessage,
    ExecutorFailed,
    FromClient,
    InputMessage,
    RecoveryNotice,
    ShutdownMessage,
    UtilityMessage,
    UtilityOutput,
    decode_messages,
)
from engine_actors.ray_places import place_of_this_process
from engine_actors.ray_sigterm import on_sigterm
from engine_actors.recovery_limits import RecoveryFailedError
from engine_actors.utility_queue import UtilityQueue
from executors.base import ExecutorFailedError
from executors.niceness import undo_ray_niceness
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealthReport:
    """The step loop as its own process sees it.

    Attributes:
        state: "running", "recovering", "stopping", "stopped" or "dead".
        cause: Why it is dead.
        oldest_step_age_s: How long the oldest dispatched step has been running; 0 when none is.
        since_progress_s: Seconds since the loop last finished a step or found nothing to do.
        workers_problem: What is wrong with the workers, which were just asked; None when they are well.
    """

    state: str
    cause: str | None
    num_steps: int
    oldest_step_age_s: float
    since_progress_s: float
    workers_problem: str | None = None


@dataclass(slots=True)
class _InFlight:
    pending: PendingStep
    dispatched_s: float


class EngineCoreActor:
    """The actor. Call `start`, then `outputs` for each client; everything else goes through `send`."""

    def __init__(self, config: EngineConfig) -> None:
        # Blocking calls of Ray happen in threads here, not on the event loop.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        undo_ray_niceness()
        self._config = config
        self._queue: deque[InputMessage] = deque()
        self._changed = asyncio.Event()
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._requests: dict[int, set[str]] = {}
        self._hasty: dict[int, set[str]] = {}  # of the requests, those whose tokens are read one by one
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread: int
        self._core: EngineCore
        self._recovery: WorkerRecovery
        self._busy_loop_task: asyncio.Task[None]
        self._in_flight: deque[_InFlight] = deque()
        self._utilities: UtilityQueue
        self._state = "running"
        self._cause: str | None = None
        self._may_replay = False
        self._num_steps = 0
        self._progress_s = time.monotonic()
        self._workers_check: asyncio.Task[None] | None = None

    # Methods that clients call

    async def start(self, calls: Sequence[UtilityCall] = ()) -> CoreInfo:
        """Start the workers, load the model and begin to serve. Raises what went wrong; the actor is then of no use.

        Args:
            calls: Utilities that make it what an EngineCore before it was.
        """
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._core = await asyncio.to_thread(EngineCore, self._config)
        await asyncio.to_thread(self._core.utilities.restore, calls)
        self._recovery = WorkerRecovery(self._core, self._config, self._changed.set)
        self._utilities = UtilityQueue(
            self._core.utilities,
            refusal=self._utility_refusal,
            on_lost_workers=self._lost_workers,
            answer=self._answer_utility,
            wake=self._changed.set,
        )
        self._watch_executor()
        loop = asyncio.get_running_loop()
        self._core.on_grammar_change(partial(loop.call_soon_threadsafe, self._changed.set))
        self._busy_loop_task = asyncio.create_task(self._run())
        return self._core.info

    async def stop_on_sigterm(self) -> None:
        """Shut down as a client would, with the configured timeout, when the actor's process gets SIGTERM."""
        message = FromClient(0, ShutdownMessage(self._config.shutdown_timeout_s))
        on_sigterm(partial(self._put, message))

    def _watch_executor(self) -> None:
        loop, executor = asyncio.get_running_loop(), self._core.executor

        def on_failure(error: ExecutorFailedError) -> None:
            loop.call_soon_threadsafe(self._put, ExecutorFailed(error, executor))

        executor.register_failure_callback(on_failure)
        executor.use_loop(loop)

    async def send(self, client_index: int, sequence: int, data: bytes) -> None:
        """Messages of one client (`encode_messages`). `sequence` counts its calls from 0; they come in any order."""
        try:
            for payload in self._inboxes.setdefault(client_index, Inbox()).accept(sequence, data):
                for message in decode_messages(payload):
                    self._put(FromClient(client_index, message))
        except Exception as error:
            logger.exception("Client %d sent messages that cannot be read", client_index)
            self._put(FromClient(client_index, DisconnectMessage()))
            self._outbox(client_index).die(f"messages that EngineCore cannot read: {error}")

    async def outputs(self, client_index: int) -> AsyncIterator[bytes]:
        """Everything for one client, as encoded OutputBatches. Closing the stream aborts the client's requests.

        It ends when the engine does, and pauses while the client has nothing under way (`OutputBatch.paused_after`).
        """
        outbox, inbox = self._outbox(client_index), self._inboxes.setdefault(client_index, Inbox())
        is_last = False
        try:
            async for batch, is_last in outbox.batches(lambda: self._is_idle(client_index), inbox):  # noqa: B007  read below
                yield batch
        finally:
            if not is_last:
                self._put(FromClient(client_index, DisconnectMessage()))

    def _is_idle(self, client_index: int) -> bool:
        """Nothing of this client is under way."""
        return (
            self._state == "running"
            and not self._queue
            and not self._requests.get(client_index)
            and not self._utilities.has_calls_of(client_index)
            and self._outbox(client_index).is_empty
        )

    async def health(self) -> HealthReport:
        asked = self._state == "running" and not self._recovery.under_way
        problem = await self._workers_problem() if asked else None
        state = "recovering" if self._state == "running" and self._recovery.under_way else self._state
        now = time.monotonic()
        oldest = now - self._in_flight[0].dispatched_s if self._in_flight else 0.0
        return HealthReport(
            state, self._cause, self._num_steps, oldest, now - self._progress_s, problem if state == "running" else None
        )

    async def _workers_problem(self) -> str | None:
        """Ask the workers, busy or idle; callers that come meanwhile share the answer."""
        if self._workers_check is None:
            self._workers_check = asyncio.create_task(asyncio.to_thread(self._core.executor.check_health))
            self._workers_check.add_done_callback(self._on_workers_checked)
        try:
            await asyncio.shield(self._workers_check)
        except ExecutorFailedError as error:
            return str(error)
        return None

    def _on_workers_checked(self, check: asyncio.Task[None]) -> None:
        self._workers_check = None
        if not check.cancelled():
            check.exception()  # Marks it as seen: whoever asked may have given up.

    async def has_ended(self) -> bool:
        """For clients that have no stream open, which tells the others."""
        return self._state in ("stopped", "dead")

    async def where(self) -> str:
        return place_of_this_process()

    # The busy loop

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._busy_loop()
                except RecoveryFailedError:
                    raise
                except ExecutorFailedError as error:
                    self._recovery.begin(error)
                    self._in_flight.clear()
        except _StopNow:
            self._state = "stopped"
        except Exception as error:
            self._die(error)
        self._in_flight.clear()
        await self._recovery.abandon()
        # Workers and their placement group are given back before clients hear of the end.
        try:
            await asyncio.to_thread(self._core.shutdown)
        except Exception:
            logger.exception("Shutting down the executor failed")
        for outbox in self._outboxes.values():
            outbox.stop()

    async def _busy_loop(self) -> None:
        core = self._core
        while True:
            self._changed.clear()
            if self._recovery.is_done:
                self._go_on()
            # First of all: aborts count before the tokens of a step that has ended meanwhile.
            self._drain_input()
            if self._state == "stopping" and not core.has_requests():
                self._publish(core.take_outputs())
                raise _StopNow
            if not self._recovery.under_way:
                self._utilities.turn(bool(self._in_flight))
            if self._begin_step() or self._finish_step():
                continue
            self._publish(core.take_outputs())
            if not self._in_flight:
                self._progress_s = time.monotonic()
                may_run = core.has_runnable_requests and not core.scheduler.waits_for_grammars_only
                if may_run and not self._recovery.under_way and not self._utilities.blocks_steps:
                    await asyncio.sleep(YIELD_S)
                    continue
            await self._changed.wait()

    def _begin_step(self) -> bool:
        """Dispatch a step if another may be in flight and there is something to run."""
        core = self._core
        if self._utilities.blocks_steps or self._recovery.under_way:
            return False
        if len(self._in_flight) >= core.max_concurrent_batches:
            return False
        pending = core.begin_step() if core.has_requests() else None
        if pending is None:
            return False
        self._in_flight.append(_InFlight(pending, time.monotonic()))
        pending.future.add_done_callback(self._on_result)
        return True

    def _on_result(self) -> None:
        """In any thread."""
        if threading.get_ident() == self._loop_thread:
            self._changed.set()
            return
        with suppress(RuntimeError):  # the loop is closed: the actor ends
            self._loop.call_soon_threadsafe(self._changed.set)

    def _finish_step(self) -> bool:
        """Take in the oldest step's result, if it is there."""
        if not self._in_flight or not self._in_flight[0].pending.future.done():
            return False
        step = self._in_flight.popleft()
        outputs = self._core.finish_step(step.pending, step.pending.future.result())
        self._num_steps += 1
        self._progress_s = time.monotonic()
        self._recovery.note_progress()
        self._publish(outputs)
        return True

    def _go_on(self) -> None:
        """New workers are there, or cannot be had, which raises."""
        lost_s = self._recovery.finish()
        self._watch_executor()
        notice = RecoveryNotice(self._recovery.cause, lost_s, self._core.scheduler.num_unfinished_requests)
        logger.warning("Recovered in %.1f s; %d requests go on", lost_s, notice.num_replayed)
        for outbox in self._outboxes.values():
            outbox.put_recovery(notice)
        self._publish(self._core.take_outputs())

    # Input

    def _put(self, message: InputMessage) -> None:
        self._queue.append(message)
        self._changed.set()

    def _drain_input(self) -> None:
        while self._queue:
            message = self._queue.popleft()
            match message:
                case FromClient(client_index, client_message):
                    self._handle(client_index, client_message)
                case ExecutorFailed(error, executor):
                    if executor is self._core.executor and not self._recovery.under_way:
                        raise error

    def _handle(self, client_index: int, message: Any) -> None:
        match message:
            case AddMessage(requests):
                self._add(client_index, requests)
            case AbortMessage(request_ids):
                self._core.abort_requests(request_ids)
            case UtilityMessage():
                self._utilities.put(client_index, message)
            case ShutdownMessage(timeout_s):
                self._begin_shutdown(timeout_s)
            case DisconnectMessage():
                self._core.abort_requests(self._requests.pop(client_index, ()))
                self._hasty.pop(client_index, None)
                self._outbox(client_index).close()

    def _add(self, client_index: int, requests: list[Any]) -> None:
        own = self._requests.setdefault(client_index, set())
        for request in requests:
            own.add(request.request_id)
            if not _may_wait(request):
                self._hasty.setdefault(client_index, set()).add(request.request_id)
            request.client_index = client_index
            if self._state == "running":
                self._core.add_request(request)
            else:
                self._core.refuse_request(request, "the engine is shutting down", EngineDeadError.__name__)

    def _begin_shutdown(self, timeout_s: float) -> None:
        self._state = "stopping"
        if timeout_s > 0:
            self._core.abort_paused()
            loop = asyncio.get_running_loop()
            loop.call_later(timeout_s, self._put, FromClient(0, ShutdownMessage(0.0)))
            return
        self._core.abort_all()
        self._publish(self._core.take_outputs())
        raise _StopNow

    def _utility_refusal(self, name: str) -> EngineDeadError | None:
        if self._state == "running":
            return None
        return EngineDeadError(f"the engine is shutting down; {name} is not run")

    def _lost_workers(self, name: str, error: ExecutorFailedError) -> Exception:
        """What a utility's caller is told whose workers died."""
        if self._recovery.under_way or self._recovery.cause:
            return EngineRecoveredError(f"{name}: {error}; the engine has recovered, call it again")
        return EngineDeadError(f"EngineCore failed: {type(error).__name__}: {error}")

    def _answer_utility(self, client_index: int, output: UtilityOutput) -> None:
        # What the utility ended is told before its answer.
        self._publish(self._core.take_outputs())
        self._outbox(client_index).put_utility(output)

    # Output

    def _outbox(self, client_index: int) -> Outbox:
        outbox = self._outboxes.get(client_index)
        if outbox is None:
            outbox = self._outboxes[client_index] = Outbox()
            if self._state == "dead":
                outbox.die(self._cause or "", self._may_replay)
            elif self._state == "stopped":
                outbox.stop()
        return outbox

    def _publish(self, outputs: OutputsByClient) -> None:
        for client_index, client_outputs in outputs.items():
            ended = [ended.request_id for ended in client_outputs.finished]
            if ended:
                self._requests.get(client_index, set()).difference_update(ended)
                self._hasty.get(client_index, set()).difference_update(ended)
            self._outbox(client_index).put_outputs(client_outputs, may_wait=not self._hasty.get(client_index))

    def _die(self, error: Exception) -> None:
        """Tell every client, with the cause."""
        self._state, self._cause = "dead", f"{type(error).__name__}: {error}"
        logger.error("EngineCore failed and ends: %s", self._cause, exc_info=error)
        self._may_replay = not isinstance(error, RecoveryFailedError)
        for outbox in self._outboxes.values():
            outbox.die(self._cause, self._may_replay)


def _may_wait(request: EngineCoreRequest) -> bool:
    """Whether the front end does nothing with a request's tokens before its end. Stop strings it looks for in each."""
    params = request.sampling_params
    return params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop


class _StopNow(Exception):
    """Leave the busy loop in order: nothing is in flight any more, or it has been aborted."""
