"""Cost of sampling one step: logits in, tokens (and log-probabilities) on the host, without the model.

    python benchmarks/sampling.py [--vllm-python PATH] [--threads 1] [--batches 1 32 256] [--only greedy top-p …]

Each engine runs in a process of its own and they take turns case by case, so that a drift of the machine's speed meets
both alike. Our share is what `ModelRunner` does between logits and answer; vLLM's is a call of its V1 `Sampler` and the
copy to lists. Prints the median milliseconds per step, and vLLM's over ours. Logits are float32, peaked as a language
model's: 50 tokens of each row stand out. Each request has 400 prompt and 100 generated tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARIES = (49_152, 262_144)
FEATURES = ("greedy", "top-p", "top-k+top-p", "penalties", "logprobs=5", "grammar")
PROMPT_TOKENS, OUTPUT_TOKENS = 400, 100
MIN_SECONDS, MAX_REPEATS = 0.5, 50
TOP_P, TOP_K, PENALTIES = 0.95, 50, (1.1, 0.5, 0.5)
"""Penalties: repetition, presence, frequency."""

Step = Callable[[Any], object]
"""Samples once from logits that it may change."""


def make_logits(batch: int, vocab_size: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, vocab_size, generator=generator) * 2
    high = torch.randint(0, vocab_size, (batch, 50), generator=generator)
    return logits.scatter_add_(1, high, torch.rand(batch, 50, generator=generator) * 8 + 6)


def make_tokens(batch: int, vocab_size: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (batch, PROMPT_TOKENS + OUTPUT_TOKENS), generator=generator).tolist()


def make_bitmask(batch: int, vocab_size: int) -> Any:
    """Random, half of the tokens allowed: int32 [batch, ceil(vocab_size / 32)]."""
    import torch

    words = torch.randint(
        -(2**31), 2**31 - 1, (batch, -(-vocab_size // 32)), generator=torch.Generator().manual_seed(2)
    )
    return words.to(torch.int32)


def ours(feature: str, batch: int, vocab_size: int) -> Step:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import numpy as np
    import torch

    from executors.bitmask import apply_bitmask
    from executors.input_batch import InputBatch
    from executors.logprobs import compute_logprobs
    from executors.sampler import sample
    from scheduler.output import NewRequestData, pack_int32
    from scheduler.sampling_params import SamplingParams

    options: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "top-p": {"top_p": TOP_P},
        "top-k+top-p": {"top_p": TOP_P, "top_k": TOP_K},
        "penalties": dict(zip(("repetition_penalty", "presence_penalty", "frequency_penalty"), PENALTIES, strict=True))
        | {"temperature": 0.0},
        "logprobs=5": {"temperature": 0.0, "logprobs": 5},
        "grammar": {"temperature": 0.0},
    }
    device = torch.device("cpu")
    state = InputBatch(batch, 1024, [16], device)
    for row, tokens in enumerate(make_tokens(batch, vocab_size)):
        params = SamplingParams(seed=row, **options[feature])
        token_ids, blocks = pack_int32(tokens), pack_int32(range(32))
        state._set_row(NewRequestData(row, f"r{row}", token_ids, PROMPT_TOKENS, 0, [blocks], params))
    rows = np.arange(batch)
    bitmask = make_bitmask(batch, vocab_size) if feature == "grammar" else None

    def step(logits: Any) -> object:
        raw = logits
        logits = state.logits.apply(logits, rows)
        if bitmask is not None:
            apply_bitmask(logits, bitmask)
        tokens = sample(logits, state.sampling.columns(rows, state.num_tokens[rows], device))
        token_ids = tokens.numpy().astype("<i4")
        state.append_tokens(rows, token_ids)
        logprobs = compute_logprobs(raw, tokens, state.logprobs.num_logprobs) if feature == "logprobs=5" else None
        return token_ids.tobytes(), logprobs

    return step


def vllm(feature: str, batch: int, vocab_size: int) -> Step:
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    tokens = make_tokens(batch, vocab_size)
    is_random = feature.startswith("top-")
    repetition, presence, frequency = PENALTIES if feature == "penalties" else (1.0, 0.0, 0.0)
    outputs = [row[PROMPT_TOKENS:] for row in tokens]
    metadata = SamplingMetadata(
        temperature=torch.ones(batch) if is_random else None,
        all_greedy=not is_random,
        all_random=is_random,
        top_p=torch.full((batch,), TOP_P) if is_random else None,
        top_k=torch.full((batch,), TOP_K, dtype=torch.int32) if feature == "top-k+top-p" else None,
        generators={},
        max_num_logprobs=5 if feature == "logprobs=5" else None,
        no_penalties=feature != "penalties",
        prompt_token_ids=torch.tensor([row[:PROMPT_TOKENS] for row in tokens]) if feature == "penalties" else None,
        frequency_penalties=torch.full((batch,), frequency),
        presence_penalties=torch.full((batch,), presence),
        repetition_penalties=torch.full((batch,), repetition),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler()
    bitmask = None
    if feature == "grammar":
        import xgrammar

        bitmask = make_bitmask(batch, vocab_size)

    def step(logits: Any) -> object:
        if bitmask is not None:
            xgrammar.apply_token_bitmask_inplace(logits, bitmask)
        output = sampler(logits, metadata)
        sampled = output.sampled_token_ids.tolist()
        if feature == "penalties":
            for row, (token,) in zip(outputs, sampled, strict=True):
                row.append(token)
        return sampled, output.logprobs_tensors.tolists() if output.logprobs_tensors is not None else None

    return step


def serve_cases(make_step: Callable[[str, int, int], Step], threads: int) -> None:
    """The child process: a case per line on stdin, its milliseconds per step on stdout."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    answers, sys.stdout = sys.stdout, sys.stderr  # Imports may print.
    for line in sys.stdin:
        feature, batch, vocab_size = json.loads(line)
        step, logits = make_step(feature, batch, vocab_size), make_logits(batch, vocab_size)
        step(logits.clone())
        times: list[float] = []
        while not times or (sum(times) < MIN_SECONDS and len(times) < MAX_REPEATS):
            copy = logits.clone()
            start = time.perf_counter()
            step(copy)
            times.append(time.perf_counter() - start)
        answers.write(json.dumps(statistics.median(times) * 1e3) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--only", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--serve", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_cases(ours if options.serve == "ours" else vllm, options.threads)
        return
    pythons = {"ours": sys.executable} | ({"vllm": options.vllm_python} if options.vllm_python else {})
    children = {
        name: subprocess.Popen(
            [python, __file__, "--serve", name, "--threads", str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name, python in pythons.items()
    }  # fmt: skip
    print(f"{'vocabulary':>10} {'batch':>5} {'feature':12}" + "".join(f"{name + ' ms':>12}" for name in pythons))
    for vocab_size in options.vocabularies:
        for batch in options.batches:
            for feature in options.only:
                times = [ask(child, [feature, batch, vocab_size]) for child in children.values()]
                ratio = f"{times[1] / times[0]:10.1f}x" if len(times) > 1 else ""
                print(
                    f"{vocab_size:10} {batch:5} {feature:12}" + "".join(f"{t:12.3f}" for t in times) + ratio, flush=True
                )
    for child in children.values():
        child.communicate()


def ask(child: subprocess.Popen[str], case: list[Any]) -> float:
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child process has no pipes")
    child.stdin.write(json.dumps(case) + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise RuntimeError(f"{child.args!r} ended (exit status {child.wait()}) in case {case}")
    return float(json.loads(answer))


if __name__ == "__main__":
    main()
