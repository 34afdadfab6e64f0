"""Thousands of random traces: whatever happens around a request, its tokens are those it would have alone.

Each trace draws a configuration (pool and block sizes, KV groups, budgets, policy, async or pipeline depth) and a
sequence of arrivals, aborts, schedules, updates and crashes of the workers in any order. `Harness` checks the
invariants after each call.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.errors import QueueFullError, RequestRefusedError
from scheduler.structured_params import StructuredOutputsParams
from tests.scheduler.fake_grammars import form
from tests.scheduler.fake_worker import VOCABULARY
from tests.scheduler.harness import Harness

# Prompts are cut from these, so that prefixes are shared, also partly.
BASES = [[1] * 80, list(range(80)), [3, 1, 4, 1, 5, 9, 2, 6] * 10]
# Tokens that end a request: hit never, after some 25 tokens, after some 8.
STOPS = [(), (), (), (), tuple(range(0, VOCABULARY, 25)), tuple(range(3, VOCABULARY, 8))]
CRASHES = 0.02  # of all actions
ACTIONS = ["add", "add", "schedule", "update", "step", "step", "step", "abort"]


def configuration(rng: random.Random) -> dict[str, Any]:
    """Arguments of Harness. Pools are mostly about as large as one or two requests need."""
    block_size = rng.choice([1, 2, 4, 8])
    window = rng.choice([1, 2, 3, block_size, block_size + 1, 3 * block_size - 1, 3 * block_size + 1])
    group_windows = rng.choice([(None,), (None,), (None, window), (window,), (window, None, window)])
    max_model_len = rng.randint(8, 60)
    max_num_seqs = rng.choice([1, 2, 3, 4, 5, 5])
    chunked = rng.random() < 0.75
    lowest_budget = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    mode = rng.choice(["sync", "async", "pipeline"])
    blocks_for_one = len(group_windows) * -(-max_model_len // block_size)
    num_blocks = rng.choice([rng.randint(blocks_for_one // 2, blocks_for_one + blocks_for_one // 4),
                             rng.randint(1, 3 * blocks_for_one)])  # fmt: skip
    return {
        "block_size": block_size,
        "group_windows": group_windows,
        "num_blocks": 1 + max(len(group_windows), num_blocks),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.randint(lowest_budget, lowest_budget + 40),
        "enable_chunked_prefill": chunked,
        "caching": rng.random() < 0.75,
        "policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 10]),
        "max_long_partial_prefills": rng.randint(1, 2),
        "max_num_queued_requests": rng.choice([None, None, 0, 2]),
        "async_scheduling": mode == "async",
        "depth": {"sync": 1, "async": rng.randint(1, 3), "pipeline": rng.randint(2, 3)}[mode],
    }


def arrival(rng: random.Random, max_model_len: int) -> dict[str, Any]:
    """Arguments of Harness.add."""
    shared = rng.choice(BASES)[: rng.randint(0, max_model_len)]
    prompt = shared + [rng.randint(0, 3)] * rng.randint(0, 3) or [7]
    max_tokens = rng.choice([None, None, rng.randint(1, 30)])
    return {
        "prompt": prompt,
        "seed": rng.randint(0, 2),
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, 1, max_tokens or 5]),
        "eos": rng.choice(STOPS),
        "stop_token_ids": list(rng.choice(STOPS)),
        "ignore_eos": rng.random() < 0.5,
        "priority": rng.randint(0, 2),
        "cache_salt": rng.choice([None, None, None, "", "tenant"]),
        "client_index": rng.choice([0, 0, 0, 1]),
        "structured_outputs": grammar(rng) if rng.random() < 0.25 else None,
    }


def grammar(rng: random.Random) -> StructuredOutputsParams:
    """Mostly at hand or soon, and complete after a few tokens; some are refused, some matchers fail."""
    return form(
        delay=rng.choice([0, 0, 1, 5, 30]),
        end=rng.choice([1, 5, 12, 1000]),
        fails_at=rng.choice([None, None, None, None, 0, 3]),
        refused=rng.random() < 0.1,
    )


def play(rng: random.Random) -> Harness:
    """A trace, run to its end."""
    harness = Harness(**configuration(rng))
    harness.scheduler._batch.headroom_blocks = rng.choice([0, 0, 1])  # without headroom there are more preemptions
    for _ in range(rng.randint(1, 60)):
        action = "crash" if rng.random() < CRASHES else rng.choice(ACTIONS)
        if action == "crash":
            harness.crash()
        elif action == "add":
            add(harness, arrival(rng, harness.config.max_model_len))
        elif action == "schedule" and len(harness.in_flight) < harness.depth:
            harness.schedule()
        elif action == "update" and harness.in_flight:
            harness.update()
        elif action == "step":
            harness.step()
        elif action == "abort" and harness.sent:
            harness.abort(rng.choice(sorted(harness.sent)))
    harness.run()
    assert harness.scheduler.reset_prefix_cache()
    assert harness.scheduler._batch.kv.pool.num_cached == 0
    return harness


def add(harness: Harness, request: dict[str, Any]) -> None:
    """Add, or see that the refusal is right."""
    prompt_len = len(request["prompt"])
    scheduler, config = harness.scheduler, harness.config
    too_long = prompt_len >= config.max_model_len or prompt_len > scheduler._limits.pool_tokens
    try:
        harness.add(**request)
    except (RequestRefusedError, QueueFullError) as caught:
        error: Exception | None = caught
    else:
        error = None
    if isinstance(error, QueueFullError):
        assert config.max_num_queued_requests is not None
        assert scheduler._num_waiting >= config.max_num_queued_requests
    else:
        assert (error is not None) == too_long


@pytest.mark.parametrize("first_seed", range(0, 3000, 500))
def test_tokens_never_depend_on_what_happens_around_a_request(first_seed: int) -> None:
    num_preemptions = num_hits = 0
    for seed in range(first_seed, first_seed + 500):
        try:
            harness = play(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"trace of seed {seed}") from error
        num_preemptions += harness.num_preemptions
        num_hits += sum(sent.events.num_cached_tokens > 0 for sent in harness.sent.values() if sent.events)
    assert num_preemptions > 50, "the traces no longer test preemption"
    assert num_hits > 50, "the traces no longer test prefix hits"


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms())
def test_a_failing_trace_is_found_and_made_small(rng: random.Random) -> None:
    """The same traces drawn through hypothesis: fewer, since that is slow, but a failure is reduced to its core."""
    play(rng)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_tokens_never_depend_on_what_happens_around_a_request_soak() -> None:
    for seed in range(10_000, 110_000):
        try:
            play(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"trace of seed {seed}") from error
