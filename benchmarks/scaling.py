"""How a decode step's time grows: with the number of requests, and with the length of their contexts.

    python benchmarks/scaling.py [MODEL_DIR] [--only concurrency context] [--quantization int8] [--actors]

Concurrency: the cost of a generated token should fall until the arithmetic limit and stay there up to `max_num_seqs`.
Context: time beyond that of a short context should be what reading keys and values takes; the last column is that
rate, to compare with the memory speed that `benchmarks/kernels.py` prints.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import random_prompt

STEPS = 32


class Timer:
    """Times decode steps alone: prompts come from the prefix cache, and a run with one token is taken off."""

    def __init__(self, llm: Any, repeat: int) -> None:
        self._llm, self._repeat = llm, repeat

    def step_s(self, prompts: list[list[int]]) -> float:
        self._run(prompts, 1)
        return statistics.median(
            (self._run(prompts, 1 + STEPS) - self._run(prompts, 1)) / STEPS for _ in range(self._repeat)
        )

    def _run(self, prompts: list[list[int]], num_tokens: int) -> float:
        from engine_actors import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start


def bench_concurrency(timer: Timer, rng: random.Random, most: int) -> None:
    print(f"\n{'requests':>10}{'step, ms':>12}{'us a token':>14}")
    requests = 1
    while requests <= most:
        seconds = timer.step_s([random_prompt(rng, 32) for _ in range(requests)])
        print(f"{requests:>10}{seconds * 1e3:>12.2f}{seconds / requests * 1e6:>14.0f}", flush=True)
        requests *= 2


def bench_context(timer: Timer, rng: random.Random, requests: int, bytes_per_token: int, longest: int) -> None:
    print(f"\n{requests} requests\n{'context':>10}{'step, ms':>12}{'KV, MB':>10}{'GB/s beyond the first':>24}")
    first: tuple[float, float] | None = None
    context = 64
    while context + STEPS < longest:
        seconds = timer.step_s([random_prompt(rng, context) for _ in range(requests)])
        kv_bytes = requests * (context + STEPS / 2) * bytes_per_token
        first = first or (seconds, kv_bytes)
        rate = f"{(kv_bytes - first[1]) / (seconds - first[0]) / 1e9:.1f}" if seconds > first[0] else ""
        print(f"{context:>10}{seconds * 1e3:>12.2f}{kv_bytes / 1e6:>10.1f}{rate:>24}", flush=True)
        context *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--only", nargs="+", choices=("concurrency", "context"), default=["concurrency", "context"])
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--actors", action="store_true", help="through Ray actors instead of in process")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())
    from engine_actors import LLM
    from executors.config import ModelConfig
    from executors.model_config import resolve_model_config

    model = resolve_model_config(ModelConfig(args.model))
    options = {} if args.actors else {"engine_core": "inproc", "distributed_executor_backend": "uni"}
    rng = random.Random(5)
    with LLM(
        model=args.model, dtype="bfloat16", quantization=args.quantization, max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len, max_num_batched_tokens=2048, **options,
    ) as llm:  # fmt: skip
        timer = Timer(llm, args.repeat)
        if "concurrency" in args.only:
            bench_concurrency(timer, rng, args.max_num_seqs)
        if "context" in args.only:
            bytes_per_token = model.num_layers * 2 * model.num_kv_heads * model.head_size * 2
            for requests in (1, 8):
                bench_context(timer, rng, requests, bytes_per_token, args.max_model_len)


if __name__ == "__main__":
    main()
