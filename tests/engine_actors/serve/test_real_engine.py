"""The HTTP server over a real AsyncLLM: actor, scheduler, KV manager and front end; only the executor is a fake one."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from engine_actors.async_llm import AsyncLLM
from engine_actors.config import EngineConfig
from engine_actors.serve import ServedModel, ServerSettings
from tests.engine_actors.serve.server import RunningServer, serving
from tests.engine_actors.serve.test_errors import error_of
from tests.fakes import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
COMPLETIONS = "/v1/completions"
WAIT_S = 60
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
MakeConfig = Callable[..., EngineConfig]


@contextmanager
def engine_server(config: EngineConfig) -> Iterator[RunningServer]:
    """A server over an AsyncLLM of its own."""
    llm = AsyncLLM.from_config(config)
    try:
        with serving(ServedModel.from_async_llm(llm, ["fake"]), ServerSettings()) as server:
            yield server
    finally:
        llm.shutdown(0.0)


@pytest.fixture(scope="module")
def server(fake_config: MakeConfig, ray_cluster: None) -> Iterator[RunningServer]:
    with engine_server(fake_config({"step_s": 0.002})) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def gauge(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"vllm:{name}{{")))


def wait_until_idle(http: httpx.Client) -> None:
    """Nothing runs or waits any more, and no KV block is in use."""
    deadline = time.monotonic() + WAIT_S
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(gauge(http, name) for name in names):
        assert time.monotonic() < deadline


def test_facts_come_from_the_engine(http: httpx.Client, server: RunningServer) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == server.model.limits.max_model_len == 256


def test_tokens_are_the_engines(http: httpx.Client) -> None:
    choice = http.post(COMPLETIONS, json={"prompt": [5, 6, 7], **GREEDY}).json()["choices"][0]
    assert choice["token_ids"] == expected_tokens([5, 6, 7], 20)
    assert choice["finish_reason"] == "length"


async def test_concurrent_streams_get_their_own_tokens(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def run(prompt: list[int]) -> list[int]:
            extra = {name: GREEDY[name] for name in ("ignore_eos", "return_token_ids")}
            chunks = await client.completions.create(
                model="fake", prompt=prompt, max_tokens=20, temperature=0, stream=True, extra_body=extra
            )
            return [token async for chunk in chunks for token in chunk.choices[0].token_ids]  # type: ignore[attr-defined]

        prompts = [[3 + index, 4, 5] for index in range(32)]
        assert await asyncio.gather(*map(run, prompts)) == [expected_tokens(prompt, 20) for prompt in prompts]


def test_batched_prompts_and_n(http: httpx.Client) -> None:
    body = {"prompt": [[5], [6, 7], [8, 9]], "n": 2, **GREEDY}
    answer = http.post(COMPLETIONS, json=body).json()
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert ids == [expected_tokens(prompt, 20) for prompt in body["prompt"] for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 120


def test_prefix_hits_are_reported_and_forgotten(http: httpx.Client) -> None:
    body = {"prompt": list(range(2, 102)), **GREEDY}

    def cached() -> int:
        usage = http.post(COMPLETIONS, json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() == 96
    body["cache_salt"] = "another tenant"
    assert cached() == 0
    wait_until_idle(http)
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_kv(http: httpx.Client, server: RunningServer, stream: bool) -> None:
    wait_until_idle(http)
    body = {"prompt": [[9, 8, 7]] * 3, **GREEDY, "n": 2, "max_tokens": 250, "stream": stream}
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall("\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content)
        while gauge(http, "num_requests_running") < 6:
            pass
        assert gauge(http, "kv_cache_usage_perc") > 0
    wait_until_idle(http)
    assert http.get("/load").json() == {"server_load": 0}


def test_chat_and_stop_strings_through_the_engines_detokenizer(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 30}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    assert len(stop) == 3
    choice = http.post("/v1/chat/completions", json={**body, "stop": stop}).json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_full_queue_is_a_429(fake_config: MakeConfig, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    config = fake_config({"hold_file": str(hold)}, max_num_seqs=1, max_num_queued_requests=1)
    with engine_server(config) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        # Three at once: one runs, one waits, one is refused; `stream` or not, with its status.
        response = http.post(COMPLETIONS, json={"prompt": [[5], [6], [7]], **GREEDY, "stream": True})
        assert error_of(response, 429)["type"] == "RateLimitError"
        assert response.headers["retry-after"] == "1"
        hold.unlink()
        wait_until_idle(http)
        assert http.post(COMPLETIONS, json={"prompt": [5], **GREEDY}).status_code == 200


def test_engine_death_ends_streams_and_turns_health_red(fake_config: MakeConfig) -> None:
    config = fake_config({"step_s": 0.01, "fail_at_step": 20})
    with engine_server(config) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        assert http.get("/health").status_code == 200
        body = {"prompt": [5], **GREEDY, "max_tokens": 200}
        events = http.post(COMPLETIONS, json={**body, "stream": True}).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "ServiceUnavailableError"
        assert events[-2] == "data: [DONE]"
        for path in ("/health", "/ping"):
            assert http.get(path).status_code == 503
        after = http.post(COMPLETIONS, json=body)
        assert error_of(after, 503)["type"] == "ServiceUnavailableError"
        assert int(after.headers["retry-after"]) > 0
        assert http.get("/metrics").status_code == 200
        assert http.get("/status").json()["models"][0]["healthy"] is False


@pytest.mark.model
def test_real_model_continues_the_sentence(smollm2_dir: Path) -> None:
    config = EngineConfig.from_kwargs(
        str(smollm2_dir), max_model_len=256, num_gpu_blocks_override=64, distributed_executor_backend="uni"
    )
    with engine_server(config) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        with client:
            answer = client.completions.create(
                model="fake", prompt="The capital of France is", max_tokens=4, temperature=0
            )
            assert answer.choices[0].text.startswith(" Paris")
            messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
            chunks = client.chat.completions.create(
                model="fake", messages=messages, max_tokens=12, temperature=0, stream=True
            )
            assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
