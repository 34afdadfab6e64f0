"""Engine Actors: an LLM inference engine whose parts are Ray actors. The public names, each loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_actors.async_llm import AsyncLLM
    from engine_actors.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from engine_actors.config import EngineConfig
    from engine_actors.engine import Engine
    from engine_actors.errors import (
        EngineDeadError,
        EnginePausedError,
        EngineStartupError,
        ExecutorFailedError,
        InvalidRequestError,
        QueueFullError,
        RequestAbortedError,
        RequestFailedError,
    )
    from engine_actors.llm import LLM
    from engine_actors.llm_engine import LLMEngine
    from engine_actors.outputs import CompletionOutput, Logprob, RequestOutput
    from executors.logits_processors import LogitsProcessor
    from scheduler.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EnginePausedError",
    "EngineStartupError",
    "ExecutorFailedError",
    "InvalidRequestError",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "QueueFullError",
    "RequestAbortedError",
    "RequestFailedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

_MODULES = {
    "LLM": "engine_actors.llm",
    "AsyncLLM": "engine_actors.async_llm",
    "BeamSearchOutput": "engine_actors.beam_search",
    "BeamSearchParams": "engine_actors.beam_search",
    "BeamSearchSequence": "engine_actors.beam_search",
    "CompletionOutput": "engine_actors.outputs",
    "Engine": "engine_actors.engine",
    "EngineConfig": "engine_actors.config",
    "LLMEngine": "engine_actors.llm_engine",
    "LogitsProcessor": "executors.logits_processors",
    "Logprob": "engine_actors.outputs",
    "RequestOutput": "engine_actors.outputs",
    "RequestOutputKind": "scheduler.sampling_params",
    "SamplingParams": "scheduler.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "engine_actors.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
