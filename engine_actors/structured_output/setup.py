"""The `StructuredOutputManager` of an engine, made when its first request with structured output comes (core.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_actors.config import EngineConfig
from engine_actors.structured_output.manager import StructuredOutputManager
from engine_actors.structured_output.xgrammar_backend import XGrammarBackend
from executors.config import ModelConfig, ModelFacts


def make_manager(
    config: EngineConfig, eos_token_ids: Sequence[int], on_change: Callable[[], Any]
) -> StructuredOutputManager:
    """Returns at once: the compiler process starts with the first grammar.

    Args:
        eos_token_ids: What ends a text of this engine, as the front ends settled it.
        on_change: See StructuredOutputManager.

    Raises:
        ValueError: The engine has no tokenizer, or the model names no end-of-sequence token.
    """
    if config.skip_tokenizer_init:
        raise ValueError("structured_outputs need a tokenizer, but skip_tokenizer_init is set")
    model = config.model_config
    facts = model.facts or _read_facts(model)
    backend = XGrammarBackend(
        model.tokenizer or facts.model_dir,
        facts.vocab_size,
        eos_token_ids,
        trust_remote_code=model.trust_remote_code,
    )
    return StructuredOutputManager(backend, max_num_rows=config.scheduler_config.max_num_seqs, on_change=on_change)


def _read_facts(model: ModelConfig) -> ModelFacts:
    """For a config that no front end has resolved. Imports torch: seconds, in which an EngineCore runs no steps."""
    from executors.model_config import resolve_model_config

    resolved = resolve_model_config(model)
    return ModelFacts(str(resolved.model_dir), resolved.vocab_size)
