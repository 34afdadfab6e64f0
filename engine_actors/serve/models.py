"""A served model: its names, its engine, and what requests need to know of it. Made by the CLI and the deployment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_actors.engine_metrics import EngineMetrics
from engine_actors.serve.chat_template import ChatTemplate
from engine_actors.serve.errors import APIError, BadRequest, shown
from engine_actors.serve.generation import EngineClient
from engine_actors.serve.prompts import PromptLimits
from engine_actors.serve.settings import ServerSettings
from engine_actors.serve.tokenization import Tokenization
from scheduler.sampling_params import SamplingParams

OWNER = "engine-actors"
DEFAULT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling defaults that a model's generation_config.json may set."""


@dataclass(slots=True)
class ServedModel:
    """One model behind the API.

    Attributes:
        names: Requests may use any; the first is reported.
        llm: `AsyncLLM`, or something that behaves like it.
        tokenization, template, limits: For requests' prompts.
        metrics: Where its figures go.
        defaults: Sampling defaults of the model, by field of SamplingParams.
        server_max_tokens: No request generates more; None is no limit.
        root: Where the model came from, for /v1/models.
    """

    names: tuple[str, ...]
    llm: EngineClient
    tokenization: Tokenization
    template: ChatTemplate
    limits: PromptLimits
    metrics: EngineMetrics
    defaults: Mapping[str, Any] = field(default_factory=dict)
    server_max_tokens: int | None = None
    root: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def build(
        names: Sequence[str],
        llm: EngineClient,
        tokenizer: Any,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        settings: ServerSettings | None = None,
        chat_template: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        server_max_tokens: int | None = None,
        root: str | None = None,
        cache_config: Mapping[str, Any] | None = None,
    ) -> ServedModel:
        """A model from its parts.

        Args:
            tokenizer: A transformers tokenizer.
            max_model_len: Prompt and output, tokens.
            vocab_size: The model's; the tokenizer's when None.
            chat_template: Replaces the tokenizer's own.
            cache_config: Facts for the metric `cache_config_info`.
        """
        if not names or any(not isinstance(name, str) or not name for name in names):
            raise ValueError(f"names must hold at least one non-empty string, got {names!r}")
        settings = settings or ServerSettings()
        tokenization = Tokenization(tokenizer)
        return ServedModel(
            names=tuple(names),
            llm=llm,
            tokenization=tokenization,
            template=ChatTemplate(tokenization, chat_template),
            limits=PromptLimits(max_model_len, vocab_size or tokenization.size, settings.max_prompts),
            metrics=EngineMetrics(names[0], max_model_len, cache_config=cache_config),
            defaults=dict(defaults or {}),
            server_max_tokens=server_max_tokens,
            root=root,
        )

    @staticmethod
    def from_async_llm(
        llm: Any,
        names: Sequence[str],
        settings: ServerSettings | None = None,
        chat_template: str | None = None,
    ) -> ServedModel:
        """A model served by an `engine_actors.AsyncLLM`, whose config, tokenizer and defaults it takes."""
        processor, config = llm.input_processor, llm.config
        default: SamplingParams = llm.get_default_sampling_params()
        plain = SamplingParams()
        defaults = {
            name: getattr(default, name)
            for name in DEFAULT_FIELDS
            if name in SamplingParams.__struct_fields__ and getattr(default, name) != getattr(plain, name)
        }
        model = ServedModel.build(
            names,
            llm,
            llm.get_tokenizer(),
            max_model_len=processor.max_model_len,
            vocab_size=processor.vocab_size,
            settings=settings,
            chat_template=chat_template,
            defaults=defaults,
            server_max_tokens=default.max_tokens if default.max_tokens != plain.max_tokens else None,
            root=config.model_config.model,
            cache_config=_cache_facts(llm),
        )
        llm.add_stats_listener(model.metrics.observe_stats)
        model.metrics.recovery = llm.recovery_stats
        return model

    def card(self, name: str | None = None) -> dict[str, Any]:
        """Its entry in /v1/models."""
        name = name or self.names[0]
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": OWNER,
            "root": self.root or name,
            "parent": None,
            "max_model_len": self.limits.max_model_len,
            "permission": [
                {
                    "id": f"modelperm-{name}",
                    "object": "model_permission",
                    "created": self.created,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }


def _cache_facts(llm: Any) -> dict[str, Any]:
    """For the metric `cache_config_info`, under vLLM's names."""
    cache, capacity = llm.config.cache_config, llm.client.info.capacity
    return {
        "block_size": cache.block_size,
        "num_gpu_blocks": capacity.num_blocks,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "cache_dtype": cache.cache_dtype,
    }


class ServedModels:
    """All models of one server, by name.

    Raises:
        ValueError: There is none, or two share a name.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        if not models:
            raise ValueError("at least one model must be served")
        self._models = list(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise ValueError(f"two models are named {name!r}")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def get(self, name: str | None) -> ServedModel:
        """The model a request means; a request without a name means the only one.

        Raises:
            APIError: 404, there is none of that name. 400, there are several and none is named.
        """
        if not name and len(self._models) == 1:
            return self._models[0]
        if not name:
            raise BadRequest(f"model must name one of {', '.join(self._by_name)}; it is missing", "model")
        model = self._by_name.get(name)
        if model is None:
            known = ", ".join(f"`{each}`" for each in self._by_name)
            raise APIError(404, f"The model {shown(name)} does not exist. Valid names: {known}", "model")
        return model
