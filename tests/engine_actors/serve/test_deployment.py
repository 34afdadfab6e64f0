"""The application on Ray Serve: the replica is the HTTP server, its engine lives in its group and is replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.exceptions import RayError, RayTaskError

from engine_actors import AsyncLLM, SamplingParams
from scheduler.sampling_params import RequestOutputKind
from tests.engine_actors.serve.serve_app import WAIT_S, gauge, llm_config, running_app, wait_for

pytestmark = [pytest.mark.ray]
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 20, "ignore_eos": True,
                        "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module")
def app(serve_port: int, random_llama_dir: Path) -> Iterator[Any]:
    with running_app("one", [llm_config(random_llama_dir)], serve_port) as handle:
        yield handle


@pytest.fixture(scope="module")
def http(app: Any, serve_port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{serve_port}/one/", timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def expected(random_llama_dir: Path) -> list[int]:
    """What transformers continues BODY's prompt with."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(random_llama_dir, dtype=torch.float32)
    tokens = model.generate(torch.tensor([BODY["prompt"]]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    return [int(token) for token in tokens[0, 3:]]


def pid_of(app: Any, part: str) -> int:
    found = re.search(r"pid (\d+)", app.describe.remote().result()["places"][part])
    assert found is not None
    return int(found[1])


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, as they come."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_tokens_are_the_models(http: httpx.Client, expected: list[int]) -> None:
    whole = http.post("v1/completions", json=BODY).json()["choices"][0]["token_ids"]
    with http.stream("POST", "v1/completions", json={**BODY, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        streamed = [token for event in sse(response) for token in event["choices"][0]["token_ids"]]
    assert whole == streamed == expected


def test_the_whole_api_is_at_the_routes_prefix(http: httpx.Client) -> None:
    assert http.get("v1/models").json()["data"][0]["id"] == "tiny"
    assert http.get("health").status_code == 200
    assert "vllm:num_requests_running" in http.get("metrics").text
    missing = http.get("nowhere")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    refused = http.post("v1/completions", json={**BODY, "temperature": 3, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


def test_request_ids_are_echoed(http: httpx.Client) -> None:
    answer = http.post("v1/completions", json=BODY, headers={"X-Request-Id": "abc-1"})
    assert answer.headers.get_list("x-request-id") == ["abc-1"]
    assert answer.json()["id"] == "cmpl-abc-1"


def test_engine_and_workers_sit_in_the_replicas_group(app: Any) -> None:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [group["bundles"] for group in groups] == [{0: {"CPU": 1.0}}]
    assert app.describe.remote().result()["kv_capacity"].startswith("KV cache: 127 blocks")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_kv_through_serves_proxy(http: httpx.Client, stream: bool) -> None:
    body = {**BODY, "prompt": [[5, 6, 7]] * 8, "max_tokens": 250, "stream": stream, "n": 2}
    left = threading.Event()

    def leave() -> None:
        with httpx.Client(timeout=0.5) as client:
            try:
                client.post(str(http.base_url) + "v1/completions", json=body)
            except httpx.TimeoutException:
                left.set()

    client = threading.Thread(target=leave)
    client.start()
    client.join()
    if stream or left.is_set():
        wait_for(lambda: gauge(http, "num_requests_running") == 0, "still running")
        wait_for(lambda: gauge(http, "kv_cache_usage_perc") == 0, "KV is still in use")
    assert http.get("load").json() == {"server_load": 0}


def test_async_llm_works_in_a_deployment_of_ones_own(app: Any, random_llama_dir: Path, expected: list[int]) -> None:
    """One that knows nothing of this package's Serve application; its group's first bundle is the replica's own."""
    from ray import serve

    @serve.deployment(
        ray_actor_options={"num_cpus": 1}, placement_group_bundles=[{"CPU": 1}, {"CPU": 1}], health_check_period_s=0.5
    )
    class Generator:
        def __init__(self, model: str) -> None:
            self.llm = AsyncLLM(model, max_model_len=256, num_gpu_blocks_override=64)

        async def check_health(self) -> None:
            await self.llm.check_health()

        async def stream(self, prompt: list[int]) -> AsyncIterator[list[int]]:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            async for output in self.llm.generate(prompt, params):
                yield output.outputs[0].token_ids

        async def kill_worker(self) -> None:
            await self.llm.collective_rpc(lambda worker: os.kill(os.getpid(), signal.SIGKILL))

    handle = serve.run(Generator.bind(str(random_llama_dir)), name="own", route_prefix=None)
    try:

        def tokens() -> list[int]:
            return [t for part in handle.options(stream=True).stream.remote(BODY["prompt"]) for t in part]

        assert tokens() == expected
        with pytest.raises(RayTaskError, match="EngineDeadError"):
            handle.kill_worker.remote().result()

        def is_back() -> bool:
            try:
                return tokens() == expected
            except RayError:
                return False  # The replica that lost its engine, until its health check has failed.

        wait_for(is_back, "Serve did not replace the replica whose engine had died")
    finally:
        serve.delete("own")


def test_figures_reach_rays_own_endpoint(http: httpx.Client) -> None:
    import ray

    http.post("v1/completions", json=BODY)
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = ("ray_vllm_generation_tokens_total{", "ray_vllm_num_requests_running{",
              "ray_engine_actors_time_to_first_token_seconds_bucket{", "ray_vllm_request_success_total{")  # fmt: skip

    def exported() -> bool:
        text = httpx.get(url, timeout=WAIT_S).text
        return all(name in text for name in wanted)

    wait_for(exported, "metrics are not exported")


@pytest.mark.parametrize(
    "part",
    ["EngineCore", pytest.param("Worker 0", marks=pytest.mark.soak), pytest.param("Replica", marks=pytest.mark.soak)],
)
def test_what_dies_is_replaced_and_clients_are_told(
    app: Any, http: httpx.Client, expected: list[int], part: str
) -> None:
    pid = pid_of(app, part)
    events: list[dict[str, Any]] = []
    started = threading.Event()

    def stream() -> None:
        body = {**BODY, "max_tokens": 250, "stream": True, "prompt": [[5, 6, 7]] * 16}
        with suppress(httpx.HTTPError), http.stream("POST", "v1/completions", json=body) as response:
            for line in response.iter_lines():
                started.set()
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert started.wait(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    streaming.join(WAIT_S)
    if part != "Replica":  # which can tell nothing any more: the connection breaks off
        assert events[-1]["error"]["code"] == 503
    statuses = set()

    def is_back() -> bool:
        answer = http.post("v1/completions", json=BODY)
        statuses.add(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            return False
        return bool(answer.json()["choices"][0]["token_ids"] == expected)

    wait_for(is_back, "no replica came back")
    assert pid_of(app, part) != pid
