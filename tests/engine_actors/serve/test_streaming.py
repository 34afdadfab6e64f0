"""Streams: the exact events, and that they add up to the whole answer."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from tests.engine_actors.serve.fake_llm import DEFAULT_REPLY
from tests.engine_actors.serve.server import MODEL, RunningServer

MESSAGES = [{"role": "user", "content": "Hi"}]


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; every event must be a `data:` line and a blank one."""
    text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    events = text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def stream(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(response)


def test_completion_chunks(http: httpx.Client, server: RunningServer) -> None:
    server.llm.reply = "The cat"
    events = stream(http, "/v1/completions", prompt="a")
    assert [event["choices"][0]["text"] for event in events] == ["The", " cat", ""]
    first = events[0]
    assert set(first) == {"id", "object", "created", "model", "choices"}
    assert first["object"] == "text_completion"
    assert first["id"].startswith("cmpl-")
    assert first["choices"][0] == {
        "index": 0, "text": "The", "logprobs": None, "finish_reason": None, "stop_reason": None,
        "prompt_token_ids": None, "token_ids": None,
    }  # fmt: skip
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_chat_begins_with_the_role_and_ends_with_a_reason(http: httpx.Client, server: RunningServer) -> None:
    server.llm.reply = "The cat"
    events = stream(http, "/v1/chat/completions", messages=MESSAGES)
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert (events[0]["prompt_token_ids"], events[0]["prompt_text"]) == (None, None)
    assert events[1]["choices"] == [
        {"index": 0, "delta": {"content": "The"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    ]
    last = events[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({"content": ""}, "stop", None)
    assert [("system_fingerprint" in event) for event in events] == [False, False, False, True]


def test_role_is_sent_with_the_first_output_and_not_before(server: RunningServer, http: httpx.Client) -> None:
    server.hold()
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        server.release(1)
        assert '"role":"assistant"' in next(lines)
        server.release(100)
        assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, server: RunningServer, endpoint: str) -> None:
    server.llm.reply = "Zürich 👩‍🚀 日本語 <|im_start|> done"
    if endpoint == "chat":
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content  # type: ignore[arg-type]
        chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        whole = client.completions.create(model=MODEL, prompt="a", max_tokens=99).choices[0].text
        parts = client.completions.create(model=MODEL, prompt="a", max_tokens=99, stream=True)
        streamed = "".join(chunk.choices[0].text for chunk in parts)
    assert streamed == whole
    assert "👩‍🚀" in streamed


def test_usage_chunk_comes_last_and_only_when_asked_for(http: httpx.Client, server: RunningServer) -> None:
    server.llm.num_cached = 7
    events = stream(http, "/v1/chat/completions", messages=MESSAGES, stream_options={"include_usage": True})
    assert all("usage" not in event for event in events[:-1])
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == len(events) - 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    events = stream(http, "/v1/chat/completions", messages=MESSAGES, stream_options={"include_usage": False})
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_up(http: httpx.Client, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(http, path, max_tokens=3, stream_options=options, **asked)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == ([1, 2, 3, 3] if path == "/v1/completions" else [0, 1, 2, 3, 3])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_of_n_choices_ends_once(http: httpx.Client, server: RunningServer, path: str) -> None:
    server.llm.reply = lambda _prompt, index: "word " * (index + 1)
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    events = stream(http, path, n=3, **asked)
    texts: dict[int, str] = defaultdict(str)
    reasons = []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons.append((choice["index"], choice["finish_reason"]))
    assert texts == {0: "word ", 1: "word word ", 2: "word word word "}
    assert sorted(reasons) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_batched_prompts_are_told_apart_by_index(http: httpx.Client, server: RunningServer, tokenizer: Any) -> None:
    server.llm.reply = lambda prompt, index: f"{tokenizer.decode(prompt)} {index}"
    events = stream(http, "/v1/completions", prompt=["one", "two"], n=2, stream_options={"include_usage": True})
    texts: dict[int, str] = defaultdict(str)
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "one 0", 1: "one 1", 2: "two 0", 3: "two 1"}
    assert events[-1]["usage"]["prompt_tokens"] == 2


def test_echo_comes_with_the_first_chunk(http: httpx.Client, tokenizer: Any) -> None:
    events = stream(http, "/v1/completions", prompt="Hello", echo=True, max_tokens=2, return_token_ids=True, logprobs=1)
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["HelloThe", " quick"]
    assert [choice["prompt_token_ids"] for choice in choices] == [tokenizer.encode("Hello"), None]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["Hello", "The"], [" quick"]]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 5], [8]]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5]


def test_echo_without_tokens_streams_the_prompt_only(http: httpx.Client) -> None:
    events = stream(http, "/v1/completions", prompt="Hello", echo=True, max_tokens=0)
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [("Hello", "length")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_are_returned_when_asked_for(http: httpx.Client, tokenizer: Any, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    events = stream(http, path, max_tokens=3, return_token_ids=True, **asked)
    ids = [token for event in events for token in event["choices"][0].get("token_ids") or []]
    assert ids == tokenizer.encode("The quick brown")
    if path != "/v1/completions":
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert events[0]["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)


def test_chat_logprobs_are_per_chunk(http: httpx.Client) -> None:
    events = stream(http, "/v1/chat/completions", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2)
    contents = [event["choices"][0]["logprobs"]["content"] for event in events[1:]]
    assert [[entry["token"] for entry in content] for content in contents] == [["The"], [" quick"]]
    assert contents[0][0]["bytes"] == list(b"The")
    assert [top["logprob"] for top in contents[0][0]["top_logprobs"]] == [-0.5, -1.5]


def test_stream_interval_gathers_tokens_but_not_the_first(http: httpx.Client) -> None:
    events = stream(http, "/v1/completions", prompt="a", max_tokens=8, stream_interval=3, return_token_ids=True)
    assert [len(event["choices"][0]["token_ids"]) for event in events] == [1, 3, 3, 1]
    assert "".join(event["choices"][0]["text"] for event in events) == DEFAULT_REPLY.rpartition(" ")[0]


def test_stop_string_never_leaks_into_the_stream(http: httpx.Client) -> None:
    events = stream(http, "/v1/completions", prompt="a", stop=" fox jumps")
    assert "".join(event["choices"][0]["text"] for event in events) == "The quick brown"
    assert events[-1]["choices"][0]["stop_reason"] == " fox jumps"


def test_error_in_the_middle_is_an_event_and_then_done(http: httpx.Client, server: RunningServer) -> None:
    server.llm.failure_after = (2, RuntimeError("secret /usr/lib/engine.py detail"))
    events = stream(http, "/v1/completions", prompt="a")
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None]
    error = events[-1]["error"]
    assert (error["type"], error["code"], error["param"]) == ("InternalServerError", 500, None)
    assert "secret" not in error["message"]


def test_openai_client_raises_on_an_error_in_the_middle(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.failure_after = (2, RuntimeError("boom"))
    chunks = client.completions.create(model=MODEL, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="Internal server error"):
        list(chunks)
