"""Prefix hits between requests: who may share what and when, and what is counted."""

from __future__ import annotations

import pytest

from scheduler.request import Request
from tests.scheduler.harness import Harness

SYSTEM = tuple(range(16))


def cached(harness: Harness, request_id: str) -> int:
    events = harness.sent[request_id].events
    assert events is not None
    return events.num_cached_tokens


def test_a_later_request_computes_only_what_differs() -> None:
    harness = Harness(block_size=4)
    harness.add((*SYSTEM, 50, 51))
    harness.run()
    second = harness.add((*SYSTEM, 60, 61, 62))
    assert harness.scheduled() == {second: 3}
    harness.update()
    harness.run()
    assert cached(harness, second) == 16


def test_generated_tokens_are_shared_too() -> None:
    harness = Harness(block_size=4)
    first = harness.add(SYSTEM, max_tokens=9)
    harness.run()
    conversation = (*SYSTEM, *harness.sent[first].tokens, 70)
    second = harness.add(conversation)
    harness.run()
    assert cached(harness, second) == 24  # of 26; the last generated token was never computed


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 16, 17])
def test_the_same_prompt_again_still_computes_its_last_token(length: int) -> None:
    harness = Harness(block_size=4)
    first = harness.add(range(length))
    harness.run()
    second = harness.add(range(length))
    assert harness.scheduled()[second] >= 1
    harness.update()
    harness.run()
    assert cached(harness, second) == (length - 1) // 4 * 4
    assert harness.sent[first].tokens == harness.sent[second].tokens


def test_requests_that_arrive_together_share_in_the_same_step() -> None:
    # The blocks are filled in the very step that reads them; nothing decided later can take that step's work back.
    harness = Harness(block_size=4)
    for tail in (50, 60, 70):
        harness.add((*SYSTEM, tail))
    assert harness.scheduled() == {"0": 17, "1": 1, "2": 1}
    harness.update()
    harness.run()
    assert [cached(harness, name) for name in "012"] == [0, 16, 16]


def test_a_prompt_being_computed_shares_what_is_done() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=10)
    harness.add(range(30), "first")
    harness.add(range(30), "second")
    assert harness.scheduled() == {"first": 10}
    harness.update()
    assert harness.scheduled() == {"first": 10}
    harness.update()
    assert harness.scheduled() == {"first": 10}
    harness.update()
    assert harness.scheduled() == {"first": 1, "second": 2}
    harness.update()
    harness.run()


def test_salts_separate_tenants() -> None:
    harness = Harness(block_size=4)
    for salt in (None, "a", "b", ""):
        harness.add(SYSTEM, cache_salt=salt)
        harness.run()
    assert [cached(harness, name) for name in "0123"] == [0, 0, 0, 0]
    again = harness.add(SYSTEM, cache_salt="b")
    harness.run()
    assert cached(harness, again) == 12


def test_a_request_that_needs_all_logits_does_not_read_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(block_size=4)
    harness.add(SYSTEM)
    harness.run()
    monkeypatch.setattr(Request, "skip_reading_prefix_cache", True)
    second = harness.add(SYSTEM)
    assert harness.scheduled() == {second: 16}
    harness.update()
    harness.run()
    assert cached(harness, second) == 0


def test_hits_and_queries_are_counted_in_tokens_once_per_request() -> None:
    harness = Harness(block_size=4, max_num_seqs=1)
    queries = hits = 0
    for tail in (50, 60):
        harness.add((*SYSTEM, tail, tail))
    while harness.scheduler.has_requests():
        harness.schedule()
        for output in harness.update().values():
            assert output.stats is not None
            queries += output.stats.prefix_cache_queries
            hits += output.stats.prefix_cache_hits
    assert (queries, hits) == (36, 16)


def test_a_pool_full_of_cached_blocks_serves_strangers() -> None:
    harness = Harness(num_blocks=1 + 6, block_size=4)
    for start in range(0, 1000, 100):
        harness.add(range(start, start + 20), max_tokens=4)
    harness.run()


def test_a_request_keeps_what_it_hit_while_it_evicts_the_rest() -> None:
    harness = Harness(num_blocks=1 + 6, block_size=4)
    harness.add(range(24), max_tokens=1)
    harness.run()
    longest = harness.add((*range(8), *range(500, 515)), max_tokens=1)  # hits 2 blocks, needs the 4 others
    harness.run()
    assert cached(harness, longest) == 8


def test_reset_forgets_everything_once_nothing_runs() -> None:
    harness = Harness(block_size=4)
    harness.add(SYSTEM)
    harness.step()
    assert not harness.scheduler.reset_prefix_cache()
    harness.run()
    assert harness.scheduler.reset_prefix_cache()
    second = harness.add(SYSTEM)
    harness.run()
    assert cached(harness, second) == 0


@pytest.mark.parametrize("window", [3, 4, 5, 8, 9, 16])
def test_windows_share_prefixes_longer_than_the_window(window: int) -> None:
    harness = Harness(block_size=4, group_windows=(None, window), max_num_batched_tokens=8)
    harness.add(range(40), max_tokens=4)
    harness.run()
    second = harness.add((*range(40), 77), max_tokens=12)
    harness.run()
    assert cached(harness, second) == 40
