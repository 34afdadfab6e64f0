"""Clients of an EngineCore that lives in a Ray actor: `RayClient` for plain callers, `AsyncRayClient` for asyncio."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ray.exceptions import GetTimeoutError, RayError

from engine_actors.clients import EngineCoreClient, SyncCoreClient
from engine_actors.config import EngineConfig
from engine_actors.core_actor import HealthReport
from engine_actors.errors import EngineDeadError
from engine_actors.messages import AbortMessage, AddMessage, ClientMessage, OutputBatch
from engine_actors.ray_core_link import SHUT_DOWN, SHUTDOWN_GRACE_S, CoreLink
from engine_actors.ray_utilities import utility_message, utility_value
from scheduler.output import EngineCoreOutputs
from scheduler.request import EngineCoreRequest


class _RayClientBase(EngineCoreClient):
    """What both have in common."""

    def __init__(self, config: EngineConfig, link: CoreLink) -> None:
        self._config = config
        self.link = link
        self.info = link.info
        self.client_index = link.client_index
        self._call_ids = itertools.count()

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self.link.dead_error

    def _shutdown_timeout(self, timeout_s: float | None) -> float:
        return self._config.shutdown_timeout_s if timeout_s is None else timeout_s

    def _check_report(self, report: HealthReport) -> None:
        if report.cause is not None:
            raise self.link.mark_dead(f"EngineCore failed: {report.cause}")
        limit_s = self._config.parallel_config.step_timeout_s
        if report.oldest_step_age_s > limit_s:
            raise EngineDeadError(
                f"the engine is stuck: a step has been running for {report.oldest_step_age_s:.0f} s, step_timeout_s "
                f"is {limit_s:g}"
            )


class RayClient(_RayClientBase, SyncCoreClient):
    """For plain, single-threaded callers."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CoreLink(config))
        self._unread: deque[EngineCoreOutputs] = deque()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.link.send([AddMessage(list(requests))])

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.link.send([AbortMessage(list(request_ids))])

    def get_output(self) -> list[EngineCoreOutputs]:
        while not self._unread:
            self._read()
        outputs = list(self._unread)
        self._unread.clear()
        return outputs

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._call_ids)
        self.link.send([utility_message(call_id, name, args, kwargs)])
        while True:
            for answer in self._read().utilities:
                if answer.call_id == call_id:
                    return utility_value(answer)

    def check_health(self) -> None:
        try:
            report = self.link.health()
        except GetTimeoutError as error:
            raise EngineDeadError(f"EngineCore does not answer: {error}") from error
        except RayError as error:
            raise self.link.mark_dead(f"EngineCore's process died: {error}", error) from error
        self._check_report(report)

    def shutdown(self, timeout_s: float | None = None) -> None:
        timeout_s = self._shutdown_timeout(timeout_s)
        if self.link.begin_shutdown(timeout_s):
            self.link.wait_stopped(timeout_s + SHUTDOWN_GRACE_S)
        self.link.mark_dead(SHUT_DOWN)

    def _read(self) -> OutputBatch:
        batch = self.link.next_batch()
        self._unread.extend(batch.outputs)
        return batch


class AsyncRayClient(_RayClientBase):
    """For one event loop at a time. Someone must keep awaiting `get_output_async`: it also delivers utilities' answers.

    What is sent within one turn of the loop travels in one call.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, _off_loop(CoreLink, config))
        self._unsent: list[ClientMessage] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._sent: asyncio.Future[None] | None = None

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._send(AddMessage(list(requests)))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._send(AbortMessage(list(request_ids)))

    async def get_output_async(self) -> list[EngineCoreOutputs]:
        """This client's share of what the engine does next. Waits while there is nothing to do."""
        while True:
            try:
                if not self.link.has_stream:
                    await self._until_sent()
                batch = await self.link.next_batch_async()
            except EngineDeadError as error:
                self._fail_answers(error)
                raise
            for answer in batch.utilities:
                waiting = self._answers.pop(answer.call_id, None)
                if waiting is not None and not waiting.done():
                    try:
                        waiting.set_result(utility_value(answer))
                    except Exception as error:
                        waiting.set_exception(error)
            if batch.outputs:
                return batch.outputs

    async def call_utility_async(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        call_id = next(self._call_ids)
        message = utility_message(call_id, name, args, kwargs)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await answer
        finally:
            self._answers.pop(call_id, None)

    async def check_health_async(self) -> None:
        """Raise EngineDeadError unless the engine is alive and its step loop not stuck."""
        try:
            report = await self.link.health_async()
        except TimeoutError as error:
            raise EngineDeadError("the engine is stuck: EngineCore does not answer") from error
        except RayError as error:
            raise self.link.mark_dead(f"EngineCore's process died: {error}", error) from error
        self._check_report(report)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Blocks the calling thread while the engine stops; on an event loop prefer `shutdown_async`."""
        timeout_s = self._shutdown_timeout(timeout_s)
        if self._begin_shutdown(timeout_s):
            _off_loop(self.link.wait_stopped, timeout_s + SHUTDOWN_GRACE_S)
        self.link.close()

    async def shutdown_async(self, timeout_s: float | None = None) -> None:
        timeout_s = self._shutdown_timeout(timeout_s)
        if self._begin_shutdown(timeout_s):
            await self.link.wait_stopped_async(timeout_s + SHUTDOWN_GRACE_S)
        self.link.close()

    def _begin_shutdown(self, timeout_s: float) -> bool:
        try:
            self._flush()
            return self.link.begin_shutdown(timeout_s)
        except EngineDeadError:
            return False
        finally:
            self._wake()

    def _send(self, message: ClientMessage) -> None:
        self.link.check_alive()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush_soon)
        self._unsent.append(message)

    def _flush_soon(self) -> None:
        try:
            self._flush()
        except EngineDeadError as error:
            # Whoever sent these learns it from the output stream's end.
            self._fail_answers(error)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        try:
            if messages:
                self.link.send(messages)
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    async def _until_sent(self) -> None:
        self.link.check_alive()
        self._sent = asyncio.get_running_loop().create_future()
        try:
            await self._sent
        finally:
            self._sent = None

    def _fail_answers(self, error: EngineDeadError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(error)))


def _off_loop(function: Any, *args: Any) -> Any:
    """Call a function that blocks in Ray; in a thread if this one runs an event loop, about which Ray would warn."""
    if asyncio._get_running_loop() is None:
        return function(*args)
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="engine-actors-wait", daemon=True).start()
    return done.result()
