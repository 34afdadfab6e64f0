"""TP ranks as threads of this process: the real layers with any tp_size, without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from executors.parallel_state import ParallelState

T = TypeVar("T")


class _Exchange:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[torch.Tensor | None] = [None] * size

    def all(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[rank] = tensor.clone()
        self.barrier.wait()
        parts = [part for part in self.slots if part is not None]
        self.barrier.wait()
        return parts


class ThreadedParallelState(ParallelState):
    def __init__(self, rank: int, tp_size: int, exchange: _Exchange) -> None:
        super().__init__(rank, tp_size)
        self._exchange = exchange

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._exchange.all(self.tp_rank, tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange.all(self.tp_rank, tensor), dim=dim)


def run_on_ranks(tp_size: int, body: Callable[[ParallelState], T]) -> list[T]:
    """`body` on each rank at once; its results in rank order. A rank's failure is raised, the others give up."""
    exchange = _Exchange(tp_size)

    def guarded(rank: int) -> T:
        try:
            return body(ThreadedParallelState(rank, tp_size, exchange))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(tp_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in causes or errors:
            raise error
        return [future.result() for future in futures]
