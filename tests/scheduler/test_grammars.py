"""Requests with structured output in the scheduler: waiting for the grammar, masks, and ends by the grammar."""

from __future__ import annotations

from typing import Any

import pytest

from kv.config import CacheConfig
from scheduler.errors import QueueFullError, RequestRefusedError
from scheduler.output import FinishReason, ModelRunnerOutput, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.fake_grammars import MATCHER_FAILED, REFUSED, form
from tests.scheduler.harness import Harness

DEPTHS = [
    pytest.param({}, id="sync"),
    pytest.param({"async_scheduling": True, "depth": 2}, id="async"),
    pytest.param({"depth": 2}, id="pipeline"),
]


def test_a_request_waits_for_its_grammar_beside_the_queue_and_is_counted() -> None:
    harness = Harness(max_num_queued_requests=1, max_num_seqs=1)
    harness.add([1, 2], "slow", structured_outputs=form(delay=4))
    assert harness.schedule() is None
    assert harness.scheduler.waits_for_grammars_only
    stats = harness.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    harness.add([1, 2, 3], "quick")
    with pytest.raises(QueueFullError):
        harness.add([5], "third")
    assert list(harness.scheduled()) == ["quick"]
    assert not harness.scheduler.waits_for_grammars_only
    harness.run()


def test_when_its_grammar_comes_it_goes_before_later_arrivals() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add([1], "running", max_tokens=2)
    harness.add([2], "slow", structured_outputs=form(delay=2))
    harness.add([3], "later")
    assert list(harness.scheduled()) == ["running"]
    harness.update()
    harness.run()
    order = [message.new_requests[0].request_id for message in harness.messages if message.new_requests]
    assert order == ["running", "slow", "later"]


@pytest.mark.parametrize("options", DEPTHS)
def test_a_complete_text_ends_the_request_and_its_last_token_is_text(options: dict[str, Any]) -> None:
    harness = Harness(**options)
    harness.add([1, 2], "a", structured_outputs=form(end=3), max_tokens=3)
    harness.add([1, 2], "b", max_tokens=20)
    harness.run()
    a = harness.sent["a"]
    assert (len(a.tokens), a.finished.reason, a.finished.last_token_is_text) == (3, FinishReason.STOP, True)
    assert not harness.sent["b"].finished.last_token_is_text


def test_a_stop_token_goes_before_the_grammars_end() -> None:
    plain = Harness()
    plain.add([1, 2], "a", max_tokens=3)
    plain.run()
    third = plain.sent["a"].tokens[2]
    harness = Harness()
    harness.add([1, 2], "a", structured_outputs=form(end=3), stop_token_ids=[third], max_tokens=20)
    harness.run()
    end = harness.sent["a"].finished
    assert (end.reason, end.stop_reason, end.last_token_is_text) == (FinishReason.STOP, third, False)


def test_under_async_scheduling_only_requests_with_a_grammar_wait_for_their_token() -> None:
    harness = Harness(async_scheduling=True, depth=2)
    harness.add([1, 2], "form", structured_outputs=form())
    harness.add([3, 4], "free")
    assert set(harness.scheduled()) == {"form", "free"}
    assert set(harness.scheduled()) == {"free"}
    harness.update()
    assert set(harness.scheduled()) == {"form", "free"}
    harness.run()


@pytest.mark.parametrize("options", DEPTHS)
def test_chunks_of_a_prompt_have_no_mask_before_the_last(options: dict[str, Any]) -> None:
    harness = Harness(max_num_batched_tokens=8, **options)
    harness.add(range(20), "form", structured_outputs=form(), max_tokens=2)
    harness.run()
    flags = [message.has_structured_output for message in harness.messages]
    assert flags == [False, False, True, True]


@pytest.mark.parametrize("options", DEPTHS)
def test_a_refused_grammar_and_a_failing_matcher_end_their_request_alone(options: dict[str, Any]) -> None:
    harness = Harness(**options)
    harness.add([1], "refused at once", structured_outputs=form(refused=True))
    harness.add([2], "refused later", structured_outputs=form(refused=True, delay=3))
    harness.add([3], "matcher", structured_outputs=form(fails_at=2))
    harness.add([4], "good")
    harness.run()
    errors = {name: sent.finished.error for name, sent in harness.sent.items()}
    assert errors == {
        "refused at once": f"structured_outputs: {REFUSED}",
        "refused later": f"structured_outputs: {REFUSED}",
        "matcher": f"structured_outputs: {MATCHER_FAILED}",
        "good": None,
    }
    assert harness.sent["refused later"].finished.error_field == "structured_outputs"
    assert len(harness.sent["matcher"].tokens) == 2


def test_it_can_be_aborted_while_it_waits_for_its_grammar() -> None:
    harness = Harness()
    harness.add([1, 2], "slow", structured_outputs=form(delay=1000))
    harness.abort("slow")
    assert harness.sent["slow"].finished.reason is FinishReason.ABORT
    harness.check_nothing_left()


def test_preemption_leaves_the_matcher_where_it_is() -> None:
    harness = Harness(num_blocks=9, max_model_len=30, max_num_seqs=3)
    for name in "abc":
        harness.add([1, 2, 3], name, structured_outputs=form(end=15), max_tokens=20)
    harness.run()
    assert harness.num_preemptions > 0
    assert all(len(sent.tokens) == 15 for sent in harness.sent.values())


def test_a_crash_leaves_matchers_and_those_that_wait_for_grammars_alone() -> None:
    harness = Harness()
    harness.add([1], "running", structured_outputs=form(end=6))
    harness.add([2], "slow", structured_outputs=form(delay=6, end=4))
    harness.step()
    harness.step()
    harness.schedule()
    harness.crash()
    assert harness.grammars.num_tokens("running") == 2
    harness.run()
    assert [len(harness.sent[name].tokens) for name in ("running", "slow")] == [6, 4]


def test_tokens_generated_in_an_engine_that_died_are_told_to_the_new_matcher() -> None:
    harness = Harness()
    params = SamplingParams(seed=0, max_tokens=10, structured_outputs=form(end=7))
    wire = EngineCoreRequest("again", pack_int32([1, 2]), params, output_token_ids=pack_int32([5, 6, 7]))
    harness.scheduler.add_request(wire)
    assert harness.grammars.num_tokens("again") == 3
    num_steps = 0
    while harness.scheduler.has_requests():
        message = harness.scheduler.schedule()
        harness.scheduler.update_from_output(message, harness.worker.execute(message))
        num_steps += 1
    assert num_steps == 4


def test_a_request_that_no_token_is_left_for_ends_with_an_error_and_no_token() -> None:
    harness = Harness()
    harness.add([1], "bad")
    harness.add([2], "good", max_tokens=1)
    message = harness.scheduler.schedule()
    result = harness.worker.execute(message)
    output = ModelRunnerOutput(result.step, result.sampled_token_ids, without_choice=pack_int32([0]))
    outputs = harness.scheduler.update_from_output(message, output)
    assert outputs[0].request_ids == ["good"]
    (end,) = harness.scheduler.take_outputs()[0].finished
    assert (end.request_id, end.reason) == ("bad", FinishReason.ERROR)
    assert end.error.startswith("no token is left to sample after 0 generated ones")


def test_without_a_grammar_manager_the_request_is_refused() -> None:
    harness = Harness()
    scheduler = Scheduler(harness.config, CacheConfig(block_size=4), harness.kv_config)
    params = SamplingParams(seed=0, structured_outputs=form())
    with pytest.raises(RequestRefusedError, match="structured_outputs are not offered here"):
        scheduler.add_request(EngineCoreRequest("a", pack_int32([1]), params))


def test_workers_never_see_the_form() -> None:
    harness = Harness()
    harness.add([1], structured_outputs=form())
    (new,) = harness.schedule().new_requests
    assert new.sampling_params.structured_outputs is None
    harness.run()
