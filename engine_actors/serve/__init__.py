"""The OpenAI-compatible HTTP server. `create_app` makes an ASGI app over running engines."""

from engine_actors.serve.app import create_app
from engine_actors.serve.models import ServedModel
from engine_actors.serve.settings import ServerSettings

__all__ = ["ServedModel", "ServerSettings", "create_app"]
