"""Many streams at once, a third of whose clients leave: nobody else loses a token, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.engine_actors.serve.server import RunningServer
from tests.engine_actors.serve.test_real_engine import GREEDY, MakeConfig, engine_server, wait_until_idle
from tests.fakes import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
LEAVING = 0.3


@pytest.fixture(scope="module")
def server(fake_config: MakeConfig, ray_cluster: None) -> Iterator[RunningServer]:
    with engine_server(fake_config({"step_s": 0.001}, max_num_seqs=64)) as running:
        yield running


async def one(server: RunningServer, number: int, leaves_after: float | None) -> list[int] | None:
    """Stream 20 tokens, or leave in the middle; the tokens, unless this client left."""
    prompt = [2 + number % 500, 2 + number // 500, 7]
    content = json.dumps({"prompt": prompt, "stream": True, **GREEDY}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        if leaves_after is not None:
            await asyncio.wait_for(reader.read(1), leaves_after) if leaves_after else None
            return None
        text = (await reader.read()).decode()
    except TimeoutError:
        return None
    finally:
        writer.close()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text[-500:]
    tokens = [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]
    assert tokens == expected_tokens(prompt, 20)
    return tokens


async def load(server: RunningServer, num_requests: int, num_at_once: int) -> None:
    generator = random.Random(0)
    room = asyncio.Semaphore(num_at_once)

    async def run(number: int) -> bool:
        leaves = generator.choice([0.0, 0.001, 0.01, 0.1]) if generator.random() < LEAVING else None
        async with room:
            tokens = await one(server, number, leaves)
        return (tokens is not None) == (leaves is None)

    assert all(await asyncio.gather(*map(run, range(num_requests))))
    await asyncio.to_thread(check_nothing_is_left, server)


def check_nothing_is_left(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        wait_until_idle(http)
        assert http.get("/load").json() == {"server_load": 0}
        assert http.get("/health").status_code == 200
        assert http.post("/reset_prefix_cache").json() == {"success": True}


async def test_a_third_of_150_clients_leaves(server: RunningServer) -> None:
    await load(server, 150, 50)


@pytest.mark.soak
async def test_a_third_of_10000_clients_leaves(server: RunningServer) -> None:
    await load(server, 10_000, 1000)
