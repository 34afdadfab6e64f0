"""The main job on a real model: an Engine actor answers prompts through an EngineCore actor and worker actors.

make demo     or     python examples/demo.py [MODEL_DIR] [--tensor-parallel-size N] [--pipeline-parallel-size N]
"""

from __future__ import annotations

import argparse
import os
import time

import ray

from engine_actors import Engine, SamplingParams
from engine_actors.fetch_model import fetch_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
]
QUESTION = [{"role": "user", "content": "In one sentence: what is the Ray framework good for?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="a Hugging Face directory; default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1)
    args = parser.parse_args()
    model = args.model or str(fetch_model())

    print(f"model     {model}")
    ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    started = time.perf_counter()
    engine = Engine.remote(
        model=model,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
    )
    where = ray.get(engine.where.remote())
    print(f"started   in {time.perf_counter() - started:.1f} s")
    for part, place in where.items():
        print(f"          {part:<16} {place}")

    params = SamplingParams(temperature=0.0, max_tokens=48)
    started = time.perf_counter()
    texts = engine.generate.remote(PROMPTS, params)
    answer = engine.chat.remote(QUESTION, params.clone(max_tokens=64))
    outputs = ray.get(texts) + ray.get(answer)
    elapsed = time.perf_counter() - started

    for output in outputs:
        prompt = output.prompt if output in outputs[: len(PROMPTS)] else QUESTION[0]["content"]
        print(f"\n> {prompt}\n  {output.outputs[0].text.strip()!r}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{len(outputs)} requests, {tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens/s")

    print("\nstreamed  ", end="")
    for item in engine.stream.remote("The sun is", SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24)):
        print(ray.get(item).outputs[0].text, end="|", flush=True)
    print()
    ray.get(engine.shutdown.remote())
    ray.shutdown()
    print("done      every actor, placement group and process is gone")


if __name__ == "__main__":
    main()
