"""Async scheduling and the batch queue: steps go out before earlier results are back, and nothing changes by it."""

from __future__ import annotations

import pytest

from scheduler.output import FinishReason, ModelRunnerOutput, unpack_int32
from scheduler.step import StepPlan
from tests.scheduler.fake_worker import reference_tokens
from tests.scheduler.harness import Harness


def async_harness(depth: int = 2, **options: object) -> Harness:
    return Harness(depth=depth, async_scheduling=True, **options)  # type: ignore[arg-type]


def test_async_dispatches_a_request_again_before_its_token_is_known() -> None:
    harness = async_harness(3)
    harness.add(range(5))
    assert [harness.scheduled() for _ in range(3)] == [{"0": 5}, {"0": 1}, {"0": 1}]
    harness.run()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_async_never_computes_past_the_length_limit(max_tokens: int) -> None:
    harness = async_harness(3)
    harness.add(range(5), max_tokens=max_tokens)
    harness.run()
    assert sum(len(unpack_int32(message.rows)) for message in harness.messages) == max_tokens


def test_async_drops_what_was_dispatched_beyond_a_stop_and_only_then_frees() -> None:
    harness = async_harness(3, max_num_seqs=1, block_size=4)
    tokens = reference_tokens(tuple(range(5)), 0, (None,), 3)
    harness.add(range(5), max_tokens=20, eos=(tokens[1],))
    harness.add(range(100, 103), max_tokens=1)
    for _ in range(3):
        harness.schedule()
    harness.update()
    harness.update()  # EOS, while a third step is in flight
    assert harness.sent["0"].finished is not None
    assert harness.scheduler._batch.kv.pool.num_used > 0
    assert harness.schedule() is None  # the row is still written
    harness.update()
    assert harness.scheduler._batch.kv.pool.num_used == 0
    assert list(harness.scheduled()) == ["1"]
    harness.run()
    assert tuple(harness.sent["0"].tokens) == tokens[:2]


def test_an_abort_between_dispatch_and_result_drops_the_result() -> None:
    harness = async_harness()
    harness.add(range(5), "gone", client_index=1)
    harness.add(range(100, 105), "stays")
    harness.schedule()
    harness.schedule()
    harness.abort("gone")
    assert list(harness.update()) == [0]
    harness.run()
    assert harness.sent["gone"].tokens == []


def test_an_id_may_be_used_again_while_its_late_result_is_out() -> None:
    harness = async_harness()
    harness.add(range(5), "same", max_tokens=3)
    harness.schedule()
    harness.scheduler.abort_requests(["same"])
    harness.scheduler.take_outputs()
    del harness.sent["same"]
    harness.add(range(100, 105), "same", max_tokens=3)
    harness.run()


def test_a_preempted_request_keeps_the_token_it_had_in_flight() -> None:
    harness = async_harness(num_blocks=1 + 4, block_size=4, caching=False)
    harness.scheduler._batch.headroom_blocks = 0
    harness.add(range(7), "first", max_tokens=6)
    harness.add(range(100, 107), "second", max_tokens=6)
    harness.schedule()
    harness.schedule()  # all 8 slots of each
    assert harness.schedule() is None  # "second" is preempted; its blocks come back with the steps in flight
    assert {request.request_id for request in harness.scheduler._batch.running} == {"first"}
    harness.update()
    harness.update()
    assert len(harness.sent["second"].tokens) == 2
    harness.run()
    assert harness.num_preemptions == 1


def test_a_preempted_request_starts_again_only_with_all_its_tokens() -> None:
    harness = async_harness(3, caching=False)
    scheduler = harness.scheduler
    harness.add(range(7), "first", max_tokens=9)
    harness.add(range(100, 107), "second", max_tokens=9)
    harness.schedule()
    harness.schedule()
    scheduler._batch.preempt(StepPlan(scheduler._batch.step + 1, 64), scheduler._requests["second"])
    assert "second" not in harness.scheduled()  # there is room, but two of its tokens are on their way
    harness.update()
    assert "second" not in harness.scheduled()
    harness.update()
    assert harness.scheduled()["second"] == 9
    harness.run()


def test_no_more_requests_are_preempted_than_give_enough_blocks_once_steps_are_back() -> None:
    harness = async_harness(num_blocks=1 + 6, block_size=4, caching=False)
    harness.scheduler._batch.headroom_blocks = 0
    for start in (0, 100, 200):
        harness.add(range(start, start + 7 - start // 200), max_tokens=8)
    harness.schedule()
    harness.schedule()  # the first two have filled their blocks
    harness.schedule()
    assert harness.scheduler._batch.running[-1].request_id == "1"
    assert [request.request_id for request in harness.scheduler._batch.running] == ["0", "1"]
    harness.run()


def test_a_pipeline_computes_chunks_of_a_prompt_one_after_another_without_waiting() -> None:
    harness = Harness(depth=3, max_num_batched_tokens=8)
    harness.add(range(20))
    assert [harness.scheduled() for _ in range(3)] == [{"0": 8}, {"0": 8}, {"0": 4}]
    assert harness.schedule() is None  # the first decode waits for its token
    harness.run()


def test_a_pipeline_spreads_decodes_over_its_batches() -> None:
    harness = Harness(depth=3)
    for start in range(0, 600, 100):
        harness.add(range(start, start + 3), max_tokens=30)
    harness.schedule()
    harness.update()  # all prompts were computed in one step
    batches = [set(harness.scheduled()) for _ in range(3)]
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert set.union(*batches) == set("012345")
    for _ in range(10):  # and it stays so
        harness.update()
        assert len(harness.scheduled()) == 2
    harness.run()


def test_a_pipeline_serves_everyone_even_if_it_is_never_filled() -> None:
    harness = Harness(depth=2)
    for start in range(0, 300, 100):
        harness.add(range(start, start + 3), max_tokens=4)
    while harness.scheduler.has_requests():
        harness.schedule()
        harness.update()
    harness.check_results()


def test_a_batch_of_the_pipeline_is_not_left_empty_because_its_requests_wait_for_blocks() -> None:
    harness = Harness(depth=3, num_blocks=1 + 5, block_size=4, caching=False)
    harness.scheduler._batch.headroom_blocks = 0
    for start, length in ((0, 5), (100, 5), (200, 4)):
        harness.add(range(start, start + length), max_tokens=8)
    harness.schedule()
    harness.update()
    # Each batch is one request. The third, whose turn comes last, needs a block and there is none.
    for expected in (["0"], ["1"], []):
        assert list(harness.scheduled()) == expected
    harness.update()
    # It is the longest unserved now, yet the batch goes to one that can run.
    assert list(harness.scheduled()) == ["0"]
    harness.run()


def test_stages_are_told_each_token_once() -> None:
    harness = Harness(depth=2)
    harness.add(range(5), max_tokens=4)
    harness.run()
    told = [token for message in harness.messages for token in unpack_int32(message.known_tokens)]
    assert told == harness.sent["0"].tokens[:3]  # the last one ends the request


def test_a_stage_is_not_told_a_token_that_comes_with_a_resumed_request() -> None:
    harness = Harness(depth=2, num_blocks=1 + 6, block_size=4, caching=False)
    scheduler = harness.scheduler
    harness.add(range(5), max_tokens=4)
    harness.schedule()
    scheduler._batch.preempt(StepPlan(scheduler._batch.step + 1, 64), scheduler._requests["0"])
    harness.update()  # the token it had in flight
    message = harness.schedule()
    assert message is not None
    assert len(unpack_int32(message.new_requests[0].token_ids)) == 6
    assert message.known_rows == b""
    harness.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_are_the_same_with_any_number_of_steps_in_flight(depth: int, async_scheduling: bool) -> None:
    harness = Harness(depth=depth, async_scheduling=async_scheduling, num_blocks=30, block_size=4)
    for index in range(12):
        harness.add(range(index, index + 5 + 3 * index), seed=index, max_tokens=5 + index)
    harness.run()  # compares with the reference


def test_results_out_of_order_are_refused() -> None:
    harness = async_harness()
    harness.add(range(5))
    first, second = harness.schedule(), harness.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match=r"result of step 2 was given for step 2, while the oldest .* is 1"):
        harness.scheduler.update_from_output(second, ModelRunnerOutput(2, b"\0" * 4))
    with pytest.raises(RuntimeError, match="result of step 2 was given for step 1"):
        harness.scheduler.update_from_output(first, ModelRunnerOutput(2, b"\0" * 4))
    harness.run()


def test_a_result_with_a_wrong_number_of_tokens_is_refused() -> None:
    harness = Harness()
    harness.add(range(5))
    message = harness.schedule()
    assert message is not None
    with pytest.raises(RuntimeError, match="step 1: 1 requests sample, the workers returned 2 tokens"):
        harness.scheduler.update_from_output(message, ModelRunnerOutput(1, b"\0" * 8))


def test_an_abort_during_a_prompt_frees_its_blocks_after_the_step() -> None:
    harness = Harness(depth=2, max_num_batched_tokens=8)
    harness.add(range(30))
    harness.schedule()
    harness.schedule()
    harness.abort("0")
    assert harness.scheduler.has_requests()  # steps are outstanding
    harness.update()
    harness.update()
    assert not harness.scheduler.has_requests()
    assert harness.sent["0"].finished is not None
    assert harness.sent["0"].finished.reason is FinishReason.ABORT
    harness.check_nothing_left()
