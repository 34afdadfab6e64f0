"""Many requests to one server: at a rate, with at most so many at once. Used by `engine-actors bench serve`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from engine_actors.bench.client import BenchRequest, BenchResult, Target, send_request

TIMEOUT_S = 6 * 3600


@dataclass(frozen=True)
class LoadPlan:
    """How requests arrive.

    Attributes:
        request_rate: Requests a second on average; infinity sends all at once.
        burstiness: 1 is a Poisson process; less is burstier, more is steadier (gamma-distributed gaps).
        max_concurrency: Requests in flight at most; None is no limit.
        seed: Of the arrival times.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request_rate must be more than 0 (or inf), got {self.request_rate!r}")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be more than 0, got {self.burstiness!r}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1 or None, got {self.max_concurrency!r}")

    def start_times_s(self, num_requests: int) -> list[float]:
        """When each request is due, in seconds from the start; the last comes when the rate says it should."""
        if self.request_rate == float("inf"):
            return [0.0] * num_requests
        random_gaps = random.Random(self.seed)
        mean_s = 1.0 / self.request_rate
        gaps = [random_gaps.gammavariate(self.burstiness, mean_s / self.burstiness) for _ in range(num_requests)]
        scale = num_requests * mean_s / sum(gaps)
        due, times = 0.0, []
        for gap in gaps:
            due += gap * scale
            times.append(due)
        return times


@dataclass(frozen=True)
class LoadReport:
    """All results, in the order of the requests.

    Attributes:
        duration_s: From the first request to the last token.
    """

    results: list[BenchResult]
    duration_s: float


async def run_load(
    target: Target, requests: Sequence[BenchRequest], plan: LoadPlan, on_done: Callable[[], None] | None = None
) -> LoadReport:
    """Send all requests. `on_done` is called at the end of each."""
    limit = asyncio.Semaphore(plan.max_concurrency or len(requests))
    async with make_session() as session:
        started_s = time.perf_counter()

        async def one(request: BenchRequest, due_s: float) -> BenchResult:
            await asyncio.sleep(max(0.0, started_s + due_s - time.perf_counter()))
            async with limit:
                result = await send_request(session, target, request)
            if on_done is not None:
                on_done()
            return result

        due_s = plan.start_times_s(len(requests))
        results = await asyncio.gather(*map(one, requests, due_s))
        return LoadReport(list(results), time.perf_counter() - started_s)


def make_session() -> aiohttp.ClientSession:
    """Without a limit on connections, and patient."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), read_bufsize=1 << 20
    )
