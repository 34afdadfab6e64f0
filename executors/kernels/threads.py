"""Which processors a worker's kernel threads run on. Called by `executors.worker`."""

from __future__ import annotations

import os


def cpus_of_worker(num_threads: int, local_rank: int, num_workers_on_node: int, usable: int) -> list[int]:
    """One processor for each thread of the pool, or none where pinning would do harm.

    Threads are pinned where this engine's workers together take every processor there is: then each has its own. With
    fewer threads than processors, other engines on the node would pin theirs to the same ones.

    Args:
        usable: Processors this process may use, quota considered.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads * num_workers_on_node != usable or usable != len(cpus):
        return []
    return cpus[local_rank * num_threads : (local_rank + 1) * num_threads]
