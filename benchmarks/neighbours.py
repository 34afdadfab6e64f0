"""What one bad request costs its neighbours: the gaps between the tokens of seven streams beside it.

    python benchmarks/neighbours.py path/to/model [--only "huge regex" …] [--rounds 10] [--constant]

Seven requests stream; when all of them are under way an eighth comes: a plain one, or a bad one of some kind, no two
equal. Rounds with a plain one and with a bad one take turns. Compared are the gaps from then until the bad one has been
refused, has failed or has ended, and a little longer; of the plain round beside it just as long a piece. With
`--constant` the eighth stream is one such request after the other until the seven end.

Prints for each kind how long the bad request lived, the median and the 99th percentile of the seven streams' gaps over
all rounds beside plain and beside bad requests, the ratios, and what noise alone would do to a ratio: 99 of 100 times
it stays below this where each pair of rounds is told apart by the toss of a coin. A ratio above that GROWS. One kind is
another plain request, for which nothing should grow. Tokens must be the same in all rounds. Before all that it prints
how long the engine's first grammar takes beside the streams, which starts the compiler's process, and their gaps then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.bad_requests import BAD, PLAIN, PROMPT, Send
from engine_actors import AsyncLLM, RequestOutputKind, SamplingParams
from engine_actors.fetch_model import fetch_model

NUM_STREAMS = 7
TOKENS_BEFORE = 10
"""Of each stream, when the eighth request comes."""
MIN_WINDOW_S, AFTERMATH_S = 0.25, 0.1
"""Gaps are compared for at least so long, and for so long after the bad request's end."""
LONG_ROUND_TOKENS = 400
"""Of each stream beside the first grammar, which takes seconds."""
PAUSE_S = 0.05
"""With --constant, between the end of a request and the next."""
NUM_TOSSES, NOISE_PERCENTILE = 2000, 99
STREAM: dict[str, Any] = {
    "temperature": 0.8, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA,
}  # fmt: skip


@dataclass
class Round:
    """What was seen of the seven streams.

    Attributes:
        ends_s, gaps_s: When a token came, after the eighth request was sent, and the time since the one before.
        life_s: From sending the eighth until its end, or the streams'.
        num_sent: Eighth requests.
        tokens: Of each stream.
    """

    ends_s: np.ndarray
    gaps_s: np.ndarray
    life_s: float
    num_sent: int
    tokens: list[list[int]]

    def gaps_within(self, window_s: float) -> np.ndarray:
        """Gaps in the first `window_s`, the one under way at the end among them."""
        return self.gaps_s[self.ends_s - self.gaps_s < window_s]


class Stream:
    """One of the seven, and when its tokens came."""

    def __init__(self, engine: AsyncLLM, index: int, num_tokens: int) -> None:
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.under_way = asyncio.Event()
        params = SamplingParams(**STREAM, seed=index, max_tokens=num_tokens)
        self.task = asyncio.create_task(self._read(engine, [100 + index] * (20 + index), params))

    async def _read(self, engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
        async for output in engine.generate(prompt, params):
            self.times_s.append(time.perf_counter())
            self.tokens += output.outputs[0].token_ids
            if len(self.times_s) == TOKENS_BEFORE:
                self.under_way.set()


async def run_round(engine: AsyncLLM, num_tokens: int, send: Send, numbers: Iterator[int], constant: bool) -> Round:
    streams = [Stream(engine, index, num_tokens) for index in range(NUM_STREAMS)]
    for stream in streams:
        await stream.under_way.wait()
    sent_s = ended_s = time.perf_counter()
    num_sent = 0

    async def eighth() -> None:
        nonlocal num_sent, ended_s
        while True:
            num_sent += 1
            await send(engine, next(numbers))
            ended_s = time.perf_counter()
            if not constant:
                return
            await asyncio.sleep(PAUSE_S)

    task = asyncio.create_task(eighth())
    await asyncio.gather(*(stream.task for stream in streams))
    if not task.done():
        ended_s = time.perf_counter()
        task.cancel()
    result = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(result, Exception):
        raise result
    ends_s = np.concatenate([stream.times_s[1:] for stream in streams]) - sent_s
    gaps_s = np.concatenate([np.diff(stream.times_s) for stream in streams])
    after = ends_s > 0
    return Round(ends_s[after], gaps_s[after], ended_s - sent_s, num_sent, [stream.tokens for stream in streams])


@dataclass(frozen=True)
class Comparison:
    """A percentile of gaps beside plain and beside bad requests, in milliseconds."""

    plain_ms: float
    bad_ms: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.bad_ms / self.plain_ms

    def __str__(self) -> str:
        return f"{self.plain_ms:7.1f}{self.bad_ms:7.1f}{self.ratio:6.2f}x <{self.noise:5.2f}x"


def compare(pairs: list[tuple[np.ndarray, np.ndarray]], percentile: float) -> Comparison:
    """Gaps of (plain, bad) rounds; noise is the ratio that the same rounds reach with each pair in either order."""

    def of(chosen: list[np.ndarray]) -> float:
        return float(np.percentile(np.concatenate(chosen), percentile)) * 1e3

    sides = np.random.default_rng(0).integers(0, 2, (NUM_TOSSES, len(pairs)))
    ratios = [
        of([pair[1 - side] for pair, side in zip(pairs, row, strict=True)])
        / of([pair[side] for pair, side in zip(pairs, row, strict=True)])
        for row in sides
    ]
    plain, bad = (of([pair[side] for pair in pairs]) for side in (0, 1))
    return Comparison(plain, bad, float(np.percentile(ratios, NOISE_PERCENTILE)))


async def send_grammar(engine: AsyncLLM, index: int) -> None:
    params = SamplingParams(max_tokens=1, structured_outputs={"regex": f"[a-f]{{{index + 9}}}"})
    await engine.generate_all([PROMPT], params)


async def measure_first_grammar(engine: AsyncLLM, numbers: Iterator[int]) -> None:
    """It happens once in an engine, so there is one round of each."""
    print(f"{'beside':22}{'ms':>7}{'median gap ms':>15}{'longest gap ms':>16}")
    for name, send in (("a plain request", PLAIN), ("the first grammar", send_grammar), ("the second", send_grammar)):
        seen = await run_round(engine, LONG_ROUND_TOKENS, send, numbers, constant=False)
        gaps_s = seen.gaps_within(max(MIN_WINDOW_S, seen.life_s + AFTERMATH_S))
        print(f"{name:22}{seen.life_s * 1e3:7.0f}{np.median(gaps_s) * 1e3:15.1f}{np.max(gaps_s) * 1e3:16.1f}")


async def measure(engine: AsyncLLM, names: list[str], num_rounds: int, num_tokens: int, constant: bool) -> None:
    numbers = itertools.count(1)
    await run_round(engine, num_tokens, PLAIN, numbers, constant)
    await measure_first_grammar(engine, numbers)
    columns = "plain    bad  ratio  noise"
    print(f"{'one ' if not constant else ''}{'beside':22}"[:22] + f"{'sent':>5}{'life ms':>9}", end="")
    print(f"    median {columns}    p99 {columns}")
    for name in names:
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        lives_s, num_sent, all_tokens = [], 0, []
        for index in range(num_rounds):
            # Either comes first as often as the other: the machine's speed drifts.
            order = (PLAIN, BAD[name]) if index % 2 else (BAD[name], PLAIN)
            rounds = [await run_round(engine, num_tokens, send, numbers, constant) for send in order]
            plain, bad = rounds if index % 2 else rounds[::-1]
            window_s = float("inf") if constant else max(MIN_WINDOW_S, bad.life_s + AFTERMATH_S)
            pairs.append((plain.gaps_within(window_s), bad.gaps_within(window_s)))
            lives_s.append(bad.life_s / bad.num_sent)
            num_sent += bad.num_sent
            all_tokens += [plain.tokens, bad.tokens]
        compared = [compare(pairs, percentile) for percentile in (50, 99)]
        grows = any(each.ratio > each.noise for each in compared)
        is_same = all(tokens == all_tokens[0] for tokens in all_tokens)
        print(
            f"{name:22}{num_sent:5}{float(np.median(lives_s)) * 1e3:9.0f}    {compared[0]}{compared[1]}  "
            f"{'GROWS' if grows else 'within noise'}, {'same tokens' if is_same else 'OTHER TOKENS'}",
            flush=True,
        )  # fmt: skip


async def run(options: dict[str, Any], *arguments: Any) -> None:
    engine = AsyncLLM(**options)
    try:
        await measure(engine, *arguments)
    finally:
        await engine.shutdown_async()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a model folder; SmolLM2 135M when left out")
    parser.add_argument("--only", nargs="+", choices=BAD, default=list(BAD), metavar="KIND", help=", ".join(BAD))
    parser.add_argument("--rounds", type=int, default=10, help="pairs of rounds; fewer than 7 can tell nothing")
    parser.add_argument("--tokens", type=int, default=70, help="of each stream")
    parser.add_argument("--constant", action="store_true", help="bad requests one after the other")
    args = parser.parse_args()
    options = {
        "model": str(args.model or fetch_model("smollm2-135m-instruct")), "max_model_len": 2048,
        "num_gpu_blocks_override": 1000,
    }  # fmt: skip
    # The fault in the detokenizer is logged with its traceback.
    logging.getLogger("engine_actors.output_processor").setLevel(logging.CRITICAL)
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    asyncio.run(run(options, args.only, args.rounds, args.tokens, args.constant))


if __name__ == "__main__":
    main()
