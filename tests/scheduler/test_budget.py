"""How one step's tokens are shared: decodes, chunks, long prompts, arrivals."""

from __future__ import annotations

import pytest

from scheduler.output import unpack_int32
from tests.scheduler.harness import Harness


@pytest.mark.parametrize("budget", [9, 10, 11])
def test_a_prompt_around_the_budget_takes_one_step_or_two(budget: int) -> None:
    harness = Harness(max_num_batched_tokens=budget)
    harness.add(range(10))
    assert harness.scheduled() == {"0": min(10, budget)}
    harness.update()
    assert harness.scheduled() == {"0": 1}
    assert len(harness.sent["0"].tokens) == (budget >= 10)
    harness.run()


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(range(20))
    chunks = []
    for _ in range(4):
        chunks.append(harness.scheduled()["0"])
        harness.update()
    assert chunks == [8, 8, 4, 1]
    harness.run()


def test_decodes_come_before_chunks_and_each_running_request_has_its_token() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(range(3), max_tokens=20)
    harness.add(range(3), max_tokens=20)
    harness.step()
    harness.add(range(30))
    for _ in range(3):
        assert list(harness.scheduled().items()) == [("0", 1), ("1", 1), ("2", 6)]
        harness.update()
    harness.run()


def test_leftover_budget_goes_to_the_next_arrival() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.add(range(10))
    harness.add(range(100, 130))
    harness.add(range(200, 205))
    assert harness.scheduled() == {"0": 10, "1": 6}
    harness.update()
    assert harness.scheduled() == {"0": 1, "1": 15}
    harness.update()
    assert harness.scheduled() == {"0": 1, "1": 9, "2": 5}
    harness.update()
    harness.run()


def test_rows_bound_the_number_of_running_requests() -> None:
    harness = Harness(max_num_seqs=2)
    for _ in range(3):
        harness.add(range(3), max_tokens=2)
    assert list(harness.scheduled()) == ["0", "1"]
    harness.update()
    assert list(harness.scheduled()) == ["0", "1"]
    harness.update()
    assert list(harness.scheduled()) == ["2"]
    harness.update()
    harness.run()


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it() -> None:
    harness = Harness(enable_chunked_prefill=False, max_model_len=32, max_num_batched_tokens=32)
    harness.add(range(20), max_tokens=4)
    harness.add(range(100, 113))
    harness.add(range(200, 202))  # first come, first served: it does not pass
    assert harness.scheduled() == {"0": 20}
    harness.update()
    assert harness.scheduled() == {"0": 1, "1": 13, "2": 2}
    harness.update()
    harness.run()


def test_without_chunking_a_recomputed_request_needs_only_its_prompt_in_one_step() -> None:
    harness = Harness(
        enable_chunked_prefill=False, max_model_len=40, max_num_batched_tokens=40, num_blocks=1 + 14, caching=False
    )
    harness.scheduler._batch.headroom_blocks = 0
    first = harness.add(range(20), max_tokens=20)
    second = harness.add(range(100, 120), max_tokens=20)
    harness.run()
    assert harness.num_preemptions > 0
    assert [len(harness.sent[request].tokens) for request in (first, second)] == [20, 20]


def test_a_long_prompt_gets_its_threshold_while_others_compute_prompts() -> None:
    harness = Harness(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    harness.add(range(40))
    assert harness.scheduled() == {"0": 20}  # alone it may have everything
    harness.update()
    harness.add(range(100, 130))
    harness.add(range(200, 204))
    # The second long prompt waits, the short one passes it.
    assert harness.scheduled() == {"0": 6, "2": 4}
    harness.update()
    harness.run()


def test_long_prompts_are_computed_a_few_at_a_time() -> None:
    for limit in (1, 2):
        harness = Harness(
            max_num_batched_tokens=20, long_prefill_token_threshold=6, max_long_partial_prefills=limit, caching=False
        )
        for start in (0, 100, 200):
            harness.add(range(start, start + 30))
        seen = 0
        while harness.scheduler.has_requests():
            scheduled = harness.scheduled()
            seen = max(seen, sum(count > 1 for count in scheduled.values()))
            harness.update()
        # A prompt whose rest is within the threshold is long no more, so the next may begin beside it.
        assert seen <= limit + 1
        harness.check_results()


def test_short_prompts_start_while_long_ones_wait() -> None:
    harness = Harness(max_num_batched_tokens=12, long_prefill_token_threshold=4)
    for start in (0, 100, 200):
        harness.add(range(start, start + 50))
    harness.step()
    short = harness.add(range(300, 304))
    assert short in harness.scheduled()
    harness.update()
    assert len(harness.sent[short].tokens) == 1
    harness.run()


def test_a_step_with_single_tokens_only_has_no_counts() -> None:
    harness = Harness()
    harness.add([7])
    message = harness.schedule()
    assert message is not None
    assert message.num_scheduled_tokens == b""
    harness.update()
    harness.add(range(3))
    message = harness.schedule()
    assert message is not None
    assert list(unpack_int32(message.num_scheduled_tokens)) == [1, 3]
    harness.update()
    harness.run()


def test_nothing_to_do_is_no_step() -> None:
    harness = Harness()
    assert harness.schedule() is None
    assert not harness.scheduler.has_requests()
    harness.add(range(3), max_tokens=1)
    harness.schedule()
    assert harness.scheduler.has_requests()
    assert harness.schedule() is None  # its only token is on its way
    harness.update()
    assert not harness.scheduler.has_requests()
    assert harness.schedule() is None
