"""A client's connection to its EngineCoreActor: starting it, sending messages, reading the stream, killing it.

Used by both Ray clients (`ray_clients.py`). The process that starts the actor owns it: when it dies, Ray ends the
actor and with it the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from engine_actors.config import EngineConfig
from engine_actors.core import CoreInfo
from engine_actors.core_actor import EngineCoreActor, HealthReport
from engine_actors.core_utilities import UtilityCall
from engine_actors.errors import EngineDeadError, EngineStartupError
from engine_actors.messages import ClientMessage, OutputBatch, ShutdownMessage, decode_batch, encode_messages
from engine_actors.ray_places import cluster_to_join
from executors.placement import remove_placement_groups_of

logger = logging.getLogger(__name__)

STARTUP_GRACE_S = 30.0
"""Beyond the executor's own start-up deadline, for the actor's process itself."""
SHUTDOWN_GRACE_S = 15.0
"""Beyond the drain timeout, for stopping the workers; then the actor is killed."""
HEALTH_TIMEOUT_S = 8.0
"""Of EngineCore's answer, which itself waits for the workers' (`executors.ray_executor.HEALTH_TIMEOUT_S`)."""
SHUT_DOWN = "the engine was shut down"

_starting_ray = threading.Lock()


class CoreLink:
    """One EngineCoreActor and this client's place at it.

    Attributes:
        info: What start-up settled.
        dead_error: Why nothing works any more; None while it does.
        may_replay: With `dead_error`: another EngineCore may be tried.
    """

    def __init__(self, config: EngineConfig, client_index: int = 0, calls: Sequence[UtilityCall] = ()) -> None:
        """Starts the actor and waits until the engine is ready.

        Args:
            calls: Utilities that have been run when it is.

        Raises:
            EngineStartupError: With the root cause; nothing is left behind.
        """
        ensure_ray()
        self.client_index = client_index
        self.dead_error: EngineDeadError | None = None
        self.may_replay = False
        self._sequence = 0
        self._stream: Any | None = None
        self._unread: Any = None
        self._closed = False
        self._worker_id = ray.get_runtime_context().get_worker_id()
        self.actor = _create_actor(config)
        self._actor_id = self.actor._actor_id.hex()
        self._has_placement_group = config.uses_ray_executor
        self._kill = weakref.finalize(self, _kill_actor, self.actor)
        try:
            self.info = _start(self.actor, config, calls)
            logger.info("The engine is ready. %s", self.info.capacity)
        except BaseException:
            self.close()
            raise

    # Messages

    def send(self, messages: list[ClientMessage]) -> None:
        """Send without waiting, in the order of calls.

        Raises:
            EngineDeadError: The engine is known to have failed, or was shut down.
        """
        self._check_open()
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            if self._stream is None:
                self.open_stream()
            self.actor.send.remote(self.client_index, sequence, encode_messages(messages))
        except RayError as error:
            raise self.mark_lost(f"EngineCore cannot be reached: {error}", error) from error

    def _check_open(self) -> None:
        """Raise EngineDeadError if nothing can be asked of the engine any more."""
        self.check_alive()
        if self._closed:
            raise EngineDeadError(SHUT_DOWN)

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine is known to have failed; what it sent before a shutdown can be read."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error.__cause__
        if not self.is_connected:
            raise self.mark_dead("this process has left the Ray cluster the engine runs in")

    @property
    def is_connected(self) -> bool:
        """Whether this process still is in the Ray cluster that it started the engine in."""
        return ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._worker_id

    # Outputs

    @property
    def has_stream(self) -> bool:
        """Whether a batch may come: the engine has, or recently had, something to do for this client."""
        return self._stream is not None

    def next_batch(self) -> OutputBatch:
        """Wait for the next batch. Only while `has_stream`.

        Raises:
            EngineDeadError: The engine failed, died, or was shut down.
        """
        self.check_alive()
        try:
            # Kept until it is read, so that an interrupt in between loses nothing.
            if self._unread is None:
                self._unread = next(self._live_stream)
            data = ray.get(self._unread)
            self._unread = None
        except StopIteration:
            raise self.mark_dead(SHUT_DOWN) from None
        except (RayError, ValueError) as error:
            raise self.mark_lost(_death_text(error), error) from error
        return self._checked(decode_batch(data))

    async def next_batch_async(self) -> OutputBatch:
        """Same, awaited. May be cancelled without loss."""
        self.check_alive()
        try:
            if self._unread is None:
                self._unread = await anext(self._live_stream)
            data = await self._unread
            self._unread = None
        except StopAsyncIteration:
            raise self.mark_dead(SHUT_DOWN) from None
        except (RayError, ValueError) as error:
            raise self.mark_lost(_death_text(error), error) from error
        return self._checked(decode_batch(data))

    def _checked(self, batch: OutputBatch) -> OutputBatch:
        if batch.paused_after is not None:
            self._stream = None
            if self._sequence > batch.paused_after:
                self.open_stream()
        if batch.engine_core_dead is None:
            return batch
        text = f"EngineCore failed: {batch.engine_core_dead}"
        error = self.mark_lost(text) if batch.may_replay else self.mark_dead(text)
        if batch.outputs or batch.utilities:
            return batch  # The last the engine did; the next call raises.
        raise error

    def open_stream(self) -> None:
        """Ask for what the engine has for this client, or will have."""
        self._stream = self.actor.outputs.remote(self.client_index)

    @property
    def _live_stream(self) -> Any:
        if self._stream is None:
            raise RuntimeError("an output was asked for while the engine has nothing to do for this client")
        return self._stream

    def mark_lost(self, text: str, cause: BaseException | None = None) -> EngineDeadError:
        """As `mark_dead`, for an end that nobody wanted: another EngineCore may be tried."""
        if self.dead_error is None:
            self.may_replay = self.is_connected and not self._closed
        return self.mark_dead(text, cause)

    def mark_dead(self, text: str, cause: BaseException | None = None) -> EngineDeadError:
        """Every later call raises this. The actor, if it still is there, is of no use and is killed."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError(text)
            self.dead_error.__cause__ = cause
            self.close()
        return EngineDeadError(str(self.dead_error))

    # Health and the end

    async def health_async(self) -> HealthReport:
        self._check_open()
        return await asyncio.wait_for(_as_future(self.actor.health.remote()), HEALTH_TIMEOUT_S)

    async def has_ended_async(self) -> bool:
        """Whether the engine has died or was shut down; what it says of that can be read from a stream."""
        return await asyncio.wait_for(_as_future(self.actor.has_ended.remote()), HEALTH_TIMEOUT_S)

    def health(self) -> HealthReport:
        self._check_open()
        return ray.get(self.actor.health.remote(), timeout=HEALTH_TIMEOUT_S)

    def begin_shutdown(self, timeout_s: float) -> bool:
        """Tell the engine to stop, and send nothing more; False when there is nothing to wait for."""
        try:
            self.send([ShutdownMessage(timeout_s)])
        except EngineDeadError:
            return False
        finally:
            self._closed = True
        return True

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until the stream has ended, which the engine does last."""
        with contextlib.suppress(RayError, ValueError):
            ray.wait([self._live_stream.completed()], timeout=timeout_s)

    async def wait_stopped_async(self, timeout_s: float) -> None:
        with contextlib.suppress(RayError, ValueError, asyncio.TimeoutError):
            await asyncio.wait_for(_as_future(self._live_stream.completed()), timeout_s)

    def close(self) -> None:
        """Kill the actor. What its stream brought until now can still be read. Idempotent."""
        self._closed = True
        if not self._kill.alive:
            return
        if not self.is_connected:
            self._kill.detach()
            return
        self._kill()
        if self._has_placement_group:
            # An engine that was shut down has removed it; one that died has not, and Ray keeps it.
            with contextlib.suppress(RayError):
                remove_placement_groups_of(self._actor_id)


def ensure_ray() -> None:
    """Join the cluster at RAY_ADDRESS, or start Ray here, unless this process is connected already.

    A Ray that is started here ends with the thread that started it, not with the process (the kernel's parent-death
    signal). So any thread but the main one leaves the start to one that lasts.
    """
    with _starting_ray:
        if ray.is_initialized():
            return
        if threading.current_thread() is threading.main_thread():
            _init_ray()
            return
        done: Future[None] = Future()
        threading.Thread(target=_init_ray_and_stay, args=(done,), name="engine-actors-ray", daemon=True).start()
        done.result()


def _init_ray() -> None:
    ray.init(
        address=cluster_to_join(),
        include_dashboard=False,
        logging_level=logging.WARNING,
    )


def _init_ray_and_stay(done: Future[None]) -> None:
    try:
        _init_ray()
    except BaseException as error:
        done.set_exception(error)
        return
    done.set_result(None)
    threading.Event().wait()


def _create_actor(config: EngineConfig) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
    parallel = config.parallel_config
    if not config.uses_ray_executor and config.executor_class is None:
        # The worker runs inside this actor, so the actor reserves what a worker would.
        if parallel.device == "cuda":
            options["num_gpus"] = parallel.num_gpus_per_worker
        else:
            options["num_cpus"] = 1 if parallel.num_cpus_per_worker is None else parallel.num_cpus_per_worker
        _check_resources(options)
    group: PlacementGroup | None = ray.util.get_current_placement_group()
    if group is not None:
        # Beside its client, whose node's bundles may be few of the group's; an actor that computes needs room besides.
        computes = bool(options.get("num_cpus") or options.get("num_gpus"))
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, -1 if computes else _bundle_here(group), placement_group_capture_child_tasks=True
        )
    else:
        node_id = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return ray.remote(EngineCoreActor).options(**options).remote(config)


def _bundle_here(group: PlacementGroup) -> int:
    """A bundle of the group on this process's node; -1, any, if it has none here."""
    node_id = ray.get_runtime_context().get_node_id()
    bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return next((int(index) for index, node in sorted(bundles.items()) if node == node_id), -1)


def _check_resources(options: dict[str, Any]) -> None:
    total = ray.cluster_resources()
    for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        needed = options.get(key) or 0
        if total.get(name, 0) < needed:
            raise EngineStartupError(
                f"the engine needs {needed} {name} in one process; the Ray cluster has {total.get(name, 0):g}"
            )


def _start(actor: Any, config: EngineConfig, calls: Sequence[UtilityCall]) -> CoreInfo:
    timeout_s = config.parallel_config.startup_timeout_s + STARTUP_GRACE_S
    try:
        info = ray.get(actor.start.remote(calls), timeout=timeout_s)
        actor.stop_on_sigterm.remote()
        return info
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        raise EngineStartupError(f"the engine could not start: {type(cause).__name__}: {cause}") from cause
    except RayActorError as error:
        raise EngineStartupError(f"the engine could not start: {_death_text(error)}") from error
    except GetTimeoutError as error:
        raise EngineStartupError(
            f"the engine was not ready {timeout_s:g} s after its start (startup_timeout_s "
            f"{config.parallel_config.startup_timeout_s:g} and {STARTUP_GRACE_S:g} s of grace)"
        ) from error


def _death_text(error: BaseException) -> str:
    """Ray's reason in one line, without its list of common causes."""
    text = " ".join(str(error).split()).partition(" Some common causes include")[0]
    kind = "EngineCore's process died" if isinstance(error, RayActorError) else "EngineCore cannot be reached"
    return f"{kind}: {text}"


def _kill_actor(actor: Any) -> None:
    """Also runs at interpreter exit and after ray.shutdown(), when there is nothing left to kill."""
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)


async def _as_future(ref: Any) -> Any:
    return await ref
