"""A request's sampling fields → `SamplingParams`, everything checked that can be without the engine.

Called by completions.py and chat.py. Precedence of each value: request, then the model's defaults, then OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine_actors.serve.errors import BadRequest, bad_value, shown
from engine_actors.serve.prompts import PromptLimits
from engine_actors.serve.protocol import GenerationRequest
from engine_actors.serve.settings import ServerSettings
from engine_actors.serve.structured import Constraint
from engine_actors.serve.tokenization import check_token_ids
from scheduler.sampling_params import RequestOutputKind, SamplingParams

SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "min_tokens", "allowed_token_ids", "prompt_logprobs",
    "logprob_token_ids",
)  # fmt: skip
"""Fields whose name and meaning are those of SamplingParams."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "bad_words": ([],),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
}
"""Values that ask for nothing: accepted even when SamplingParams lacks the field."""
TOKEN_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
MAX_LOGIT_BIAS = 100.0
INT64 = (-(2**63), 2**63 - 1)
_LEADING_NAME = re.compile(r"^[a-z_]+")


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    logprobs_field: str,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
    defaults: Mapping[str, Any],
    limits: PromptLimits,
    settings: ServerSettings,
    skip_special_tokens: bool | None = None,
) -> SamplingParams:
    """The request's SamplingParams, `max_tokens` not yet cut to what its prompt leaves: see `fit_to_prompt`.

    Args:
        max_tokens: What the request asks for; None is the rest of the context.
        max_tokens_field, logprobs_field: The request's own names for it, for errors.
        logprobs, prompt_logprobs: Alternatives per generated and prompt token; None is none.
        defaults: The model's own sampling defaults.
        skip_special_tokens: Overrides the request.

    Raises:
        BadRequest: A value is out of range, or the engine does not offer the field.
    """
    _check_counts(request, settings)
    fields: dict[str, Any] = {name: value for name, value in defaults.items() if name in SAME_NAME}
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias, limits.vocab_size)
    for name in TOKEN_ID_FIELDS:
        if name in fields:
            check_token_ids(fields[name], limits.vocab_size, name)
    if request.allowed_token_ids == []:
        raise BadRequest("allowed_token_ids must not be empty", "allowed_token_ids")
    for name, field, value in (("logprobs", logprobs_field, logprobs), ("prompt_logprobs",) * 2 + (prompt_logprobs,)):
        if value is not None:
            _check_logprobs(field, value, settings, limits)
            fields[name] = value
        else:
            fields.pop(name, None)
    if not fields.get("logprob_token_ids"):
        fields.pop("logprob_token_ids", None)
    elif logprobs is None:
        raise BadRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
    elif logprobs == 0:
        del fields["logprobs"]  # Chat's `logprobs: true` alone.
    if constraint is not None:
        fields["structured_outputs"] = constraint.params
    if skip_special_tokens is not None:
        fields["skip_special_tokens"] = skip_special_tokens
    if max_tokens is not None and max_tokens > limits.max_model_len:
        raise bad_value(max_tokens_field, max_tokens, f"at most the model's context length {limits.max_model_len}")
    stream_interval = effective_stream_interval(request, settings)
    if stream_interval > 1 and "stream_interval" in SamplingParams.__struct_fields__:
        fields["stream_interval"] = stream_interval
    fields["max_tokens"] = max_tokens
    fields["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    _refuse_missing(fields, {"logprobs": logprobs_field, "structured_outputs": constraint.param if constraint else ""})
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise _renamed(error, {"max_tokens": max_tokens_field, "logprobs": logprobs_field}) from error


def fit_to_prompt(params: SamplingParams, num_prompt_tokens: int, limits: PromptLimits, server_max: int | None,
                  is_last: bool) -> SamplingParams:  # fmt: skip
    """`params` with max_tokens cut to what the prompt leaves of the context, and to the server's own limit.

    Args:
        is_last: Nobody needs `params` afterwards, so it may be changed in place.
    """
    room = limits.max_model_len - num_prompt_tokens
    max_tokens = min(value for value in (params.max_tokens, room, server_max) if value is not None)
    min_tokens = min(params.min_tokens, max_tokens)
    if not is_last:
        return params.clone(max_tokens=max_tokens, min_tokens=min_tokens)
    params.max_tokens, params.min_tokens = max_tokens, min_tokens
    return params


def effective_stream_interval(request: GenerationRequest, settings: ServerSettings) -> int:
    """Tokens per chunk: the request's wish, not below the server's."""
    wanted = request.stream_interval
    if wanted is not None and wanted < 1:
        raise bad_value("stream_interval", wanted, "at least 1")
    return max(wanted or 1, settings.stream_interval)


def effective_priority(request: GenerationRequest, header: str | None) -> int:
    """Scheduling priority: the X-Vllm-Priority header, else the body."""
    priority = request.priority or 0
    if header is not None:
        try:
            priority = int(header)
        except ValueError:
            raise bad_value("priority", header, "an integer in the X-Vllm-Priority header") from None
    if not INT64[0] <= priority <= INT64[1]:
        raise bad_value("priority", priority, "a 64-bit integer")
    return priority


def check_stream_options(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether the stream carries usage: at its end, and in every chunk."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise BadRequest("stream_options needs stream to be true", "stream_options")
    include_usage = bool(options.include_usage)
    return include_usage, include_usage and bool(options.continuous_usage_stats)


def _check_counts(request: GenerationRequest, settings: ServerSettings) -> None:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= settings.max_n:
        raise bad_value("n", n, f"1 to {settings.max_n}")
    if request.best_of is not None and not 1 <= request.best_of <= n:
        raise bad_value("best_of", request.best_of, f"at most n ({n}): choosing among more completions is not offered")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > settings.max_stop_strings:
        raise BadRequest(f"stop must hold at most {settings.max_stop_strings} strings, got {len(stops)}", "stop")
    if any(not stop for stop in stops):
        raise BadRequest(f"stop must hold non-empty strings, got {shown(request.stop)}", "stop")
    if any(len(stop) > settings.max_stop_chars for stop in stops):
        raise BadRequest(f"stop strings must have at most {settings.max_stop_chars} characters", "stop")


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        try:
            token_id = int(key)
        except ValueError:
            raise bad_value("logit_bias", key, "an object whose keys are token ids") from None
        biases[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))
    check_token_ids(list(biases), vocab_size, "logit_bias")
    return biases


def _check_logprobs(field: str, value: int, settings: ServerSettings, limits: PromptLimits) -> None:
    most = limits.vocab_size if settings.max_logprobs == -1 else settings.max_logprobs
    wanted = limits.vocab_size if value == -1 else value
    if value < -1 or wanted > most:
        raise bad_value(field, value, f"0 to {most}" + (", or -1" if most >= limits.vocab_size else ""))


def _refuse_missing(fields: dict[str, Any], names: Mapping[str, str]) -> None:
    """Drop neutral values of fields the engine lacks, and refuse the others: nothing is lost silently."""
    for name in [name for name in fields if name not in SamplingParams.__struct_fields__]:
        value = fields.pop(name)
        if value not in NEUTRAL.get(name, ()):
            param = names.get(name) or name
            raise BadRequest(f"{param} is not offered by this engine, got {shown(value)}", param)


def _renamed(error: ValueError, names: Mapping[str, str]) -> BadRequest:
    """SamplingParams' errors begin with the field's name: make it the request's, and `param`."""
    message = str(error)
    found = _LEADING_NAME.match(message)
    name = getattr(error, "field", None) or (found[0] if found else None)
    if name not in SamplingParams.__struct_fields__:
        return BadRequest(message)
    own = names.get(name, name)
    return BadRequest(own + message.removeprefix(name) if message.startswith(name) else message, own)
