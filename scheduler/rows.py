"""Rows of the workers' persistent batch, and what ended requests still hold until no step can write it.

Owned by scheduler.scheduler.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kv.manager import KVCacheManager, KVSequence
from scheduler.request import Request


class Retired(NamedTuple):
    """Row and KV of a request that ended or was preempted; steps up to `last_step` may write them."""

    last_step: int
    kv: KVSequence
    row: int


class BatchRows:
    """Who holds which row is the requests' knowledge (`Request.row`); this gives rows out and takes them back.

    Attributes:
        completed_step: The latest step whose result is back; workers run steps in order, so it and all before it are
            done.
        free: Rows to give out, a heap: low ones first, to keep the batch dense.
        retired: Not free yet.
    """

    def __init__(self, num_rows: int, kv: KVCacheManager) -> None:
        self._kv = kv
        self.completed_step = 0
        self.free = list(range(num_rows))
        self.retired: list[Retired] = []

    def take(self) -> int:
        """A free row; there must be one."""
        return heapq.heappop(self.free)

    def retire(self, request: Request) -> None:
        """Give the request's row and blocks back, now or when its last dispatched step is done.

        Its content is findable from now on: the steps that compute it are dispatched.
        """
        self._kv.register(request.kv, request.num_computed_tokens)
        if request.last_step > self.completed_step:
            self.retired.append(Retired(request.last_step, request.kv, request.row))
        else:
            self._release(request.kv, request.row)

    def complete(self, step: int) -> None:
        """A step's result is back."""
        self.completed_step = step
        if self.retired:
            still_written = []
            for entry in self.retired:
                if entry.last_step > step:
                    still_written.append(entry)
                else:
                    self._release(entry.kv, entry.row)
            self.retired = still_written

    def num_retired_blocks(self) -> int:
        """Blocks that come back with the steps in flight; an upper bound, since some may be shared."""
        return sum(self._kv.num_blocks_of(entry.kv) for entry in self.retired)

    def _release(self, kv: KVSequence, row: int) -> None:
        self._kv.free(kv)
        heapq.heappush(self.free, row)
