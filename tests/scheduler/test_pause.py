"""Pauses: what runs on, what waits, and that nobody's tokens change by it."""

from __future__ import annotations

import pytest

from scheduler.errors import QueueFullError
from scheduler.output import FinishReason
from scheduler.pause import PauseMode
from tests.scheduler.harness import Harness


@pytest.fixture(params=["sync", "async", "pipeline"])
def harness(request: pytest.FixtureRequest) -> Harness:
    mode = request.param
    return Harness(depth=1 if mode == "sync" else 2, async_scheduling=mode == "async", num_blocks=60)


def step_until_idle(harness: Harness) -> None:
    while harness.scheduler.has_runnable_requests or harness.in_flight:
        harness.step()


def test_kept_requests_go_on_where_they_stopped(harness: Harness) -> None:
    for length in (3, 9, 20):
        harness.add(range(length), max_tokens=12)
    for _ in range(4):
        harness.step()
    harness.scheduler.pause(PauseMode.KEEP)
    step_until_idle(harness)
    before = {name: list(sent.tokens) for name, sent in harness.sent.items()}
    used = harness.scheduler._batch.kv.pool.num_used
    harness.add(range(7))
    assert harness.scheduler.has_requests()
    assert not harness.scheduler.has_runnable_requests
    assert harness.schedule() is None
    assert {name: sent.tokens for name, sent in harness.sent.items() if name in before} == before
    assert harness.scheduler._batch.kv.pool.num_used == used > 0
    harness.scheduler.resume()
    assert not harness.scheduler.is_paused
    harness.run()
    assert harness.num_preemptions == 0


def test_waiting_lets_those_in_flight_end_and_holds_the_others(harness: Harness) -> None:
    harness.add(range(9), "running", max_tokens=10)
    harness.step()
    harness.add(range(5), "queued", max_tokens=3)
    harness.scheduler.pause(PauseMode.WAIT)
    harness.add(range(8), "late")
    step_until_idle(harness)
    assert {name for name, sent in harness.sent.items() if sent.finished} == {"running", "queued"}
    assert harness.sent["late"].tokens == []
    harness.scheduler.pause(PauseMode.KEEP)
    harness.scheduler.resume()
    harness.run()


def test_abort_ends_those_in_flight_with_what_they_have(harness: Harness) -> None:
    harness.add(range(9), "old", max_tokens=10)
    harness.step()
    harness.step()
    harness.scheduler.pause(PauseMode.ABORT)
    harness.add(range(9), "new", max_tokens=4)
    harness._take(harness.scheduler.take_outputs())
    assert harness.sent["old"].finished is not None
    assert harness.sent["old"].finished.reason is FinishReason.ABORT
    step_until_idle(harness)
    assert harness.sent["new"].tokens == []
    harness.scheduler.resume()
    harness.run()


def test_held_and_frozen_requests_can_be_aborted_and_count_for_the_queue_limit() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_requests=1)
    harness.add(range(9), "running", max_tokens=10)
    harness.step()
    harness.scheduler.pause(PauseMode.KEEP)
    harness.add(range(9), "held")
    with pytest.raises(QueueFullError, match="max_num_queued_requests is 1"):
        harness.add(range(9), "too many")
    assert harness.scheduler.make_stats().num_waiting == 1
    harness.num_scheduled_tokens = 0
    harness.abort("held")
    harness.abort("running")
    assert not harness.scheduler.has_requests()
    harness.check_nothing_left()


def test_ending_what_is_paused_leaves_what_may_run_on() -> None:
    harness = Harness()
    harness.add(range(9), "running", max_tokens=10)
    harness.step()
    harness.scheduler.pause(PauseMode.WAIT)
    harness.add(range(9), "held")
    harness.scheduler.abort_paused()
    harness._take(harness.scheduler.take_outputs())
    assert harness.sent["held"].finished is not None
    harness.run()
    assert len(harness.sent["running"].tokens) == 10


def test_all_kv_can_be_given_back_during_a_pause_and_tokens_stay_the_same(harness: Harness) -> None:
    for length in (3, 9, 20):
        harness.add(range(length), max_tokens=12)
    for _ in range(4):
        harness.step()
    harness.scheduler.pause(PauseMode.KEEP)
    if harness.in_flight:
        with pytest.raises(RuntimeError, match="steps are in flight"):
            harness.scheduler.preempt_all()
    step_until_idle(harness)
    harness.scheduler.preempt_all()
    assert harness.scheduler._batch.kv.pool.num_used == 0
    assert harness.scheduler.reset_prefix_cache()
    harness.scheduler.resume()
    harness.run()
    assert harness.num_preemptions == 3


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of 'abort', 'wait', 'keep', got 'stop'"):
        PauseMode.parse("stop")
    assert PauseMode.parse("keep") is PauseMode.parse(PauseMode.KEEP)
