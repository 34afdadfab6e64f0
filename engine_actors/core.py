"""`EngineCore`: scheduler, KV cache and executor put together, and one step of them. No Ray, no asyncio.

`EngineCoreActor` drives it from an event loop, `InprocClient` by plain calls. A step is `begin_step` (schedule and
dispatch) and `finish_step` (take the result in); whoever drives decides what happens in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from engine_actors.config import EngineConfig
from engine_actors.core_utilities import CoreUtilities
from executors.base import Executor, StepFuture
from kv.planner import CapacityReport, KVCachePlan, plan_kv_cache
from scheduler.errors import QueueFullError, RequestRefusedError
from scheduler.output import (
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from scheduler.request import EngineCoreRequest
from scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from engine_actors.structured_output import StructuredOutputManager

logger = logging.getLogger(__name__)

OutputsByClient = dict[int, EngineCoreOutputs]

YIELD_S = 0.001
"""Pause when work remains, but no step can run and none is in flight."""


@dataclass(frozen=True)
class CoreInfo:
    """What start-up settled; clients get it when the engine is ready.

    Attributes:
        max_model_len: Longest prompt + output.
        capacity: Of the KV cache.
    """

    max_model_len: int
    capacity: CapacityReport


@dataclass(frozen=True)
class NewWorkers:
    """Workers that take the place of failed ones, ready for step 1."""

    executor: Executor
    plan: KVCachePlan


@dataclass(slots=True)
class PendingStep:
    """A step that was dispatched and not yet finished."""

    scheduled: SchedulerOutput
    future: StepFuture[ModelRunnerOutput | None] | StepFuture[ModelRunnerOutput]


class EngineCore:
    """One engine: its executor, its scheduler, and the requests of all clients.

    Attributes:
        utilities: What clients can ask for besides requests, by name.

    Construction starts the workers and loads the model; it may take minutes.

    Raises:
        ValueError: The configuration cannot work, e.g. the KV cache is too small for one sequence.
        ExecutorFailedError: A worker failed while starting.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.executor = make_executor(config)
        if not config.skip_tokenizer_init:
            _import_grammars_ahead()
        try:
            plan = _initialize_kv_cache(self.executor, config, auto_fit=config.model_config.max_model_len == -1)
            self.config = _settle(config, plan)
            self.scheduler = Scheduler(
                self.config.scheduler_config,
                self.config.cache_config,
                plan.configs[0],
                max_concurrent_batches=self.executor.max_concurrent_batches,
                send_known_tokens=config.parallel_config.pipeline_parallel_size > 1,
            )
        except BaseException:
            self.executor.shutdown()
            raise
        self.info = CoreInfo(plan.max_model_len, plan.report)
        self.max_concurrent_batches = self.executor.max_concurrent_batches
        self._batch_queue: deque[PendingStep] = deque()
        self._refused: dict[int, list[FinishedRequest]] = {}
        self._grammars: StructuredOutputManager | None = None
        self._on_grammar_change: Callable[[], Any] = lambda: None
        self.step_fn = self.step if self.max_concurrent_batches == 1 else self.step_with_batch_queue
        self.max_num_batched_tokens_at_start = self.config.scheduler_config.max_num_batched_tokens
        self.step_timeout_s_at_start = self.config.parallel_config.step_timeout_s
        self.utilities = CoreUtilities(self)

    # Requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. A refusal does not raise: it becomes the request's end, in the next outputs."""
        try:
            if request.sampling_params.structured_outputs is not None and self._grammars is None:
                self._start_grammars(request)
            self.scheduler.add_request(request)
        except RequestRefusedError as error:
            self.refuse_request(request, str(error), "InvalidRequestError")
        except QueueFullError as error:
            self.refuse_request(request, str(error), "QueueFullError")

    def on_grammar_change(self, callback: Callable[[], Any]) -> None:
        """Call `callback`, from any thread, when a grammar has been compiled or refused: there may be something to run.

        Set it before the first request comes.
        """
        self._on_grammar_change = callback

    def _start_grammars(self, request: EngineCoreRequest) -> None:
        """The first request with structured output: engines that never see one start no compiler."""
        from engine_actors.structured_output.setup import make_manager

        try:
            self._grammars = make_manager(self.config, request.eos_token_ids, self._on_grammar_change)
        except ValueError as error:
            raise RequestRefusedError(str(error)) from error
        self.scheduler.use_grammars(self._grammars)

    def refuse_request(self, request: EngineCoreRequest, error: str, error_type: str) -> None:
        """End a request that was never queued, with an error for its front end to raise."""
        refusal = FinishedRequest(request.request_id, FinishReason.ERROR, error=error, error_type=error_type)
        self._refused.setdefault(request.client_index, []).append(refusal)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests early; unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)

    def abort_all(self) -> None:
        self.scheduler.abort_all()

    def has_requests(self) -> bool:
        """Some request is unfinished, or some dispatched step is."""
        return self.scheduler.has_requests()

    @property
    def has_runnable_requests(self) -> bool:
        """Some unfinished request is not held back by a pause."""
        return self.scheduler.has_runnable_requests

    def abort_paused(self) -> None:
        """End the requests that a pause holds back."""
        self.scheduler.abort_paused()

    def take_outputs(self) -> OutputsByClient:
        """Ends that needed no step: aborts and refusals."""
        outputs = self.scheduler.take_outputs()
        for client_index, refused in self._refused.items():
            outputs.setdefault(client_index, EngineCoreOutputs()).finished.extend(refused)
        self._refused.clear()
        return outputs

    # Steps

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether `step_with_batch_queue` has dispatched steps it has not waited for."""
        return bool(self._batch_queue)

    def finish_dispatched_steps(self) -> list[OutputsByClient]:
        """Wait for the steps that `step_with_batch_queue` has dispatched, and begin no others."""
        return [self._finish_oldest() for _ in range(len(self._batch_queue))]

    def _finish_oldest(self) -> OutputsByClient:
        pending = self._batch_queue.popleft()
        return self.finish_step(pending, pending.future.result())

    def begin_step(self) -> PendingStep | None:
        """Schedule and dispatch, without waiting. None: nothing can run now.

        With structured output the masks are filled while the workers run the forward, and a second call samples.
        """
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        future = self.executor.execute_model(scheduled)
        if not scheduled.has_structured_output:
            return PendingStep(scheduled, future)
        bitmask = self.scheduler.fill_bitmask()
        encoded = None if bitmask is None else msgspec.msgpack.encode(bitmask)
        return PendingStep(scheduled, self.executor.sample_tokens(encoded))

    def wait_for_work(self, timeout_s: float) -> None:
        """Block for so long at most, for callers that found nothing to run: if it is grammars they wait for, until one
        is there."""
        if self._grammars is not None and self.scheduler.waits_for_grammars_only:
            self._grammars.wait(timeout_s)
        else:
            time.sleep(min(timeout_s, YIELD_S))

    def finish_step(self, pending: PendingStep, output: ModelRunnerOutput | None) -> OutputsByClient:
        """Take in the result of the oldest pending step. Aborts must have been passed on before."""
        if output is None:
            raise RuntimeError(f"step {pending.scheduled.step} brought no sampled tokens")
        outputs = self.scheduler.update_from_output(pending.scheduled, output)
        for client_index, ends in self.take_outputs().items():
            if client_index in outputs:
                outputs[client_index].finished.extend(ends.finished)
                outputs[client_index].stats = ends.stats or outputs[client_index].stats
            else:
                outputs[client_index] = ends
        return outputs

    def step(self) -> OutputsByClient:
        """One step, waited for."""
        pending = self.begin_step()
        if pending is None:
            return self.take_outputs()
        return self.finish_step(pending, pending.future.result())

    def step_with_batch_queue(self) -> OutputsByClient:
        """One turn with up to `max_concurrent_batches` steps in flight: fill the queue first, then wait for the oldest.

        Returns nothing while the queue is being filled and its oldest step still runs.
        """
        queue = self._batch_queue
        if len(queue) < self.max_concurrent_batches:
            pending = self.begin_step()
            if pending is not None:
                queue.append(pending)
                if len(queue) < self.max_concurrent_batches and not queue[0].future.done():
                    return self.take_outputs()
        if not queue:
            return self.take_outputs()
        return self._finish_oldest()

    # Recovery

    @property
    def runs_worker_in_process(self) -> bool:
        return self.config.executor_class is None and not self.config.uses_ray_executor

    def start_new_workers(self, timeout_s: float) -> NewWorkers:
        """Clear away the failed workers and start others, which take memory and weights anew. Blocks, and leaves
        the scheduler alone: call it in a thread, and pass the result to `go_on_with`.

        Raises:
            ExecutorFailedError: They could not start within the time, e.g. because nothing has room for them.
        """
        self.executor.shutdown()
        # A node that was lost may come back, or another take its place.
        parallel_config = replace(self.config.parallel_config, startup_timeout_s=timeout_s, wait_for_nodes=True)
        scheduler_config = replace(
            self.config.scheduler_config, max_num_batched_tokens=self.max_num_batched_tokens_at_start
        )
        executor = make_executor(
            replace(self.config, parallel_config=parallel_config, scheduler_config=scheduler_config)
        )
        try:
            plan = _initialize_kv_cache(executor, self.config, auto_fit=False)
            if self.utilities.workers_sleep_level:
                executor.collective_rpc("sleep", None, (self.utilities.workers_sleep_level,))
            return NewWorkers(executor, plan)
        except BaseException:
            executor.shutdown()
            raise

    def go_on_with(self, workers: NewWorkers, cause: str) -> None:
        """Replay every unfinished request on new workers. What the steps in flight would have brought is dropped.

        Args:
            cause: What happened to the old ones.
        """
        self.executor = workers.executor
        self.executor.set_step_timeout(self.config.parallel_config.step_timeout_s)
        self._batch_queue.clear()
        self.scheduler.restart(workers.plan.configs[0], cause)

    def shutdown(self) -> None:
        """Stop the workers and the grammar compiler. Idempotent."""
        if self._grammars is not None:
            self._grammars.close()
        self.executor.shutdown()


def make_executor(config: EngineConfig) -> Executor:
    """The executor the config names, loaded. Imported here so that each pulls in only what it needs."""
    make: Callable[..., Executor]
    if config.executor_class is not None:
        make = config.executor_class
    elif config.parallel_config.distributed_executor_backend == "ray":
        from executors.ray_executor import RayExecutor as make
    else:
        from executors.uniproc import UniProcExecutor as make
    return make(config.model_config, config.cache_config, config.scheduler_config, config.parallel_config)


def _initialize_kv_cache(executor: Executor, config: EngineConfig, *, auto_fit: bool) -> KVCachePlan:
    """Ask the workers what they need and have, divide it, and let them allocate."""
    specs = executor.get_kv_cache_specs()
    cache_config = config.cache_config
    if cache_config.num_gpu_blocks_override is None and cache_config.kv_cache_memory_bytes is None:
        available = executor.determine_available_memory()
    else:
        available = [0] * len(specs)
    plan = plan_kv_cache(
        specs,
        available,
        cache_config,
        max_model_len=config.scheduler_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        auto_fit=auto_fit,
    )
    executor.initialize_from_config(plan.configs)
    logger.info("%s", plan.report)
    return plan


def _settle(config: EngineConfig, plan: KVCachePlan) -> EngineConfig:
    """The config as the model and the memory allow it."""
    config = config.with_max_model_len(plan.max_model_len)
    if not plan.configs[0].has_non_causal_layers:
        return config
    logger.info("The model has non-causal layers: chunked prefill and prefix caching are off")
    return replace(
        config,
        scheduler_config=replace(config.scheduler_config, enable_chunked_prefill=False),
        cache_config=replace(config.cache_config, enable_prefix_caching=False),
    )


def _import_grammars_ahead() -> None:
    """Beside the workers' start. The first request with a grammar would hold up all others by tenths of a second."""
    module = "engine_actors.structured_output.setup"
    threading.Thread(target=import_module, args=(module,), name="engine-actors-imports", daemon=True).start()
