"""Clients of an EngineCore that lives in a Ray actor: `RayClient` for plain callers, `AsyncRayClient` for asyncio."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from ray.exceptions import GetTimeoutError, RayError

from engine_actors.clients import PAUSED, EngineCoreClient, SyncCoreClient
from engine_actors.config import EngineConfig
from engine_actors.core_actor import HealthReport
from engine_actors.errors import EngineDeadError, EnginePausedError, EngineRecoveredError
from engine_actors.messages import AbortMessage, AddMessage, ClientMessage, OutputBatch, UtilityMessage
from engine_actors.off_loop import off_loop, off_loop_async
from engine_actors.ray_core_link import SHUT_DOWN, SHUTDOWN_GRACE_S, CoreLink, ensure_ray
from engine_actors.ray_recovery import CoreRecovery, note_worker_recoveries
from engine_actors.ray_utilities import utility_message, utility_value
from engine_actors.replay import RecoveryStats
from scheduler.output import EngineCoreOutputs, FinishedRequest
from scheduler.request import EngineCoreRequest

IDLE_CHECK_S = 1.0
"""How often an AsyncRayClient without anything under way asks whether the engine still runs: no call is pending then
that would fail with it."""


class _RayClientBase(EngineCoreClient):
    """What both have in common.

    Attributes:
        link: To the EngineCore actor. Recovery replaces it.
        recovery_stats: What recoveries cost so far.
    """

    def __init__(self, config: EngineConfig, link: CoreLink) -> None:
        self._config = config
        self.link = link
        self.info = link.info
        self.client_index = link.client_index
        self.recovery_stats = RecoveryStats()
        self._recovery = CoreRecovery(config, link.info, self.recovery_stats) if config.replays else None
        self._call_ids = itertools.count()
        self._final_error: EngineDeadError | None = None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return None if self._may_recover else self._final_error or self.link.dead_error

    @property
    def _may_recover(self) -> bool:
        """EngineCore is dead, and another may take its place."""
        return self._recovery is not None and self._final_error is None and self.link.may_replay

    def _check_final(self) -> None:
        if self._final_error is not None:
            raise EngineDeadError(str(self._final_error)) from self._final_error.__cause__

    def _shutdown_timeout(self, timeout_s: float | None) -> float:
        return self._config.shutdown_timeout_s if timeout_s is None else timeout_s

    def _note_utility(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One that this client called has succeeded."""
        if self._recovery is not None:
            self._recovery.lasting.note(name, args, kwargs)

    def _check_report(self, report: HealthReport) -> None:
        if report.cause is not None:
            raise self.link.mark_lost(f"EngineCore failed: {report.cause}")
        limit_s = self._config.parallel_config.step_timeout_s
        if report.oldest_step_age_s > limit_s:
            raise EngineDeadError(
                f"the engine is stuck: a step has been running for {report.oldest_step_age_s:.0f} s, step_timeout_s "
                f"is {limit_s:g}"
            )
        if report.workers_problem is not None:
            raise EngineDeadError(f"the engine is not well: {report.workers_problem}")


class RayClient(_RayClientBase, SyncCoreClient):
    """For plain, single-threaded callers."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CoreLink(config))
        self._unread: deque[EngineCoreOutputs] = deque()
        self._may_be_paused = False

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        to_send = list(requests)
        if self._recovery is not None:
            self._check_final()
            to_send = self._recovery.log.add(to_send)
        if to_send:
            self._send_logged([AddMessage(to_send)])

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        to_send = list(request_ids)
        if self._recovery is not None:
            self._check_final()
            to_send = self._recovery.log.abort(to_send)
            self._keep_ends(self._recovery.log.take_aborted_held())
        if to_send:
            self._send_logged([AbortMessage(to_send)])

    def get_output(self) -> list[EngineCoreOutputs]:
        while not self._unread:
            # Asking comes after everything that was sent before, so its answer comes after all outputs of that.
            self._may_be_paused = self._may_be_paused and self.call_utility("is_paused")
            if self._unread:
                break
            if self._may_be_paused:
                raise EnginePausedError(PAUSED)
            try:
                self._read()
            except EngineDeadError as error:
                self._recover(error)
        outputs = list(self._unread)
        self._unread.clear()
        return outputs

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._call_ids)
        self._may_be_paused = self._may_be_paused or name in ("pause", "sleep")
        message = utility_message(call_id, name, args, kwargs)
        try:
            self.link.send([message])
        except EngineDeadError as error:
            self._recover(error)
            self.link.send([message])
        while True:
            try:
                batch = self._read()
            except EngineDeadError as error:
                self._recover(error)
                raise EngineRecoveredError(f"{name}: {error}; the engine has recovered, call it again") from error
            for answer in batch.utilities:
                if answer.call_id == call_id:
                    value = utility_value(answer)
                    self._note_utility(name, args, kwargs)
                    return value

    def check_health(self) -> None:
        self._check_final()
        try:
            report = self.link.health()
        except GetTimeoutError as error:
            raise EngineDeadError(f"EngineCore does not answer: {error}") from error
        except EngineDeadError as error:
            self._recover(error)
            return
        except RayError as error:
            self._recover(self.link.mark_lost(f"EngineCore's process died: {error}", error))
            return
        self._check_report(report)

    def shutdown(self, timeout_s: float | None = None) -> None:
        timeout_s = self._shutdown_timeout(timeout_s)
        if self.link.begin_shutdown(timeout_s):
            self.link.wait_stopped(timeout_s + SHUTDOWN_GRACE_S)
        self.link.mark_dead(SHUT_DOWN)
        self._final_error = self._final_error or self.link.dead_error

    def _send_logged(self, messages: list[ClientMessage]) -> None:
        """Send what a replay would repeat."""
        try:
            self.link.send(messages)
        except EngineDeadError as error:
            self._recover(error)

    def _read(self) -> OutputBatch:
        batch = self.link.next_batch()
        self._unread.extend(batch.outputs)
        note_worker_recoveries(self.recovery_stats, batch.recoveries)
        if self._recovery is not None:
            for outputs in batch.outputs:
                released = self._recovery.note_outputs(outputs)
                if released:
                    self._send_logged([AddMessage(released)])
        return batch

    def _recover(self, error: EngineDeadError) -> None:
        """Go on with a new EngineCore, or raise `error` or why there is none."""
        while True:
            if self._recovery is None or not self._may_recover:
                raise error
            dead = self.link
            try:
                self.link = self._recovery.start_core(dead)
            except EngineDeadError as failure:
                self._final_error = failure
                raise
            requests, ends = self._recovery.replay(dead)
            self._keep_ends(ends.finished if ends is not None else [])
            if not requests:
                return
            try:
                self.link.send([AddMessage(requests)])
                return
            except EngineDeadError as again:
                error = again

    def _keep_ends(self, ends: list[FinishedRequest]) -> None:
        if ends:
            self._unread.append(EngineCoreOutputs(finished=ends))


class AsyncRayClient(_RayClientBase):
    """For one event loop at a time. Someone must keep awaiting `get_output_async`: it also delivers utilities' answers,
    and recovers.

    What is sent within one turn of the loop travels in one call.
    """

    def __init__(self, config: EngineConfig) -> None:
        ensure_ray()  # Here, where it can be the main thread, for Ray's signal handlers.
        super().__init__(config, off_loop(CoreLink, config))
        self._unsent: list[ClientMessage] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._sent: asyncio.Future[None] | None = None
        self._ends: list[FinishedRequest] = []

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        to_send = list(requests)
        if self._recovery is not None:
            self._check_final()
            to_send = self._recovery.log.add(to_send)
        if to_send:
            self._send(AddMessage(to_send))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        to_send = list(request_ids)
        if self._recovery is not None:
            self._check_final()
            to_send = self._recovery.log.abort(to_send)
            self._ends += self._recovery.log.take_aborted_held()
        if to_send:
            self._send(AbortMessage(to_send))

    async def get_output_async(self) -> list[EngineCoreOutputs]:
        """This client's share of what the engine does next. Waits while there is nothing to do."""
        while True:
            if self._ends:
                ends, self._ends = self._ends, []
                return [EngineCoreOutputs(finished=ends)]
            try:
                if not self.link.has_stream:
                    await self._until_sent()
                batch = await self.link.next_batch_async()
            except EngineDeadError as error:
                await self._recover(error)
                continue
            for answer in batch.utilities:
                waiting = self._answers.pop(answer.call_id, None)
                if waiting is not None and not waiting.done():
                    try:
                        waiting.set_result(utility_value(answer))
                    except Exception as error:
                        waiting.set_exception(error)
            note_worker_recoveries(self.recovery_stats, batch.recoveries)
            if batch.outputs:
                if self._recovery is not None:
                    for outputs in batch.outputs:
                        released = self._recovery.note_outputs(outputs)
                        if released:
                            self._send(AddMessage(released))
                return batch.outputs

    async def call_utility_async(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        call_id = next(self._call_ids)
        message = utility_message(call_id, name, args, kwargs)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            value = await answer
        finally:
            self._answers.pop(call_id, None)
        self._note_utility(name, args, kwargs)
        return value

    async def check_health_async(self) -> None:
        """Raise EngineDeadError unless the engine is alive and its step loop not stuck. A recovery is no failure."""
        if self._may_recover:
            return
        self._check_final()
        try:
            report = await self.link.health_async()
        except TimeoutError as error:
            raise EngineDeadError("the engine is stuck: EngineCore does not answer") from error
        except RayError as error:
            failure = self.link.mark_lost(f"EngineCore's process died: {error}", error)
            self._wake()
            if self._may_recover:
                return
            raise failure from error
        self._check_report(report)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Blocks the calling thread while the engine stops; on an event loop prefer `shutdown_async`."""
        timeout_s = self._shutdown_timeout(timeout_s)
        if self._begin_shutdown(timeout_s):
            off_loop(self.link.wait_stopped, timeout_s + SHUTDOWN_GRACE_S)
        self.link.close()

    async def shutdown_async(self, timeout_s: float | None = None) -> None:
        timeout_s = self._shutdown_timeout(timeout_s)
        if self._begin_shutdown(timeout_s):
            await self.link.wait_stopped_async(timeout_s + SHUTDOWN_GRACE_S)
        self.link.close()

    def _begin_shutdown(self, timeout_s: float) -> bool:
        if self._may_recover:
            self._final_error = EngineDeadError(SHUT_DOWN)  # ends a recovery under way
            self._wake()
            return False
        try:
            self._flush()
            return self.link.begin_shutdown(timeout_s)
        except EngineDeadError:
            return False
        finally:
            self._wake()

    def _send(self, message: ClientMessage) -> None:
        self._check_final()
        if self._may_recover:
            # Requests and aborts are in the log, from which the next EngineCore gets them.
            if isinstance(message, UtilityMessage):
                self._unsent.append(message)
            self._wake()
            return
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
        if self._may_recover:
            self._wake()
            return
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
        """Wait until something is sent to the engine, or the engine has ended, which leaves something to read."""
        self._check_final()
        self.link.check_alive()
        self._sent = sent = asyncio.get_running_loop().create_future()
        try:
            while not (await asyncio.wait({sent}, timeout=IDLE_CHECK_S))[0]:
                if await self._has_ended():
                    self.link.open_stream()
                    return
        finally:
            self._sent = None
        if not self.link.has_stream:
            self.link.check_alive()

    async def _has_ended(self) -> bool:
        """Whether the engine is no longer running. One that does not answer is for `check_health` to find."""
        self.link.check_alive()
        try:
            return await self.link.has_ended_async()
        except TimeoutError:
            return False
        except RayError as error:
            raise self.link.mark_lost(f"EngineCore's process died: {error}", error) from error

    async def _recover(self, error: EngineDeadError) -> None:
        """Go on with a new EngineCore, or raise `error` or why there is none."""
        if self._recovery is None or not self._may_recover:
            self._fail_answers(self._final_error or error)
            raise self._final_error or error
        # Requests and aborts that were not sent yet are in the log, from which they are replayed.
        self._unsent = [message for message in self._unsent if isinstance(message, UtilityMessage)]
        self._fail_answers(EngineRecoveredError(f"{error}; the engine recovers, call it again"), but=self._unsent)
        dead = self.link
        try:
            link = await off_loop_async(self._recovery.start_core, dead)
        except EngineDeadError as failure:
            self._final_error = self._final_error or failure
            self._fail_answers(self._final_error)
            raise self._final_error from failure.__cause__
        if self._final_error is not None:
            await off_loop_async(link.close)
            self._fail_answers(self._final_error)
            raise self._final_error
        self.link = link
        requests, ends = self._recovery.replay(dead)
        if ends is not None:
            self._ends += ends.finished
        if requests:
            self._unsent.append(AddMessage(requests))
        self._flush_soon()

    def _fail_answers(self, error: Exception, but: Sequence[ClientMessage] = ()) -> None:
        unsent = {message.call_id for message in but if isinstance(message, UtilityMessage)}
        for call_id, answer in self._answers.items():
            if not answer.done() and call_id not in unsent:
                answer.set_exception(type(error)(str(error)))
