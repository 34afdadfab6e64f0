"""What a failure leaves in the logs: its cause once, and next to nothing for each request that comes later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, logging, sys, time
from functools import partial
import ray
from engine_actors import AsyncLLM, EngineDeadError, SamplingParams
from tests.fakes import FakeExecutor

logging.basicConfig(level=logging.INFO)
ray.init(address=sys.argv[1], log_to_driver=True)

async def main():
    engine = AsyncLLM(sys.argv[2], executor_class=partial(FakeExecutor, fail_at_step=5))
    params = SamplingParams(temperature=0.0, max_tokens=20)
    print("--- in flight", file=sys.stderr, flush=True)
    results = await asyncio.gather(*(engine.generate_all([[5, i]], params) for i in range(50)), return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results), results
    time.sleep(2)  # the actor's lines come through Ray's log monitor
    print("--- later", file=sys.stderr, flush=True)
    for i in range(20):
        try:
            await engine.generate_all([[5, i]], params)
        except EngineDeadError as error:
            assert "boom" in str(error)
        try:
            await engine.check_health()
        except EngineDeadError:
            pass
    await engine.shutdown_async()
    time.sleep(1)
    print("--- end", file=sys.stderr, flush=True)

asyncio.run(main())
"""


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_cause_is_logged_once_and_later_requests_add_no_more_than_a_line(fake_model_dir: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address, str(fake_model_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    _, in_flight, later = done.stdout.split("--- ")[-4:-1]
    named = [line for line in in_flight.splitlines() if "EngineCore failed" in line]
    assert len(named) == 1, in_flight
    assert "worker rank 0 failed in step 5: boom" in named[0]
    # The one report ends with the exception itself.
    assert in_flight.count("boom") <= 3, in_flight
    assert len(later.splitlines()) <= 1 + 20, later
