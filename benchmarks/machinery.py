"""What the machinery itself costs: a two-layer toy model, so that only scheduling, messages and calls take time.

    python benchmarks/machinery.py [--batches 1 32 256] [--vllm-python VENV/bin/python] [--repeat 3]

Runs greedy decoding of 128 tokens per request through LLM → EngineCore actor → worker actor (or as --options say), and,
given the python of an environment with vLLM, the same through vLLM, in turns. Prints ms per step and tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

NUM_TOKENS = 128
CHILD = "ENGINE_ACTORS_MACHINERY_CHILD"


def make_toy_model(folder: Path) -> Path:
    """Hidden size 64, two layers, SmolLM2's vocabulary of 49,152 and tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from engine_actors.fetch_model import fetch_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(fetch_model()).save_pretrained(folder)
    return folder


def serve(engine: str, model: str, options: dict[str, Any]) -> None:
    """Child process: for each batch size on standard input, answer with the seconds of one run."""
    sys.path.pop(0)  # this folder: its kernels.py would hide a package of that name, which vLLM imports
    sizes = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 4096, "dtype": "bfloat16"}
    if engine == "vllm":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        from vllm import LLM, SamplingParams
    else:
        from engine_actors import LLM, SamplingParams
    llm = LLM(model=model, **sizes, **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.generate([[5] * 16] * 4, params, use_tqdm=False) if engine != "vllm" else llm.generate(
        [{"prompt_token_ids": [5] * 16}] * 4, params, use_tqdm=False
    )
    answers = os.fdopen(int(os.environ[CHILD]), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": [7 + i % 1000] * 16} for i in range(int(line))]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - started, file=answers, flush=True)


class Child:
    """One engine in its own process."""

    def __init__(self, python: str, engine: str, model: str, options: dict[str, Any]) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [python, __file__, "--child", engine, "--model", model, "--options", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
            env={**os.environ, CHILD: str(write)},
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read)
        self.answer()

    def answer(self) -> str:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"an engine process ended with status {self.process.wait()}")
        return line

    def seconds(self, batch: int) -> float:
        assert self.process.stdin is not None
        print(batch, file=self.process.stdin, flush=True)
        return float(self.answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM, to compare in the same run")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of LLM, as JSON")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.child, args.model, args.options)
        return

    sys.path.insert(0, str(Path(__file__).parent.parent))
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_toy_model(Path(folder)))
        children = {"ours": Child(sys.executable, "ours", model, args.options)}
        if args.vllm_python:
            children["vllm"] = Child(args.vllm_python, "vllm", model, {"enable_prefix_caching": True})
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for batch in args.batches:
            for _ in range(args.repeat):
                for engine, child in children.items():
                    seconds[engine, batch].append(child.seconds(batch))
        for child in children.values():
            child.close()

    for batch in args.batches:
        medians = {engine: statistics.median(seconds[engine, batch]) for engine in children}
        row = "   ".join(
            f"{engine} {1e3 * s / NUM_TOKENS:7.2f} ms/step {batch * NUM_TOKENS / s:9.0f} tokens/s"
            for engine, s in medians.items()
        )
        ratio = f"   ours/vllm {medians['vllm'] / medians['ours']:.2f}" if "vllm" in medians else ""
        print(f"batch {batch:4d}   {row}{ratio}")


if __name__ == "__main__":
    main()
