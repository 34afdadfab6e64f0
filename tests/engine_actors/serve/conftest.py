"""A server over the fake engine, and the unmodified openai client for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine_actors.serve import ServerSettings
from tests.engine_actors.serve.server import RunningServer, running


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="session")
def session_server(tokenizer: Any) -> Iterator[RunningServer]:
    with running(tokenizer, ServerSettings(first_output_wait_s=0.3)) as server:
        yield server


@pytest.fixture
def server(session_server: RunningServer) -> Iterator[RunningServer]:
    """The session's server, its engine as new."""
    session_server.llm.reset()
    yield session_server
    if session_server.llm.gate is not None:
        session_server.release(10_000)
    assert session_server.llm.idle.wait(10)


# Making a client takes 0.1 s, mostly for TLS it does not use: one of each per session.


@pytest.fixture(scope="session")
def session_client(session_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{session_server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="session")
def session_http(session_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=session_server.url, timeout=30) as made:
        yield made


@pytest.fixture
def client(server: RunningServer, session_client: openai.OpenAI) -> openai.OpenAI:
    return session_client


@pytest.fixture
def http(server: RunningServer, session_http: httpx.Client) -> httpx.Client:
    return session_http


@pytest.fixture(scope="module")
def serve_port(ray_cluster: None) -> Iterator[int]:
    """Ray Serve on the session's cluster."""
    from ray import serve

    from engine_actors.serve.direct import free_ports

    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
