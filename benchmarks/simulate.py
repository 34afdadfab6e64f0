"""The real scheduler and KV manager at the size of a fleet, with a step-time model in place of workers.

    python benchmarks/simulate.py [--workload chat|rag|agents|burst] [--requests 5000] [--rate 40] [--variants fcfs ...]
    python benchmarks/simulate.py --trace trace.jsonl

This is how scheduling changes are judged without GPUs: run before and after, compare the table. Times are simulated,
except `host us/step`, the CPU time schedule + update_from_output really took. The default device is about an H100
with an 8B model; `--device` and `--blocks` describe another one.

A trace file has one JSON object a line: arrival_s, prompt_tokens, output_tokens, and optionally prefix_id and
prefix_tokens (requests of one prefix_id share so many first tokens) and priority.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv.config import CacheConfig
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Device:
    """Seconds of one step: max(weights read, arithmetic of its tokens) + KV read.

    `host_gap_s` passes between steps that are not scheduled ahead.
    """

    weights_s: float = 7e-3
    token_s: float = 50e-6
    kv_token_s: float = 45e-9
    host_gap_s: float = 2e-3

    def step_s(self, num_tokens: int, num_context_tokens: int) -> float:
        return max(self.weights_s, num_tokens * self.token_s) + num_context_tokens * self.kv_token_s


@dataclass(frozen=True)
class Arrival:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: int = -1
    prefix_tokens: int = 0
    priority: int = 0


# ---- workloads


def workload(name: str, num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """Arrivals of a kind, Poisson at `rate` per second.

    chat: ten system prompts of 800 tokens, lognormal questions and answers. rag: prompts of 2k to 16k tokens among
    short ones. agents: conversations that return with their whole history after a pause. burst: everything at once.
    """
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num_requests))
    if name == "burst":
        times = np.zeros(num_requests)
    questions = np.clip(rng.lognormal(5.0, 0.9, num_requests), 8, 4000).astype(int)
    answers = np.clip(rng.lognormal(5.2, 0.7, num_requests), 4, 2000).astype(int)
    priorities = rng.choice([0, 1, 2], num_requests, p=[0.1, 0.6, 0.3])
    if name == "agents":
        return _agents(rng, times, questions, answers)
    arrivals = []
    for index in range(num_requests):
        prompt, prefix_id, prefix = int(questions[index]), -1, 0
        if name == "rag" and rng.random() < 0.25:
            prompt = int(rng.integers(2000, 16000))
        else:
            prefix_id, prefix = int(min(9, rng.geometric(0.3) - 1)), 800
            prompt += prefix
        arrivals.append(
            Arrival(float(times[index]), prompt, int(answers[index]), prefix_id, prefix, int(priorities[index]))
        )
    return arrivals


def _agents(rng: np.random.Generator, times: np.ndarray, questions: np.ndarray, answers: np.ndarray) -> list[Arrival]:
    arrivals = []
    turns = 8
    for index in range(0, len(times), turns):
        at, history = float(times[index]), 0
        for turn in range(index, min(index + turns, len(times))):
            prompt = history + int(questions[turn])
            arrivals.append(Arrival(at, prompt, int(answers[turn]), index, history))
            history = min(prompt + int(answers[turn]), 12_000)
            at += 10 + float(rng.exponential(20))
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def read_trace(path: Path) -> list[Arrival]:
    """Raises ValueError with the line number."""
    arrivals = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            arrivals.append(Arrival(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def prompt_of(arrival: Arrival, index: int) -> bytes:
    """Token ids: the prefix depends on prefix_id only, the rest on the request."""
    tokens = np.empty(arrival.prompt_tokens, np.int32)
    prefix = min(arrival.prefix_tokens, arrival.prompt_tokens)
    tokens[:prefix] = np.arange(prefix) + 1_000_003 * (arrival.prefix_id + 1)
    tokens[prefix:] = np.arange(arrival.prompt_tokens - prefix) + 7919 * index
    return pack_int32(array("i", tokens.tobytes()))


# ---- simulation


class ModelTimes:
    """Follows the messages as a worker does, for lengths only; says which rows sample and how long a step takes."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self.device = device
        self.remaining = np.zeros(max_num_seqs, np.int64)
        self.computed = np.zeros(max_num_seqs, np.int64)

    def run(self, message: SchedulerOutput) -> tuple[float, bytes]:
        for new in message.new_requests:
            self.computed[new.row] = new.num_computed_tokens
            self.remaining[new.row] = len(new.token_ids) // 4 - new.num_computed_tokens
        rows = np.frombuffer(message.rows, "<i4")
        counts = np.frombuffer(message.num_scheduled_tokens, "<i4") if message.num_scheduled_tokens else 1
        self.computed[rows] += counts
        self.remaining[rows] -= counts
        sampled = rows[self.remaining[rows] == 0]
        self.remaining[sampled] = 1
        num_tokens = int(np.sum(counts)) if message.num_scheduled_tokens else len(rows)
        return self.device.step_s(num_tokens, int(self.computed[rows].sum())), pack_int32([7]) * len(sampled)


@dataclass
class Served:
    """One request's times."""

    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    cached: int = 0
    preemptions: int = 0
    longest_gap_s: float = 0.0


def simulate(
    arrivals: list[Arrival],
    config: SchedulerConfig,
    *,
    num_blocks: int,
    device: Device,
    caching: bool = True,
    pipeline: int = 1,
    headroom_blocks: int | None = None,
) -> dict[str, float]:
    """Play the arrivals; returns the row of the table."""
    now_s = 0.0
    spec = FullAttentionSpec(BLOCK_SIZE, 8, 128, 2)
    depth = 2 if config.async_scheduling else pipeline
    scheduler = Scheduler(
        config,
        CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),)),
        max_concurrent_batches=depth,
        clock=lambda: now_s,
    )
    if headroom_blocks is not None:
        scheduler._batch.headroom_blocks = headroom_blocks
    model = ModelTimes(device, config.max_num_seqs)
    served: dict[str, Served] = {}
    # Each step passes all stages; a stage takes its share of the time and one step at a time.
    stage_free_s = [0.0] * pipeline
    in_flight: deque[tuple[float, SchedulerOutput, bytes]] = deque()
    host_s, num_steps, next_arrival, hits, queries = 0.0, 0, 0, 0, 0
    while next_arrival < len(arrivals) or scheduler.has_requests():
        while next_arrival < len(arrivals) and arrivals[next_arrival].arrival_s <= now_s:
            arrival = arrivals[next_arrival]
            name = str(next_arrival)
            served[name] = Served(arrival.arrival_s)
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, seed=0)
            prompt = prompt_of(arrival, next_arrival)
            scheduler.add_request(
                EngineCoreRequest(name, prompt, params, arrival_time_s=arrival.arrival_s, priority=arrival.priority)
            )
            next_arrival += 1
        begin = time.process_time()
        message = scheduler.schedule() if len(in_flight) < depth else None
        host_s += time.process_time() - begin
        if message is not None:
            num_steps += 1
            step_s, tokens = model.run(message)
            at = now_s + (0.0 if in_flight else device.host_gap_s)
            for stage in range(pipeline):
                at = stage_free_s[stage] = max(at, stage_free_s[stage]) + step_s / pipeline
            in_flight.append((at, message, tokens))
            if len(in_flight) < depth:
                continue
        if not in_flight:
            if next_arrival == len(arrivals):
                raise RuntimeError("work remains and nothing is scheduled")
            now_s = max(now_s, arrivals[next_arrival].arrival_s)
            continue
        done_s, message, tokens = in_flight.popleft()
        now_s = max(now_s, done_s)
        begin = time.process_time()
        outputs = scheduler.update_from_output(message, ModelRunnerOutput(message.step, tokens))
        host_s += time.process_time() - begin
        for output in outputs.values():
            if output.stats is not None:
                hits += output.stats.prefix_cache_hits
                queries += output.stats.prefix_cache_queries
            for events in output.started:
                served[events.request_id].first_s = served[events.request_id].last_s = now_s
            for request_id in output.request_ids:
                request = served[request_id]
                request.num_tokens += 1
                request.longest_gap_s = max(request.longest_gap_s, now_s - request.last_s)
                request.last_s = now_s
            for finished in output.finished:
                served[finished.request_id].preemptions = finished.num_preemptions
    return _summary(list(served.values()), now_s, num_steps, host_s, hits / max(1, queries))


def _summary(served: list[Served], end_s: float, num_steps: int, host_s: float, hit_rate: float) -> dict[str, float]:
    ttft = np.array([request.first_s - request.arrival_s for request in served])
    gaps = np.array([
        (request.last_s - request.first_s) / (request.num_tokens - 1) for request in served if request.num_tokens > 1
    ])  # fmt: skip
    longest = np.array([request.longest_gap_s for request in served])
    return {
        "tok/s": sum(request.num_tokens for request in served) / end_s,
        "TTFT p50 s": float(np.percentile(ttft, 50)),
        "TTFT p99 s": float(np.percentile(ttft, 99)),
        "ITL p50 ms": 1e3 * float(np.percentile(gaps, 50)),
        "ITL p99 ms": 1e3 * float(np.percentile(gaps, 99)),
        "stall p99 ms": 1e3 * float(np.percentile(longest, 99)),
        "preempted": sum(request.preemptions for request in served),
        "hit rate": hit_rate,
        "steps": num_steps,
        "host us/step": 1e6 * host_s / max(1, num_steps),
    }


VARIANTS: dict[str, dict[str, object]] = {
    "fcfs": {},
    "priority": {"policy": "priority"},
    "no cache": {"caching": False},
    "long prompts limited": {"long_prefill_token_threshold": 1024, "max_long_partial_prefills": 1},
    "async": {"async_scheduling": True},
    "pipeline 4": {"pipeline": 4},
    "headroom 0": {"headroom_blocks": 0},
    "headroom 1": {"headroom_blocks": 1},
    "headroom 3": {"headroom_blocks": 3},
    "headroom 4": {"headroom_blocks": 4},
}
NOT_IN_CONFIG = ("caching", "pipeline", "headroom_blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", choices=["chat", "rag", "agents", "burst"], default="chat")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals per second")
    parser.add_argument("--blocks", type=int, default=30_000, help="KV pool, in blocks of 16 tokens")
    parser.add_argument("--max-num-seqs", type=int, default=1000)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--device", type=float, nargs=4, metavar=("WEIGHTS_S", "TOKEN_S", "KV_TOKEN_S", "HOST_GAP_S"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    arrivals = (
        read_trace(args.trace) if args.trace else workload(args.workload, args.requests, args.rate, args.seed)
    )  # fmt: skip
    device = Device(*args.device) if args.device else Device()
    for index, name in enumerate(args.variants):
        options = dict(VARIANTS[name])
        rest = {key: options.pop(key) for key in NOT_IN_CONFIG if key in options}
        config = SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            **options,  # type: ignore[arg-type]
        )
        row = simulate(arrivals, config, num_blocks=args.blocks, device=device, **rest)  # type: ignore[arg-type]
        if args.json:
            print(json.dumps({"variant": name, **row}), flush=True)
            continue
        if index == 0:
            print(f"{'variant':<22}" + "".join(f"{column:>14}" for column in row))
        print(f"{name:<22}" + "".join(f"{value:>14.4g}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
