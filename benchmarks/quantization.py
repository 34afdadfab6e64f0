"""What rounding the weights costs: perplexity of this repository's documentation with each `quantization`.

    python benchmarks/quantization.py [MODEL_DIR] [--tokens 8192] [--window 1024]

The text is cut into windows; a token's probability is given those before it in its window. bfloat16 is the reference.
The two small models of `fetch-model` come from four-bit files, which int4 finds again almost exactly: other
checkpoints lose more. `--perturb` shows that: it moves each weight by a random part of its row's spread first.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.agreement import passages_text


def perplexity(model: str, quantization: str | None, windows: list[list[int]]) -> tuple[float, float]:
    """Perplexity of all but the first token of each window, and the seconds that loading took."""
    from engine_actors import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    started = time.perf_counter()
    with LLM(
        model=model, dtype="bfloat16", quantization=quantization, max_model_len=len(windows[0]) + 1,
        max_num_batched_tokens=2048, engine_core="inproc", distributed_executor_backend="uni",
    ) as llm:  # fmt: skip
        loaded = time.perf_counter() - started
        total, count = 0.0, 0
        for window, output in zip(windows, llm.generate(windows, params), strict=True):
            assert output.prompt_logprobs is not None
            for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                total -= entry[token].logprob
                count += 1
    return math.exp(total / count), loaded


def perturbed(model: str, part: float, target: Path) -> str:
    """A copy of the model whose layers' weights are moved at random by `part` of their row's standard deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for path in Path(model).glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std(1, keepdim=True) * part
                weights[name] = (weight.float() + noise).to(weight.dtype)
        save_file(weights, target / path.name, metadata={"format": "pt"})
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--perturb", type=float, default=0.0, metavar="PART")
    args = parser.parse_args()
    if not args.model:
        from engine_actors.fetch_model import fetch_model

        args.model = str(fetch_model())
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(args.model)(passages_text())["input_ids"][: args.tokens]
    windows = [ids[i : i + args.window] for i in range(0, len(ids) - args.window + 1, args.window)]
    if not windows:
        raise SystemExit(f"--window must be at most {len(ids)}, the tokens there are, got {args.window}")
    print(f"{len(windows)} windows of {args.window} tokens")
    print(f"{'':<10}{'perplexity':>12}{'change':>10}{'load, s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        model = perturbed(args.model, args.perturb, Path(folder)) if args.perturb else args.model
        reference = 0.0
        for name, quantization in (("bfloat16", None), ("int8", "int8"), ("int4", "int4")):
            value, loaded = perplexity(model, quantization, windows)
            reference = reference or value
            print(f"{name:<10}{value:>12.3f}{value / reference - 1:>10.2%}{loaded:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
