"""`EngineConfig`: the packages' configs composed, and built from flat keyword arguments with vLLM's names.

Every way to start an engine (`LLM`, `AsyncLLM`, `Engine`, the command line) goes through `EngineConfig.from_kwargs`.
Importing it loads no torch: the EngineCore actor of a Ray executor never needs it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from executors.config import ModelConfig, ParallelConfig
from kv.config import CacheConfig
from scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from executors.base import Executor

ENGINE_CORES = ("actor", "inproc")
GENERATION_CONFIGS = ("auto", "vllm")
RECOVERIES = ("none", "replay")
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = 256
ALIASES = {"scheduling_policy": "policy", "kv_cache_dtype": "cache_dtype"}
"""vLLM's flat names where ours, inside their own config, are shorter."""

T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is started with. Build it with `from_kwargs`, which fills in what the model decides.

    Attributes:
        engine_core: "actor" (EngineCore in a Ray actor of its own) or "inproc" (in the caller's process).
        generation_config: "auto" takes default sampling parameters and end-of-sequence ids from the model's
            generation_config.json as well; "vllm" ignores that file.
        max_logprobs: Most log-probabilities per token a request may ask for; -1 is no limit.
        skip_tokenizer_init: Work on token ids only; text prompts, text outputs and stop strings are then refused.
        shutdown_timeout_s: At shutdown, let requests in flight run on for up to so long; 0 aborts them.
        recovery: "none": a failure ends the engine, and every call raises EngineDeadError. "replay": workers that fail,
            or EngineCore itself, are started anew and every unfinished request goes on where it was. Needs
            engine_core="actor".
        recovery_timeout_s: From a failure until the engine works again, waiting for resources included; then it ends.
        max_recovery_attempts: Starts of new workers, or of a new EngineCore, that may fail in a row.
        executor_class: An `executors.base.Executor` class of your own instead of distributed_executor_backend's.
    """

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    engine_core: str = "actor"
    generation_config: str = "auto"
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    shutdown_timeout_s: float = 0.0
    recovery: str = "none"
    recovery_timeout_s: float = 300.0
    max_recovery_attempts: int = 3
    executor_class: Callable[..., Executor] | None = None

    def __post_init__(self) -> None:
        if self.engine_core not in ENGINE_CORES:
            raise ValueError(f"engine_core must be one of {ENGINE_CORES}, got {self.engine_core!r}")
        if self.generation_config not in GENERATION_CONFIGS:
            raise ValueError(f"generation_config must be one of {GENERATION_CONFIGS}, got {self.generation_config!r}")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs must be at least 0, or -1 (no limit), got {self.max_logprobs!r}")
        if not self.shutdown_timeout_s >= 0:
            raise ValueError(f"shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s!r}")
        if self.recovery not in RECOVERIES:
            raise ValueError(f"recovery must be one of {RECOVERIES}, got {self.recovery!r}")
        if self.replays and self.engine_core == "inproc":
            raise ValueError(
                "recovery='replay' needs engine_core='actor': an EngineCore in the caller's process cannot start anew"
            )
        if not self.recovery_timeout_s > 0:
            raise ValueError(f"recovery_timeout_s must be positive, got {self.recovery_timeout_s!r}")
        if self.max_recovery_attempts < 1:
            raise ValueError(f"max_recovery_attempts must be at least 1, got {self.max_recovery_attempts!r}")
        if self.scheduler_config.async_scheduling and self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                f"async_scheduling=True cannot be combined with pipeline_parallel_size "
                f"{self.parallel_config.pipeline_parallel_size}: earlier stages would have to start a token's step "
                f"before the last stage has sampled it; allowed are False and None"
            )
        if self.model_config.quantization is not None and self.parallel_config.device == "cuda":
            raise ValueError(
                f"quantization {self.model_config.quantization!r} is for the CPU; it cannot be combined with "
                f"device 'cuda'"
            )
        if self.executor_class is not None and not callable(self.executor_class):
            raise ValueError(f"executor_class must be an Executor class, got {self.executor_class!r}")

    @property
    def uses_ray_executor(self) -> bool:
        return self.executor_class is None and self.parallel_config.distributed_executor_backend == "ray"

    @property
    def replays(self) -> bool:
        return self.recovery == "replay"

    def with_runtime_options(self, options: dict[str, Any]) -> EngineConfig:
        """What `update_config` has changed in the engine, for its front end."""

        def changed(config: Any) -> Any:
            names = {field.name for field in fields(config)}
            return replace(config, **{name: value for name, value in options.items() if name in names})

        return replace(
            self, scheduler_config=changed(self.scheduler_config), parallel_config=changed(self.parallel_config)
        )

    @staticmethod
    def from_kwargs(model: str, **kwargs: Any) -> EngineConfig:
        """Compose a config from flat keyword arguments: the fields of the four configs and of this one.

        The model's config.json is read: it decides `max_model_len` unless given, and which layouts are possible.

        Raises:
            TypeError: An unknown keyword; the text names close matches.
            ValueError: A wrong value, an impossible combination, or an unusable model folder.
        """
        options = _check_names({ALIASES.get(name, name): value for name, value in kwargs.items()})
        model_config = _build(ModelConfig, {"model": str(model), **options})
        parallel_config = _build(ParallelConfig, options)

        from executors.model_config import check_parallel, resolve_model_config, with_resolution

        resolved = resolve_model_config(model_config)
        check_parallel(resolved, parallel_config.tensor_parallel_size, parallel_config.pipeline_parallel_size)
        config = EngineConfig(
            model_config=with_resolution(resolved),
            cache_config=_build(CacheConfig, options),
            scheduler_config=_scheduler_config(options, resolved.max_model_len),
            parallel_config=parallel_config,
            **{name: _convert(name, options[name], hint) for name, hint in _OWN_FIELDS.items() if name in options},
        )
        return config._with_async_scheduling_decided()

    def _with_async_scheduling_decided(self) -> EngineConfig:
        """Left open, it is on where steps cross to worker actors and nobody must be told sampled tokens.

        There it hides the call: on a two-layer toy model (benchmarks/machinery.py) a step takes about half the time.
        """
        if self.scheduler_config.async_scheduling is not None:
            return self
        wins = self.uses_ray_executor and self.parallel_config.pipeline_parallel_size == 1
        return replace(self, scheduler_config=replace(self.scheduler_config, async_scheduling=wins))

    def with_max_model_len(self, max_model_len: int) -> EngineConfig:
        """The same, for the length that start-up settled on."""
        return replace(self, scheduler_config=replace(self.scheduler_config, max_model_len=max_model_len))


_CONFIGS = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)
_OWN_FIELDS: dict[str, Any] = {
    "engine_core": str,
    "generation_config": str,
    "max_logprobs": int,
    "skip_tokenizer_init": bool,
    "shutdown_timeout_s": float,
    "recovery": str,
    "recovery_timeout_s": float,
    "max_recovery_attempts": int,
    "executor_class": Any,
}


def option_names() -> list[str]:
    """Every keyword `EngineConfig.from_kwargs` takes, besides `model`."""
    names = {field.name for config in _CONFIGS for field in fields(config)} - {"model", "resolved", "facts"}
    return sorted(names | set(_OWN_FIELDS) | set(ALIASES))


def _check_names(options: dict[str, Any]) -> dict[str, Any]:
    known = option_names()
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known are {', '.join(known)}"
            raise TypeError(f"unknown engine option {name!r}{hint}")
    return options


def _build(config: type[T], options: dict[str, Any]) -> T:
    """The config from its own share of the options, each checked against the field's type."""
    hints = get_type_hints(config)
    values = {}
    for field in fields(config):  # type: ignore[arg-type]
        if field.name in options:
            values[field.name] = _convert(field.name, options[field.name], hints[field.name])
    return config(**values)


def _convert(name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        expected = getattr(hint, "__name__", None) or str(hint)
        raise ValueError(f"{name} must be of type {expected}, got {value!r}") from error


def _scheduler_config(options: dict[str, Any], max_model_len: int) -> SchedulerConfig:
    """Fill in the token budget and the number of rows so that they agree with each other and with the model."""
    options = {**options, "max_model_len": max_model_len}
    if options.get("max_num_batched_tokens") is None:
        needed = [DEFAULT_MAX_NUM_BATCHED_TOKENS]
        if options.get("enable_chunked_prefill") is False:
            needed.append(max_model_len)
        if isinstance(options.get("max_num_seqs"), int):
            needed.append(options["max_num_seqs"])
        options["max_num_batched_tokens"] = max(needed)
    if options.get("max_num_seqs") is None:
        budget = options["max_num_batched_tokens"]
        options["max_num_seqs"] = min(DEFAULT_MAX_NUM_SEQS, budget) if isinstance(budget, int) else DEFAULT_MAX_NUM_SEQS
    return _build(SchedulerConfig, options)
