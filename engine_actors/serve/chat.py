"""POST /v1/chat/completions: the request checked and its prompt rendered. Run by endpoints.py."""

from __future__ import annotations

from engine_actors.serve.chat_job import ChatJob
from engine_actors.serve.errors import BadRequest, bad_value
from engine_actors.serve.generation import Generation
from engine_actors.serve.inflight import InflightRequest
from engine_actors.serve.job import RequestInfo, StreamShape
from engine_actors.serve.models import ServedModel
from engine_actors.serve.params import (
    check_stream_options,
    effective_priority,
    effective_stream_interval,
    fit_to_prompt,
    sampling_params,
)
from engine_actors.serve.prompts import to_prompt
from engine_actors.serve.protocol import ChatCompletionRequest
from engine_actors.serve.settings import ServerSettings
from engine_actors.serve.structured import Constraint, constraint
from engine_actors.serve.tool_parsers import HERMES_OPEN, PYTHON_TAG, detect_style
from engine_actors.serve.tools import ToolChoice, ToolUse, tool_use
from scheduler.sampling_params import SamplingParams


async def prepare_chat(
    request: ChatCompletionRequest, info: RequestInfo, model: ServedModel, settings: ServerSettings
) -> ChatJob:
    """Check everything about a request, and render its prompt.

    Raises:
        BadRequest: Naming the field at fault.
    """
    include_usage, usage_in_each_chunk = check_stream_options(request)
    tools = tool_use(request, settings.max_tools)
    style = _tool_style(tools, model, settings)
    if request.chat_template is not None and not settings.trust_request_chat_template:
        raise BadRequest(
            "chat_template is not accepted from requests unless the server runs with --trust-request-chat-template",
            "chat_template",
        )
    limit = constraint(request, tools)
    params = _params(request, model, settings, limit, _shows_special_tokens(tools, style, model))
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    text = await model.template.render(
        request.messages or [],
        tools=tools.for_template(),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=template_kwargs,
        template=request.chat_template,
    )
    prompt = await to_prompt(text, request, model.tokenization, model.limits, add_special_tokens=False,
                             param="messages")  # fmt: skip
    params = fit_to_prompt(params, len(prompt.token_ids), model.limits, model.server_max_tokens, True)
    record = InflightRequest(info.request_id, info.external_id, "chat", model.names[0], bool(request.stream))
    priority = effective_priority(request, info.priority_header)
    generation = Generation(model.llm, [prompt], [params], priority, record, model.metrics.request_meter())
    shape = StreamShape(include_usage, usage_in_each_chunk, effective_stream_interval(request, settings))
    return ChatJob(request, info, model, generation, shape, tools, style, limit, text)


def _params(
    request: ChatCompletionRequest,
    model: ServedModel,
    settings: ServerSettings,
    limit: Constraint | None,
    shows_special_tokens: bool,
) -> SamplingParams:
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, field)
    if max_tokens is not None and max_tokens < 1:
        raise bad_value(field, max_tokens, "at least 1")
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.stream and request.prompt_logprobs:
        raise BadRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    return sampling_params(
        request,
        max_tokens=max_tokens,
        max_tokens_field=field,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logprobs_field="top_logprobs" if request.top_logprobs else "logprobs",
        prompt_logprobs=request.prompt_logprobs,
        constraint=limit,
        defaults=model.defaults,
        limits=model.limits,
        settings=settings,
        skip_special_tokens=False if shows_special_tokens else None,
    )


def _tool_style(tools: ToolUse, model: ServedModel, settings: ServerSettings) -> str:
    if settings.tool_call_parser in ("hermes", "llama3_json"):
        return settings.tool_call_parser
    if settings.tool_call_parser == "none" and tools.choice is ToolChoice.AUTO:
        raise BadRequest('tool_choice "auto" needs a tool call parser; the server runs with --tool-call-parser none',
                         "tool_choice")  # fmt: skip
    # A template without a place for tools gets them described in the hermes style.
    return detect_style(model.template.source) if model.template.knows_tools else "hermes"


def _shows_special_tokens(tools: ToolUse, style: str, model: ServedModel) -> bool:
    """Whether the marks around calls are special tokens, which would be left out of the text."""
    if tools.choice is not ToolChoice.AUTO:
        return False
    mark = HERMES_OPEN if style == "hermes" else PYTHON_TAG
    return mark in getattr(model.tokenization.tokenizer, "all_special_tokens", ())
