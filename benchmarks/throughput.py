"""Offline throughput of the engine, through its actors and in process, beside transformers in the same run.

    python benchmarks/throughput.py [MODEL_DIR] [--engines actors inproc transformers] [--only decode-8 …] [--repeat 3]

Each engine runs in a process of its own, one after the other, in turns of one repetition each, so that a drift of the
machine's speed meets all of them alike. Prints the median tokens/s of each workload and the ratios to transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import Workload, standard_workloads

ENGINE_OPTIONS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
Run = Callable[[Workload], None]


def start_ours(model: str, dtype: str, **options: Any) -> Run:
    from engine_actors import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, **ENGINE_OPTIONS, **options)

    def run(workload: Workload) -> None:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == workload.max_tokens

    return run


def start_transformers(model: str, dtype: str) -> Run:
    """`generate`, batched where all prompts have one length, else one prompt at a time (no continuous batching)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    lm.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(workload: Workload) -> None:
        same = len(set(map(len, workload.prompts))) == 1 and len(set(workload.max_tokens)) == 1
        pairs = list(zip(workload.prompts, workload.max_tokens, strict=True))
        groups = [(workload.prompts, workload.max_tokens[0])] if same else [([p], n) for p, n in pairs]
        for batch, length in groups:
            ids = torch.tensor(batch)
            mask = torch.ones_like(ids)
            out = lm.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0)
            assert out.shape[1] == ids.shape[1] + length

    return run


ENGINES: dict[str, Callable[[str, str], Run]] = {
    "actors": lambda model, dtype: start_ours(model, dtype),
    "inproc": lambda model, dtype: start_ours(model, dtype, engine_core="inproc", distributed_executor_backend="uni"),
    "transformers": start_transformers,
}


def serve(engine: str, model: str, dtype: str) -> None:
    """Child process: run the workload named on each input line, answer with its seconds."""
    workloads = {workload.name: workload for workload in standard_workloads()}
    run = ENGINES[engine](model, dtype)
    run(Workload("warm-up", [[5] * 16], [8]))
    print("ready", file=sys.stderr)
    answers = os.fdopen(int(os.environ["BENCHMARK_FD"]), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        run(workloads[line.strip()])
        print(time.perf_counter() - started, file=answers, flush=True)


class Child:
    """One engine in its own process."""

    def __init__(self, engine: str, model: str, dtype: str) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, model, "--dtype", dtype, "--child", engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
            env={**os.environ, "BENCHMARK_FD": str(write)},
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read)
        self._answer()

    def _answer(self) -> str:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"an engine process ended with status {self.process.wait()}")
        return line

    def seconds(self, workload: Workload) -> float:
        assert self.process.stdin is not None
        print(workload.name, file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--only", nargs="+", help="names of workloads")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.child, args.model, args.dtype)
        return
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())

    workloads = [w for w in standard_workloads() if not args.only or w.name in args.only]
    children = {engine: Child(engine, args.model, args.dtype) for engine in args.engines}
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for workload in workloads:
        for _ in range(args.repeat):
            for engine, child in children.items():
                rates[workload.name, engine].append(workload.counted_tokens / child.seconds(workload))
    for child in children.values():
        child.close()

    print(f"{'tokens/s':<14}" + "".join(f"{engine:>14}" for engine in children) + "   ratios to the last")
    for workload in workloads:
        medians = [statistics.median(rates[workload.name, engine]) for engine in children]
        ratios = "  ".join(f"{m / medians[-1]:.2f}" for m in medians[:-1])
        print(f"{workload.name:<14}" + "".join(f"{m:>14.1f}" for m in medians) + f"   {ratios}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"/".join(key): values for key, values in rates.items()}, indent=1))


if __name__ == "__main__":
    main()
