"""`LLMServer`: a Ray Serve deployment that serves one model. Its replica is the HTTP server and holds the engine.

Serve's proxy hands a request straight to the replica that generates; no other deployment lies between. EngineCore and
workers run in the replica's placement group and end with it. Made by `builder.build_llm_deployment`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine_actors.async_llm import AsyncLLM
from engine_actors.ray_places import place_of_this_process
from engine_actors.serve.app import create_app
from engine_actors.serve.asgi_call import Answer, call_app, whole_answer
from engine_actors.serve.llm_config import LLMConfig
from engine_actors.serve.models import ServedModel
from engine_actors.serve.ray_metrics import RayMetricsExporter
from executors.niceness import undo_ray_niceness

logger = logging.getLogger(__name__)


class LLMServer:
    """A replica.

    Args:
        config: The model.
        engine_options: What `resources.py` has decided: keyword arguments of `AsyncLLM` over those of the config.

    Raises:
        EngineStartupError, ValueError: The engine cannot start; Serve tries again and then reports it.
    """

    async def __init__(self, config: LLMConfig, engine_options: dict[str, Any]) -> None:  # type: ignore[misc]
        undo_ray_niceness()
        options = {**config.engine_options(), **engine_options}
        started_s = time.monotonic()
        # Loading takes seconds to minutes, in which Serve must be able to reach this actor.
        self._llm = await asyncio.to_thread(AsyncLLM, config.model_source, **options)
        logger.info("%s is ready after %.1f s", config.model_id, time.monotonic() - started_s)
        settings = config.options.settings
        names = [config.model_id, *config.model_loading_config.aliases]
        self._model = ServedModel.from_async_llm(self._llm, names, settings, config.options.chat_template)
        self._app = create_app([self._model], settings, behind_serve=True)
        self._exporter: RayMetricsExporter | None = None
        if config.log_engine_metrics:
            self._exporter = RayMetricsExporter(self._model.metrics, settings.enable_vllm_metric_names)
            self._exporter.start()

    def __serve_build_asgi_app__(self) -> Any:
        """What Serve sends HTTP requests to, when this is the ingress."""
        return self._app

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: health is the engine's."""
        await self._llm.check_health()

    async def describe(self) -> dict[str, Any]:
        """What `engine-actors serve` prints."""
        capacity = self._llm.client.info.capacity
        return {
            "names": list(self._model.names),
            "max_model_len": self._model.limits.max_model_len,
            "kv_capacity": str(capacity),
            "places": {"Replica": place_of_this_process(), **await self._llm.where()},
        }

    # For ModelRouter: the app, called through a deployment handle

    async def relay(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The app's answer, as lists of the ASGI messages there are. Closing it cancels the request."""
        async with aclosing(call_app(self._app, scope, body)) as batches:
            async for batch in batches:
                yield batch

    async def answer(self, scope: dict[str, Any], body: bytes) -> Answer:
        """The app's whole answer: status, headers, body."""
        return await whole_answer(self._app, scope, body)

    async def abort_all(self) -> int:
        """End every request in flight; how many."""
        return len(await self._app.state.inflight.abort(None))

    async def __del__(self) -> None:
        """Serve awaits it when the replica's streams have drained."""
        llm = getattr(self, "_llm", None)
        if self.__dict__.get("_exporter") is not None:
            self._exporter.stop()  # type: ignore[union-attr]
        if llm is not None:
            await llm.shutdown_async(0.0)
