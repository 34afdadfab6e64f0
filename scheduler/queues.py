"""The waiting queue: a total order over requests that hold no batch row. Used by scheduler.scheduler only."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from scheduler.request import Rank, Request


def fcfs_rank(request: Request) -> Rank:
    """First come, first served. A preempted request has come before all that never ran."""
    return (request.sequence_number,)


def priority_rank(request: Request) -> Rank:
    """Lower priority value first, then by arrival. A request that has run came first within its priority."""
    return (request.priority, request.num_preemptions == 0, request.arrival_time_s, request.sequence_number)


RANKS: dict[str, Callable[[Request], Rank]] = {"fcfs": fcfs_rank, "priority": priority_rank}


class RequestHeap:
    """Requests by rank; any of them can be removed. A rank must not change while its request is in here."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request) -> None:
        self._members.add(request)
        heapq.heappush(self._heap, (request.rank, request))

    def first(self) -> Request | None:
        """The request of lowest rank."""
        while self._heap:
            request = self._heap[0][1]
            if request in self._members:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Taken out at once; its heap entry may stay until it comes up, or until such entries outnumber the rest."""
        self._members.remove(request)
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)


class WaitingQueue:
    """Waiting requests, short and long prompts apart, so that short ones can pass while no long one may start."""

    def __init__(self) -> None:
        self._short = RequestHeap()
        self._long = RequestHeap()

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def add(self, request: Request) -> None:
        self._heap_of(request).add(request)

    def remove(self, request: Request) -> None:
        self._heap_of(request).remove(request)

    def first(self, long_allowed: bool) -> Request | None:
        """The next to run; without `long_allowed`, the next with a short prompt."""
        short = self._short.first()
        long = self._long.first() if long_allowed else None
        if short is None or long is None:
            return short or long
        return min(short, long, key=lambda request: request.rank)

    def _heap_of(self, request: Request) -> RequestHeap:
        return self._long if request.is_long else self._short
