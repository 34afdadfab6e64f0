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
import asyncio, logging, sys
from functools import partial
import ray
from engine_actors import AsyncLLM, EngineDeadError, SamplingParams
from tests.fakes import FakeExecutor

logging.basicConfig(level=logging.INFO)
ray.init(address=sys.argv[1], log_to_driver=True)

@ray.remote(num_cpus=0)
def say(text):
    print(text, file=sys.stderr, flush=True)

async def main():
    engine = AsyncLLM(sys.argv[2], executor_class=partial(FakeExecutor, fail_at_step=5))
    params = SamplingParams(temperature=0.0, max_tokens=20)
    print("--- in flight", file=sys.stderr, flush=True)
    results = await asyncio.gather(*(engine.generate_all([[5, i]], params) for i in range(50)), return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results), results
    sys.stdin.readline()  # when the actor's lines have come through Ray's log monitor
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
    await say.remote("all is told")  # behind all lines written before
    sys.stdin.readline()

asyncio.run(main())
"""


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_cause_is_logged_once_and_later_requests_add_no_more_than_a_line(fake_model_dir: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address, str(fake_model_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
    )
    assert program.stdin is not None
    assert program.stdout is not None
    lines: list[str] = []

    def read_until(text: str) -> None:
        for line in program.stdout or ():
            lines.append(line)
            if text in line:
                break
        else:
            raise AssertionError(f"{text!r} never came:\n{''.join(lines)}")
        program.stdin.write("\n")  # type: ignore[union-attr]
        program.stdin.flush()  # type: ignore[union-attr]

    try:
        read_until("EngineCore failed")
        read_until("all is told")
        rest, _ = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 0, rest
    output = "".join(lines) + rest
    in_flight, later = output.split("--- in flight")[1].split("--- later")
    # A traceback follows the line that names the cause, and may come behind the mark.
    named = [line for line in output.splitlines() if "EngineCore failed" in line]
    assert len(named) == 1, output
    assert "worker rank 0 failed in step 5: boom" in named[0]
    # The one report ends with the exception itself.
    assert output.count("boom") <= 3, output
    own = [line for line in later.splitlines()[1:] if "EngineCoreActor pid=" not in line and "all is told" not in line]
    assert len(own) <= 20, later
    assert in_flight.strip()
