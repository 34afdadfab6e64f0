"""How fast a dead process is noticed, and how long `recovery="replay"` takes to repair it.

    python benchmarks/recovery.py path/to/model --tensor-parallel-size 2

While eight requests stream, a worker or EngineCore gets SIGKILL. Without recovery: the time until the first and the
last caller have their EngineDeadError. With it: the time lost, and the longest pause that a caller sees; every text is
compared with an undisturbed run's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import ray

from engine_actors import AsyncLLM, EngineDeadError, SamplingParams
from engine_actors.fetch_model import fetch_model

NUM_REQUESTS = 8
NUM_TOKENS = 150
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Caller:
    """One request, and when its tokens came."""

    def __init__(self, engine: AsyncLLM, index: int) -> None:
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.error_s: float | None = None
        self.in_the_middle = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, [100 + index] * (20 + index)))

    async def _read(self, engine: AsyncLLM, prompt: list[int]) -> None:
        try:
            async for output in engine.generate({"prompt_token_ids": prompt}, PARAMS):
                self.tokens = output.outputs[0].token_ids
                self.times_s.append(time.monotonic())
                if len(self.tokens) > NUM_TOKENS // 4:
                    self.in_the_middle.set()
        except EngineDeadError:
            self.error_s = time.monotonic()

    @property
    def longest_pause_s(self) -> float:
        return max(after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False))


async def pid_of(engine: AsyncLLM, victim: str) -> int:
    if victim == "EngineCore":
        place = await engine.client.link.actor.where.remote()
        return int(place.rpartition(" ")[2])
    pids = await engine.collective_rpc(lambda worker: os.getpid())
    return int(pids[-1])


async def disturb(engine: AsyncLLM, victim: str) -> tuple[float, list[Caller]]:
    """Kill the victim in the middle of the requests. Returns when, and the callers, which have ended."""
    pid = await pid_of(engine, victim)
    callers = [Caller(engine, index) for index in range(NUM_REQUESTS)]
    await asyncio.gather(*(caller.in_the_middle.wait() for caller in callers))
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*(caller.task for caller in callers))
    return killed_s, callers


async def undisturbed(engine: AsyncLLM) -> list[list[int]]:
    callers = [Caller(engine, index) for index in range(NUM_REQUESTS)]
    await asyncio.gather(*(caller.task for caller in callers))
    return [caller.tokens for caller in callers]


async def measure_detection(options: dict[str, Any], victim: str, repeats: int) -> None:
    firsts, lasts = [], []
    for _ in range(repeats):
        engine = AsyncLLM(**options)
        await undisturbed(engine)
        killed_s, callers = await disturb(engine, victim)
        errors = [caller.error_s - killed_s for caller in callers if caller.error_s is not None]
        if len(errors) != NUM_REQUESTS:
            raise SystemExit(f"{NUM_REQUESTS - len(errors)} calls did not end with EngineDeadError")
        firsts.append(min(errors))
        lasts.append(max(errors))
        await engine.shutdown_async()
    print(f"{victim:10s} killed, no recovery: first error {text(firsts)}, last {text(lasts)}", flush=True)


async def measure_recovery(options: dict[str, Any], victims: list[str], repeats: int) -> None:
    engine = AsyncLLM(**options, recovery="replay")
    expected = await undisturbed(engine)
    for victim in victims:
        lost, pauses, num_equal = [], [], 0
        for _ in range(repeats):
            before_s = engine.recovery_stats.lost_s
            _, callers = await disturb(engine, victim)
            lost.append(engine.recovery_stats.lost_s - before_s)
            pauses.append(max(caller.longest_pause_s for caller in callers))
            num_equal += [caller.tokens for caller in callers] == expected
        print(
            f"{victim:10s} killed, replay: time lost {text(lost)}, longest pause of a caller {text(pauses)}; "
            f"{num_equal} of {repeats} runs token-identical",
            flush=True,
        )
    await engine.shutdown_async()


def text(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s (max {max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a model folder; SmolLM2 135M when left out")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    options = {
        "model": str(args.model or fetch_model("smollm2-135m-instruct")),
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 1000,
    }
    num_cpus = max(args.tensor_parallel_size * args.pipeline_parallel_size, os.cpu_count() or 1)
    ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    victims = ["worker", "EngineCore"]
    for victim in victims:
        asyncio.run(measure_detection(options, victim, args.repeats))
    asyncio.run(measure_recovery(options, victims, args.repeats))


if __name__ == "__main__":
    main()
