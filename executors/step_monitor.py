"""An executor's steps in flight, and the one failure that ends them all. Shared by both executors.

A thread waits for the first of: a failure somebody reports, and the deadline of the oldest step in flight. It then ends
every pending step with an ExecutorFailedError, has the workers killed and calls the failure callbacks, once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from executors.base import ExecutorFailedError, FailureCallback, StepFuture

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOT_CAUSE_WAIT_S = 1.0
"""How long a consequence (a collective that a lost peer broke) waits to be explained by the loss itself."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What happened to a worker.

    Attributes:
        error: Ready to be raised; its text names rank, node and cause.
        is_consequence: Another worker's failure is the likely cause.
    """

    error: ExecutorFailedError
    is_consequence: bool = False


class PendingStep(StepFuture[T]):
    """A step in flight. The executor resolves it with the worker's bytes; the monitor fails it.

    Attributes:
        due: By rank of the workers that run the step, how many steps a worker has finished when this one is done.
    """

    def __init__(self, name: str, decode: Callable[[bytes | None], T]) -> None:
        self.name = name
        self.due: dict[int, int] = {}
        self._make_object_ref: Callable[[], Any] | None = None
        self._decode = decode
        self._future: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()
        # Running futures cannot be cancelled: a caller that gives up awaiting does not take the result from others.
        self._future.set_running_or_notify_cancel()

    def result(self, timeout_s: float | None = None) -> T:
        try:
            return self._decode(self._future.result(timeout_s))
        except concurrent.futures.TimeoutError as error:
            raise ExecutorFailedError(f"{self.name} had no result within {timeout_s} s") from error

    def __await__(self) -> Generator[Any, None, T]:
        payload = yield from asyncio.wrap_future(self._future).__await__()
        return self._decode(payload)

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], Any]) -> None:
        self._future.add_done_callback(lambda _: callback())

    @property
    def object_ref(self) -> Any:
        """A Ray object ref of the result, as the worker sent it; None where there is no Ray."""
        return None if self._make_object_ref is None else self._make_object_ref()

    def set_object_ref(self, make: Callable[[], Any]) -> None:
        """Called once, by the executor."""
        self._make_object_ref = make

    def set_payload(self, payload: bytes | None) -> None:
        """Called once, by the monitor that tracks this step."""
        self._future.set_result(payload)

    def set_error(self, error: ExecutorFailedError) -> None:
        """Called once, by the monitor that tracks this step."""
        self._future.set_exception(error)


class StepMonitor:
    """Thread-safe. After the first failure, and after `close`, every use raises ExecutorFailedError."""

    def __init__(
        self,
        step_timeout_s: float,
        *,
        kill_workers: Callable[[], None],
        give_back: Callable[[], None] = lambda: None,
        describe_overdue: Callable[[PendingStep[Any]], str] = lambda step: "the worker hangs",
    ) -> None:
        """
        Args:
            step_timeout_s: From a step's dispatch to its result, steps queued before it included.
            kill_workers, give_back: Called on failure, by the monitor's thread, before and after the callbacks.
            describe_overdue: What is known of a step that missed its deadline, for the error's text.
        """
        self._step_timeout_s = step_timeout_s
        self._kill_workers = kill_workers
        self._give_back = give_back
        self._describe_overdue = describe_overdue
        self._lock = threading.Lock()
        # In order of dispatch, so of deadline.
        self._deadlines: dict[PendingStep[Any], float] = {}
        self._callbacks: list[FailureCallback] = []
        self._failure: ExecutorFailedError | None = None
        self._closed = False
        self._failed = threading.Event()
        self._events: queue.SimpleQueue[FailureReport | None] = queue.SimpleQueue()
        self._waits_without_deadline = False
        self._thread = threading.Thread(target=self._run, name="executor-monitor", daemon=True)
        self._thread.start()

    def track(self, name: str, decode: Callable[[bytes | None], T]) -> PendingStep[T]:
        """A new step whose deadline runs from now.

        Raises:
            ExecutorFailedError: The executor has failed, or is closed.
        """
        step = PendingStep(name, decode)
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            self._deadlines[step] = time.monotonic() + self._step_timeout_s
            wake, self._waits_without_deadline = self._waits_without_deadline, False
        if wake:
            self._events.put(None)
        return step

    def set_step_timeout(self, step_timeout_s: float) -> None:
        """For steps tracked from now on. Steps are looked at in their order: a shorter deadline counts from when the
        steps before it are done, or late.
        """
        with self._lock:
            self._step_timeout_s = step_timeout_s

    def resolve(self, step: PendingStep[Any], payload: bytes | None) -> None:
        """The step's result is there. Ignored when the step has already failed."""
        with self._lock:
            if self._deadlines.pop(step, None) is None:
                return
        step.set_payload(payload)

    def report(self, report: FailureReport) -> None:
        """A worker has failed. Never blocks; may be called from any thread, Ray's callbacks included."""
        self._events.put(report)

    def raise_if_failed(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)

    def wait_for_failure(self, timeout_s: float) -> ExecutorFailedError | None:
        """The failure, once it is known; None if there is none within the time."""
        self._failed.wait(timeout_s)
        with self._lock:
            return None if self._failure is None else _again(self._failure)

    def add_callback(self, callback: FailureCallback) -> None:
        """`callback` runs once on failure, at once if that has been; not on close."""
        with self._lock:
            if self._failure is None:
                self._callbacks.append(callback)
                return
            failure, closed = self._failure, self._closed
        if not closed:
            callback(_again(failure))

    def close(self) -> bool:
        """Stop watching; pending steps fail. Failures reported from now on are the result of the shutdown.

        Returns:
            Whether this was the first call.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._failure is None:
                self._failure = ExecutorFailedError("the executor was shut down")
            failure, pending = self._failure, list(self._deadlines)
            self._deadlines.clear()
            self._callbacks.clear()
        for step in pending:
            step.set_error(_again(failure))
        self._failed.set()
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._failure is not None:
                    return
                oldest = next(iter(self._deadlines.items()), None)
                self._waits_without_deadline = oldest is None
            if oldest is not None and oldest[1] <= time.monotonic():
                self._fail(self._overdue(oldest[0]))
                return
            timeout = None if oldest is None else oldest[1] - time.monotonic()
            try:
                report = self._events.get(timeout=None if timeout is None else max(0.0, timeout))
            except queue.Empty:
                continue
            if report is not None:
                self._fail(self._root_cause(report))
                return

    def _root_cause(self, report: FailureReport) -> ExecutorFailedError:
        """The first report that is no consequence of another's failure, if it comes soon; else the first of all."""
        first, deadline = report, time.monotonic() + ROOT_CAUSE_WAIT_S
        while report.is_consequence and not self._closed:
            try:
                report = self._events.get(timeout=max(0.0, deadline - time.monotonic())) or first
            except queue.Empty:
                return first.error
        return report.error

    def _overdue(self, step: PendingStep[Any]) -> ExecutorFailedError:
        try:
            found = self._describe_overdue(step)
        except Exception as error:
            found = f"the workers could not be asked ({error})"
        return ExecutorFailedError(
            f"{step.name} is not finished after step_timeout_s = {self._step_timeout_s:g} s: {found}"
        )

    def _fail(self, error: ExecutorFailedError) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            pending, callbacks = list(self._deadlines), list(self._callbacks)
            self._deadlines.clear()
            self._callbacks.clear()
        for step in pending:
            step.set_error(_again(error))
        self._failed.set()
        actions: list[Callable[[], None]] = [self._kill_workers]
        actions += [partial(callback, _again(error)) for callback in callbacks]
        actions.append(self._give_back)
        for action in actions:
            try:
                action()
            except Exception:
                logger.exception("after the failure of the executor, %r raised", action)


def _again(error: ExecutorFailedError) -> ExecutorFailedError:
    """A copy to raise: one exception raised in several threads would mix up their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
