"""The server under load: a thousand streams, clients that leave, each part killed. Figures go to docs/deploy.md.

Run with `make soak`. $SOAK_MINUTES (10) is how long memory is watched.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from engine_actors.bench.client import BenchRequest, BenchResult, Target, send_request
from engine_actors.bench.load import make_session
from engine_actors.serve.direct import free_ports
from tests.engine_actors.serve.cli_server import CliServer, cli_server
from tests.engine_actors.serve.serve_app import gauge, wait_for

pytestmark = pytest.mark.soak
STREAMS = 1000
MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
BACK_S = 120
EXTRA: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(random_llama_dir: Path) -> Iterator[CliServer]:
    (port,) = free_ports(1)
    arguments = ("--port", str(port), "--served-model-name", "tiny", "--max-model-len", "256", "--max-num-seqs", "256",
                 "--num-gpu-blocks-override", "4096")  # fmt: skip
    with cli_server(str(random_llama_dir), *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def target(server: CliServer) -> Target:
    return Target(f"{server.url}/v1/completions", "tiny", extra=EXTRA)


def request(number: int, max_tokens: int = 32) -> BenchRequest:
    return BenchRequest([2 + number % 500, 2 + number // 500 % 500, 7], 3, max_tokens)


def processes(server: CliServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def process_of(server: CliServer, name: str) -> psutil.Process:
    return next(each for each in processes(server) if name in " ".join(_command_of(each)))


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def check_idle(server: CliServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            wait_for(lambda name=name: gauge(http, name) == 0, f"{name} does not return to 0")
        assert http.get("/load").json() == {"server_load": 0}


async def watch_health(server: CliServer, bad: list[str]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{server.url}/health") as response:
                if response.status != 200:
                    bad.append(f"{response.status}")
            await asyncio.sleep(0.5)


async def test_a_thousand_streams_lose_nothing_and_memory_is_flat(server: CliServer, target: Target) -> None:
    bad: list[str] = []
    watching = asyncio.create_task(watch_health(server, bad))
    replica = process_of(server, "ServeReplica")
    memory_mb: list[float] = []
    num_done = 0
    started_s = time.monotonic()
    deadline_s = started_s + 60 * MINUTES
    async with make_session() as session:

        async def stream(number: int) -> None:
            nonlocal num_done
            while True:
                result = await send_request(session, target, request(number))
                assert (result.error, result.num_output_tokens) == ("", 32)
                num_done += 1
                if time.monotonic() > deadline_s:
                    return

        async def sample() -> None:
            while True:
                memory_mb.append(replica.memory_info().rss / 2**20)
                await asyncio.sleep(5)

        sampling = asyncio.create_task(sample())
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(stream(number))
        sampling.cancel()
    watching.cancel()
    check_idle(server)
    assert bad == []
    settled, last = statistics.median(memory_mb[len(memory_mb) // 4 :][:5]), statistics.median(memory_mb[-5:])
    print(f"{num_done} streams in {time.monotonic() - started_s:.0f} s, replica {settled:.0f} → {last:.0f} MB")
    assert last < settled * 1.1 + 20


async def test_clients_that_leave_leave_nothing_behind(server: CliServer, target: Target) -> None:
    draw = random.Random(0)
    room = asyncio.Semaphore(500)
    started_s = time.monotonic()
    async with make_session() as session:

        async def one(number: int) -> bool:
            leaves_s = draw.choice([0.001, 0.01, 0.1]) if draw.random() < 0.3 else None
            async with room:
                try:
                    async with asyncio.timeout(leaves_s):
                        return (await send_request(session, target, request(number))).success
                except TimeoutError:
                    return leaves_s is not None

        results = await asyncio.gather(*map(one, range(10_000)))
    assert all(results)
    check_idle(server)
    print(f"10000 requests, 30 % of whose clients left, in {time.monotonic() - started_s:.0f} s")


@pytest.mark.parametrize("part", ["RayWorker", "EngineCore", "ServeReplica", "ServeController"])
async def test_a_part_killed_under_load_comes_back(server: CliServer, target: Target, part: str) -> None:
    """Accepted requests end with a result or an error; service returns by itself."""
    victim = process_of(server, part)
    results: list[tuple[float, BenchResult]] = []
    stop, answered = asyncio.Event(), asyncio.Event()
    async with make_session() as session:

        async def client(number: int) -> None:
            while not stop.is_set():
                async with asyncio.timeout(BACK_S):
                    result = await send_request(session, target, request(number, 64))
                results.append((time.monotonic(), result))
                if result.success:
                    answered.set()
                await asyncio.sleep(0 if result.success else 0.2)

        async with asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(client(number))
            await answered.wait()
            killed_s = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            back_s = None
            while back_s is None or time.monotonic() < back_s + 2:
                assert time.monotonic() < killed_s + BACK_S, f"no answer after {part} was killed"
                began = [at for at, result in results if result.success and result.started_s > killed_s + 1]
                back_s = began[0] if began else None
                await asyncio.sleep(0.05)
            stop.set()
    errors = [result.error for _, result in results if result.error]
    kinds = sorted({re.sub(r"request [\w-]+", "request …", error)[:80] for error in errors})
    print(f"{part}: back {back_s - killed_s:.1f} s after the kill, {len(errors)} errors of {len(results)}: {kinds}")
    assert psutil.pid_exists(server.process.pid)
    check_idle(server)
