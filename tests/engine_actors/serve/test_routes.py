"""Every route that does not generate, and what holds for all: ids, keys, limits."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_actors.serve import ServedModel, ServerSettings, create_app
from engine_actors.serve.middleware import ApiKeys
from scheduler.output import SchedulerStats
from tests.engine_actors.serve.server import ALIAS, MAX_MODEL_LEN, MODEL, RunningServer, running
from tests.engine_actors.serve.test_errors import error_of

COMPLETIONS = "/v1/completions"


# Models


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL, ALIAS]
    assert listed[0].object == "model"
    assert listed[0].max_model_len == MAX_MODEL_LEN  # type: ignore[attr-defined]
    assert listed[0].root == "models/smollm2"  # type: ignore[attr-defined]
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.param == "model"


def test_names_with_slashes_may_be_written_with_dashes(tokenizer: Any) -> None:
    with running(tokenizer, names=["org/model"]) as server, httpx.Client(base_url=server.url) as http:
        for name in ("org/model", "org--model"):
            assert http.get(f"/v1/models/{name}").json()["id"] == "org/model"


def test_two_models_of_one_name_are_refused(server: RunningServer) -> None:
    other = ServedModel.build([ALIAS], server.llm, server.llm.tokenizer, max_model_len=9)
    with pytest.raises(ValueError, match=f"two models are named '{ALIAS}'"):
        create_app([server.model, other])


# Tokens


def test_tokenize_text(http: httpx.Client, tokenizer: Any) -> None:
    body = http.post("/tokenize", json={"model": MODEL, "prompt": "Hello world", "return_token_strs": True}).json()
    ids = tokenizer.encode("Hello world")
    assert body == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": ["Hello", "Ġworld"]}


def test_tokenize_messages(http: httpx.Client, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = http.post("/tokenize", json={"messages": messages}).json()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert body["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert body["token_strs"] is None


def test_tokenize_empty_text_is_no_token(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_detokenize_is_the_inverse(http: httpx.Client, tokenizer: Any) -> None:
    text = "Zürich 👩‍🚀 <|im_end|>"
    assert http.post("/detokenize", json={"tokens": tokenizer.encode(text)}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_bad_token_requests_are_400(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(http.post(path, json=body), 400)["param"] == param


def test_tokenizer_info_is_off_unless_switched_on(http: httpx.Client, tokenizer: Any) -> None:
    assert http.get("/tokenizer_info").status_code == 404
    with (
        running(tokenizer, ServerSettings(enable_tokenizer_info=True)) as server,
        httpx.Client(base_url=server.url) as other,
    ):
        info = other.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert str(Path.home()) not in str(info)


# Health, version, load


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_follows_the_engine(http: httpx.Client, server: RunningServer, path: str) -> None:
    assert (http.get(path).status_code, http.get(path).content) == (200, b"")
    server.llm.dead = "a worker died"
    down = http.get(path)
    assert (down.status_code, down.content) == (503, b"")
    assert int(down.headers["retry-after"]) > 0
    server.llm.dead = None
    assert http.get(path).status_code == 200


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("engine-actors")}


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "CompletionRequest" in document["components"]["schemas"]
    assert "post" in document["paths"]["/v1/chat/completions"]
    assert http.get("/docs").status_code == 200


def test_reset_prefix_cache(http: httpx.Client, server: RunningServer) -> None:
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert server.llm.num_cache_resets == 1


# Request ids


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/metrics"])
def test_request_id_is_echoed_everywhere(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"X-Request-Id": "my-id"}).headers["x-request-id"] == "my-id"
    assert len(http.get(path).headers["x-request-id"]) == 32


def test_request_id_becomes_the_answers_id(http: httpx.Client, server: RunningServer) -> None:
    body = {"prompt": "a", "request_id": "in-body"}
    answer = http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "in-header"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("in-header", "cmpl-in-header")
    answer = http.post(COMPLETIONS, json=body)
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("in-body", "cmpl-in-body")
    answer = http.post(COMPLETIONS, json={"prompt": "a"})
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    ids = [call.request_id for call in server.llm.calls]
    assert len(set(ids)) == 3


def test_equal_request_ids_may_run_at_once(http: httpx.Client, server: RunningServer) -> None:
    for _ in range(2):
        assert http.post(COMPLETIONS, json={"prompt": "a", "request_id": "same"}).status_code == 200
    first, second = (call.request_id for call in server.llm.calls)
    assert first != second


def test_unusable_request_ids_are_replaced(http: httpx.Client) -> None:
    assert len(http.get("/version", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"]) == 32


# Keys and limits


def test_api_key_guards_all_but_probes(tokenizer: Any) -> None:
    settings = ServerSettings(api_keys=("secret", "other"))
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url) as http:
        for path in ("/health", "/ping", "/metrics", "/version", "/"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/load", "/status", "/docs", "/nothing"):
            refused = http.get(path)
            assert error_of(refused, 401)["type"] == "AuthenticationError"
            assert refused.headers["www-authenticate"] == "Bearer"
        error_of(http.post(COMPLETIONS, json={"prompt": "a"}), 401)
        for wrong in ("Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "secret"):
            assert http.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        for right in ("Bearer secret", "bearer other"):
            assert http.get("/v1/models", headers={"Authorization": right}).status_code == 200
        wrong_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with wrong_client, pytest.raises(openai.AuthenticationError):
            wrong_client.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.models.list().data


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("engine_actors.serve.middleware.hmac.compare_digest", compare)
    scope = {"method": "GET", "headers": [(b"authorization", b"Bearer one")]}
    ApiKeys(["one", "two", "three"]).check(scope, "/v1/models")
    assert len(compared) == 3
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_keys_do_not_show_in_the_settings_text() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


def test_large_bodies_are_refused_before_they_are_read(tokenizer: Any) -> None:
    settings = ServerSettings(max_body_bytes=1000)
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url) as http:
        headers = {"Content-Type": "application/json"}
        declared = http.post(COMPLETIONS, content=b"x" * 1001, headers=headers)
        assert error_of(declared, 413)["type"] == "RequestTooLargeError"

        def endless() -> Any:
            yield from (b"x" * 100 for _ in range(11))

        assert error_of(http.post(COMPLETIONS, content=endless(), headers=headers), 413)
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_cors_only_when_origins_are_allowed(http: httpx.Client, tokenizer: Any) -> None:
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.get("/version", headers=headers).headers
    settings = ServerSettings(allowed_origins=("http://page.example",), api_keys=("k",))
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url) as other:
        answer = other.options(COMPLETIONS, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_n", 0), ("max_body_bytes", True), ("max_logprobs", -2), ("tool_call_parser", "xml"), ("api_keys", ("",)),
     ("sse_keep_alive_s", 0), ("first_output_wait_s", -1)],
)  # fmt: skip
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ServerSettings(**{field: value})


# Metrics


def values_of(http: httpx.Client) -> dict[tuple[str, str], float]:
    """(sample name, finished_reason or le or "") → value."""
    text = http.get("/metrics").text
    return {
        (s.name, s.labels.get("finished_reason") or s.labels.get("le") or ""): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.labels.get("model_name", MODEL) == MODEL
    }


def test_metrics_answer_at_both_paths_in_prometheus_format(http: httpx.Client) -> None:
    for path in ("/metrics", "/metrics/"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")


@pytest.mark.parametrize("prefix", ["engine_actors_", "vllm:"])
def test_a_request_is_counted_under_both_names(http: httpx.Client, server: RunningServer, prefix: str) -> None:
    server.llm.num_cached = 1
    before = values_of(http)
    answer = http.post(COMPLETIONS, json={"prompt": "Hello world", "max_tokens": 4, "stream": True})
    assert answer.status_code == 200
    after = values_of(http)

    def grown(name: str, label: str = "") -> float:
        return after[prefix + name, label] - before.get((prefix + name, label), 0.0)

    assert grown("prompt_tokens_total") == 2
    assert grown("prompt_tokens_cached_total") == 1
    assert grown("generation_tokens_total") == 4
    assert grown("request_success_total", "length") == 1
    assert grown("request_success_total", "abort") == 0
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 3
    for name in ("time_per_output_token", "queue_time", "prefill_time", "decode_time", "inference_time"):
        assert grown(f"request_{name}_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("request_prompt_tokens_sum") == 2
    assert grown("request_generation_tokens_sum") == 4
    assert grown("request_generation_tokens_bucket", "2.0") == 0
    assert grown("request_generation_tokens_bucket", "5.0") == 1


def test_scheduler_stats_become_gauges_and_counters(http: httpx.Client, server: RunningServer) -> None:
    before = values_of(http)
    stats = SchedulerStats(3, 2, 0.25, num_scheduled_tokens=7, prefix_cache_queries=10, prefix_cache_hits=4,
                           num_preemptions=1)  # fmt: skip
    server.call(lambda: server.model.metrics.observe_stats(stats))
    after = values_of(http)
    assert after["vllm:num_requests_running", ""] == 3
    assert after["vllm:num_requests_waiting", ""] == 2
    assert after["vllm:kv_cache_usage_perc", ""] == 0.25
    for name, step in (("prefix_cache_queries", 10), ("prefix_cache_hits", 4), ("num_preemptions", 1)):
        assert after[f"vllm:{name}_total", ""] - before[f"vllm:{name}_total", ""] == step
    assert after["vllm:iteration_tokens_total_sum", ""] - before["vllm:iteration_tokens_total_sum", ""] == 7
    server.call(lambda: server.model.metrics.observe_stats(SchedulerStats()))


def test_static_and_http_metrics(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json={"prompt": ""})
    http.get("/no/such/path")
    text = http.get("/metrics").text
    assert 'vllm:cache_config_info{block_size="16",engine="0",model_name="smollm2"} 1.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"}' in text
    assert 'handler="none",method="GET",status="4xx"' in text
    assert "/no/such/path" not in text
    assert "process_resident_memory_bytes" in text


def test_vllm_names_can_be_switched_off(tokenizer: Any) -> None:
    settings = ServerSettings(enable_vllm_metric_names=False)
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url) as http:
        text = http.get("/metrics").text
    assert "vllm:" not in text
    assert "engine_actors_num_requests_running" in text


def test_refusals_for_load_are_counted(http: httpx.Client, server: RunningServer) -> None:
    from engine_actors.errors import QueueFullError

    server.llm.refusal = QueueFullError("full")
    http.post(COMPLETIONS, json={"prompt": "a"})
    text = http.get("/metrics").text
    assert 'vllm:admission_rejections_total{engine="0",model_name="smollm2",reason="queue_full"}' in text
