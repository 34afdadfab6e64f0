"""UniProcExecutor: one worker in the caller's own process, on a thread of its own.

The thread keeps callers free while a step runs (a grammar bitmask is filled meanwhile, an event loop goes on). Failure
semantics are RayExecutor's, but for a worker that hangs: a thread cannot be killed, so it is abandoned.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from executors.base import Executor, ExecutorFailedError, FailureCallback, StepFuture
from executors.config import ModelConfig, ParallelConfig
from executors.step_monitor import FailureReport, PendingStep, StepMonitor
from executors.worker import Worker
from kv.config import CacheConfig
from kv.spec import KVCacheConfig, KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")

_STOP_TIMEOUT_S = 5.0


class UniProcExecutor(Executor):
    """See `Executor`. Needs tensor_parallel_size = pipeline_parallel_size = 1."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
    ) -> None:
        """
        Raises:
            ValueError: The parallel config asks for more than one worker.
            ExecutorFailedError: The worker could not start; the cause is attached.
        """
        if parallel_config.world_size != 1:
            raise ValueError(
                f"UniProcExecutor runs 1 worker, the parallel config asks for {parallel_config.world_size}"
            )
        self._max_concurrent_batches = 2 if scheduler_config.async_scheduling else 1
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._thread = _WorkerThread()
        self._monitor = StepMonitor(parallel_config.step_timeout_s, kill_workers=self._thread.stop)
        device = parallel_config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"

        def start() -> Worker:
            worker = Worker(model_config, cache_config, scheduler_config, parallel_config, rank=0, device=device)
            worker.load_model()
            return worker

        started = self._thread.submit(start)
        try:
            self._worker: Worker | None = started.result(parallel_config.startup_timeout_s)
        except BaseException as error:
            self._monitor.close()
            self._thread.stop()
            if isinstance(error, concurrent.futures.TimeoutError) and not started.done():
                limit = f"startup_timeout_s = {parallel_config.startup_timeout_s:g} s"
                raise ExecutorFailedError(f"the worker did not start within {limit}") from error
            if not isinstance(error, Exception):
                raise
            raise ExecutorFailedError(f"the worker could not start: {type(error).__name__}: {error}") from error

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        if len(configs) != 1:
            raise ValueError(f"1 worker needs 1 KVCacheConfig, got {len(configs)}")
        self.collective_rpc("initialize_from_config", args=(configs[0],))

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture[ModelRunnerOutput | None]:
        payload = self._encoder.encode(scheduler_output)
        step = self._monitor.track(f"step {scheduler_output.step}", self._decode)
        self._submit_step(step, lambda: self._live_worker.execute_model(payload))
        return step

    def sample_tokens(self, grammar_bitmask: bytes | None) -> StepFuture[ModelRunnerOutput]:
        step = self._monitor.track("sampling", self._decode_output)
        self._submit_step(step, lambda: self._live_worker.sample_tokens(grammar_bitmask))
        return step

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self._monitor.raise_if_failed()

        def call() -> Any:
            worker = self._live_worker
            function = getattr(worker, method) if isinstance(method, str) else partial(method, worker)
            return function(*args, **(kwargs or {}))

        try:
            called = self._thread.submit(call)
            return [called.result(timeout_s)]
        except (concurrent.futures.CancelledError, _ThreadStoppedError):
            self._monitor.raise_if_failed()
            raise

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._monitor.add_callback(callback)

    def set_step_timeout(self, step_timeout_s: float) -> None:
        self._monitor.set_step_timeout(step_timeout_s)

    def check_health(self) -> None:
        self._monitor.raise_if_failed()

    def shutdown(self) -> None:
        if self._monitor.close():
            self._thread.stop()
            self._thread.join(_STOP_TIMEOUT_S)
            self._worker = None

    @property
    def max_concurrent_batches(self) -> int:
        return self._max_concurrent_batches

    def _decode(self, payload: bytes | None) -> ModelRunnerOutput | None:
        return None if payload is None else self._decoder.decode(payload)

    def _decode_output(self, payload: bytes | None) -> ModelRunnerOutput:
        return self._decoder.decode(payload or b"")

    @property
    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise ExecutorFailedError("the executor was shut down")
        return self._worker

    def _submit_step(self, step: PendingStep[Any], call: Callable[[], bytes | None]) -> None:
        def run() -> None:
            try:
                payload = call()
            except BaseException as error:
                failure = ExecutorFailedError(
                    f"worker rank 0 (in this process) failed in {step.name}: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._monitor.report(FailureReport(failure))
                # The steps behind this one are on this thread's queue: none of them may succeed.
                self._monitor.wait_for_failure(_STOP_TIMEOUT_S)
            else:
                self._monitor.resolve(step, payload)

        # A thread that stopped meanwhile was stopped by the monitor, which has ended the step too.
        with contextlib.suppress(_ThreadStoppedError):
            self._thread.submit(run)


class _ThreadStoppedError(RuntimeError):
    """The worker's thread takes no more calls."""


class _WorkerThread:
    """Runs functions one after another on one daemon thread, which cannot keep the process from exiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="executor-worker", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """The future is cancelled when the thread stops before the function's turn."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._stopped:
                raise _ThreadStoppedError("the worker's thread has stopped")
            self._jobs.put((function, future))
        return future

    def stop(self) -> None:
        """Cancel what waits; the function that runs is not interrupted. Idempotent, does not wait."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[1].cancel()
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            # Not kept until the next job: what it refers to may be large.
            del job, function, future
