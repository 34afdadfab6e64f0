"""Every route that does not generate: models, tokens, health, metrics, administration, status. Used by app.py."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_actors.errors import EngineDeadError, EngineStartupError, ExecutorFailedError
from engine_actors.metrics import ServerMetrics
from engine_actors.serve.decode import decode_json, to_struct
from engine_actors.serve.endpoints import ServerState
from engine_actors.serve.errors import RETRY_AFTER_S, APIError, BadRequest
from engine_actors.serve.http import ClientDisconnected, check_json_content_type, read_body
from engine_actors.serve.models import ServedModel
from engine_actors.serve.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from engine_actors.serve.rates import Rates
from engine_actors.serve.tokenization import check_token_ids

PATH_SETTINGS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file")
"""Settings of tokenizers that hold paths of this machine."""
T = TypeVar("T", bound=msgspec.Struct)


def package_version() -> str:
    """The installed version of this project."""
    try:
        return version("engine-actors")
    except PackageNotFoundError:
        return "unknown"


class JSON(Response):
    """A JSON response by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Routes:
    """The handlers, each `async (Request) -> Response`."""

    def __init__(self, state: ServerState, metrics: ServerMetrics) -> None:
        self._models = state.models
        self._settings = state.settings
        self._inflight = state.inflight
        self._metrics = metrics
        self._rates = Rates(model.metrics for model in state.models)
        self._page = files("engine_actors.serve").joinpath("status.html").read_bytes()
        self._started_s = time.monotonic()

    # Models and tokens

    async def list_models(self, request: Request) -> Response:
        return JSON({"object": "list", "data": [model.card(name) for model in self._models for name in model.names]})

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            model = self._models.get(name)
        except APIError:
            name = name.replace("--", "/")  # how ray.serve.llm writes names in paths
            model = self._models.get(name)
        return JSON(model.card(name))

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        model = self._models.get(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("tokenize needs either prompt or messages", "prompt")
        if body.messages is not None:
            if body.chat_template is not None and not self._settings.trust_request_chat_template:
                raise BadRequest("chat_template is not accepted from requests", "chat_template")
            text = await model.template.render(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                kwargs=body.chat_template_kwargs,
                template=body.chat_template,
            )
            add_special_tokens = bool(body.add_special_tokens)
        else:
            text = body.prompt or ""
            add_special_tokens = body.add_special_tokens is not False
        token_ids = await model.tokenization.encode(text, add_special_tokens)
        strings = [model.tokenization.raw_token(token) for token in token_ids] if body.return_token_strs else None
        return JSON(
            {
                "count": len(token_ids),
                "max_model_len": model.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        model = self._models.get(body.model)
        if body.tokens is None:
            raise BadRequest("tokens must be a list of token ids, it is missing", "tokens")
        check_token_ids(body.tokens, max(model.limits.vocab_size, model.tokenization.size), "tokens")
        return JSON({"prompt": await model.tokenization.decode(body.tokens, False)})

    async def tokenizer_info(self, request: Request) -> Response:
        model = self._models.get(request.query_params.get("model"))
        tokenizer = model.tokenization.tokenizer
        settings = getattr(tokenizer, "init_kwargs", {})
        info = {key: value for key, value in settings.items() if _is_plain(value) and key not in PATH_SETTINGS}
        named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = model.template.source
        return JSON({**info, **named, "tokenizer_class": type(tokenizer).__name__, "chat_template": template})

    # Health and load

    async def health(self, request: Request) -> Response:
        try:
            await asyncio.gather(*(model.llm.check_health() for model in self._models))
        except (EngineDeadError, EngineStartupError, ExecutorFailedError):
            return Response(status_code=503, headers={"Retry-After": str(RETRY_AFTER_S[503])})
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=None, headers={"Content-Type": self._metrics.content_type})

    async def version(self, request: Request) -> Response:
        return JSON({"version": package_version()})

    async def load(self, request: Request) -> Response:
        return JSON({"server_load": len(self._inflight)})

    # Administration

    async def reset_prefix_cache(self, request: Request) -> Response:
        done = await asyncio.gather(*(model.llm.reset_prefix_cache() for model in self._models))
        return JSON({"success": all(done)})

    async def abort_requests(self, request: Request) -> Response:
        body = await self._read_raw(request)
        wanted = to_struct(decode_json(body), AbortRequest) if body.strip() else AbortRequest()
        return JSON({"aborted": await self._inflight.abort(wanted.request_ids)})

    # The status page

    async def status_page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8")

    async def status(self, request: Request) -> Response:
        """What the page shows."""
        now_s = time.monotonic()
        return JSON(
            {
                "version": package_version(),
                "uptime_s": round(now_s - self._started_s, 1),
                "models": [self._describe(model) for model in self._models],
                "requests": [each.describe(now_s) for each in self._inflight],
            }
        )

    def _describe(self, model: ServedModel) -> dict[str, Any]:
        metrics = model.metrics
        prompt_rate, generation_rate = self._rates.of(metrics)
        return {
            "names": model.names,
            "max_model_len": model.limits.max_model_len,
            "healthy": not model.llm.errored,
            "running": metrics.stats.num_running,
            "waiting": metrics.stats.num_waiting,
            "kv_cache_usage": metrics.stats.kv_cache_usage,
            "prefix_cache_queries": metrics.prefix_cache_queries,
            "prefix_cache_hits": metrics.prefix_cache_hits,
            "preemptions": metrics.num_preemptions,
            "prompt_tokens_per_s": prompt_rate,
            "generation_tokens_per_s": generation_rate,
            "prompt_tokens": metrics.num_prompt_tokens,
            "generation_tokens": metrics.num_generated_tokens,
            "finished": metrics.finished,
        }

    async def _read(self, request: Request, kind: type[T]) -> T:
        check_json_content_type(request.scope)
        return to_struct(decode_json(await self._read_raw(request)), kind)

    async def _read_raw(self, request: Request) -> bytes:
        try:
            return await read_body(request.scope, request.receive, self._settings.max_body_bytes)
        except ClientDisconnected:
            raise BadRequest("the request body is incomplete") from None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
