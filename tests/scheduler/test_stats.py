"""What the scheduler reports about itself: gauges that come back to zero, however the last request ends."""

from __future__ import annotations

import pytest

from scheduler.output import EngineCoreOutputs, SchedulerStats
from tests.scheduler.harness import Harness


def last_stats(outputs: dict[int, EngineCoreOutputs]) -> SchedulerStats:
    """The one report among the clients' shares."""
    (stats,) = [each.stats for each in outputs.values() if each.stats is not None]
    return stats


def gauges(stats: SchedulerStats) -> tuple[int, int, float]:
    return stats.num_running, stats.num_waiting, stats.kv_cache_usage


def test_a_step_reports_what_runs_waits_and_is_used() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=11)
    harness.add(range(8))
    harness.add(range(8))
    harness.schedule()
    stats = last_stats(harness.update())
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert 0.0 < stats.kv_cache_usage <= 1.0


def test_an_abort_between_steps_reports_idleness() -> None:
    harness = Harness()
    request = harness.add(range(8))
    harness.schedule()
    harness.update()
    harness.scheduler.abort_requests([request])
    assert gauges(last_stats(harness.scheduler.take_outputs())) == (0, 0, 0.0)
    assert harness.scheduler.take_outputs() == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_during_a_step_reports_idleness_after_it(depth: int) -> None:
    """Blocks stay in use until the dispatched steps have ended, and no request is left to bring the news."""
    harness = Harness(depth=depth, async_scheduling=depth > 1)
    request = harness.add(range(8), client_index=3)
    for _ in range(depth):
        harness.schedule()
    harness.scheduler.abort_requests([request])
    assert [each.stats for each in harness.scheduler.take_outputs().values()] == [None]
    for _ in range(depth):
        assert harness.update() == {}
    outputs = harness.scheduler.take_outputs()
    assert list(outputs) == [3]
    assert gauges(last_stats(outputs)) == (0, 0, 0.0)


def test_the_last_token_reports_idleness() -> None:
    harness = Harness()
    harness.add(range(8), max_tokens=1)
    harness.schedule()
    assert gauges(last_stats(harness.update())) == (0, 0, 0.0)
    assert harness.scheduler.take_outputs() == {}
