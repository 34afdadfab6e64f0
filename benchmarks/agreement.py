"""How far the engine's greedy texts agree with transformers' in bfloat16: computed in bfloat16, and in float32.

    python benchmarks/agreement.py [MODEL_DIR] [--prompts 200] [--tokens 64] [--vllm-python PATH] [--no-float32]
                                   [--part 1/4]

Prompts are passages of this repository's documentation. Two texts agree up to their first different token; after it
they are different texts. Prints, for each engine, the share of tokens before that place and of texts without one: both
hang on few places, a different one early in a text costs all that follows. So it also prints how often the engine,
given transformers' own text up to a token, finds that token the most likely ("next tokens"): there every place counts
once.
transformers in float32 shows what rounding to bfloat16 alone costs. --vllm-python names an interpreter that has vLLM.
--part does every fourth prompt, from the first on; the mean over all parts is the result for all prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

Texts = list[list[int]]
PROMPT_LENGTHS = (8, 16, 32, 64)


def passages_text() -> str:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n\n".join(path.read_text() for path in files)


def passages(model: str, count: int) -> Texts:
    """Token ids of `count` passages, spread evenly over the documentation."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(passages_text())["input_ids"]
    step = (len(ids) - max(PROMPT_LENGTHS)) // count
    if step < 1:
        raise SystemExit(f"--prompts must be below {len(ids) - max(PROMPT_LENGTHS)}, the tokens there are, got {count}")
    lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(count)]
    return [ids[i * step : i * step + length] for i, length in enumerate(lengths)]


@dataclass
class Row:
    """What one engine made of the prompts.

    Attributes:
        texts: Of each prompt, the greedy continuation.
        next_tokens: Of each prompt, what the engine finds most likely at each place of the reference's continuation.
    """

    texts: Texts
    next_tokens: Texts


def most_likely(positions: Sequence[Any]) -> list[int]:
    """Of each position's log-probabilities: the likeliest token, of equal ones the lowest, as argmax has it."""
    return [min(entries, key=lambda token: (-entries[token].logprob, token)) for entries in positions]


def by_engine(model: str, dtype: str, prompts: Texts, reference: Texts) -> Row:
    from engine_actors import LLM, SamplingParams

    num_tokens = len(reference[0])
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    with LLM(
        model=model, dtype=dtype, max_model_len=1024, engine_core="inproc", distributed_executor_backend="uni"
    ) as llm:
        texts = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        forced = llm.generate([prompt + text for prompt, text in zip(prompts, reference, strict=True)], params)
        return Row(texts, [most_likely((output.prompt_logprobs or [])[-num_tokens:]) for output in forced])


VLLM_SCRIPT = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
from vllm import LLM, SamplingParams
model, prompts, reference = json.load(sys.stdin)
num_tokens = len(reference[0])
llm = LLM(model=model, dtype="bfloat16", max_model_len=1024)
def run(prompts, **options):
    params = SamplingParams(temperature=0, detokenize=False, **options)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
texts = [list(o.outputs[0].token_ids) for o in run(prompts, max_tokens=num_tokens, ignore_eos=True)]
forced = run([p + t for p, t in zip(prompts, reference)], max_tokens=1, prompt_logprobs=1)
tops = [[min(d, key=lambda t: (-d[t].logprob, t)) for d in o.prompt_logprobs[-num_tokens:]] for o in forced]
print("\\nTEXTS " + json.dumps([texts, tops]), flush=True)
"""


def by_vllm(python: str, model: str, prompts: Texts, reference: Texts) -> Row:
    work = json.dumps([model, prompts, reference])
    env = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-c", VLLM_SCRIPT], input=work, stdout=subprocess.PIPE, text=True, env=env)
    # vLLM's own lines stand before and behind it. Its threads can abort the interpreter's end, when all is said.
    lines = [line for line in done.stdout.splitlines() if line.startswith("TEXTS ")]
    if not lines:
        raise RuntimeError(f"vLLM ended with status {done.returncode} and without a result")
    (line,) = lines
    return Row(*json.loads(line.removeprefix("TEXTS ")))


def by_transformers(model: str, dtype: str, prompts: Texts, num_tokens: int) -> Texts:
    """One prompt at a time: padding would change the bits."""
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    lm.generation_config.eos_token_id = None
    texts = []
    for prompt in tqdm(prompts, desc=f"transformers {dtype}"):
        ids = torch.tensor([prompt])
        out = lm.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def share_equal(tokens: Texts, reference: Texts) -> float:
    equal = sum(a == b for row, other in zip(tokens, reference, strict=True) for a, b in zip(row, other, strict=True))
    return equal / sum(map(len, reference))


def agreement(texts: Texts, reference: Texts) -> tuple[float, float]:
    """(share of tokens before the first difference, share of texts without one)."""
    common = [
        next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), len(other))
        for text, other in zip(texts, reference, strict=True)
    ]
    return sum(common) / sum(map(len, reference)), sum(
        count == len(other) for count, other in zip(common, reference, strict=True)
    ) / len(reference)


def part_of(text: str) -> slice:
    """ "2/4" → every fourth prompt, from the second on."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text!r}")
    return slice(int(number) - 1, None, int(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--no-float32", action="store_true", help="leave out the rows in float32")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="I/N")
    args = parser.parse_args()
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())
    prompts = passages(args.model, args.prompts)[args.part]
    reference = by_transformers(args.model, "bfloat16", prompts, args.tokens)
    rows = {"engine, bfloat16": by_engine(args.model, "bfloat16", prompts, reference)}
    if args.vllm_python:
        rows["vLLM, bfloat16"] = by_vllm(args.vllm_python, args.model, prompts, reference)
    if not args.no_float32:
        rows["engine, float32"] = by_engine(args.model, "float32", prompts, reference)
    print(f"{len(prompts)} prompts, {args.tokens} tokens each; against transformers in bfloat16")
    print(f"{'':<24}{'tokens':>10}{'texts':>10}{'next tokens':>14}")
    for name, row in rows.items():
        tokens, whole = agreement(row.texts, reference)
        print(f"{name:<24}{tokens:>10.1%}{whole:>10.1%}{share_equal(row.next_tokens, reference):>14.2%}")
    if not args.no_float32:
        texts = by_transformers(args.model, "float32", prompts, args.tokens)
        tokens, whole = agreement(texts, reference)
        print(f"{'transformers, float32':<24}{tokens:>10.1%}{whole:>10.1%}")
        tokens, whole = agreement(rows["engine, bfloat16"].texts, rows["engine, float32"].texts)
        print(f"engine, bfloat16 against float32: {tokens:.1%} of tokens, {whole:.1%} of texts")


if __name__ == "__main__":
    main()
