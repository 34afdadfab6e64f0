"""The generation endpoints as ASGI apps: body → checked job → answer or stream. Who leaves, aborts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from engine_actors.errors import EngineDeadError, QueueFullError
from engine_actors.serve.chat import prepare_chat
from engine_actors.serve.completions import prepare_completion
from engine_actors.serve.decode import decode_json, to_struct
from engine_actors.serve.errors import APIError, to_api_error
from engine_actors.serve.http import (
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    check_json_content_type,
    header,
    read_body,
    send_json,
    until_disconnect,
)
from engine_actors.serve.inflight import InflightRequests
from engine_actors.serve.job import Job, RequestInfo
from engine_actors.serve.models import ServedModel, ServedModels
from engine_actors.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from engine_actors.serve.settings import ServerSettings
from engine_actors.serve.sse import EventStream

MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True)
class ServerState:
    """What all routes share."""

    models: ServedModels
    settings: ServerSettings
    inflight: InflightRequests


class GenerationEndpoint(ABC):
    """One generation route."""

    request_type: type[GenerationRequest]
    id_prefix: str

    def __init__(self, state: ServerState) -> None:
        self._models = state.models
        self._settings = state.settings
        self._inflight = state.inflight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_json_content_type(scope)
        try:
            body = await read_body(scope, receive, self._settings.max_body_bytes)
        except ClientDisconnected:
            return
        await until_disconnect(receive, self._answer(scope, body, send))

    @abstractmethod
    async def _prepare(self, request: Any, info: RequestInfo, model: ServedModel) -> Job:
        """Check the request."""

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        request = to_struct(decode_json(body), self.request_type)
        del body
        model = self._models.get(request.model)
        info = self._identify(scope, request)
        renamed: dict[str, str] = {}
        try:
            if model.llm.errored:
                raise EngineDeadError("the engine has failed")
            job = await self._prepare(request, info, model)
            renamed.update(job.renamed)
            with self._inflight.tracked(job.generation.record):
                if request.stream:
                    await self._stream(job, send)
                    return
                async with asyncio.timeout(self._settings.request_timeout_s):
                    response = await job.response()
            await send_json(send, response)
        except Exception as error:
            raise self._told(error, info, model, renamed) from error

    async def _stream(self, job: Job, send: Send) -> None:
        def to_error(error: Exception) -> APIError:
            return self._told(error, job.info, job.model, dict(job.renamed))

        settings = self._settings
        stream = EventStream(job.events(), to_error, settings.first_output_wait_s, settings.sse_keep_alive_s)
        await stream.run(send)

    def _told(self, error: Exception, info: RequestInfo, model: ServedModel, renamed: dict[str, str]) -> APIError:
        if isinstance(error, QueueFullError):
            model.metrics.observe_rejection("queue_full")
        elif isinstance(error, EngineDeadError):
            model.metrics.observe_rejection("engine_dead")
        return to_api_error(error, info.external_id, renamed)

    def _identify(self, scope: Scope, request: GenerationRequest) -> RequestInfo:
        """The header's id, else the body's, else a new one; the middleware echoes it."""
        state = scope["state"]
        external_id = state.get("request_id") or _clean_id(request.request_id) or uuid4().hex
        state["request_id"] = external_id
        return RequestInfo(self.id_prefix + external_id, external_id, header(scope, b"x-vllm-priority"))


class CompletionsEndpoint(GenerationEndpoint):
    """POST /v1/completions."""

    request_type = CompletionRequest
    id_prefix = "cmpl-"

    async def _prepare(self, request: CompletionRequest, info: RequestInfo, model: ServedModel) -> Job:
        return await prepare_completion(request, info, model, self._settings)


class ChatEndpoint(GenerationEndpoint):
    """POST /v1/chat/completions."""

    request_type = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    async def _prepare(self, request: ChatCompletionRequest, info: RequestInfo, model: ServedModel) -> Job:
        return await prepare_chat(request, info, model, self._settings)


def _clean_id(request_id: str | None) -> str | None:
    return request_id if request_id and is_usable_id(request_id) else None


def is_usable_id(request_id: str) -> bool:
    """Whether an id may go into headers, logs and engine ids as it is."""
    return len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()
