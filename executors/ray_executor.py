"""RayExecutor: one actor per rank, driven by msgpack bytes (`executors.ray_transport` carries them).

The future of a step stands for an object ref of rank 0 of the last stage. Workers that die or raise are seen by their
`watch` calls, which end only then; the monitor thread (`executors.step_monitor`) turns the first failure into the end
of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executors.base import Executor, ExecutorFailedError, FailureCallback, StepFuture
from executors.config import ModelConfig, ParallelConfig
from executors.placement import Placement, place_workers
from executors.ray_transport import StepTransport, make_step_transport
from executors.ray_worker import RayWorkerActor
from executors.step_monitor import ROOT_CAUSE_WAIT_S, FailureReport, PendingStep, StepMonitor
from kv.config import CacheConfig
from kv.spec import KVCacheConfig, KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 2.0
_OVERDUE_PING_S = 0.5
_DEATH_REPORT_S = 5.0
"""A call that failed because its actor died waits this long at most for the monitor to say why."""

# How torch.distributed reports a peer that went away or never came.
_PEER_LOSS_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "SharedMemoryPeerLostError")
_PEER_LOSS_TEXTS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class RayExecutor(Executor):
    """See `Executor`. Ray must be initialised. The process that makes it, driver or actor, owns the workers.

    Attributes:
        placement: The placement group and each rank's place.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
    ) -> None:
        """Place, start and load all workers. Blocks: in an asyncio actor, call it from a thread.

        Raises:
            ResourcesUnavailableError: The cluster has no room for the workers.
            ExecutorFailedError: A worker could not start; the text names rank, node and cause, which is attached.
        """
        if not ray.is_initialized():
            raise RuntimeError("Ray is not initialised: call ray.init() before making a RayExecutor")
        self._parallel_config = parallel_config
        self._async_scheduling = bool(scheduler_config.async_scheduling)
        tp_size, self._pp_size = parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size
        self._output_rank = tp_size * (self._pp_size - 1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._workers: list[Any] = []
        self._pids: dict[int, int] = {}
        self._transport: StepTransport | None = None
        self._device = _resolve_device(parallel_config)
        deadline_s = time.monotonic() + parallel_config.startup_timeout_s
        demand = _worker_demand(parallel_config, self._device)
        self.placement: Placement = place_workers(
            tp_size,
            self._pp_size,
            demand,
            strategy=parallel_config.placement_strategy,
            deadline_s=deadline_s,
            wait_for_nodes=parallel_config.wait_for_nodes,
        )
        try:
            self._create_workers(demand)
            self._start_workers((model_config, cache_config, scheduler_config, parallel_config), deadline_s)
            self._monitor = StepMonitor(
                parallel_config.step_timeout_s,
                kill_workers=self._kill_workers,
                give_back=self._give_back,
                describe_overdue=self._describe_overdue,
            )
            nodes = [place.node_id for place in self.placement.places]
            self._transport = make_step_transport(
                self._workers, nodes, self._output_rank, self._monitor.resolve, self._on_step_error
            )
        except BaseException:
            self._kill_workers()
            self._give_back()
            raise
        self._watch_refs = [worker.watch.remote() for worker in self._workers]
        for rank, ref in enumerate(self._watch_refs):
            ref.future().add_done_callback(partial(self._on_watch_end, rank))

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self.collective_rpc("get_kv_cache_spec", self._parallel_config.startup_timeout_s)

    def determine_available_memory(self) -> list[int]:
        return self.collective_rpc("determine_available_memory", self._parallel_config.startup_timeout_s)

    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        if len(configs) != len(self._workers):
            raise ValueError(f"{len(self._workers)} workers need as many KVCacheConfigs, got {len(configs)}")
        refs = self._steps.call("initialize_from_config", [(config,) for config in configs], {})
        self._results(refs, "initialize_from_config", self._parallel_config.startup_timeout_s)

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture[ModelRunnerOutput | None]:
        step = self._monitor.track(f"step {scheduler_output.step}", self._decode)
        self._steps.execute(self._encoder.encode(scheduler_output), step)
        return step

    def sample_tokens(self, grammar_bitmask: bytes | None) -> StepFuture[ModelRunnerOutput]:
        step = self._monitor.track("sampling", self._decode_output)
        self._steps.sample(grammar_bitmask, step)
        return step

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `Executor.collective_rpc`. Calls queue behind the steps in flight.

        Raises:
            TimeoutError: Not every worker answered within `timeout_s`. The calls go on.
            ExecutorFailedError: A worker died.
        """
        self._monitor.raise_if_failed()
        refs = self._steps.call(method, [args] * len(self._workers), kwargs or {})
        return self._results(refs, method if isinstance(method, str) else repr(method), timeout_s)

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._monitor.add_callback(callback)

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._steps.use_loop(loop)

    def set_step_timeout(self, step_timeout_s: float) -> None:
        self._monitor.set_step_timeout(step_timeout_s)

    def check_health(self) -> None:
        self._monitor.raise_if_failed()
        refs = [worker.ping.remote() for worker in self._workers]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=HEALTH_TIMEOUT_S)
        if late:
            names = ", ".join(self._name(rank) for rank, ref in enumerate(refs) if ref in late)
            raise ExecutorFailedError(f"{names}: no answer within {HEALTH_TIMEOUT_S:g} s")
        self._results(refs, "ping", HEALTH_TIMEOUT_S)

    def shutdown(self) -> None:
        if not self._monitor.close():
            return
        self._steps.close()
        if not ray.is_initialized():
            return  # The workers ended with the connection to Ray, and an own placement group with the job.
        with contextlib.suppress(RayError):
            refs = [worker.shutdown.remote() for worker in self._workers]
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_TIMEOUT_S)
        self._kill_workers()
        self._give_back()
        # A watch ref fails when its process is gone.
        ray.wait(self._watch_refs, num_returns=len(self._watch_refs), timeout=SHUTDOWN_TIMEOUT_S)

    @property
    def max_concurrent_batches(self) -> int:
        if self._pp_size > 1:
            return self._pp_size
        return 2 if self._async_scheduling else 1

    def _create_workers(self, demand: dict[str, float]) -> None:
        custom = {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")}
        for place in self.placement.places:
            strategy = PlacementGroupSchedulingStrategy(
                self.placement.group, place.bundle_index, placement_group_capture_child_tasks=False
            )
            options = RayWorkerActor.options(
                num_cpus=demand.get("CPU", 0.0),
                num_gpus=demand.get("GPU", 0.0),
                resources=custom,
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
                enable_task_events=False,
            )
            self._workers.append(options.remote(place.rank, place.rank == self._output_rank))

    def _start_workers(self, configs: tuple[Any, ...], deadline_s: float) -> None:
        where = self._startup_call("start", [worker.where.remote() for worker in self._workers], deadline_s)
        for place, found in zip(self.placement.places, where, strict=True):
            self._pids[place.rank] = found["pid"]
            if found["node_id"] != place.node_id:
                raise ExecutorFailedError(
                    f"worker rank {place.rank} runs on node {found['node_ip']}, but its bundle {place.bundle_index} "
                    f"is on {place.node_ip}"
                )
        init_method = ""
        if len(self._workers) > 1:
            (init_method,) = self._startup_call("listen", [self._workers[0].listen.remote()], deadline_s)
        refs = [
            worker.init_worker.remote(
                configs,
                self._device,
                local_rank=place.local_rank,
                num_workers_on_node=place.num_workers_on_node,
                distributed_init_method=init_method,
            )
            for worker, place in zip(self._workers, self.placement.places, strict=True)
        ]
        self._startup_call("initialise", refs, deadline_s)
        self._startup_call(
            "load the model", [worker.call.remote("load_model", (), {}) for worker in self._workers], deadline_s
        )

    def _startup_call(self, phase: str, refs: list[Any], deadline_s: float) -> list[Any]:
        """Results by rank, or the first failure (the first that is no consequence of another, if that comes soon)."""
        pending = {ref: rank for rank, ref in enumerate(refs)}
        consequence: ExecutorFailedError | None = None
        while pending:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout_s)
            if not ready and consequence is not None:
                raise consequence
            if not ready:
                limit = f"startup_timeout_s = {self._parallel_config.startup_timeout_s:g} s"
                names = ", ".join(self._name(rank) for rank in pending.values())
                raise ExecutorFailedError(f"{names} did not {phase} within {limit}")
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    ray.get(ref)
                except RayError as error:
                    report = self._report(rank, error, f"could not {phase}")
                    if not report.is_consequence:
                        raise report.error from report.error.__cause__
                    if consequence is None:
                        consequence = report.error
                        deadline_s = min(deadline_s, time.monotonic() + ROOT_CAUSE_WAIT_S)
        if consequence is not None:
            raise consequence
        return ray.get(refs)

    def _on_step_error(self, step: PendingStep[Any], error: BaseException) -> None:
        """In a thread of Ray's, where nothing may block and Ray must not be called."""
        self._monitor.report(self._report(self._output_rank, error, f"failed in {step.name}"))

    def _on_watch_end(self, rank: int, future: Any) -> None:
        """In a thread of Ray's, as `_on_step_error`."""
        self._monitor.report(self._report(rank, future.exception(), "failed in a step"))

    def _report(self, rank: int, error: BaseException | None, what: str) -> FailureReport:
        if isinstance(error, RayTaskError):
            cause = error.cause
            cause.add_note(f"On the worker:\n{error}")
            failure = ExecutorFailedError(f"{self._name(rank)} {what}: {type(cause).__name__}: {cause}")
            failure.__cause__ = cause
            return FailureReport(failure, _is_peer_loss(cause))
        # Unavailable: its connection broke before Ray knows why, e.g. with the whole node.
        what = "is unreachable" if isinstance(error, ActorUnavailableError) else "died"
        failure = ExecutorFailedError(f"{self._name(rank)} {what}: {_death_reason(error)}")
        failure.__cause__ = error
        return FailureReport(failure)

    def _results(self, refs: list[Any], name: str, timeout_s: float | None) -> list[Any]:
        _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if late:
            self._monitor.raise_if_failed()
            names = ", ".join(self._name(rank) for rank, ref in enumerate(refs) if ref in late)
            raise TimeoutError(f"{name}: no answer within {timeout_s:g} s from {names}")
        try:
            return ray.get(refs)
        except RayTaskError as error:
            self._monitor.raise_if_failed()
            raise error.cause from error
        except RayActorError as error:
            failure = self._monitor.wait_for_failure(_DEATH_REPORT_S)
            raise failure or ExecutorFailedError(f"a worker died in {name}: {error}") from error

    def _describe_overdue(self, step: PendingStep[Any]) -> str:
        """Which ranks are late with a step, and which of them do not even answer."""
        pings = {rank: self._workers[rank].ping.remote() for rank in step.due}
        silent = ray.wait([*pings.values()], num_returns=len(pings), timeout=_OVERDUE_PING_S)[1] if pings else []
        names = []
        for rank, due in step.due.items():
            if pings[rank] in silent:
                names.append(f"{self._name(rank)}, which does not answer")
            elif ray.get(pings[rank]) < due:
                names.append(self._name(rank))
        return f"waiting for {'; '.join(names)}"

    def _kill_workers(self) -> None:
        """Errors are those of a Ray that is going away itself. Once it is gone, these calls would start another Ray."""
        if not ray.is_initialized():
            return
        for worker in self._workers:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(worker)

    def _give_back(self) -> None:
        if not ray.is_initialized():
            return  # An own placement group goes with the job.
        with contextlib.suppress(RayError, ValueError):
            self.placement.remove()

    def _name(self, rank: int) -> str:
        place = self.placement.places[rank]
        pid = self._pids.get(rank)
        return f"worker rank {rank} (node {place.node_ip}{f', pid {pid}' if pid else ''})"

    @property
    def _steps(self) -> StepTransport:
        if self._transport is None:
            raise RuntimeError("the executor has not started")
        return self._transport

    def _decode(self, payload: bytes | None) -> ModelRunnerOutput | None:
        return None if payload is None else self._decoder.decode(payload)

    def _decode_output(self, payload: bytes | None) -> ModelRunnerOutput:
        return self._decoder.decode(payload or b"")


def _death_reason(error: BaseException | None) -> str:
    """Ray's reason in one line, without its list of common causes. The whole text is in the cause."""
    text = " ".join(str(error).split())
    _, _, reason = text.partition("The actor is dead because ")
    return (reason or text).partition(" Some common causes include")[0]


def _is_peer_loss(error: BaseException) -> bool:
    if type(error).__name__ in _PEER_LOSS_TYPES:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOSS_TEXTS)


def _resolve_device(config: ParallelConfig) -> str:
    if config.device != "auto":
        return config.device
    gpus = ray.cluster_resources().get("GPU", 0.0)
    return "cuda" if gpus and gpus >= config.num_gpus_per_worker * config.world_size else "cpu"


def _worker_demand(config: ParallelConfig, device: str) -> dict[str, float]:
    if device == "cuda":
        return {"GPU": config.num_gpus_per_worker, **config.worker_resources}
    cpus = 1.0 if config.num_cpus_per_worker is None else config.num_cpus_per_worker
    return {"CPU": cpus, **config.worker_resources}
