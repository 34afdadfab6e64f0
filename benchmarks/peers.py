"""The engine beside other CPU engines on the same work: greedy, bfloat16, token ids in, fixed numbers of tokens out.

    python benchmarks/peers.py [MODEL_DIR] [--vllm PYTHON] [--openvino PYTHON OPENVINO_DIR] [--llamacpp PYTHON GGUF]
                               [--int8] [--llamacpp-q8 PYTHON GGUF] [--inproc] [--only decode-1 …] [--repeat 3]

PYTHON is the interpreter of an environment in which that engine is installed: vllm, openvino-genai, llama-cpp-python.
MODEL_DIR is a Hugging Face folder (SmolLM2-135M if there is none); the others' files must be the same model.
--int8 adds the engine with quantization="int8", --llamacpp-q8 a GGUF in Q8_0 to compare it with, --inproc the engine
without actors.

Every engine stays in processes of its own. They take turns of one repetition of one workload, so that a drift of the
machine's speed meets all of them alike. Prints the median tokens/s of each, and the engine's ratio to each peer.
llama.cpp has no continuous batching here: its sequences decode in lockstep.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.workloads import Workload, shared_prefix_workload, standard_workloads

Run = Callable[[Workload], int]
"""Does the work; returns how many tokens came out."""

WITH_PREFIX_CACHE = ("ours", "vllm")
"""Kinds of engines that take the workload of a shared prefix."""

LIMITS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


def workloads() -> dict[str, Workload]:
    """mixed-16, a quarter of mixed-64, is for larger models; it runs only when it is named."""
    work = {workload.name: workload for workload in [*standard_workloads(), shared_prefix_workload()]}
    mixed = work["mixed-64"]
    return {**work, "mixed-16": Workload("mixed-16", mixed.prompts[:16], mixed.max_tokens[:16])}


def start_ours(model: str, threads: int, **options: Any) -> Run:
    from engine_actors import LLM, SamplingParams

    llm = LLM(model=model, dtype="bfloat16", **LIMITS, **options)

    def run(workload: Workload) -> int:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(workload.prompts, params, use_tqdm=False))

    return run


def start_vllm(model: str, threads: int) -> Run:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="bfloat16", enable_prefix_caching=True, **LIMITS)

    def run(workload: Workload) -> int:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))

    return run


def start_openvino(model: str, threads: int) -> Run:
    import numpy as np
    import openvino
    import openvino_genai

    limits = openvino_genai.SchedulerConfig()
    limits.cache_size = 2
    limits.max_num_batched_tokens, limits.max_num_seqs = LIMITS["max_num_batched_tokens"], LIMITS["max_num_seqs"]
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, limits, "CPU", properties)

    def run(workload: Workload) -> int:
        handles = []
        for number, (prompt, length) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            wanted = openvino_genai.GenerationConfig()
            wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = length, True, False
            handles.append(pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), wanted))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    return run


def start_llamacpp(model: str, threads: int) -> Run:
    """Tokens that go in after the prompt are arbitrary: what they are costs nothing."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    most_tokens = 2048

    def run(workload: Workload) -> int:
        prompts, lengths = workload.prompts, workload.max_tokens
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sum(map(len, prompts)) + sum(lengths) + 64 * len(prompts)
        params.n_batch, params.n_ubatch = most_tokens, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = len(prompts), True
        context = llama_cpp.llama_init_from_model(weights, params)
        batch = llama_cpp.llama_batch_init(most_tokens, 0, 1)

        def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
            """(token id, position, sequence, whether its logits are wanted) of each."""
            for start in range(0, len(tokens), most_tokens):
                part = tokens[start : start + most_tokens]
                batch.n_tokens = len(part)
                for i, (token, position, sequence, wants_logits) in enumerate(part):
                    batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
                    batch.seq_id[i][0], batch.n_seq_id[i] = sequence, 1
                if llama_cpp.llama_decode(context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
                llama_cpp.llama_get_logits(context)

        decode([(token, i, s, i + 1 == len(p)) for s, p in enumerate(prompts) for i, token in enumerate(p)])
        produced = len(prompts)
        for step in range(1, max(lengths)):
            live = [s for s, length in enumerate(lengths) if step < length]
            decode([(100 + step, len(prompts[s]) + step - 1, s, True) for s in live])
            produced += len(live)
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return produced

    return run


START: dict[str, Callable[..., Run]] = {
    "ours": start_ours,
    "vllm": start_vllm,
    "openvino": start_openvino,
    "llamacpp": start_llamacpp,
}


def serve(kind: str, model: str, threads: int, options: dict[str, Any]) -> None:
    """Child process: run the workload named on each input line, answer with its seconds."""
    answers = os.fdopen(int(os.environ["BENCHMARK_FD"]), "w")
    work = workloads()
    run = START[kind](model, threads, **options)
    run(Workload("warm-up", [[5] * 16], [8]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        workload = work[line.strip()]
        started = time.perf_counter()
        produced = run(workload)
        seconds = time.perf_counter() - started
        if produced != sum(workload.max_tokens):
            raise RuntimeError(f"{workload.name} asks for {sum(workload.max_tokens)} tokens, {produced} came")
        print(seconds, file=answers, flush=True)


@dataclass(frozen=True)
class Engine:
    """One column of the table. `rival_of`: the engine of ours that its figures are compared with."""

    name: str
    kind: str
    python: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    rival_of: str = ""


class Child:
    """One engine in processes of its own."""

    def __init__(self, engine: Engine, threads: int) -> None:
        read, write = os.pipe()
        env = {**os.environ, "BENCHMARK_FD": str(write)}
        if engine.kind != "ours":
            env.pop("PYTHONPATH", None)
            env["PATH"] = f"{Path(engine.python).parent}{os.pathsep}{env.get('PATH', '')}"
        arguments = [__file__, engine.model, "--child", engine.kind, "--options", json.dumps(engine.options)]
        self._process = subprocess.Popen(
            [engine.python, *arguments, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if engine.kind != "ours" else None,
            pass_fds=[write],
            env=env,
            text=True,
        )
        os.close(write)
        self._name = engine.name
        self._answers = os.fdopen(read)
        self._answer()

    def _answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self._name}'s process ended with status {self._process.wait()}")
        return line

    def seconds(self, workload: Workload) -> float:
        assert self._process.stdin is not None
        print(workload.name, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def engines_of(args: argparse.Namespace) -> list[Engine]:
    engines = [Engine("ours", "ours", sys.executable, args.model)]
    if args.inproc:
        options = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
        engines.append(Engine("in process", "ours", sys.executable, args.model, options, "ours"))
    if args.vllm:
        engines.append(Engine("vllm", "vllm", args.vllm, args.model, rival_of="ours"))
    if args.openvino:
        engines.append(Engine("openvino", "openvino", *args.openvino, rival_of="ours"))
    if args.llamacpp:
        engines.append(Engine("llama.cpp", "llamacpp", *args.llamacpp, rival_of="ours"))
    if args.int8:
        engines.append(Engine("ours int8", "ours", sys.executable, args.model, {"quantization": "int8"}))
    if args.llamacpp_q8:
        engines.append(Engine("llama.cpp q8", "llamacpp", *args.llamacpp_q8, rival_of="ours int8" if args.int8 else ""))
    return engines


def main() -> None:
    names = list(workloads())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "DIR"))
    parser.add_argument("--llamacpp", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--llamacpp-q8", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--inproc", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names[:-1], metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--child", choices=START, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.child, args.model, args.threads, args.options)
        return
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())

    engines = engines_of(args)
    children = {engine.name: Child(engine, args.threads) for engine in engines}
    width = max(14, *(len(engine.name) + 2 for engine in engines))
    print(f"{'tokens/s':<14}" + "".join(f"{engine.name:>{width}}" for engine in engines) + "   ratios", flush=True)
    for name in args.only:
        workload = workloads()[name]
        rates: dict[str, list[float]] = defaultdict(list)
        takers = [e for e in engines if name != shared_prefix_workload().name or e.kind in WITH_PREFIX_CACHE]
        for _ in range(args.repeat):
            for engine in takers:
                rates[engine.name].append(workload.counted_tokens / children[engine.name].seconds(workload))
        medians = {engine_name: statistics.median(values) for engine_name, values in rates.items()}
        ratios = [
            f"{engine.rival_of} / {engine.name} {medians[engine.rival_of] / medians[engine.name]:.2f}"
            for engine in takers
            if engine.rival_of
        ]
        cells = [f"{medians[engine.name]:.1f}" if engine in takers else "-" for engine in engines]
        print(f"{name:<14}" + "".join(f"{cell:>{width}}" for cell in cells) + f"   {', '.join(ratios)}", flush=True)
    for child in children.values():
        child.close()


if __name__ == "__main__":
    main()
