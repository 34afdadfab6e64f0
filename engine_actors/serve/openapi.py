"""The OpenAPI document of the routes, from the protocol's structs. Served at /openapi.json and /docs by app.py."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_actors.serve.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_requests": AbortRequest,
}
_POSTS = {
    "/v1/completions": "Complete a prompt",
    "/v1/chat/completions": "Answer a conversation",
    "/tokenize": "Text or messages to token ids",
    "/detokenize": "Token ids to text",
    "/reset_prefix_cache": "Forget cached prefixes",
    "/abort_requests": "Abort requests in flight",
}
_GETS = {
    "/v1/models": "The served models",
    "/v1/models/{name}": "One model",
    "/health": "200 while the engine lives, else 503",
    "/ping": "Same as /health",
    "/metrics": "Prometheus metrics",
    "/version": "The server's version",
    "/load": "Requests in flight",
    "/status": "What the status page shows",
}


def openapi_document(title: str, version: str) -> dict[str, Any]:
    """The document. Request bodies are described; answers are OpenAI's."""
    names = {path: body.__name__ for path, body in _BODIES.items()}
    _, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for path, summary in _POSTS.items():
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Success"}}}
        if path in names:
            schema = {"$ref": f"#/components/schemas/{names[path]}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["post"] = operation
    for path, summary in _GETS.items():
        operation = {"summary": summary, "responses": {"200": {"description": "Success"}}}
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})["get"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
