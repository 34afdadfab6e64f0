"""recovery="replay" with real workers and real signals: the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine_actors.async_llm import AsyncLLM
from scheduler.sampling_params import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
PROMPTS = [[(7 * i + j) % 500 + 2 for j in range(1 + 9 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=100, ignore_eos=True, presence_penalty=0.5)
GRAMMAR = SamplingParams(temperature=1.0, seed=8, max_tokens=100, structured_outputs={"regex": "([a-z]{3} ){20}"})
STEP_TIMEOUT_S = 3.0


async def tokens(engine: AsyncLLM, prompt: list[int], params: SamplingParams, begun: asyncio.Event) -> list[int]:
    found: list[int] = []
    async for output in engine.generate(prompt, params):
        found = output.outputs[0].token_ids
        begun.set()
    return found


async def run(engine: AsyncLLM, target: int | None = None, with_signal: int = signal.SIGKILL) -> list[list[int]]:
    """Tokens of all requests; once one has a token, the process gets a signal."""
    begun = asyncio.Event()
    requests = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SEEDED, GRAMMAR)]
    tasks = [asyncio.create_task(tokens(engine, prompt, params, begun)) for prompt, params in requests]
    if target is not None:
        await begun.wait()
        os.kill(target, with_signal)
    return await asyncio.gather(*tasks)


async def pids(engine: AsyncLLM) -> list[int]:
    """EngineCore's, then the workers'."""
    place = await engine.client.link.actor.where.remote()
    return [int(place.rpartition(" ")[2]), *await engine.collective_rpc(lambda worker: os.getpid())]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp2-async"),
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 16}, id="pp2-chunked"),
    ],
)
async def test_tokens_are_those_of_an_undisturbed_run(random_llama_dir: Path, options: dict[str, Any]) -> None:
    engine = AsyncLLM(
        str(random_llama_dir),
        recovery="replay",
        dtype="float32",
        num_gpu_blocks_override=200,
        torch_num_threads=1,
        step_timeout_s=STEP_TIMEOUT_S,
        **options,
    )
    try:
        expected = await run(engine)
        core, first, last = await pids(engine)
        assert await run(engine, last) == expected, "a worker was killed"
        _, first, _ = await pids(engine)
        assert await run(engine, first, signal.SIGSTOP) == expected, "a worker hung"
        assert await run(engine, core) == expected, "EngineCore was killed"
        _, first, _ = await pids(engine)
        os.kill(first, signal.SIGKILL)  # while idle
        assert await run(engine) == expected, "an idle worker was killed"
        assert engine.recovery_stats.recoveries == 4
    finally:
        await engine.shutdown_async()
