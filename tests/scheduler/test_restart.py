"""New workers after a crash: every request goes on where it was; one that crashes them again and again ends alone."""

from __future__ import annotations

import pytest

from scheduler.output import FinishReason, pack_int32
from scheduler.probation import Probation
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from tests.scheduler.harness import CRASH, Harness, Sent

MODES = {
    "sync": {},
    "async": {"async_scheduling": True, "depth": 2},
    "pipeline": {"depth": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_any_step_changes_no_token(mode: str) -> None:
    for crash_after in range(20):
        harness = Harness(**MODES[mode], max_num_batched_tokens=16)
        for length in (3, 30, 7, 50):
            harness.add([length] * length, max_tokens=12, stop_token_ids=[5])
        for _ in range(crash_after):
            harness.schedule() if len(harness.in_flight) < harness.depth else harness.update()
        harness.crash()
        harness.run()
        assert all(sent.finished and sent.finished.reason is not FinishReason.ERROR for sent in harness.sent.values())


def test_prompt_tokens_in_the_prefix_cache_are_forgotten_with_the_workers() -> None:
    harness = Harness()
    harness.add([1] * 20)
    harness.run()
    harness.crash()
    second = harness.add([1] * 20)
    harness.run()
    events = harness.sent[second].events
    assert events is not None
    assert events.num_cached_tokens == 0


def crash_with(harness: Harness, poison: str, at_tokens: int) -> None:
    """Run; each step that would compute `poison` once it has `at_tokens` output tokens kills the workers."""
    for _ in range(1000):
        if not harness.scheduler.has_requests():
            return
        harness.schedule()
        tokens = len(harness.sent[poison].tokens)
        if poison in harness.worker.batch.values() and tokens >= at_tokens and harness.in_flight:
            harness.crash()
        elif harness.in_flight:
            harness.update()
    raise AssertionError("the crashes do not end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_tokens", [0, 3])
def test_a_request_that_crashes_the_workers_ends_alone_with_the_cause(mode: str, at_tokens: int) -> None:
    harness = Harness(**MODES[mode])
    names = [harness.add([index] * 9, max_tokens=10) for index in range(5)]
    poison = names[2]
    crash_with(harness, poison, at_tokens)
    ends = {name: harness.sent[name].finished for name in names}
    assert ends[poison] is not None
    assert ends[poison].reason is FinishReason.ERROR
    assert CRASH in (ends[poison].error or "")
    for name in names:
        if name != poison:
            assert ends[name] is not None
            assert ends[name].reason is FinishReason.LENGTH
    harness.check_results()
    harness.check_nothing_left()


def test_crashes_between_which_requests_progress_blame_nobody() -> None:
    harness = Harness(max_num_batched_tokens=128)
    names = [harness.add([index] * 9, max_tokens=20) for index in range(3)]
    while harness.scheduler.has_requests():
        harness.step()
        harness.schedule()
        if harness.in_flight:
            harness.crash()
    for name in names:
        end = harness.sent[name].finished
        assert end is not None
        assert end.reason is FinishReason.LENGTH
    harness.check_results()


def test_crashes_of_idle_workers_blame_nobody() -> None:
    harness = Harness()
    harness.add([1] * 9)
    for _ in range(5):
        harness.crash()
    harness.run()
    assert harness.sent["0"].finished is not None
    assert harness.sent["0"].finished.reason is FinishReason.LENGTH


def test_requests_wait_while_one_is_tried_alone() -> None:
    harness = Harness()
    for index in range(3):
        harness.add([index] * 9)
    for _ in range(2):
        harness.schedule()
        harness.crash()
    for name in "012":
        harness.schedule()
        assert list(harness.worker.batch.values()) == [name]
        harness.update()
    harness.schedule()
    assert sorted(harness.worker.batch.values()) == ["0", "1", "2"]
    harness.run()


def test_a_request_on_trial_can_be_aborted() -> None:
    harness = Harness()
    names = [harness.add([index] * 9) for index in range(2)]
    for _ in range(2):
        harness.schedule()
        harness.crash()
    harness.abort(names[0])
    harness.run()
    assert harness.sent[names[1]].finished is not None
    assert harness.sent[names[1]].finished.reason is FinishReason.LENGTH


def test_a_request_too_long_for_the_new_workers_pool_ends_with_an_error() -> None:
    harness = Harness(num_blocks=40)
    long, short = harness.add([1] * 60, max_tokens=30), harness.add([2] * 8, max_tokens=4)
    harness.step()
    harness.crash(num_blocks=9)
    end = harness.sent[long].finished
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert CRASH in (end.error or "")
    assert "do not fit" in (end.error or "")
    while harness.scheduler.has_requests():
        harness.step()
    assert harness.sent[short].finished is not None
    assert harness.sent[short].finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", MODES)
def test_a_request_goes_on_after_the_tokens_it_had_in_another_engine(mode: str) -> None:
    first = Harness(**MODES[mode])
    first.add([4] * 11, max_tokens=10)
    first.run()
    tokens = first.sent["0"].tokens
    for num_known in range(len(tokens)):
        second = Harness(**MODES[mode])
        wire = EngineCoreRequest(
            "0",
            pack_int32([4] * 11),
            SamplingParams(seed=0, max_tokens=10),
            output_token_ids=pack_int32(tokens[:num_known]),
        )
        second.scheduler.add_request(wire)
        second.sent["0"] = Sent(wire, (4,) * 11, tokens[:num_known])
        while second.scheduler.has_requests():
            second.step()
        assert second.sent["0"].tokens == tokens
        assert second.sent["0"].finished == first.sent["0"].finished


def test_probation_blames_who_crashed_the_engine_alone_twice() -> None:
    probation = Probation()
    assert probation.crash(["a", "b"]) is None
    assert probation.trial is None
    probation.clear("b")
    assert probation.crash(["a", "b"]) is None
    assert probation.trial == "a"
    assert probation.crash([]) is None
    assert probation.crash(["a"]) is None
    assert probation.crash(["a"]) == "a"
    assert probation.trial is None
    probation.clear("b")
    assert not probation


def test_a_request_that_is_always_alone_is_blamed_when_its_replay_has_crashed_twice() -> None:
    probation = Probation()
    assert [probation.crash(["a"]) for _ in range(3)] == [None, None, "a"]
    assert not probation
