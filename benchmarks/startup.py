"""From the command to the first token, by phases, each measured in a fresh process.

    python benchmarks/startup.py [MODEL_DIR] [--in-process] [--quantization int8] [--repeat 3] [-o NAME=VALUE …]

Prints the median of each phase. "engine" is from its constructor to ready; the lines below it are what the worker of
rank 0 spent of that. The first run may have compiled the kernels and read the weights from disk: it is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def child(model: str, options: dict[str, Any], started: float) -> None:
    """One start. Prints the seconds of each phase as JSON on the last line."""
    phases: dict[str, float] = {}
    last = started

    def phase(name: str) -> None:
        nonlocal last
        now = time.time()
        phases[name], last = now - last, now

    phase("interpreter")
    from engine_actors import LLM, SamplingParams
    from engine_actors.ray_core_link import ensure_ray

    phase("import")
    if options.get("engine_core") != "inproc":
        ensure_ray()
        phase("Ray")
    llm = LLM(model, **options)
    phase("engine")
    for name, seconds in llm.collective_rpc("describe")[0]["startup_s"].items():
        phases[f"  worker: {name}"] = seconds
    last = time.time()
    llm.generate([[5] * 16], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    phase("first token")
    phases["command to first token"] = time.time() - started
    print("\n" + json.dumps(phases), flush=True)
    del llm


def measure(model: str, options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, model, "--child", json.dumps(options), "--started", repr(time.time())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ, check=True)
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--in-process", action="store_true", help="without Ray")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--option", "-o", action="append", metavar="NAME=VALUE")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, json.loads(args.child), args.started)
        return
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())
    from engine_actors.cli.common import parse_options

    options: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 2048, "quantization": args.quantization, **parse_options(args.option),
    }  # fmt: skip
    if args.in_process:
        options |= {"engine_core": "inproc", "distributed_executor_backend": "uni"}
    first = measure(args.model, options)
    rest = [measure(args.model, options) for _ in range(args.repeat)]
    print(f"{'seconds':<34}{'first run':>12}{'then':>10}")
    for name, seconds in first.items():
        print(f"{name:<34}{seconds:>12.2f}{statistics.median(run[name] for run in rest):>10.2f}")


if __name__ == "__main__":
    main()
