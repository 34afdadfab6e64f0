"""Which processors a worker's kernel threads run on. Called by `executors.worker`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

CLAIM_NAME = "engine-actors/cpu"
"""What begins the names of claimed processors."""


def cpus_of_worker(num_threads: int, local_rank: int, num_workers_on_node: int, usable: int) -> list[int]:
    """One processor for each thread of the pool, or none where pinning would do harm.

    Threads are pinned where this engine's workers together take every processor there is: then each has its own,
    unless another engine is there already (`CpuClaim`).

    Args:
        usable: Processors this process may use, quota considered.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if num_threads * num_workers_on_node != usable or usable != len(cpus):
        return []
    return cpus[local_rank * num_threads : (local_rank + 1) * num_threads]


class CpuClaim:
    """Processors that no other engine on this machine will pin threads to while this object, or its process, lives.

    Each is a name in the abstract namespace of Unix sockets, which the kernel frees however a process ends. Containers
    with networks of their own do not see each other's.

    Attributes:
        cpus: What was asked for, or nothing: when another process holds one of them.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self.cpus: list[int] = []
        self._sockets: list[socket.socket] = []
        for cpu in cpus:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sockets.append(name)
            try:
                name.bind(f"\0{CLAIM_NAME}/{cpu}")
            except OSError:  # in use, or no such sockets here
                self.release()
                return
        self.cpus = list(cpus)

    def release(self) -> None:
        """Idempotent."""
        for name in self._sockets:
            name.close()
        self._sockets, self.cpus = [], []

    def __del__(self) -> None:
        self.release()
