"""`CoreUtilities`: what a front end can ask of EngineCore besides requests, by name. No Ray, no asyncio.

A utility that waits is a generator: it yields `Until` (steps go on) or `OnWorkers` (none is in flight), and whoever
drives EngineCore does the waiting, with its own means: `InprocClient` by stepping, EngineCoreActor from its loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_actors.errors import QueueFullError
from scheduler import errors as scheduler_errors
from scheduler.pause import PauseMode
from scheduler.values import check_int

if TYPE_CHECKING:
    from engine_actors.core import EngineCore

SLEEP_LEVELS = (0, 1, 2)
SLEEP_TAGS = ("weights", "kv_cache", "scheduling")
RUNTIME_OPTIONS = (
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_num_batched_tokens",
    "max_num_queued_requests",
    "step_timeout_s",
)
"""What `update_config` may change. Everything else is built into the workers, the KV cache or the front ends."""


@dataclass(frozen=True, slots=True)
class Until:
    """Go on when the condition holds; steps are run meanwhile."""

    condition: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class OnWorkers:
    """Call this, which waits for workers, while no step is in flight, and go on with its result or its exception.

    So all workers see calls and steps in one order, and nothing comes between the two halves of a step.
    """

    call: Callable[[], Any]


UtilityCall = tuple[str, tuple[Any, ...]]
"""Name and arguments."""
UtilityFlow = Generator[Until | OnWorkers, Any, Any]


class CoreUtilities:
    """The utilities of one EngineCore, and what they have changed. Driven by the thread that drives EngineCore."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asleep: set[str] = set()
        self._sleep_level = 0
        self._falls_asleep = False
        self._paused = False
        self._utilities: dict[str, Callable[..., Any]] = {
            "check_admission": self.check_admission,
            "collective_rpc": self.collective_rpc,
            "execute_dummy_batch": self.execute_dummy_batch,
            "is_paused": self.is_paused,
            "is_sleeping": self.is_sleeping,
            "pause": self.pause,
            "profile": self.profile,
            "reset_prefix_cache": core.scheduler.reset_prefix_cache,
            "reset_running_requests": self.reset_running_requests,
            "resume": self.resume,
            "sleep": self.sleep,
            "update_config": self.update_config,
            "wake_up": self.wake_up,
        }

    def find(self, name: str) -> tuple[Callable[..., Any], bool]:
        """The utility, and whether calling it gives a flow that waits.

        Raises:
            ValueError: No utility of that name.
        """
        function = self._utilities.get(name)
        if function is None:
            raise ValueError(f"unknown utility {name!r}; known are {', '.join(sorted(self._utilities))}")
        return function, inspect.isgeneratorfunction(function)

    def restore(self, calls: Iterable[UtilityCall]) -> None:
        """Call these one after another in an engine that has nothing to do yet, where none waits for steps. Blocks."""
        for name, args in calls:
            function, waits = self.find(name)
            if not waits:
                function(*args)
                continue
            flow = function(*args)
            with suppress(StopIteration):
                wait = next(flow)
                while True:
                    wait = flow.send(wait.call() if isinstance(wait, OnWorkers) else None)

    # Requests

    def check_admission(self, num_requests: int = 1) -> None:
        """
        Raises:
            QueueFullError: So many more requests would not be queued now.
            ValueError: `num_requests` is not an integer of at least 1.
        """
        check_int("num_requests", num_requests, 1, None)
        try:
            self._core.scheduler.check_admission(num_requests)
        except scheduler_errors.QueueFullError as error:
            raise QueueFullError(str(error)) from None

    def reset_running_requests(self) -> UtilityFlow:
        """Forget all KV: that of running requests, which is computed anew, and cached prefixes."""
        scheduler = self._core.scheduler
        was_paused = scheduler.is_paused
        while True:
            if not scheduler.is_paused:
                scheduler.pause(PauseMode.KEEP)
            yield Until(lambda: not scheduler.has_steps_in_flight or not scheduler.is_paused)
            if not scheduler.has_steps_in_flight:
                break
            was_paused = False  # Somebody resumed it meanwhile.
        scheduler.preempt_all()
        is_reset = scheduler.reset_prefix_cache()
        if not was_paused and not self._paused and not self._asleep:
            scheduler.resume()
        return is_reset

    # Workers

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> UtilityFlow:
        """See `Executor.collective_rpc`."""
        return (yield OnWorkers(lambda: self._core.executor.collective_rpc(method, timeout_s, args, kwargs)))

    def execute_dummy_batch(self) -> UtilityFlow:
        """One forward pass on a token of nobody, on every worker."""
        yield from self.collective_rpc("execute_dummy_batch")

    def profile(self, start: bool, *options: Any) -> UtilityFlow:
        """Start recording (see `WorkerProfiler.start`), or stop it; stopping returns the traces' paths by rank."""
        if start:
            return (yield from self.collective_rpc("start_profile", None, options))
        return (yield from self.collective_rpc("stop_profile"))

    # Pauses

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> UtilityFlow:
        """Run no more steps; returns when none is in flight. See `SyncUtilities.pause`."""
        parsed = PauseMode.parse(mode)
        self._paused = True
        if self._asleep:
            return  # Nothing runs, and after wake_up nothing will.
        yield from self._pause(parsed)
        if clear_cache and parsed is not PauseMode.KEEP and self._paused:
            self._core.scheduler.reset_prefix_cache()

    def resume(self) -> None:
        """
        Raises:
            RuntimeError: The engine is asleep.
        """
        if self._asleep or self._falls_asleep:
            raise RuntimeError("the engine is asleep; wake_up() comes before resume()")
        self._paused = False
        self._core.scheduler.resume()

    def is_paused(self) -> bool:
        return self._core.scheduler.is_paused

    def _pause(self, mode: PauseMode) -> UtilityFlow:
        scheduler = self._core.scheduler
        scheduler.pause(mode)
        if mode is PauseMode.WAIT:
            yield Until(lambda: not scheduler.has_runnable_requests or not scheduler.is_paused)
            if not scheduler.is_paused:
                return  # Somebody resumed it.
            scheduler.pause(PauseMode.KEEP)
        yield Until(lambda: not scheduler.has_steps_in_flight)

    # Sleep

    def sleep(self, level: int = 1, mode: str = "abort") -> UtilityFlow:
        """Give memory back until `wake_up`. See `SyncUtilities.sleep`."""
        if level not in SLEEP_LEVELS or isinstance(level, bool):
            raise ValueError(f"level must be one of {', '.join(map(str, SLEEP_LEVELS))}, got {level!r}")
        parsed = PauseMode.parse(mode)
        if self._asleep and level == self._sleep_level:
            return
        if self._asleep:
            raise RuntimeError(
                f"the engine is asleep at level {self._sleep_level}; wake_up() comes before level {level}"
            )
        self._falls_asleep = True
        try:
            yield from self._pause(parsed)
            if level > 0:
                # Requests that are kept lose their KV; it is computed anew.
                self._core.scheduler.preempt_all()
                self._core.scheduler.reset_prefix_cache()
                # From here on some worker may sleep, whatever happens: wake_up repairs it.
                self._fell_asleep(level)
                yield OnWorkers(lambda: self._core.executor.collective_rpc("sleep", None, (level,)))
            else:
                self._fell_asleep(level)
        except BaseException:
            if not self._asleep and not self._paused:
                self._core.scheduler.resume()
            raise
        finally:
            self._falls_asleep = False

    def _fell_asleep(self, level: int) -> None:
        self._sleep_level = level
        self._asleep = set(SLEEP_TAGS) if level > 0 else {"scheduling"}

    def wake_up(self, tags: Iterable[str] | None = None) -> UtilityFlow:
        """Take memory again, and go on. See `SyncUtilities.wake_up`."""
        wanted = set(SLEEP_TAGS if tags is None else [tags] if isinstance(tags, str) else tags)
        unknown = wanted.difference(SLEEP_TAGS)
        if unknown:
            raise ValueError(f"tags may hold {', '.join(map(repr, SLEEP_TAGS))}, got {', '.join(map(repr, unknown))}")
        # Weights first: caches are bound to the layers.
        on_workers = [tag for tag in ("weights", "kv_cache") if tag in wanted & self._asleep]
        if on_workers:
            timeout_s = self._core.config.parallel_config.startup_timeout_s
            yield OnWorkers(lambda: self._core.executor.collective_rpc("wake_up", timeout_s, (on_workers,)))
            self._asleep.difference_update(on_workers)
        if self._asleep == {"scheduling"} and (on_workers or "scheduling" in wanted):
            self._asleep.clear()
            if not self._paused:
                self._core.scheduler.resume()

    @property
    def workers_sleep_level(self) -> int:
        """At which level the workers sleep; 0 when they have any of their memory."""
        return self._sleep_level if self._asleep >= {"weights", "kv_cache"} else 0

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    # Options

    def update_config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Change options while the engine runs: all of `overrides`, or none. See `SyncUtilities.update_config`."""
        refused = [name for name in overrides if name not in RUNTIME_OPTIONS]
        if refused:
            raise ValueError(
                f"{', '.join(map(repr, refused))} cannot be changed while the engine runs; allowed are "
                f"{', '.join(RUNTIME_OPTIONS)}"
            )
        core, values = self._core, dict(overrides)
        limit = core.max_num_batched_tokens_at_start
        tokens = values.get("max_num_batched_tokens")
        if isinstance(tokens, int) and tokens > limit:
            raise ValueError(
                f"max_num_batched_tokens can be changed to at most {limit}, for which the workers were started, got "
                f"{tokens}"
            )
        parallel = core.config.parallel_config
        if "step_timeout_s" in values:
            timeout_s = values.pop("step_timeout_s")
            if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool):
                raise ValueError(f"step_timeout_s must be a number of seconds, got {timeout_s!r}")
            if parallel.world_size > 1 and timeout_s > core.step_timeout_s_at_start:
                raise ValueError(
                    f"step_timeout_s can be changed to at most {core.step_timeout_s_at_start:g}, with which the "
                    f"{parallel.world_size} workers' collectives were set up, got {timeout_s!r}"
                )
            parallel = replace(parallel, step_timeout_s=float(timeout_s))
        scheduler_config = replace(core.config.scheduler_config, **values)
        # Nothing has been changed until here, and nothing fails from here on.
        core.config = replace(core.config, parallel_config=parallel, scheduler_config=scheduler_config)
        core.scheduler.update_config(scheduler_config)
        core.executor.set_step_timeout(parallel.step_timeout_s)
        return self._runtime_options()

    def _runtime_options(self) -> dict[str, Any]:
        config = self._core.config
        values = {**vars(config.scheduler_config), **vars(config.parallel_config)}
        return {name: values[name] for name in RUNTIME_OPTIONS}
