"""What one bad request costs its neighbours: the gaps between the tokens of seven streams beside it.

    python benchmarks/neighbours.py path/to/model [--only "huge regex" …] [--rounds 5]

Seven requests stream; beside them an eighth sends short requests, one after the other: plain ones, or bad ones of one
kind, no two equal, each when the one before has been refused, has failed or has ended. The two take turns, round by
round. Prints the seven streams' median and 99th percentile of gaps (median over the rounds) beside the plain requests
and beside the bad ones, the ratios, and whether their tokens were always the same. The first grammar of an engine,
which starts the compiler's process, comes before all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from engine_actors import AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from engine_actors.fetch_model import fetch_model

NUM_STREAMS = 7
PAUSE_S = 0.05
"""Between the end of a bad request and the next."""
STREAM: dict[str, Any] = {
    "temperature": 0.8, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA,
}  # fmt: skip

Bad = Callable[[int], dict[str, Any]]
"""Sampling parameters of the i-th request of a kind."""


def plain(index: int) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": index}


def form(**kinds: Any) -> dict[str, Any]:
    return {"structured_outputs": kinds, "ignore_eos": False}


def many(index: int, count: int) -> range:
    """Token ids, others for each index."""
    return range(100 + index, 100 + index + count)


BAD: dict[str, Bad] = {
    "wrong value": lambda i: {"logprobs": 1000 + i},
    "malformed form": lambda i: form(regex=f"(a{i}"),
    "exponential schema": lambda i: form(json={"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"p{i}_{option}": {"const": option}}} for option in range(12)
    ]}] * 12}),
    "exponential regex": lambda i: form(regex=f"(a|b)*a(a|b){{{40 + i}}}"),
    "huge regex": lambda i: form(regex="|".join(f"{i}x{number}" for number in range(900))),
    "nested repeats": lambda i: form(regex=f"((a{{1,{900 + i}}}){{1,900}}){{1,900}}"),
    "ambiguous grammar": lambda i: form(grammar=f'root ::= p p p p "{i}"\np ::= ("a" | "aa" | p p)*'),
    "wide grammar": lambda i: form(grammar="root ::= " + "r? " * 300 + f'"{i}"\nr ::= "a"+'),
    "large arrays": lambda i: form(
        json={"type": "array", "minItems": 5000 + i, "items": {"type": "string", "maxLength": 5000}}
    ),
    "many choices": lambda i: form(choice=[f"{i} or {number:06}" for number in range(5000)]),
    "bias on 40,000 tokens": lambda i: {"logit_bias": dict.fromkeys(many(i, 40_000), 1.0)},
    "40,000 allowed tokens": lambda i: {"allowed_token_ids": list(many(i, 40_000))},
    "1,000 stop strings": lambda i: {"stop": [f"{i}-{number}" for number in range(1000)]},
    "128 bad words": lambda i: {"bad_words_token_ids": [[t, t, t] for t in many(i, 128)]},
    "no token left": lambda i: {"structured_outputs": {"regex": f"[a-c]+{i}"}, "allowed_token_ids": [100]},
}  # fmt: skip


class Stream:
    """One of the seven, and when its tokens came."""

    def __init__(self, engine: AsyncLLM, index: int, num_tokens: int) -> None:
        self.tokens: list[int] = []
        self.gaps_s: list[float] = []
        params = SamplingParams(**STREAM, seed=index, max_tokens=num_tokens)
        self.task = asyncio.create_task(self._read(engine, [100 + index] * (20 + index), params))

    async def _read(self, engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
        before_s = None
        async for output in engine.generate(prompt, params):
            now_s = time.perf_counter()
            if before_s is not None:
                self.gaps_s.append(now_s - before_s)
            before_s = now_s
            self.tokens += output.outputs[0].token_ids


async def send(engine: AsyncLLM, kind: Bad, numbers: Iterator[int]) -> None:
    """One request after the other, for ever."""
    while True:
        params = {"seed": 0, "ignore_eos": True, "max_tokens": 20, **kind(next(numbers))}
        try:
            await engine.generate_all([[5, 6]], SamplingParams(**params))
        except EngineDeadError:
            raise
        except (ValueError, RuntimeError):  # Refused, or failed alone.
            pass
        await asyncio.sleep(PAUSE_S)


async def run_streams(
    engine: AsyncLLM, num_tokens: int, kind: Bad, numbers: Iterator[int]
) -> tuple[list[float], list[list[int]]]:
    """Gaps and tokens of the seven."""
    streams = [Stream(engine, index, num_tokens) for index in range(NUM_STREAMS)]
    eighth = asyncio.create_task(send(engine, kind, numbers))
    await asyncio.gather(*(stream.task for stream in streams))
    if not eighth.done():
        eighth.cancel()
    result = (await asyncio.gather(eighth, return_exceptions=True))[0]
    if isinstance(result, Exception):
        raise result
    return [gap for stream in streams for gap in stream.gaps_s], [stream.tokens for stream in streams]


async def measure(engine: AsyncLLM, names: list[str], rounds: int, num_tokens: int) -> None:
    numbers = itertools.count(1)
    await run_streams(engine, num_tokens, plain, numbers)
    # The process that compiles starts with the first grammar.
    await engine.generate_all([[5, 6]], SamplingParams(max_tokens=5, structured_outputs={"regex": "a{9}"}))
    print(f"{'beside':22} {'sent':>5}{'median ms':>18}{'p99 ms':>18}{'ratios':>15}")
    for name in names:
        medians: tuple[list[float], list[float]] = ([], [])
        tails: tuple[list[float], list[float]] = ([], [])
        sent, is_same = 0, True
        for _ in range(rounds):
            tokens = []
            for index, kind in enumerate((plain, BAD[name])):
                first = next(numbers)
                gaps_s, found = await run_streams(engine, num_tokens, kind, numbers)
                sent += (next(numbers) - first - 1) * index
                medians[index].append(statistics.median(gaps_s) * 1e3)
                tails[index].append(statistics.quantiles(gaps_s, n=100)[98] * 1e3)
                tokens.append(found)
            is_same &= tokens[0] == tokens[1]
        figures = [statistics.median(values) for values in (*medians, *tails)]
        print(
            f"{name:22} {sent:5}" + "".join(f"{value:9.1f}" for value in figures)
            + f"{figures[1] / figures[0]:7.2f}x {figures[3] / figures[2]:5.2f}x  "
            f"{'same tokens' if is_same else 'OTHER TOKENS'}",
            flush=True,
        )  # fmt: skip


async def run(options: dict[str, Any], names: list[str], rounds: int, num_tokens: int) -> None:
    engine = AsyncLLM(**options)
    try:
        await measure(engine, names, rounds, num_tokens)
    finally:
        await engine.shutdown_async()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a model folder; SmolLM2 135M when left out")
    parser.add_argument("--only", nargs="+", choices=BAD, default=list(BAD))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    options = {
        "model": str(args.model or fetch_model("smollm2-135m-instruct")), "max_model_len": 2048,
        "num_gpu_blocks_override": 1000,
    }  # fmt: skip
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    asyncio.run(run(options, args.only, args.rounds, args.tokens))


if __name__ == "__main__":
    main()
