"""/v1/chat/completions: messages, templates, logprobs, structured answers, through the unmodified openai client."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.engine_actors.serve.fake_llm import DEFAULT_REPLY
from tests.engine_actors.serve.server import MODEL, RunningServer, running

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def prompt_of(server: RunningServer, tokenizer: Any) -> str:
    text: str = tokenizer.decode(server.llm.calls[-1].token_ids)
    return text


def test_answer_has_message_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", DEFAULT_REPLY, "stop")
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_nullable_fields_are_present(http: httpx.Client) -> None:
    body = http.post(CHAT, json={"messages": MESSAGES}).json()
    for name in ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text"):
        assert body[name] is None
    choice = body["choices"][0]
    assert choice["logprobs"] is choice["stop_reason"] is choice["token_ids"] is None
    message = choice["message"]
    assert set(message) == {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}


def test_prompt_is_the_chat_template_without_further_special_tokens(
    client: openai.OpenAI, server: RunningServer, tokenizer: Any
) -> None:
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert prompt_of(server, tokenizer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_are_joined(client: openai.OpenAI, server: RunningServer, tokenizer: Any) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert "<|im_start|>user\none\ntwo<|im_end|>" in prompt_of(server, tokenizer)


def test_final_message_is_continued(http: httpx.Client, server: RunningServer, tokenizer: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert http.post(CHAT, json=body).status_code == 200
    assert prompt_of(server, tokenizer).endswith("<|im_start|>assistant\nWell,")


def test_max_tokens_is_the_rest_of_the_context_unless_given(client: openai.OpenAI, server: RunningServer) -> None:
    client.chat.completions.create(model=MODEL, messages=MESSAGES)
    call = server.llm.calls[0]
    assert call.params.max_tokens == server.llm.max_model_len - len(call.token_ids)


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, max_completion_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_have_bytes_and_the_likeliest_alternatives(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = "é"
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (entry,) = logprobs.content
    assert (entry.token, entry.bytes, entry.logprob) == ("é", list("é".encode()), -0.5)
    assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]


def test_bytes_of_split_characters_join_to_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = "👩‍🚀日"
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    joined = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content[:-1])  # the last is <|im_end|>
    assert joined.decode() == "👩‍🚀日" == answer.choices[0].message.content


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, max_tokens=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_tokens_named_by_id(http: httpx.Client, server: RunningServer) -> None:
    asked = {"logprob_token_ids": [70, 71], "return_tokens_as_token_ids": True}
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 1, **asked}
    (entry,) = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"], "token_id:70", "token_id:71"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -2.0, -2.0]
    assert http.post(CHAT, json={**body, "top_logprobs": 2}).is_success
    for wrong, param in (({"top_logprobs": 3}, "logprob_token_ids"), ({"logprobs": False}, "logprob_token_ids")):
        answer = http.post(CHAT, json={**body, **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    completion = {"prompt": "a", "logprobs": 2, "max_tokens": 1, **asked}
    (top,) = http.post("/v1/completions", json=completion).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert {"token_id:70", "token_id:71"} < set(top)


def test_token_ids_and_prompt_text_are_returned(http: httpx.Client, tokenizer: Any) -> None:
    body = {"messages": MESSAGES, "return_token_ids": True, "return_prompt_text": True, "max_tokens": 2}
    answer = http.post(CHAT, json=body).json()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert answer["prompt_text"] == text
    assert answer["prompt_token_ids"] == tokenizer.encode(text)
    assert answer["choices"][0]["token_ids"] == tokenizer.encode("The quick")


def test_prompt_logprobs_are_at_the_top(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: int


def test_parse_sends_the_schema_and_reads_the_answer(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = '{"kind": "cat", "age": 3}'
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Animal)
    assert answer.choices[0].message.parsed == Animal(kind="cat", age=3)
    schema = server.llm.calls[0].params.structured_outputs.json
    assert set(schema["properties"]) == {"kind", "age"}
    assert schema["additionalProperties"] is False


def test_json_object_and_text_formats(http: httpx.Client, server: RunningServer) -> None:
    http.post(CHAT, json={"messages": MESSAGES, "response_format": {"type": "json_object"}})
    http.post(CHAT, json={"messages": MESSAGES, "response_format": {"type": "text"}})
    asked = [call.params.structured_outputs for call in server.llm.calls]
    assert asked[0].json_object is True
    assert asked[1] is None


@pytest.mark.parametrize("role", ["user", "system", "developer", "critic"])
def test_roles_are_the_templates_business(http: httpx.Client, role: str) -> None:
    assert http.post(CHAT, json={"messages": [{"role": role, "content": "x"}]}).status_code == 200


def test_null_content_is_empty_text(http: httpx.Client, server: RunningServer, tokenizer: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "user", "content": "Well?"}]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    assert "<|im_start|>assistant\n<|im_end|>" in prompt_of(server, tokenizer)


def test_template_kwargs_and_refusals_of_the_template(tokenizer: Any) -> None:
    template = (
        "{% if style == 'bad' %}{{ raise_exception('no bad style') }}{% endif %}{{ style }}:{{ messages[0].content }}"
    )
    with running(tokenizer, chat_template=template) as server, httpx.Client(base_url=server.url) as http:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"style": "good"}}
        assert http.post(CHAT, json=body).status_code == 200
        assert prompt_of(server, tokenizer) == "good:Hi"
        refused = http.post(CHAT, json={**body, "chat_template_kwargs": {"style": "bad"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert "no bad style" in refused.json()["error"]["message"]
