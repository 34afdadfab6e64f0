"""Request bodies as typed structs. `None` always means "not given". Read by decode.py; checked further by params.py,
prompts.py and chat_template.py.

Unknown fields are ignored, as OpenAI's and vLLM's servers do, except those of `REFUSED_FIELDS`, whose silent loss would
change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

JsonObject = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share. Meanings are OpenAI's, then vLLM's."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[JsonObject] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    return_prompt_text: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_requests: the ids clients saw, or their X-Request-Id; without `request_ids`, all."""

    request_ids: list[str] | None = None


REFUSED_FIELDS: Mapping[str, str] = {
    "guided_json": 'use response_format or structured_outputs {"json": …}',
    "guided_regex": 'use structured_outputs {"regex": …}',
    "guided_choice": 'use structured_outputs {"choice": […]}',
    "guided_grammar": 'use structured_outputs {"grammar": …}',
    "guided_json_object": 'use response_format {"type": "json_object"}',
    "guided_decoding_backend": "the server chooses the back end",
    "guided_whitespace_pattern": 'use structured_outputs {"whitespace_pattern": …}',
    "structural_tag": 'use structured_outputs {"structural_tag": …}',
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "fill-in-the-middle completion is not offered",
    "prompt_embeds": "send text or token ids",
    "use_beam_search": "beam search is not offered over HTTP",
    "length_penalty": "it belongs to beam search, which is not offered over HTTP",
    "thinking_token_budget": "reasoning budgets are not offered",
    "repetition_detection": "it is not offered",
    "vllm_xargs": "per-request logits processor arguments are not offered",
    "kv_transfer_params": "KV transfer is not offered",
    "ec_transfer_params": "KV transfer is not offered",
    "watermarking": "it is not offered",
    "documents": "put the documents into the messages",
    "mm_processor_kwargs": "only text models are served",
    "media_io_kwargs": "only text models are served",
    "audio": "only text models are served",
    "web_search_options": "there is no web search",
}
"""Known fields that would change the answer and that this server does not act on: field → what to do instead."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "function_call": ("none",),
    "thinking_token_budget": (-1,),
}
"""Values of REFUSED_FIELDS that ask for nothing, besides null, false, {} and []."""
