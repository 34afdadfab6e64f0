"""/v1/completions: whole answers through the unmodified openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.engine_actors.serve.fake_llm import DEFAULT_REPLY
from tests.engine_actors.serve.server import ALIAS, MAX_MODEL_LEN, MODEL, RunningServer


def test_answer_has_text_reason_and_usage(client: openai.OpenAI, server: RunningServer, tokenizer: Any) -> None:
    server.llm.num_cached = 1
    answer = client.completions.create(model=MODEL, prompt="Tell me", max_tokens=64)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, DEFAULT_REPLY, "stop")]
    prompt_tokens, completion_tokens = len(tokenizer.encode("Tell me")), len(tokenizer.encode(DEFAULT_REPLY)) + 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == completion_tokens
    assert answer.usage.total_tokens == prompt_tokens + completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_nullable_fields_are_present(http: httpx.Client) -> None:
    body = http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).json()
    assert body["service_tier"] is None
    assert body["system_fingerprint"] is None
    assert body["kv_transfer_params"] is None
    choice = body["choices"][0]
    for name in ("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"):
        assert choice[name] is None


def test_max_tokens_is_sixteen_unless_given(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = DEFAULT_REPLY * 5
    answer = client.completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_max_tokens_is_cut_to_what_the_prompt_leaves(client: openai.OpenAI, server: RunningServer) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 3)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
    assert answer.choices[0].finish_reason == "length"
    assert server.llm.calls[0].params.max_tokens == 3


def test_model_may_be_missing_or_an_alias(http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == MODEL
    assert client.completions.create(model=ALIAS, prompt="a").model == ALIAS


def test_n_completions_are_ordered_by_index(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = lambda _prompt, index: f"answer {index}"
    answer = client.completions.create(model=MODEL, prompt="a", n=3)
    assert [(c.index, c.text) for c in answer.choices] == [(i, f"answer {i}") for i in range(3)]


def test_greedy_n_is_allowed(client: openai.OpenAI) -> None:
    assert len(client.completions.create(model=MODEL, prompt="a", n=2, temperature=0).choices) == 2


def test_batch_index_is_prompt_times_n_plus_sample(
    client: openai.OpenAI, server: RunningServer, tokenizer: Any
) -> None:
    server.llm.reply = lambda prompt, index: f"{tokenizer.decode(prompt)}-{index}"
    answer = client.completions.create(model=MODEL, prompt=["one", "two", "three"], n=2)
    texts = [f"{word}-{sample}" for word in ("one", "two", "three") for sample in range(2)]
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(texts))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", [[15, 16, 17], [[15, 16], [17]]], ids=["one", "batch"])
def test_token_id_prompts_reach_the_engine_as_they_are(
    client: openai.OpenAI, server: RunningServer, prompt: list[Any]
) -> None:
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    expected = prompt if isinstance(prompt[0], list) else [prompt]
    assert sorted(call.token_ids for call in server.llm.calls) == expected


def test_echo_puts_the_prompt_first(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = " world"
    assert client.completions.create(model=MODEL, prompt="Hello", echo=True).choices[0].text == "Hello world"


def test_echo_of_token_ids_is_their_text(client: openai.OpenAI, server: RunningServer, tokenizer: Any) -> None:
    server.llm.reply = " world"
    ids = tokenizer.encode("Hello")
    assert client.completions.create(model=MODEL, prompt=ids, echo=True).choices[0].text == "Hello world"


def test_echo_with_no_tokens_returns_the_prompt_only(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", echo=True, max_tokens=0, logprobs=1)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hello"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_logprobs_shape(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = "The cat"
    logprobs = client.completions.create(model=MODEL, prompt="a", logprobs=3, max_tokens=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["The", " cat"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 3]
    assert logprobs.top_logprobs is not None
    assert [list(top.values()) for top in logprobs.top_logprobs] == [[-0.5, -1.5, -2.5]] * 2


def test_zero_logprobs_gives_the_sampled_token_only(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model=MODEL, prompt="a", logprobs=0, max_tokens=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"The": -0.5}]


def test_echo_with_logprobs_covers_prompt_and_answer(client: openai.OpenAI, tokenizer: Any) -> None:
    """What lm-eval reads log-likelihoods from."""
    ids = tokenizer.encode("Hello big world")
    answer = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=1, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " big", " world", "The"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    for value, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]:
        assert max(top.values()) == value
    assert logprobs.text_offset == [0, 5, 9, 15]


def test_tokens_as_token_ids(client: openai.OpenAI, tokenizer: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="a", logprobs=1, max_tokens=1, extra_body={"return_tokens_as_token_ids": True}
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == [f"token_id:{tokenizer.encode('The')[0]}"]


def test_prompt_logprobs_are_in_each_choice(http: httpx.Client, tokenizer: Any) -> None:
    ids = tokenizer.encode("Hello big")
    body = {"model": MODEL, "prompt": ids, "prompt_logprobs": 1, "max_tokens": 1}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert found == [None, {str(ids[1]): {"logprob": -0.5, "rank": 1, "decoded_token": " big"}}]


def test_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "stop": ["nope", " fox"]}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quick brown", "stop", " fox")
    choice = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()["choices"][0]
    assert choice["text"] == "The quick brown fox"


def test_more_than_four_stop_strings_are_fine(client: openai.OpenAI) -> None:
    stops = ["a1", "b2", "c3", "d4", "e5", " jumps"]
    assert client.completions.create(model=MODEL, prompt="a", stop=stops).choices[0].text == "The quick brown fox"


def test_stop_token_id_is_the_stop_reason(http: httpx.Client, tokenizer: Any) -> None:
    fox = tokenizer.encode(" fox")[0]
    body = {"model": MODEL, "prompt": "a", "stop_token_ids": [fox], "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", fox)
    assert choice["token_ids"] == tokenizer.encode("The quick brown fox")
    assert choice["prompt_token_ids"] == tokenizer.encode("a")


def test_every_sampling_field_reaches_the_engine(http: httpx.Client, server: RunningServer) -> None:
    fields = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.05, "seed": 42, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "allowed_token_ids": [1, 2], "bad_words": ["bad"],
        "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "stop_token_ids": [7],
    }  # fmt: skip
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "logit_bias": {"5": 200, "6": -1}, **fields}
    assert http.post("/v1/completions", json=body).status_code == 200
    params = server.llm.calls[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {5: 100.0, 6: -1.0}


def test_numbers_written_as_strings_are_read(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "n": "2", "max_tokens": "1", "temperature": "0.5"}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


def test_null_means_the_default(http: httpx.Client) -> None:
    """What vllm bench serve and guidellm send."""
    body = {
        "model": MODEL, "prompt": "a", "logprobs": None, "stop": None, "n": None, "max_tokens": None, "seed": None,
        "temperature": None, "stream": None, "stream_options": None, "best_of": None, "repetition_penalty": 1.0,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 16


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "foo": {"bar": 1}}).status_code == 200


def test_cache_salt_and_priority_reach_the_engine(http: httpx.Client, server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "a", "cache_salt": "tenant-1", "priority": 3}
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json=body, headers={"X-Vllm-Priority": "-7"})
    assert [call.cache_salt for call in server.llm.calls] == ["tenant-1", "tenant-1"]
    assert [call.priority for call in server.llm.calls] == [3, -7]


@pytest.mark.parametrize(("side", "kept"), [("left", [8, 9]), ("right", [5, 6])])
def test_prompt_is_truncated_on_the_side_asked_for(
    http: httpx.Client, server: RunningServer, side: str, kept: list[int]
) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2, "truncation_side": side}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert server.llm.calls[0].token_ids == kept


def test_truncation_to_the_models_limit_leaves_room_for_a_token(http: httpx.Client, server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN + 10), "truncate_prompt_tokens": -1}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert len(server.llm.calls[0].token_ids) == MAX_MODEL_LEN - 1


def test_best_of_up_to_n_is_accepted(client: openai.OpenAI) -> None:
    assert len(client.completions.create(model=MODEL, prompt="a", n=2, best_of=2).choices) == 2


def test_structured_outputs_reach_the_engine(http: httpx.Client, server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "a", "structured_outputs": {"choice": ["yes", "no"], "json": None}}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert server.llm.calls[0].params.structured_outputs.choice == ["yes", "no"]
