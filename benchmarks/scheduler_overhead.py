"""Cost of one schedule + update_from_output with many running decodes, without any model; beside vLLM's, if given.

    python benchmarks/scheduler_overhead.py [--batches 256 1024] [--steps 300]
        [--vllm-python VENV/bin/python --vllm-script peers/vllm_scheduler.py --vllm-model TINY_MODEL_DIR]

One JSON line per measurement; `cpu_ms` is the whole loop's processor time, fair on a busy machine. The rows with
other lengths, pools and modes show what the cost does not depend on.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections import deque

import msgspec

from kv.config import CacheConfig
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
WARM_UP_STEPS = 40


def measure(
    batch: int, steps: int, *, prompt_len: int, num_blocks: int, async_scheduling: bool = False, window_groups: int = 0
) -> dict[str, float]:
    """Milliseconds per step in steady decode, and the bytes of the messages per request."""
    full = KVCacheGroup(("full",), FullAttentionSpec(BLOCK_SIZE, 1, 64, 2))
    window = KVCacheGroup(("window",), SlidingWindowSpec(BLOCK_SIZE, 1, 64, 2, sliding_window=512))
    total_steps = steps + WARM_UP_STEPS
    # Room to compute all prompts in one step, so that the measurement begins with everything running.
    config = SchedulerConfig(
        max_num_seqs=batch, max_num_batched_tokens=batch * prompt_len, max_model_len=prompt_len + total_steps + 100,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    scheduler = Scheduler(
        config, CacheConfig(block_size=BLOCK_SIZE), KVCacheConfig(num_blocks, (full,) + (window,) * window_groups),
        max_concurrent_batches=2 if async_scheduling else 1,
    )  # fmt: skip
    params = SamplingParams(max_tokens=total_steps + 50, temperature=0, seed=1)
    for index in range(batch):
        # Lengths differ, so that requests begin blocks at different steps, as they do in service.
        prompt = pack_int32([index % 1000 + 5] * (prompt_len - index % BLOCK_SIZE))
        scheduler.add_request(EngineCoreRequest(str(index), prompt, params, eos_token_ids=[2]))
    tokens = pack_int32([7]) * batch
    in_flight: deque[SchedulerOutput] = deque()
    encoder = msgspec.msgpack.Encoder()
    schedule_s = update_s = 0.0
    sent = 0
    gc.collect()
    gc.freeze()
    cpu_begin = time.process_time()
    for step in range(total_steps):
        if step == WARM_UP_STEPS:
            cpu_begin = time.process_time()
        begin = time.perf_counter()
        message = scheduler.schedule()
        scheduled = time.perf_counter()
        if message is None:
            raise RuntimeError("nothing was scheduled")
        in_flight.append(message)
        if async_scheduling and len(in_flight) < 2:
            continue
        oldest = in_flight.popleft()
        before = time.perf_counter()
        scheduler.update_from_output(oldest, ModelRunnerOutput(oldest.step, tokens))
        updated = time.perf_counter()
        if step >= WARM_UP_STEPS:
            schedule_s += scheduled - begin
            update_s += updated - before
            sent += len(encoder.encode(message))
    cpu_s = time.process_time() - cpu_begin
    return {
        "schedule_ms": round(1e3 * schedule_s / steps, 3), "update_ms": round(1e3 * update_s / steps, 3),
        "total_ms": round(1e3 * (schedule_s + update_s) / steps, 3),
        "cpu_ms": round(1e3 * cpu_s / steps, 3), "bytes_per_request": round(sent / steps / batch, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-script")
    parser.add_argument("--vllm-model")
    args = parser.parse_args()
    for batch in args.batches:
        for case, options in {
            "decode": {"prompt_len": 32, "num_blocks": 200_000},
            "decode, long sequences": {"prompt_len": 2048, "num_blocks": 400_000},
            "decode, pool of a million": {"prompt_len": 32, "num_blocks": 1_000_000},
            "decode, async": {"prompt_len": 32, "num_blocks": 200_000, "async_scheduling": True},
            "decode, 1 full and 5 window groups": {"prompt_len": 32, "num_blocks": 400_000, "window_groups": 5},
        }.items():
            print(json.dumps({"batch": batch, "case": case, **measure(batch, args.steps, **options)}), flush=True)
    if args.vllm_python:
        subprocess.run(
            [args.vllm_python, args.vllm_script, args.vllm_model, "--batches", *map(str, args.batches), "--steps",
             str(args.steps)], check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
