"""Applications on Ray Serve beyond one replica: several models, updates under load, back-pressure, autoscaling."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_actors.serve.serve_app import WAIT_S, gauge, llm_config, running_app, wait_for
from tests.engine_actors.serve.test_deployment import BODY, sse

pytestmark = [pytest.mark.ray]
LONG: dict[str, Any] = {**BODY, "prompt": [[5, 6, 7]] * 16, "max_tokens": 250, "stream": True}


@pytest.fixture(scope="module")
def two_models(serve_port: int, random_llama_dir: Path) -> Iterator[httpx.Client]:
    configs = [
        llm_config(random_llama_dir, "org/first", model_loading_config={"aliases": ["one"]}),
        llm_config(random_llama_dir, "second", engine_kwargs={"max_model_len": 128, "api_key": "secret"}),
    ]
    with (
        running_app("two", configs, serve_port),
        httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/two/", timeout=WAIT_S) as client,
    ):
        yield client


KEY = {"Authorization": "Bearer secret"}


def test_requests_reach_the_model_they_name(two_models: httpx.Client) -> None:
    first = two_models.post("v1/completions", json={**BODY, "model": "one"}, headers={"X-Request-Id": "r1"})
    assert (first.json()["model"], first.json()["id"]) == ("one", "cmpl-r1")
    assert first.headers.get_list("x-request-id") == ["r1"]
    second = {**BODY, "model": "second"}
    assert two_models.post("v1/completions", json=second).status_code == 401
    with two_models.stream("POST", "v1/completions", json={**second, "stream": True}, headers=KEY) as response:
        tokens = [token for event in sse(response) for token in event["choices"][0]["token_ids"]]
    assert tokens == first.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**BODY, "model": "third"}, 404, "model"),
        (BODY, 400, "model"),
        ({**BODY, "model": "one", "temperature": 3}, 400, "temperature"),
        ("no json", 400, None),
    ],
)
def test_errors_of_several_models_are_in_the_envelope(
    two_models: httpx.Client, body: Any, status: int, param: str | None
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = two_models.post("v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_what_concerns_all_models_is_merged(two_models: httpx.Client) -> None:
    cards = two_models.get("v1/models", headers=KEY).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in cards} == {"org/first": 256, "one": 256, "second": 128}
    assert two_models.get("v1/models").status_code == 401  # one of them wants a key
    assert two_models.get("v1/models/org--first").json()["id"] == "org/first"
    assert two_models.get("health").status_code == 200
    assert two_models.get("load", headers=KEY).json() == {"server_load": 0}
    lines = two_models.get("metrics").text.splitlines()
    assert sum(line.startswith("# TYPE vllm:num_requests_running ") for line in lines) == 1
    names = {
        line.split('model_name="')[1].split('"')[0] for line in lines if line.startswith("vllm:num_requests_running{")
    }
    assert names == {"org/first", "second"}
    models = two_models.get("status", headers=KEY).json()["models"]
    assert [model["names"][0] for model in models] == ["org/first", "second"]


def test_a_client_that_leaves_is_noticed_behind_the_router(two_models: httpx.Client) -> None:
    with two_models.stream("POST", "v1/completions", json={**LONG, "model": "one"}) as response:
        next(response.iter_lines())

    def idle() -> bool:
        lines = two_models.get("metrics").text.splitlines()
        return all(line.endswith(" 0.0") for line in lines if line.startswith("vllm:num_requests_running{"))

    wait_for(idle, "requests still run")


def test_an_update_drains_streams_and_back_pressure_has_retry_after(serve_port: int, random_llama_dir: Path) -> None:
    from ray import serve

    from engine_actors.serve import build_openai_app

    tight = {"max_ongoing_requests": 1, "max_queued_requests": 1}
    config = llm_config(random_llama_dir, deployment_config=tight)
    with (
        running_app("updated", [config], serve_port),
        httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/updated/", timeout=WAIT_S) as http,
    ):
        begun = threading.Event()

        def stream() -> list[dict[str, Any]]:
            with http.stream("POST", "v1/completions", json=LONG) as response:
                assert response.status_code == 200
                begun.set()
                return sse(response)

        with ThreadPoolExecutor(6) as pool:
            streaming = pool.submit(stream)
            assert begun.wait(WAIT_S)
            others = list(pool.map(lambda _: http.post("v1/completions", json=BODY), range(5)))
            refused = [answer for answer in others if answer.status_code != 200]
            assert {answer.status_code for answer in refused} == {503}
            assert {answer.headers["retry-after"] for answer in refused} == {"5"}
            streaming.result(WAIT_S)
            begun.clear()
            streaming = pool.submit(stream)
            assert begun.wait(WAIT_S)
            changed = llm_config(random_llama_dir, engine_kwargs={"max_model_len": 200})
            serve.run(build_openai_app({"llm_configs": [changed]}), name="updated", route_prefix="/updated")
            events = streaming.result(WAIT_S)
        tokens = sum(len(choice["token_ids"]) for event in events for choice in event["choices"])
        assert tokens == 16 * 250
        assert http.get("v1/models").json()["data"][0]["max_model_len"] == 200


@pytest.mark.soak
def test_replicas_come_and_go_with_the_load(serve_port: int, random_llama_dir: Path) -> None:
    from ray import serve

    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 1.0,
               "look_back_period_s": 1.0, "metrics_interval_s": 0.5}  # fmt: skip
    config = llm_config(
        random_llama_dir, engine_kwargs={"max_num_seqs": 4}, deployment_config={"autoscaling_config": scaling}
    )

    def replicas() -> int:
        return sum(serve.status().applications["scaled"].deployments["LLMServer:tiny"].replica_states.values())

    with (
        running_app("scaled", [config], serve_port),
        httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/scaled/", timeout=WAIT_S) as http,
        ThreadPoolExecutor(16) as pool,
    ):
        stop = threading.Event()

        def load() -> bool:
            good = True
            while not stop.is_set():
                good &= http.post("v1/completions", json={**BODY, "max_tokens": 250}).status_code == 200
            return good

        loads = [pool.submit(load) for _ in range(16)]
        wait_for(lambda: replicas() == 2, "no second replica came")
        stop.set()
        assert all(each.result(WAIT_S) for each in loads)
        wait_for(lambda: replicas() == 1, "the second replica did not go")
        wait_for(lambda: gauge(http, "num_requests_running") == 0, "requests still run")
