"""`create_app`: the OpenAI-compatible HTTP server as an ASGI app, over engines that run already.

    app = create_app([ServedModel.from_async_llm(llm, ["my-model"])], ServerSettings())

Run it with uvicorn, or as the ingress of a Ray Serve deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from engine_actors.metrics import ServerMetrics
from engine_actors.serve.endpoints import ChatEndpoint, CompletionsEndpoint, ServerState
from engine_actors.serve.errors import APIError
from engine_actors.serve.inflight import InflightRequests
from engine_actors.serve.middleware import ServerMiddleware
from engine_actors.serve.models import ServedModel, ServedModels
from engine_actors.serve.openapi import openapi_document
from engine_actors.serve.routes import Routes, package_version
from engine_actors.serve.settings import ServerSettings


def create_app(
    models: Sequence[ServedModel], settings: ServerSettings | None = None, *, behind_serve: bool = False
) -> FastAPI:
    """The app.

    Args:
        models: What it serves, at least one.
        behind_serve: Ray Serve is in front, which sends X-Request-Id back itself.

    Raises:
        ValueError: No model, or two of one name.
    """
    settings = settings or ServerSettings()
    state = ServerState(ServedModels(models), settings, InflightRequests())
    metrics = ServerMetrics((model.metrics for model in models), settings.enable_vllm_metric_names)
    routes = _routes(state, metrics)
    app = FastAPI(title="Engine Actors", version=package_version(), redirect_slashes=False)
    app.router.routes.extend(routes)
    app.openapi = lambda: openapi_document(app.title, app.version)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, raise_as_api_error)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    paths = [route.path for route in routes]
    app.add_middleware(
        ServerMiddleware,
        api_keys=settings.api_keys,
        metrics=metrics.http,
        paths=paths,
        echo_request_id=not behind_serve,
    )
    app.state.inflight = state.inflight
    return app


def _routes(state: ServerState, metrics: ServerMetrics) -> list[Route]:
    own = Routes(state, metrics)
    routes = [
        Route("/v1/completions", CompletionsEndpoint(state), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(state), methods=["POST"]),
        Route("/v1/models", own.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", own.retrieve_model, methods=["GET"]),
        Route("/tokenize", own.tokenize, methods=["POST"]),
        Route("/detokenize", own.detokenize, methods=["POST"]),
        Route("/health", own.health, methods=["GET"]),
        Route("/ping", own.health, methods=["GET", "POST"]),
        Route("/metrics", own.metrics, methods=["GET"]),
        Route("/metrics/", own.metrics, methods=["GET"]),
        Route("/version", own.version, methods=["GET"]),
        Route("/load", own.load, methods=["GET"]),
        Route("/reset_prefix_cache", own.reset_prefix_cache, methods=["POST"]),
        Route("/abort_requests", own.abort_requests, methods=["POST"]),
        Route("/status", own.status, methods=["GET"]),
        Route("/", own.status_page, methods=["GET"]),
    ]
    if state.settings.enable_tokenizer_info:
        routes.append(Route("/tokenizer_info", own.tokenizer_info, methods=["GET"]))
    return routes


async def raise_as_api_error(request: Any, error: Exception) -> Any:
    """Starlette's own 404 and 405: into the envelope, by way of the middleware."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = getattr(error, "headers", None)
    if status == 404:
        raise APIError(404, f"there is nothing at {request.url.path}; see /docs") from error
    if status == 405:
        allowed = (headers or {}).get("Allow", "")
        raise APIError(405, f"{request.method} is not allowed at {request.url.path}, use {allowed}", headers=headers)
    raise APIError(status, str(getattr(error, "detail", error)), headers=headers) from error
