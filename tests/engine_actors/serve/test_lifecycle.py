"""Requests that end early: clients that leave, aborts, timeouts; and what the server shows meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engine_actors.serve import ServerSettings
from tests.engine_actors.serve.server import MODEL, RunningServer, running
from tests.engine_actors.serve.test_errors import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 10


def wait_for(server: RunningServer, condition: Callable[[], bool]) -> None:
    """Until it holds on the server's event loop, which each look gives a turn."""
    deadline = time.monotonic() + WAIT_S
    while not server.call(condition):
        assert time.monotonic() < deadline


def post_and_leave(
    server: RunningServer, path: str, body: dict[str, Any], read_first: int = 0, num_prompts: int = 1
) -> None:
    """Send a request on a plain socket, read so many bytes once the engine has begun with all prompts, and close."""
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        connection.sendall(head.encode() + content)
        wait_for(server, lambda: len(server.llm.running) == num_prompts)
        if read_first:
            server.release(1)
            assert connection.recv(read_first)


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one", "batch"])
@pytest.mark.parametrize(("stream", "read_first"), [(False, 0), (True, 0), (True, 1)], ids=["whole", "early", "mid"])
def test_a_client_that_leaves_aborts_its_requests(
    server: RunningServer, prompt: Any, stream: bool, read_first: int
) -> None:
    server.hold()
    body = {"model": MODEL, "prompt": prompt, "stream": stream}
    post_and_leave(server, COMPLETIONS, body, read_first, len(prompt))
    assert server.llm.idle.wait(WAIT_S)
    assert len(server.llm.dropped) == len(server.llm.calls) == len(prompt)
    wait_for(server, lambda: len(server.app.state.inflight) == 0)


def test_leaving_before_the_body_is_complete_reaches_no_engine(server: RunningServer, http: httpx.Client) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    assert http.get("/health").status_code == 200
    assert server.llm.calls == []


def test_aborts_are_counted(server: RunningServer, http: httpx.Client) -> None:
    before = server.model.metrics.finished["abort"]
    server.hold()
    post_and_leave(server, COMPLETIONS, {"prompt": "a", "n": 2, "stream": True}, read_first=1)
    wait_for(server, lambda: server.model.metrics.finished["abort"] == before + 2)


class Background:
    """A request in a thread."""

    def __init__(
        self, http: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        self.response: httpx.Response | None = None

        def run() -> None:
            self.response = http.post(path, json=body, headers=headers)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(WAIT_S)
        assert self.response is not None
        return self.response


@pytest.mark.parametrize("name", ["cmpl-mine", "mine", None], ids=["answer-id", "header-id", "all"])
def test_abort_requests_ends_them_with_what_they_have(
    server: RunningServer, http: httpx.Client, name: str | None
) -> None:
    server.hold()
    request = Background(http, COMPLETIONS, {"prompt": "a"}, {"X-Request-Id": "mine"})
    assert server.llm.started.wait(WAIT_S)
    assert http.post("/abort_requests", json={"request_ids": ["other"]}).json() == {"aborted": []}
    answer = http.post("/abort_requests", json={} if name is None else {"request_ids": [name]})
    assert answer.json() == {"aborted": ["cmpl-mine"]}
    assert request.result().json()["choices"][0]["finish_reason"] == "abort"


def test_abort_requests_needs_no_body(http: httpx.Client) -> None:
    assert http.post("/abort_requests").json() == {"aborted": []}
    assert error_of(http.post("/abort_requests", content=b"{"), 400)


def test_load_counts_requests_in_flight(server: RunningServer, http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    server.hold()
    requests = [Background(http, COMPLETIONS, {"prompt": ["a", "b"]}), Background(http, CHAT, {"messages": [
        {"role": "user", "content": "Hi"}]})]  # fmt: skip
    wait_for(server, lambda: len(server.llm.running) == 3)
    assert http.get("/load").json() == {"server_load": 2}
    server.release(1000)
    assert [request.result().status_code for request in requests] == [200, 200]
    assert http.get("/load").json() == {"server_load": 0}


def test_status_shows_requests_and_figures(server: RunningServer, http: httpx.Client) -> None:
    server.hold()
    server.llm.num_cached = 1
    request = Background(http, COMPLETIONS, {"prompt": "Hello world", "stream": True}, {"X-Request-Id": "mine"})
    assert server.llm.started.wait(WAIT_S)
    (waiting,) = http.get("/status").json()["requests"]
    assert (waiting["id"], waiting["kind"], waiting["state"]) == ("cmpl-mine", "completion", "waiting for first token")
    assert (waiting["prompt_tokens"], waiting["generated_tokens"], waiting["ttft_s"]) == (2, 0, None)
    server.release(3)
    wait_for(server, lambda: next(iter(server.app.state.inflight)).num_generated == 3)
    status = http.get("/status").json()
    (running_one,) = status["requests"]
    assert (running_one["state"], running_one["generated_tokens"], running_one["cached_tokens"]) == ("running", 3, 1)
    assert running_one["ttft_s"] >= 0
    (model,) = status["models"]
    assert model["healthy"] is True
    assert model["names"][0] == MODEL
    assert model["generation_tokens_per_s"] > 0
    server.release(1000)
    assert request.result().status_code == 200


def test_status_page_is_html_that_asks_for_the_figures(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "fetch(STATUS_URL" in page.text


def test_silent_streams_are_kept_alive(tokenizer: Any) -> None:
    settings = ServerSettings(sse_keep_alive_s=0.05, first_output_wait_s=0.05)
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        server.hold()
        with http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            server.release(100)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert sum(line.startswith("data: {") for line in rest) > 5


def test_whole_answers_that_take_too_long_are_a_408(tokenizer: Any) -> None:
    settings = ServerSettings(request_timeout_s=0.05)
    with running(tokenizer, settings) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        server.hold()
        assert error_of(http.post(COMPLETIONS, json={"prompt": "a"}), 408)["type"] == "RequestTimeoutError"
        assert server.llm.idle.wait(WAIT_S)
        assert len(server.llm.dropped) == 1


def test_a_long_text_stops_neither_health_nor_streams(server: RunningServer, http: httpx.Client) -> None:
    """Tokenising it takes seconds, on a thread; texts of usual length do not wait for that thread."""
    huge = Background(http, "/tokenize", {"prompt": "lorem ipsum dolor " * 100_000})
    usual = {"prompt": "word " * 400, "stream": True, "max_tokens": 4}
    num_served = 0
    while huge.response is None:
        assert http.get("/health").status_code == 200
        assert http.post(COMPLETIONS, json=usual).text.endswith("data: [DONE]\n\n")
        num_served += 1
    assert huge.result().json()["count"] > 100_000
    assert num_served > 1


def test_a_27_mb_prompt_is_refused_or_truncated_without_being_tokenised_whole(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    tokenization = server.model.tokenization
    encode = tokenization._encode
    monkeypatch.setattr(tokenization, "_encode", lambda text, special: seen.append(len(text)) or encode(text, special))
    text = "lorem ipsum dolor " * 1_500_000 + "the end"
    assert error_of(http.post(COMPLETIONS, json={"prompt": text}), 400)["param"] == "input_text"
    assert seen == []
    body = {"prompt": text, "truncate_prompt_tokens": 2, "truncation_side": "left", "max_tokens": 1}
    assert http.post(COMPLETIONS, json=body).status_code == 200
    assert server.llm.calls[0].token_ids == server.llm.tokenizer.encode(" the end")
    assert seen[0] < 100_000
