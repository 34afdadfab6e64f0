"""The utilities every front end offers, once for each way of calling: what they do, by `call_utility`.

`LLMEngine` and `LLM` are `SyncUtilities`; `AsyncLLM` and the `Engine` actor are `AsyncUtilities`. What happens in the
engine is `engine_actors.core_utilities`' to say. An error in there is raised here, and the engine goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

WorkerMethod = str | Callable[..., Any]


def apply_to_model(worker: Any, function: Callable[[Any], Any]) -> Any:
    """On a worker: `function` of its model."""
    return function(worker.model)


def _check_no_connector(reset_connector: bool) -> None:
    if reset_connector:
        raise ValueError("reset_connector must be False: this engine has no KV connector")


class SyncUtilities(ABC):
    """Everything but `call_utility` is made of it."""

    @abstractmethod
    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Run no more steps until `resume`; requests that arrive meanwhile wait. Returns when none runs any more.

        Args:
            mode: What becomes of unfinished requests: "abort" ends them with what they have (finish_reason "abort"),
                "wait" lets them end first, "keep" freezes them in place, KV included, to go on after `resume`.
            clear_cache: Forget cached prefixes too. Not with "keep", where requests hold their KV.

        Raises:
            ValueError: An unknown mode.
        """
        self.call_utility("pause", mode, clear_cache)

    def resume(self) -> None:
        """Go on after `pause`, with what arrived meanwhile. Nothing happens unless the engine is paused.

        Raises:
            RuntimeError: The engine is asleep.
        """
        self.call_utility("resume")

    def is_paused(self) -> bool:
        """Whether no steps are run, because of `pause` or `sleep`."""
        return bool(self.call_utility("is_paused"))

    def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
        """Run no more steps and give memory back until `wake_up`; requests that arrive meanwhile wait.

        Args:
            level: 0 only stops the steps. 1 also gives the KV cache back, and moves weights from a device's memory to
                the host's; on CPU, where they are in host memory already, weights stay as they are. 2 gives weights
                and KV cache back; weights are read from disk again at `wake_up`. From 1 on cached prefixes are lost.
            mode: What becomes of unfinished requests, as for `pause`. Kept ones go on after `wake_up` with the same
                tokens; from level 1 on their KV is computed anew.

        Raises:
            ValueError: An unknown level or mode.
            RuntimeError: The engine is asleep at another level.
        """
        self.call_utility("sleep", level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `sleep` gave away; when nothing is missing any more, steps are run again (unless paused).

        Args:
            tags: Only these: "weights" (first, where they were given back), "kv_cache", "scheduling". None is all.

        Raises:
            ValueError: An unknown tag.
            Exception: What a worker raised, e.g. because the model's files are gone. The engine sleeps on; try again.
        """
        self.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether something that `sleep` gave away is still missing."""
        return bool(self.call_utility("is_sleeping"))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False while requests hold blocks.

        Args:
            reset_running_requests: Take their KV too: it is computed anew, and the tokens are the same.
            reset_connector: False, as there is none.
        """
        _check_no_connector(reset_connector)
        return bool(self.call_utility("reset_running_requests" if reset_running_requests else "reset_prefix_cache"))

    def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or a function that takes the worker first, on every worker; results by rank.

        No step runs meanwhile. Raises what a worker raises, and TimeoutError after `timeout` seconds.
        """
        return list(self.call_utility("collective_rpc", method, timeout, args, kwargs))

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call `function` with each worker's model (its shard, a torch module), as `collective_rpc`. Results by rank.

        Raises:
            Exception: What `function` raises.
        """
        return self.collective_rpc(apply_to_model, args=(function,))

    def check_admission(self, num_requests: int = 1) -> None:
        """Raise QueueFullError if so many more requests would not be queued now (`max_num_queued_requests`)."""
        self.call_utility("check_admission", num_requests)

    def execute_dummy_batch(self) -> None:
        """Run one forward pass on a token of nobody, on every worker."""
        self.call_utility("execute_dummy_batch")

    def start_profile(self, prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0) -> None:
        """Record what workers compute with torch's profiler, until `stop_profile`.

        Args:
            prefix: Begins the traces' file names.
            delay_iterations: Steps that are not recorded before the first that is.
            max_iterations: Record so many steps, and write the trace then; 0 is no limit.

        Raises:
            RuntimeError: No `torch_profiler_dir` is configured, or a profile is being recorded already.
            ValueError: A wrong argument.
        """
        self.call_utility("profile", True, prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> list[str]:
        """Write the traces, for Perfetto or chrome://tracing; their paths by rank, each on its worker's node.

        Raises:
            RuntimeError: No profile is being recorded.
        """
        return list(self.call_utility("profile", False))

    def update_config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Change engine options while it runs: all of these, or none. Returns those that can be changed, as they are.

        Args:
            overrides: `max_num_queued_requests`, `max_num_batched_tokens` (at most what the engine was started with),
                `long_prefill_token_threshold`, `max_long_partial_prefills`, `step_timeout_s` (with several workers at
                most what the engine was started with).

        Raises:
            ValueError: An option that cannot be changed, or a wrong value; the text says what is allowed.
        """
        return dict(self.call_utility("update_config", dict(overrides)))


class AsyncUtilities(ABC):
    """The same, awaited. What each does, and raises, stands at `SyncUtilities`."""

    @abstractmethod
    async def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Run no more steps until `resume`; requests that arrive meanwhile wait. Returns when none runs any more."""
        await self.call_utility("pause", mode, clear_cache)

    async def resume(self) -> None:
        """Go on after `pause`, with what arrived meanwhile. Nothing happens unless the engine is paused."""
        await self.call_utility("resume")

    async def is_paused(self) -> bool:
        """Whether no steps are run, because of `pause` or `sleep`."""
        return bool(await self.call_utility("is_paused"))

    async def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
        """Run no more steps and give memory back until `wake_up`; requests that arrive meanwhile wait."""
        await self.call_utility("sleep", level, mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `sleep` gave away; when nothing is missing any more, steps are run again (unless paused)."""
        await self.call_utility("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether something that `sleep` gave away is still missing."""
        return bool(await self.call_utility("is_sleeping"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        _check_no_connector(reset_connector)
        name = "reset_running_requests" if reset_running_requests else "reset_prefix_cache"
        return bool(await self.call_utility(name))

    async def collective_rpc(
        self,
        method: WorkerMethod,
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name; the workers keep to it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or a function that takes the worker first, on every worker; results by rank."""
        return list(await self.call_utility("collective_rpc", method, timeout, args, kwargs))

    async def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call `function` with each worker's model (its shard, a torch module); results by rank."""
        return await self.collective_rpc(apply_to_model, args=(function,))

    async def check_admission(self, num_requests: int = 1) -> None:
        """Raise QueueFullError if so many more requests would not be queued now."""
        await self.call_utility("check_admission", num_requests)

    async def execute_dummy_batch(self) -> None:
        """Run one forward pass on a token of nobody, on every worker."""
        await self.call_utility("execute_dummy_batch")

    async def start_profile(
        self, prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0
    ) -> None:
        """Record what workers compute with torch's profiler, until `stop_profile`."""
        await self.call_utility("profile", True, prefix, delay_iterations, max_iterations)

    async def stop_profile(self) -> list[str]:
        """Write the traces, for Perfetto or chrome://tracing; their paths by rank, each on its worker's node."""
        return list(await self.call_utility("profile", False))

    async def update_config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Change engine options while it runs: all of these, or none. Returns those that can be changed."""
        return dict(await self.call_utility("update_config", dict(overrides)))
