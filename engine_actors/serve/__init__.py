"""The OpenAI-compatible HTTP server. `create_app` makes an ASGI app over running engines; the rest is for Ray Serve.

`serve run` finds `engine_actors.serve:build_openai_app` here. Ray Serve is imported on first use of what needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine_actors.serve.app import create_app
from engine_actors.serve.models import ServedModel
from engine_actors.serve.settings import ServerSettings

if TYPE_CHECKING:
    from engine_actors.serve.builder import build_llm_deployment, build_openai_app
    from engine_actors.serve.deployment import LLMServer
    from engine_actors.serve.llm_config import LLMConfig

__all__ = [
    "LLMConfig",
    "LLMServer",
    "ServedModel",
    "ServerSettings",
    "build_llm_deployment",
    "build_openai_app",
    "create_app",
]

_LAZY = {
    "LLMConfig": "llm_config",
    "LLMServer": "deployment",
    "build_llm_deployment": "builder",
    "build_openai_app": "builder",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
