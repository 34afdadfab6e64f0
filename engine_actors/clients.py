"""How a front end reaches EngineCore: in this process, or in an actor, synchronously or from asyncio. One interface.

`EngineCoreClient.make_client` chooses. `LLMEngine` drives a `SyncCoreClient`, `AsyncLLM` an `AsyncRayClient`.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, overload

from engine_actors.config import EngineConfig
from engine_actors.core import CoreInfo, EngineCore, OutputsByClient
from engine_actors.core_utilities import Until, UtilityFlow
from engine_actors.errors import EngineDeadError, EnginePausedError, EngineStartupError
from executors.base import ExecutorFailedError
from scheduler.output import EngineCoreOutputs
from scheduler.request import EngineCoreRequest

if TYPE_CHECKING:
    from engine_actors.ray_clients import AsyncRayClient

GRAMMAR_WAIT_S = 1.0
"""Longest sleep at once while only grammars are awaited. They wake it."""
PAUSED = "the engine is paused or asleep: its requests go on after resume() or wake_up()"


class EngineCoreClient(ABC):
    """A front end's hold on its engine.

    After the engine has failed or was shut down, every method but `shutdown` raises `EngineDeadError` with the cause.

    Attributes:
        info: What start-up settled.
        client_index: The front end's number at the engine.
    """

    info: CoreInfo
    client_index: int = 0

    @overload
    @staticmethod
    def make_client(config: EngineConfig, asyncio_mode: Literal[False] = False) -> SyncCoreClient: ...

    @overload
    @staticmethod
    def make_client(config: EngineConfig, asyncio_mode: Literal[True]) -> AsyncRayClient: ...

    @staticmethod
    def make_client(config: EngineConfig, asyncio_mode: bool = False) -> EngineCoreClient:
        """Start an engine and connect to it.

        Raises:
            ValueError: An asyncio client was asked for an engine in this process.
            EngineStartupError: The engine could not start; the text has the root cause.
        """
        if config.engine_core == "inproc":
            if asyncio_mode:
                raise ValueError(
                    "engine_core='inproc' steps in the caller's thread and cannot serve AsyncLLM or Engine; allowed "
                    "there is engine_core='actor'"
                )
            return InprocClient(config)
        from engine_actors.ray_clients import AsyncRayClient, RayClient

        return AsyncRayClient(config) if asyncio_mode else RayClient(config)

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine cannot be used any more; None while it can."""

    @abstractmethod
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Hand over requests, without waiting."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests early, without waiting; unknown ids are ignored. Each known one still gets its last output."""

    @abstractmethod
    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop the engine and give everything back. Idempotent; never raises because the engine is dead already.

        Args:
            timeout_s: Let requests in flight run on for so long; 0 aborts them; None is the config's
                shutdown_timeout_s.
        """


class SyncCoreClient(EngineCoreClient):
    """A client for plain, single-threaded callers."""

    @abstractmethod
    def get_output(self) -> list[EngineCoreOutputs]:
        """This client's share of what the engine did next. Call it only while requests are unfinished.

        Raises:
            EnginePausedError: Nothing more comes before the engine is resumed, or woken up.
        """

    @abstractmethod
    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name, e.g. "reset_prefix_cache"; raises what it raises."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is alive."""


class InprocClient(SyncCoreClient):
    """EngineCore in this process, stepped by `get_output`. No actor, no busy loop; Ray only if the executor uses it."""

    def __init__(self, config: EngineConfig) -> None:
        self._dead_error: EngineDeadError | None = None
        self._unread: list[EngineCoreOutputs] = []
        try:
            self._core = EngineCore(config)
        except Exception as error:
            raise EngineStartupError(f"the engine could not start: {type(error).__name__}: {error}") from error
        self.info = self._core.info

    @property
    def core(self) -> EngineCore:
        """For tests and benchmarks that look inside."""
        return self._core

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead_error

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._check_alive()
        for request in requests:
            self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._check_alive()
        self._core.abort_requests(request_ids)

    def get_output(self) -> list[EngineCoreOutputs]:
        self._check_alive()
        while not self._unread:
            self._step(self._core.step_fn)
            if self._unread or not self._core.has_requests():
                break
            if not self._core.has_steps_in_flight:
                if not self._core.has_runnable_requests:
                    raise EnginePausedError(PAUSED)
                self._core.wait_for_work(GRAMMAR_WAIT_S)
        outputs, self._unread = self._unread, []
        return outputs

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._check_alive()
        function, waits = self._core.utilities.find(name)
        if not waits:
            return function(*args, **kwargs)
        try:
            return self._drive(function(*args, **kwargs))
        except ExecutorFailedError as error:
            raise self._die(error) from error

    def _drive(self, flow: UtilityFlow) -> Any:
        """Do the waiting a utility asks for, until its result is there."""
        try:
            wait = next(flow)
            while True:
                if isinstance(wait, Until):
                    while not wait.condition():
                        self._step(self._core.step_fn)
                        if not self._core.has_steps_in_flight and not wait.condition():
                            self._core.wait_for_work(GRAMMAR_WAIT_S)
                    wait = flow.send(None)
                    continue
                for outputs in self._core.finish_dispatched_steps():
                    self._keep(outputs)
                try:
                    result = wait.call()
                except Exception as error:
                    wait = flow.throw(error)
                else:
                    wait = flow.send(result)
        except StopIteration as end:
            return end.value

    def _step(self, step: Callable[[], OutputsByClient]) -> None:
        try:
            with _interrupt_deferred():
                self._keep(step())
        except Exception as error:
            raise self._die(error) from error

    def _keep(self, outputs: OutputsByClient) -> None:
        own = outputs.get(self.client_index)
        if own is not None:
            self._unread.append(own)

    def check_health(self) -> None:
        self._check_alive()
        try:
            self._core.executor.check_health()
        except Exception as error:
            raise self._die(error) from error

    def shutdown(self, timeout_s: float | None = None) -> None:
        if self._dead_error is None:
            self._dead_error = EngineDeadError("the engine was shut down")
        self._core.shutdown()

    def _check_alive(self) -> None:
        if self._dead_error is not None:
            raise EngineDeadError(str(self._dead_error)) from self._dead_error.__cause__

    def _die(self, error: Exception) -> EngineDeadError:
        self._dead_error = EngineDeadError(f"EngineCore failed: {type(error).__name__}: {error}")
        self._dead_error.__cause__ = error
        self._core.shutdown()
        return EngineDeadError(str(self._dead_error))


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Ctrl-C within the block raises KeyboardInterrupt after it: half a step would leave the scheduler inconsistent.

    A second Ctrl-C does not wait.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
