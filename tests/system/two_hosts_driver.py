"""Runs on the head of `two_hosts.py`: an engine across both, its tokens, and how long callers wait when a host is lost.

    python -m tests.system.two_hosts_driver MODEL TP PP

Prints a JSON object a line (besides what Ray says): {"tokens": …, "nodes": …} when the engine has answered, and
{"error": …, "waited_s": …} when it has failed; a line on stdin says that it is about to.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import ray

from engine_actors import AsyncLLM, EngineDeadError, SamplingParams

PROMPT = [5, 6, 7, 8]
NODES_S = 240


def wait_for_nodes(count: int) -> None:
    deadline = time.monotonic() + NODES_S
    while sum(node["Alive"] for node in ray.nodes()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} nodes did not come: {ray.nodes()}")
        time.sleep(0.2)


async def run(model: str, tp_size: int, pp_size: int) -> None:
    llm = AsyncLLM(
        model, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size, dtype="float32", max_model_len=256,
        num_gpu_blocks_override=64, device="cpu", step_timeout_s=30.0,
    )  # fmt: skip
    places = await llm.where()
    nodes = sorted({place.split(",")[0] for part, place in places.items() if part.startswith("Worker")})
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = await llm.generate_all([PROMPT], greedy)
    print(json.dumps({"tokens": list(output.outputs[0].token_ids), "nodes": nodes}), flush=True)
    endless = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    lost_s = 0.0

    async def note_loss() -> None:
        nonlocal lost_s
        await asyncio.to_thread(sys.stdin.readline)
        lost_s = time.monotonic()

    noting = asyncio.create_task(note_loss())
    try:
        while True:
            async for _ in llm.generate(PROMPT, endless):
                pass
    except EngineDeadError as error:
        await noting
        print(json.dumps({"error": str(error), "waited_s": time.monotonic() - lost_s}), flush=True)


if __name__ == "__main__":
    ray.init("10.77.0.1:6379", log_to_driver=False, _node_ip_address="10.77.0.1")
    wait_for_nodes(2)
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
