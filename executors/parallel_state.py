"""One rank's place in the tensor × pipeline grid, and the collectives over it. Made by Worker, used by the layers.

Global rank = pp_rank × tp_size + tp_rank. With one rank nothing of torch.distributed is touched. TP ranks on CPUs of
one machine exchange through shared memory (`executors.shared_memory`).
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from executors.shared_memory import REDUCIBLE, SharedMemoryGroup, join_group

BACKENDS = ("gloo", "nccl")


class ParallelState:
    """Collectives of one worker. All ranks of a group must make the same calls in the same order.

    Attributes:
        rank, world_size: In the whole grid.
        tp_rank, tp_size: Among the ranks that share each layer.
        pp_rank, pp_size: Among the stages.
    """

    def __init__(self, rank: int = 0, tp_size: int = 1, pp_size: int = 1) -> None:
        """A place without process groups: enough for one rank, or to build a shard without running it."""
        world_size = tp_size * pp_size
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}) for tp_size {tp_size} × pp_size {pp_size}, got {rank}")
        self.rank = rank
        self.world_size = world_size
        self.tp_size = tp_size
        self.pp_size = pp_size
        self.tp_rank = rank % tp_size
        self.pp_rank = rank // tp_size
        self._tp_group: Any = None
        self._shared_memory: SharedMemoryGroup | None = None
        self._owns_process_group = False
        # Tensors under way to the next stage, kept alive until their send has completed.
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    @classmethod
    def initialize(
        cls,
        *,
        rank: int,
        tp_size: int = 1,
        pp_size: int = 1,
        init_method: str = "",
        backend: str = "gloo",
        timeout_s: float = 600.0,
    ) -> ParallelState:
        """Join the grid; returns when every rank has joined.

        Args:
            init_method: Of torch.distributed, e.g. "tcp://10.0.0.1:29500". Unused with one rank.
            backend: "gloo" (CPU) or "nccl" (CUDA; the current device must be set before).
            timeout_s: Deadline of joining and of each later collective.

        Raises:
            ValueError: `backend` is unknown or `rank` is outside the grid.
            RuntimeError: torch.distributed could not connect all ranks in time.
        """
        state = cls(rank, tp_size, pp_size)
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if state.world_size == 1:
            return state
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=state.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        state._owns_process_group = True
        if tp_size > 1:
            # Every rank must create every group, in the same order.
            for stage in range(pp_size):
                members = list(range(stage * tp_size, (stage + 1) * tp_size))
                group = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend=backend)
                if stage == state.pp_rank:
                    state._tp_group = group
            if backend == "gloo":
                state._shared_memory = join_group(state._tp_group, state.tp_rank, tp_size, timeout_s)
        return state

    @property
    def transport(self) -> str:
        """What carries the collectives of the TP ranks: "shared memory", a backend of torch.distributed, or "none"."""
        if self._shared_memory is not None:
            return "shared memory"
        return "none" if self._tp_group is None else str(dist.get_backend(self._tp_group))

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the TP ranks, in place."""
        if self.tp_size == 1:
            return tensor
        if self._shared_memory is not None and tensor.dtype in REDUCIBLE:
            return self._shared_memory.all_reduce(tensor)
        dist.all_reduce(tensor, group=self._require_tp_group())
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the TP ranks' equally shaped tensors along `dim`, in rank order."""
        if self.tp_size == 1:
            return tensor
        if self._shared_memory is not None:
            return torch.cat(self._shared_memory.all_gather(tensor).unbind(), dim=dim)
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.tp_size)]
        dist.all_gather(parts, tensor, group=self._require_tp_group())
        return torch.cat(parts, dim=dim)

    def broadcast(self, tensor: torch.Tensor, src_tp_rank: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on every TP rank with that of `src_tp_rank`."""
        if self.tp_size > 1:
            source = self.pp_rank * self.tp_size + src_tp_rank
            dist.broadcast(tensor, src=source, group=self._require_tp_group())
        return tensor

    def send_hidden_states(self, tensor: torch.Tensor) -> None:
        """Start sending to the same TP rank of the next stage. Returns before the data has left."""
        if self.is_last_stage:
            raise RuntimeError(f"stage {self.pp_rank} of {self.pp_size} is the last: there is nobody to send to")
        # A send completes once the next stage received it. Stages only wait for earlier ones, so waiting for an old
        # send cannot deadlock; the bound keeps memory in check when the next stage is slower.
        while len(self._sends) > self.pp_size:
            work, _ = self._sends.popleft()
            work.wait()
        tensor = tensor.contiguous()
        self._sends.append((dist.isend(tensor, dst=self.rank + self.tp_size), tensor))

    def recv_hidden_states(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Wait for the next tensor from the same TP rank of the previous stage."""
        if self.is_first_stage:
            raise RuntimeError("stage 0 is the first: there is nobody to receive from")
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=self.rank - self.tp_size)
        return tensor

    def drain(self) -> None:
        """Wait until every tensor sent has left."""
        while self._sends:
            work, _ = self._sends.popleft()
            work.wait()

    def destroy(self) -> None:
        """Leave the grid. Idempotent; sends under way are dropped."""
        self._sends.clear()
        self._tp_group = None
        self._shared_memory = None
        if self._owns_process_group:
            self._owns_process_group = False
            dist.destroy_process_group()

    def _require_tp_group(self) -> Any:
        if self._tp_group is None:
            raise RuntimeError(
                f"rank {self.rank} of tp_size {self.tp_size} has no process group: use ParallelState.initialize"
            )
        return self._tp_group
