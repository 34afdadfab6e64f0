"""The executor interface: what EngineCore asks of whatever runs the model, in this process or on a cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from kv.spec import KVCacheConfig, KVCacheSpec
from scheduler.output import ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")


class StepFuture(ABC, Generic[T]):
    """A result that is on its way: wait for it with `result()`, or `await` it inside an event loop.

    Both raise what the worker raised (as `ExecutorFailedError` with that cause), and `ExecutorFailedError` when the
    worker died or `timeout_s` passed.
    """

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> T: ...

    @abstractmethod
    def __await__(self) -> Generator[Any, None, T]: ...

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], Any]) -> None:
        """Call `callback` when the result is there, from any thread; at once if it is. It must not block."""


class ExecutorFailedError(RuntimeError):
    """The executor cannot go on: a worker raised, died, or missed its deadline. The text names rank, node, cause."""


class ResourcesUnavailableError(ExecutorFailedError):
    """The cluster does not have, or did not free in time, what the workers need. The text lists both, per node."""


FailureCallback = Callable[[ExecutorFailedError], None]


class Executor(ABC):
    """Runs SchedulerOutputs on one or more workers. Constructed loaded: weights are in place when __init__ returns.

    Call order: __init__, get_kv_cache_specs, determine_available_memory, initialize_from_config, then
    execute_model any number of times, then shutdown. Steps run on every worker in the order of the calls.
    """

    @abstractmethod
    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per worker (global rank order), the spec of each attention layer it holds."""

    @abstractmethod
    def determine_available_memory(self) -> list[int]:
        """Bytes each worker can give to the KV cache (global rank order)."""

    @abstractmethod
    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        """Allocate KV memory and warm up; one config per worker."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture[ModelRunnerOutput | None]:
        """Dispatch one step without waiting. Resolves to None when `has_structured_output`: call sample_tokens."""

    @abstractmethod
    def sample_tokens(self, grammar_bitmask: bytes | None) -> StepFuture[ModelRunnerOutput]:
        """Second half of the step dispatched last, when it has structured output: `GrammarBitmask` in msgpack, or None.

        Call it before the next step is dispatched; the forward may still run.
        """

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method (or a callable that takes the worker first) on every worker; results by rank."""

    @abstractmethod
    def register_failure_callback(self, callback: FailureCallback) -> None:
        """`callback` runs once, from any thread, when a worker dies, busy or idle; at once if one already has."""

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:  # noqa: B027  some need nothing of it
        """From now on `loop` drives this executor: results may come in its thread, which saves waking another one.

        Called in the loop's thread, while no step is in flight.
        """

    @abstractmethod
    def set_step_timeout(self, step_timeout_s: float) -> None:
        """Another deadline for steps dispatched from now on."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise ExecutorFailedError unless every worker is alive."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and give everything back. Idempotent."""

    @property
    @abstractmethod
    def max_concurrent_batches(self) -> int:
        """Steps that may usefully be in flight at once: pipeline stages, or 2 for async scheduling."""
