"""The waiting queue: a total order under any sequence of additions and removals."""

from __future__ import annotations

import random

from scheduler.output import pack_int32
from scheduler.queues import RequestHeap, WaitingQueue, fcfs_rank, priority_rank
from scheduler.request import EngineCoreRequest, Request
from scheduler.sampling_params import SamplingParams


def request(number: int, *, priority: int = 0, arrival: float = 0.0, preempted: bool = False,
            is_long: bool = False, fcfs: bool = False) -> Request:  # fmt: skip
    wire = EngineCoreRequest(
        str(number), pack_int32([1]), SamplingParams(), arrival_time_s=arrival, priority=priority
    )  # fmt: skip
    state = Request(wire, number, 16, 0.0)
    state.num_preemptions = int(preempted)
    state.is_long = is_long
    state.rank = fcfs_rank(state) if fcfs else priority_rank(state)
    return state


def test_priority_then_preempted_then_arrival_then_number() -> None:
    ordered = [
        request(9, priority=-1, arrival=9.0),
        request(7, priority=0, arrival=5.0, preempted=True),
        request(8, priority=0, arrival=6.0, preempted=True),
        request(5, priority=0, arrival=1.0),
        request(2, priority=0, arrival=2.0),
        request(3, priority=0, arrival=2.0),
        request(1, priority=1, arrival=0.0),
    ]
    assert sorted(ordered, key=lambda each: each.rank) == ordered


def test_fcfs_goes_by_number_only() -> None:
    states = [request(number, priority=-number, fcfs=True) for number in range(4)]
    assert sorted(states, key=lambda each: each.rank) == states


def test_the_heap_is_a_sorted_list_with_removal() -> None:
    rng = random.Random(1)
    heap, model = RequestHeap(), []
    states = [request(number, priority=rng.randint(0, 3)) for number in range(200)]
    outside = list(states)
    for _ in range(5000):
        if outside and rng.random() < 0.5:
            state = outside.pop(rng.randrange(len(outside)))
            heap.add(state)
            model.append(state)
        elif model:
            state = heap.first() if rng.random() < 0.5 else rng.choice(model)
            assert state is not None
            heap.remove(state)
            model.remove(state)
            outside.append(state)
        assert heap.first() is min(model, key=lambda each: each.rank, default=None)
        assert len(heap) == len(model)


def test_removed_requests_are_not_kept_alive() -> None:
    heap = RequestHeap()
    first = request(0)
    heap.add(first)
    for number in range(1, 1000):
        state = request(number)
        heap.add(state)
        heap.remove(state)
    assert len(heap._heap) < 50


def test_long_requests_wait_apart() -> None:
    queue = WaitingQueue()
    long, short = request(1, is_long=True), request(2)
    queue.add(long)
    assert queue.first(long_allowed=False) is None
    queue.add(short)
    assert len(queue) == 2
    assert queue.first(long_allowed=True) is long
    assert queue.first(long_allowed=False) is short
    queue.remove(long)
    assert queue.first(long_allowed=True) is short
