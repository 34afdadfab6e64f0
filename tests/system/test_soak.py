"""A long random mix on a pool that is far too small, through a real worker: nothing leaks, stalls or changes a token.

`make test` runs some seconds of it, `make soak` half an hour (ENGINE_ACTORS_SOAK_S seconds).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from engine_actors import LLM, LLMEngine, RequestOutput, SamplingParams
from scheduler.sampling_params import RequestOutputKind

SOAK_S = float(os.environ.get("ENGINE_ACTORS_SOAK_S", 1800))
STALL_STEPS = 3000
"""Many times the steps that all requests in flight can need."""
OPTIONS: dict[str, Any] = {
    "engine_core": "inproc",
    "distributed_executor_backend": "uni",
    "torch_num_threads": 1,
    "dtype": "float32",
    "max_model_len": 160,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "scheduling_policy": "priority",
}
NUM_BLOCKS = 30
"""Little more than one sequence of full length, while twelve requests may run at once."""


def catalogue(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds: shared prefixes, lengths around block boundaries, greedy and seeded, n > 1."""
    heads = [[rng.randrange(2, 250) for _ in range(length)] for length in (0, 0, 7, 8, 9, 40, 64)]
    requests = []
    for _ in range(150):
        prompt = rng.choice(heads) + [rng.randrange(2, 250) for _ in range(rng.choice([1, 2, 7, 8, 9, 16, 30, 47, 48]))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1000),
            max_tokens=rng.choice([1, 2, 8, 9, 20, 40, 80]),
            ignore_eos=rng.random() < 0.5,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # all n completions in one output
        )
        requests.append((prompt, params))
    return requests


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


class Soak:
    """Adds, aborts and checks requests at random."""

    def __init__(self, engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]], rng: random.Random) -> None:
        self.engine, self.requests, self.rng = engine, requests, rng
        self.expected = [self._alone(index) for index in range(len(requests))]
        self.in_flight: dict[str, tuple[int, bool]] = {}  # request id → catalogue index, aborted
        self.num_added = self.num_finished = self.num_aborted = self.num_preemptions = self.steps_since_end = 0

    def _alone(self, index: int) -> list[list[int]]:
        self.engine.add_request(f"alone-{index}", *self.requests[index])
        while True:
            for output in self.engine.step():
                if output.finished:
                    self.engine.reset_prefix_cache()
                    return tokens_of(output)

    def play(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self.in_flight) < 40 and self.rng.random() < 0.7:
                self._add()
            if self.in_flight and self.rng.random() < 0.05:
                request_id = self.rng.choice(list(self.in_flight))
                self.in_flight[request_id] = (self.in_flight[request_id][0], True)
                self.engine.abort_requests([request_id])
            self._step()
            if self.rng.random() < 0.002:
                self.drain()
        self.drain()

    def drain(self) -> None:
        while self.in_flight:
            self._step()
        assert_nothing_left(self.engine)

    def _add(self) -> None:
        index = self.rng.randrange(len(self.requests))
        request_id = f"request-{self.num_added}"
        self.num_added += 1
        self.engine.add_request(request_id, *self.requests[index], priority=self.rng.randrange(3))
        self.in_flight[request_id] = (index, False)

    def _step(self) -> None:
        self.steps_since_end += 1
        for output in self.engine.step():
            if output.finished:
                self.steps_since_end = 0
                index, aborted = self.in_flight.pop(output.request_id)
                self._check(output, self.expected[index], aborted)
        assert self.steps_since_end < STALL_STEPS, f"no request ends any more; in flight: {sorted(self.in_flight)}"

    def _check(self, output: RequestOutput, expected: list[list[int]], aborted: bool) -> None:
        self.num_preemptions += output.metrics.num_preemptions
        for tokens, whole, completion in zip(tokens_of(output), expected, output.outputs, strict=True):
            if completion.finish_reason == "abort":
                assert aborted
                assert tokens == whole[: len(tokens)]
                self.num_aborted += 1
            else:
                assert tokens == whole
                self.num_finished += 1


def assert_nothing_left(engine: LLMEngine) -> None:
    """Every block and row is free, and every map of scheduler, KV manager, core and front end is empty."""
    core = engine.client.core  # type: ignore[attr-defined]
    while core.has_requests():  # steps dispatched ahead of the last token
        engine.client.get_output()
    scheduler = core.scheduler
    pool = scheduler._batch.kv.pool
    assert pool.num_free == pool.num_blocks - 1
    assert not any(pool._ref_counts)
    assert sorted(scheduler._batch.rows.free) == list(range(OPTIONS["max_num_seqs"]))
    containers = {
        name: len(value)
        for owner in (scheduler, scheduler._batch, scheduler._batch.rows, engine.output_processor, core)
        for name, value in vars(owner).items()
        if name not in ("free", "_utilities", "_tokenizer") and hasattr(value, "__len__")
    }
    assert {name: length for name, length in containers.items() if length} == {}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "seconds",
    [8, pytest.param(SOAK_S / 2, marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_S + 600)])],
    ids=["short", "long"],
)
def test_a_random_mix_on_a_tiny_pool_leaks_and_stalls_nothing(
    random_llama_dir: Path, seconds: float, async_scheduling: bool
) -> None:
    rng = random.Random(17)
    requests = catalogue(rng)
    options = {**OPTIONS, "num_gpu_blocks_override": NUM_BLOCKS, "async_scheduling": async_scheduling}
    with LLM(str(random_llama_dir), **options) as llm:
        soak = Soak(llm.llm_engine, requests, rng)
        soak.play(seconds)
    print(f"{soak.num_finished} completions equal, {soak.num_aborted} aborted, {soak.num_preemptions} preemptions")
    assert min(soak.num_finished, soak.num_aborted, soak.num_preemptions) > 0
