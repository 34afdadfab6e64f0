"""However a program ends, it ends: without shutdown, after ray.shutdown(), or in the middle of a request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRELUDE = """
import asyncio, sys
import ray
from engine_actors import LLM, AsyncLLM, EngineDeadError, SamplingParams
from tests.fakes import FakeExecutor, expected_tokens

model = sys.argv[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)

def check(llm):
    (output,) = llm.generate([[5]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([5], 20)

def start():
    return LLM(model, executor_class=FakeExecutor)

def connect():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
"""
AFTER_RAY_SHUTDOWN = """
connect()
llm = start()
check(llm)
ray.shutdown()
for call in (lambda: check(llm), llm.reset_prefix_cache, llm.llm_engine.check_health):
    try:
        call()
    except EngineDeadError as error:
        assert "left the Ray cluster" in str(error), error
    else:
        raise AssertionError("a dead engine answered")
llm.shutdown()

# A second cluster in the same process; the first engine's remains do not touch it.
connect()
second = start()
check(second)
llm.shutdown()
del llm
check(second)
print("done")
# The program ends without shutting down the second engine.
"""
IN_MID_STREAM = """
async def main():
    engine = AsyncLLM(model, executor_class=FakeExecutor)
    stream = engine.generate([5], GREEDY.clone(max_tokens=200))
    await anext(stream)
    pending = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    print("done")

asyncio.run(main())
"""
SHUTDOWN_INSIDE_THE_LOOP = """
async def main():
    connect()
    engine = AsyncLLM(model, executor_class=FakeExecutor)
    stream = await engine.add_request([5], GREEDY.clone(max_tokens=200))
    await anext(stream)
    engine.shutdown()
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort", outputs[-1]

    engine = AsyncLLM(model, executor_class=FakeExecutor)
    stream = await engine.add_request([5], GREEDY.clone(max_tokens=200))
    await anext(stream)
    ray.shutdown()
    engine.shutdown()
    try:
        async for _ in stream:
            pass
    except EngineDeadError:
        print("done")

asyncio.run(main())
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(AFTER_RAY_SHUTDOWN, id="after-ray-shutdown"),
        pytest.param(IN_MID_STREAM, id="in-mid-stream"),
        pytest.param(SHUTDOWN_INSIDE_THE_LOOP, id="shutdown-inside-the-loop"),
    ],
)
def test_program_ends_cleanly(fake_model_dir: Path, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, str(fake_model_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
