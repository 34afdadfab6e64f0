"""Lengths at which counting goes wrong, on purpose: around blocks, windows, the pool, the budget and the limits."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import Harness

BLOCK = 8
AROUND_BLOCKS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK]
MODES = [(1, False), (2, True), (2, False)]


def serve(harness: Harness, prompt_len: int, max_tokens: int) -> None:
    """The same request three times, one after another and beside each other: cold, cached, and with a stranger."""
    for _ in range(2):
        harness.add(range(prompt_len), max_tokens=max_tokens)
        harness.run()
    harness.add(range(prompt_len), max_tokens=max_tokens)
    harness.add(range(1, prompt_len + 1), max_tokens=max_tokens)
    harness.run()


@pytest.mark.parametrize(("depth", "async_scheduling"), MODES)
@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("prompt_len", AROUND_BLOCKS)
def test_lengths_around_blocks(prompt_len: int, max_tokens: int, depth: int, async_scheduling: bool) -> None:
    serve(Harness(block_size=BLOCK, depth=depth, async_scheduling=async_scheduling), prompt_len, max_tokens)


@pytest.mark.parametrize("window", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("offset", [-1, 0, 1, BLOCK])
@pytest.mark.parametrize("group_windows", ["hybrid", "window only"])
@pytest.mark.parametrize("budget", [8, 13, 64])
def test_lengths_around_windows(window: int, offset: int, group_windows: str, budget: int) -> None:
    windows = (None, window) if group_windows == "hybrid" else (window,)
    harness = Harness(block_size=BLOCK, group_windows=windows, max_num_batched_tokens=budget)
    serve(harness, window + offset, 3 * window)


@pytest.mark.parametrize("slots_left", [-1, 0, 1])
@pytest.mark.parametrize(("depth", "async_scheduling"), MODES)
def test_sequences_that_fill_the_pool(slots_left: int, depth: int, async_scheduling: bool) -> None:
    harness = Harness(num_blocks=1 + 4, block_size=BLOCK, depth=depth, async_scheduling=async_scheduling)
    # The last token's KV is never needed, so 33 tokens fit in 32 slots; the 34th is an error.
    total = 4 * BLOCK + 1 - slots_left
    for prompt_len in (1, BLOCK, 4 * BLOCK - 2, total - 1):
        if prompt_len <= 4 * BLOCK:
            harness.add(range(prompt_len), max_tokens=total - prompt_len)
            harness.run()


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("chunked", [True, False])
def test_prompts_around_the_budget(prompt_len: int, chunked: bool) -> None:
    budget = 16 if chunked else 40
    harness = Harness(
        block_size=BLOCK, max_num_batched_tokens=budget, enable_chunked_prefill=chunked, max_model_len=40
    )  # fmt: skip
    serve(harness, prompt_len, 5)


@pytest.mark.parametrize("total", [39, 40, 41])
@pytest.mark.parametrize("prompt_len", [1, 38, 39])
@pytest.mark.parametrize(("depth", "async_scheduling"), MODES)
def test_totals_around_max_model_len(total: int, prompt_len: int, depth: int, async_scheduling: bool) -> None:
    harness = Harness(block_size=BLOCK, max_model_len=40, depth=depth, async_scheduling=async_scheduling)
    serve(harness, prompt_len, max(1, total - prompt_len))


@pytest.mark.parametrize("budget", [2, 3, 5])
def test_a_budget_as_small_as_the_number_of_rows(budget: int) -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=budget, block_size=2)
    for start in (0, 50, 60):
        harness.add(range(start, start + 9), max_tokens=6)
    harness.run()
