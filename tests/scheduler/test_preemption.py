"""When blocks run out: who gives way, who waits, and that nothing is lost by it."""

from __future__ import annotations

from scheduler.output import FinishReason
from tests.scheduler.harness import Harness


def harness_of(num_blocks: int, **options: object) -> Harness:
    """`num_blocks` usable blocks of 4 tokens; admissions leave none free, so that they soon lack."""
    harness = Harness(num_blocks=1 + num_blocks, block_size=4, **{"caching": False, **options})  # type: ignore[arg-type]
    harness.scheduler._batch.headroom_blocks = 0
    return harness


def waiting(harness: Harness) -> set[str]:
    running = {request.request_id for request in harness.scheduler._batch.running}
    return set(harness.scheduler._requests) - running


def test_the_last_to_come_gives_way_and_is_recomputed() -> None:
    harness = harness_of(4)
    harness.add(range(7), max_tokens=6)
    harness.add(range(100, 107), max_tokens=6)
    harness.step()  # 2 blocks each
    harness.step()  # 8 tokens each: full
    assert list(harness.scheduled()) == ["0"]
    assert waiting(harness) == {"1"}
    harness.update()
    harness.run()
    assert harness.num_preemptions == 1
    ends = [harness.sent[name].finished for name in "01"]
    assert [end.num_preemptions for end in ends if end is not None] == [0, 1]


def test_a_request_does_not_preempt_those_before_it_but_waits_with_its_blocks() -> None:
    harness = harness_of(4)
    harness.add(range(5), max_tokens=8)
    harness.add(range(100, 108), max_tokens=3)
    harness.step()  # 2 blocks each
    for _ in range(3):
        assert list(harness.scheduled()) == ["0"]  # "1" needs a third block and has nobody to take it from
        assert waiting(harness) == set()
        harness.update()
    # Now "0" begins its third block, and "1" must give way.
    assert list(harness.scheduled()) == ["0"]
    assert waiting(harness) == {"1"}
    harness.update()
    harness.run()


def test_preemption_by_a_prompt_gives_the_decodes_budget_back() -> None:
    harness = harness_of(8, policy="priority", max_num_batched_tokens=8)
    harness.add(range(3), "low", priority=1, max_tokens=20)
    harness.step()
    harness.add(range(100, 128), "high", priority=0, max_tokens=1)  # all 7 free blocks
    for _ in range(3):
        assert harness.scheduled() == {"low": 1, "high": 7}
        harness.update()
    assert harness.scheduled() == {"high": 7}  # "low" has taken one of the 7 blocks, and was planned with a token
    assert waiting(harness) == {"low"}
    harness.update()  # Harness checks that the statistics count 7 tokens, not 8
    harness.run()


def test_a_preempted_request_runs_before_those_that_never_ran() -> None:
    harness = harness_of(6, max_num_seqs=2)
    for start in (0, 100, 200):
        harness.add(range(start, start + 10), max_tokens=8)
    order: list[str] = []
    while harness.scheduler.has_requests():
        message = harness.step()
        order += [new.request_id for new in message.new_requests] if message is not None else []
    assert order == ["0", "1", "1", "2"]
    harness.check_results()


def test_under_priority_the_least_important_gives_way_whatever_its_arrival() -> None:
    harness = harness_of(4, policy="priority")
    harness.add(range(7), "unimportant", priority=5, max_tokens=6)
    harness.add(range(100, 107), "important", priority=0, max_tokens=6)
    harness.step()
    harness.step()
    assert list(harness.scheduled()) == ["important"]
    assert waiting(harness) == {"unimportant"}
    harness.update()
    harness.run()


def test_priority_orders_the_queue_and_ties_go_by_arrival() -> None:
    harness = Harness(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)):
        harness.add(range(3), name, priority=priority, max_tokens=1)
    order = []
    while harness.scheduler.has_requests():
        order += list(harness.scheduled())
        harness.update()
    assert order == ["d", "b", "e", "a", "c"]


def test_fcfs_ignores_priorities() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(range(3), "a", priority=5, max_tokens=1)
    harness.add(range(3), "b", priority=-5, max_tokens=1)
    assert list(harness.scheduled()) == ["a"]
    harness.update()
    harness.run()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    harness = harness_of(7, caching=True)
    harness.add(range(11), max_tokens=7)
    second = harness.add(range(100, 111), max_tokens=12)
    harness.run()
    assert harness.num_preemptions >= 1
    resumed = [new for message in harness.messages for new in message.new_requests if new.request_id == second][1:]
    assert resumed
    assert resumed[0].num_computed_tokens > 0
    assert harness.sent[second].events is not None
    assert harness.sent[second].events.num_cached_tokens == 0  # its first admission's


def test_an_aborted_request_frees_blocks_for_one_that_waits() -> None:
    harness = harness_of(4)
    harness.add(range(14), max_tokens=2)
    harness.add(range(100, 114), max_tokens=2)
    assert list(harness.scheduled()) == ["0"]
    harness.abort("0")
    assert harness.schedule() is None  # the step in flight still writes the blocks
    harness.update()
    assert list(harness.scheduled()) == ["1"]
    harness.update()
    harness.run()
    assert harness.sent["0"].tokens == []
    assert harness.sent["0"].finished is not None
    assert harness.sent["0"].finished.reason is FinishReason.ABORT


def test_admission_leaves_room_for_running_requests_to_grow() -> None:
    harness = Harness(num_blocks=1 + 8, block_size=4, caching=False)
    harness.add(range(8), max_tokens=8)
    harness.step()
    harness.add(range(100, 116), max_tokens=4)  # 4 of the 5 or 6 free blocks
    assert list(harness.scheduled()) == ["0"]
    harness.update()
    harness.run()
    assert harness.num_preemptions == 0


def test_admission_leaves_room_for_prompts_half_computed() -> None:
    harness = harness_of(9, max_num_batched_tokens=10, long_prefill_token_threshold=8)
    harness.add(range(32), max_tokens=2)  # 8 blocks, in steps of 8 tokens while others wait
    harness.add(range(100, 108), max_tokens=2)  # 2 blocks: more than will be left
    harness.add(range(200, 204), max_tokens=2)  # first come, first served: it does not pass
    for _ in range(4):
        assert harness.scheduled() == {"0": 8}
        harness.update()
    harness.run()
    assert harness.num_preemptions == 0


def test_of_two_requests_that_need_the_last_block_the_more_important_gets_it() -> None:
    harness = harness_of(3, policy="priority")
    harness.add(range(3), "low", priority=1, max_tokens=4)
    harness.step()
    harness.add(range(100, 104), "high", priority=0, max_tokens=3)
    harness.add(range(200, 204), "aborted", priority=2, max_tokens=3)
    harness.step()  # 4 tokens each: all blocks are full
    harness.abort("aborted")
    assert list(harness.scheduled()) == ["high"]
    assert waiting(harness) == set()  # "low" keeps its block and waits for one more
    harness.update()
    harness.run()
    assert harness.num_preemptions == 0


def test_of_two_prompts_being_computed_the_more_important_has_the_budget_first() -> None:
    harness = Harness(policy="priority", max_num_seqs=2, max_num_batched_tokens=6, long_prefill_token_threshold=4,
                      max_long_partial_prefills=2)  # fmt: skip
    harness.add(range(50), "low", priority=1, max_tokens=2)
    harness.step()
    harness.add(range(100, 150), "high", priority=0, max_tokens=2)
    assert harness.scheduled() == {"low": 4, "high": 2}
    harness.update()
    assert harness.scheduled() == {"high": 4, "low": 2}
    harness.update()
    harness.run()
