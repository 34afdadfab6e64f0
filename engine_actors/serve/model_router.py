"""`ModelRouter`: the ingress of an application with several models. It reads a request's `model` and relays the rest.

Each model is a deployment of its own (`LLMServer`), scaled and replaced by itself; this one only passes bytes on, and
puts together what concerns all models: /v1/models, /health, /metrics, /status. Made by `builder.build_openai_app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from engine_actors.metrics import HttpMetrics
from engine_actors.serve.app import raise_as_api_error
from engine_actors.serve.errors import APIError, BadRequest, shown, to_api_error
from engine_actors.serve.http import ClientDisconnected, Receive, Scope, Send, read_body, send_error, until_disconnect
from engine_actors.serve.llm_config import LLMConfig
from engine_actors.serve.merge import merged_answer
from engine_actors.serve.middleware import ServerMiddleware
from engine_actors.serve.options import check_keys
from engine_actors.serve.resources import REPLICA_ENV, RETRY_AFTER_S
from executors.niceness import undo_ray_niceness

RELAYED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
"""Paths whose body names the model."""
MERGED = {
    "/v1/models": "GET",
    "/health": "GET",
    "/ping": "GET",
    "/metrics": "GET",
    "/metrics/": "GET",
    "/load": "GET",
    "/status": "GET",
    "/reset_prefix_cache": "POST",
    "/abort_requests": "POST",
}
"""Paths that concern all models; a replica of each is asked."""
OF_ANY_MODEL = ("/version", "/")
ROUTER_KEYS = (
    "num_replicas",
    "ray_actor_options",
    "max_ongoing_requests",
    "max_queued_requests",
    "backpressure_config",
    "autoscaling_config",
    "graceful_shutdown_timeout_s",
    "logging_config",
)
FORWARDED = (
    "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server"
)  # fmt: skip


class _Named(msgspec.Struct):
    """All a router wants to know of a body."""

    model: Any = None


class ModelRouter:
    """A replica of the router.

    Args:
        handles: Of the models' deployments, by model id.
        aliases: More names of each.
        max_body_bytes: Larger bodies are refused with 413.
    """

    def __init__(self, handles: Mapping[str, Any], aliases: Mapping[str, Sequence[str]], max_body_bytes: int) -> None:
        undo_ray_niceness()
        self._handles = dict(handles)
        self._max_body_bytes = max_body_bytes
        self._ids = {name: model_id for model_id in handles for name in (model_id, *aliases.get(model_id, ()))}

    def __serve_build_asgi_app__(self) -> Any:
        app = FastAPI(title="Engine Actors", redirect_slashes=False)
        asgi: list[Route] = [Route(path, _Endpoint(self._by_body), methods=["POST"]) for path in RELAYED]
        asgi += [Route(path, _Endpoint(self._merged), methods=[method]) for path, method in MERGED.items()]
        asgi += [Route(path, _Endpoint(self._of_any), methods=["GET"]) for path in OF_ANY_MODEL]
        asgi += [Route("/v1/models/{name:path}", _Endpoint(self._by_path), methods=["GET"])]
        app.router.routes.extend(asgi)
        app.add_exception_handler(HTTPException, raise_as_api_error)
        paths = [route.path for route in asgi]
        # Keys are the models' own to check: every call carries the client's headers.
        app.add_middleware(ServerMiddleware, api_keys=(), metrics=HttpMetrics(), paths=paths, echo_request_id=False)
        return app

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes)
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except msgspec.MsgspecError:
            name = next(iter(self._handles))  # any model says best what is wrong with the body
        handle = self._handles[self._find(name)]
        await until_disconnect(receive, self._relay(handle, scope, body, send))

    async def _by_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        model_id = self._find(name if name in self._ids else name.replace("--", "/"))
        await self._relay(self._handles[model_id], scope, b"", send)

    async def _of_any(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relay(next(iter(self._handles.values())), scope, b"", send)

    async def _merged(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes)
        forwarded = _forwarded(scope)
        answers = await asyncio.gather(*(handle.answer.remote(forwarded, body) for handle in self._handles.values()))
        for message in merged_answer(forwarded["path"], answers):
            await send(message)

    async def _relay(self, handle: Any, scope: Scope, body: bytes, send: Send) -> None:
        batches = handle.options(stream=True).relay.remote(_forwarded(scope), body)
        try:
            async for batch in batches:
                for message in batch:
                    await send(message)
        except asyncio.CancelledError:
            batches.cancel()
            raise

    def _find(self, name: Any) -> str:
        if not name:
            raise BadRequest(f"model must name one of {', '.join(self._ids)}; it is missing", "model")
        model_id = self._ids.get(name) if isinstance(name, str) else None
        if model_id is None:
            known = ", ".join(f"`{each}`" for each in self._ids)
            raise APIError(404, f"The model {shown(name)} does not exist. Valid names: {known}", "model")
        return model_id


class _Endpoint:
    """A handler as an ASGI app (Starlette calls plain functions with a Request). Serve's own errors become 503s."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting_send(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._handler(scope, receive, noting_send)
        except ClientDisconnected:
            return
        except (APIError, HTTPException):
            raise
        except Exception as error:
            if begun:
                raise
            state = scope.setdefault("state", {})
            await send_error(send, _unavailable(error) or to_api_error(error, str(state.get("request_id"))))


def router_options(configs: Sequence[LLMConfig], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the router's deployment."""
    check_keys(given, ROUTER_KEYS, "args.ingress_deployment_config")
    actor = dict(given.get("ray_actor_options") or {})
    environment = dict(actor.pop("runtime_env", None) or {})
    environment["env_vars"] = {**REPLICA_ENV, **(environment.get("env_vars") or {})}
    return {
        "name": "ModelRouter",
        "max_ongoing_requests": 10_000,
        "max_queued_requests": 10_000,
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": 600.0,
        **{name: value for name, value in given.items() if value is not None},
        "ray_actor_options": {"num_cpus": 0, **actor, "runtime_env": environment},
    }


def _forwarded(scope: Scope) -> dict[str, Any]:
    """What of a scope can cross to another process, with the request's id among its headers."""
    forwarded = {name: scope[name] for name in FORWARDED if name in scope}
    headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    request_id = scope.get("state", {}).get("request_id")
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1")))
    prefix = scope.get("root_path", "")
    forwarded["path"] = scope["path"].removeprefix(prefix) or "/"
    forwarded["headers"] = headers
    return forwarded


def _unavailable(error: Exception) -> APIError | None:
    """Serve's ways to say that a model has no replica that can take a request now."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    if isinstance(error, (BackPressureError, DeploymentUnavailableError, RayActorError)):
        return APIError(503, "The model has no replica free or ready; try again")
    return None
