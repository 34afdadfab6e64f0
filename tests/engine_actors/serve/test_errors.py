"""Every error class of the API: the envelope, the status, the field — and always before a stream's 200."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from engine_actors.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestFailedError,
)
from engine_actors.serve import params as serve_params
from scheduler.sampling_params import SamplingParams
from tests.engine_actors.serve.server import MAX_MODEL_LEN, MODEL, RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The envelope's inside, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    assert error["message"]
    assert "\n" not in error["message"]
    return error


# Bad fields of each endpoint: (fields, the param named, a part of the message).
BAD_FIELDS = [
    ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
    ({"temperature": 3}, "temperature", "[0.0, 2.0], got 3"),
    ({"temperature": -1}, "temperature", "got -1"),
    ({"top_p": 0}, "top_p", "got 0"),
    ({"top_p": 1.5}, "top_p", "got 1.5"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"min_p": 2}, "min_p", "got 2"),
    ({"n": 0}, "n", "1 to 128, got 0"),
    ({"n": 129}, "n", "1 to 128, got 129"),
    ({"n": True}, "n", "must be an integer, got True"),
    ({"n": 2, "best_of": 3}, "best_of", "got 3"),
    ({"seed": 2**63}, "seed", "got 9223372036854775808"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"max_tokens": -5}, "max_tokens", "got -5"),
    ({"max_tokens": MAX_MODEL_LEN + 1}, "max_tokens", f"context length {MAX_MODEL_LEN}"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "got 9"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": ["a", ""]}, "stop", "non-empty"),
    ({"stop": [1]}, "stop", "must be a string, got 1"),
    ({"stop": ["x"] * 65}, "stop", "at most 64"),
    ({"stop": "x" * 1025}, "stop", "1024"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "0 to 49151, got 49152"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "got -1"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids, got 'a'"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "got 99999"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "must be a number"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids", "got 99999"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs "),
    ({"stream_interval": 0}, "stream_interval", "at least 1, got 0"),
    ({"priority": 2**64}, "priority", "64-bit"),
    ({"cache_salt": ""}, "cache_salt", "1 to 128 characters"),
    ({"cache_salt": "a/b"}, "cache_salt", "got 'a/b'"),
    ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens", "got 513"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "up"}, "truncation_side", "got 'up'"),
    ({"guided_json": {"type": "object"}}, "guided_json", "use response_format or structured_outputs"),
    ({"guided_regex": "a+"}, "guided_regex", "structured_outputs"),
    ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search", "beam search"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "not supported"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format", 'got \'xml\''),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format", "schema"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "empty"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs", "grammar"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "must not hold yaml"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs",
     "cannot be used together"),
]  # fmt: skip
BAD_COMPLETION_FIELDS = [
    ({"prompt": None}, "prompt", "missing or empty"),
    ({"prompt": ""}, "prompt", "missing or empty"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt", "prompt[0] must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1] must not be empty"),
    ({"prompt": ["a", 1]}, "prompt", "mixes"),
    ({"prompt": [[1], ["a"]]}, "prompt", "prompt[1][0] must be an integer, got 'a'"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string or an array"),
    ({"prompt": [-1]}, "prompt", "0 to 49151, got -1"),
    ({"prompt": [49152]}, "prompt", "got 49152"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["a"] * 1024, "n": 5}, "n", "at most 4096, got 5 x 1024"),
    ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "input_tokens", "This model's maximum context length is 512 tokens."),
    ({"prompt": [5] * MAX_MODEL_LEN}, "input_tokens", "output tokens (at least 1) is longer"),
    ({"prompt": "word " * 600}, "input_tokens", "This model's maximum context length is 512 tokens."),
    ({"prompt": "word " * 60_000}, "input_text", "This model's maximum context length is 512 tokens."),
    ({"logprobs": 21}, "logprobs", "0 to 20, got 21"),
    ({"logprobs": -1}, "logprobs", "got -1"),
    ({"logprobs": "many"}, "logprobs", "must be an integer"),
    ({"echo": "maybe"}, "echo", "true or false"),
]
BAD_CHAT_FIELDS = [
    ({"messages": None}, "messages", "missing or empty"),
    ({"messages": []}, "messages", "missing or empty"),
    ({"messages": "Hi"}, "messages", "must be an array, got 'Hi'"),
    ({"messages": ["Hi"]}, "messages", "messages[0] must be an object, got 'Hi'"),
    ({"messages": [{"content": "Hi"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages",
     "only text models"),
    ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages", "messages[1].tool_calls[0].function.arguments must be JSON"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "input_tokens", "This model's maximum context length"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
    ({"max_completion_tokens": MAX_MODEL_LEN + 1}, "max_completion_tokens", "got 513"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
    ({"logprobs": 5}, "logprobs", "true or false, got 5"),
    ({"tools": []}, "tools", "empty list"),
    ({"tools": [{"type": "web"}]}, "tools", 'tools[0].type must be "function"'),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "got 'a b'"),
    ({"tools": [TOOL, TOOL]}, "tools", "twice"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "got 'always'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format", "auto"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "not accepted"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not hold tokenize"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "param", "message"), BAD_FIELDS + BAD_COMPLETION_FIELDS)
def test_bad_completion_field_is_a_400_naming_it(
    http: httpx.Client, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    response = http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "stream": stream, **fields})
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "param", "message"), BAD_FIELDS + BAD_CHAT_FIELDS)
def test_bad_chat_field_is_a_400_naming_it(
    http: httpx.Client, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    response = http.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "stream": stream, **fields})
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert message in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1, 2]", "must be a JSON object, got list"),
        (b'"text"', "must be a JSON object, got str"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "malformed", "not-utf8", "array", "string", "deep"],
)
def test_unreadable_body_is_a_400(http: httpx.Client, path: str, content: bytes, message: str) -> None:
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("BadRequestError", None)
    assert message in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_non_finite_temperature_names_the_field(http: httpx.Client, number: str) -> None:
    content = f'{{"prompt": "a", "temperature": {number}}}'
    error = error_of(http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), 400)
    assert error["param"] == "temperature"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_other_content_types_are_a_400(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}), 400)
    assert "Unsupported Media Type: Only 'application/json' is allowed" in error["message"]


def test_content_type_may_name_a_charset(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    body = json.dumps({"model": MODEL, "prompt": "a"})
    assert http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_options_need_stream(http: httpx.Client, path: str) -> None:
    body = {"model": MODEL, "prompt": "a", "messages": MESSAGES, "stream_options": {"include_usage": True}}
    assert error_of(http.post(path, json=body), 400)["param"] == "stream_options"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_unknown_model_is_a_404(http: httpx.Client, path: str) -> None:
    body = {"model": "nope", "prompt": "a", "tokens": [1]}
    if path == CHAT:
        body["messages"] = MESSAGES
    error = error_of(http.post(path, json=body), 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "'nope' does not exist" in error["message"]


def test_unknown_route_and_method_are_in_the_envelope(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    response = http.get(COMPLETIONS)
    assert error_of(response, 405)["type"] == "MethodNotAllowedError"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("field", "value"), [("presence_penalty", 0.5), ("logit_bias", {"5": 1.0}), ("allowed_token_ids", [5])]
)
def test_field_the_engine_lacks_is_refused_by_name(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    fields = tuple(name for name in SamplingParams.__struct_fields__ if name != field)
    monkeypatch.setattr(serve_params, "SamplingParams", SimpleNamespace(__struct_fields__=fields))
    error = error_of(http.post(COMPLETIONS, json={"prompt": "a", field: value}), 400)
    assert error["param"] == field
    assert "not offered" in error["message"]


# What the engine raises, by whether the answer streams.
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("refusal", "status", "error_type", "param"),
    [
        (InvalidRequestError("structured_outputs.json is bad", "structured_outputs"), 400, "BadRequestError",
         "response_format"),
        (QueueFullError("8 requests wait already"), 429, "RateLimitError", None),
        (EngineDeadError("a worker died"), 503, "ServiceUnavailableError", None),
        (RequestAbortedError("aborted"), 499, "RequestAbortedError", None),
        (RequestFailedError("detokenizer broke"), 500, "InternalServerError", None),
        (ZeroDivisionError(), 500, "InternalServerError", None),
    ],
    ids=["invalid", "queue-full", "dead", "aborted", "failed", "bug"],
)  # fmt: skip
def test_engine_errors_keep_their_status(
    http: httpx.Client,
    server: RunningServer,
    refusal: Exception,
    status: int,
    error_type: str,
    param: str | None,
    stream: bool,
) -> None:
    server.llm.refusal = refusal
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream, "response_format": {"type": "json_object"}}
    response = http.post(CHAT, json=body, headers={"X-Request-Id": "abc"})
    error = error_of(response, status)
    assert (error["type"], error["param"]) == (error_type, param)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status >= 500:
        assert "abc" in error["message"]


def test_finish_reason_error_is_a_500(http: httpx.Client, server: RunningServer) -> None:
    server.llm.error_output = RequestFailedError("internal detail")
    error = error_of(http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"}), 500)
    assert "internal detail" not in error["message"]


def test_one_failing_prompt_of_a_batch_aborts_the_others(http: httpx.Client, server: RunningServer) -> None:
    server.llm.failure_after = (1, QueueFullError("full"))
    error_of(http.post(COMPLETIONS, json={"model": MODEL, "prompt": ["a", "b", "c"]}), 429)
    assert server.llm.idle.wait(10)
    assert len(server.llm.dropped) == 3


def test_dead_engine_is_a_503_before_anything_else_about_the_prompt(http: httpx.Client, server: RunningServer) -> None:
    server.llm.dead = "a worker died"
    response = http.post(COMPLETIONS, json={"model": MODEL, "prompt": ""})
    assert error_of(response, 503)["type"] == "ServiceUnavailableError"
    assert int(response.headers["retry-after"]) > 0
    assert server.llm.calls == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"model": "nope"}, openai.NotFoundError),
    ],
)
def test_openai_client_raises_its_own_classes(
    client: openai.OpenAI, body: dict[str, Any], expected: type[openai.APIStatusError]
) -> None:
    with pytest.raises(expected) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "a", **body})
    assert caught.value.param == next(iter(body))
    assert caught.value.code == str(caught.value.status_code) or caught.value.code == caught.value.status_code


def test_openai_client_retries_what_a_retry_can_cure(server: RunningServer) -> None:
    server.llm.refusal = EngineDeadError("restarting")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="a")
        assert caught.value.response.headers["retry-after"] == "5"
        server.llm.refusal = QueueFullError("full")
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model=MODEL, prompt="a")
        assert limited.value.response.headers["retry-after"] == "1"
    server.llm.calls.clear()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="a")
        assert len(server.llm.calls) == 2
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="a", n=0)
        assert len(server.llm.calls) == 2
