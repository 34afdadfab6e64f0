"""Collectives of CPU tensors among ranks on one machine, over a mapped segment. Used by `executors.parallel_state`.

All ranks of a group must make the same calls in the same order. A rank that waits spins for some microseconds, then
sleeps. A peer that dies is noticed by the executor, which ends all ranks; the timeout here is a last resort.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executors.kernels.library import NativeKernels, native_kernels

logger = logging.getLogger(__name__)

SHARED_DIR = Path("/dev/shm")
SLOT_BYTES = 1 << 20
MAX_RANKS = 64
REDUCIBLE = (torch.float32, torch.bfloat16)
_TOKEN_BYTES = 16


class SharedMemoryPeerLostError(RuntimeError):
    """Another rank did not come to a collective in time."""


class SharedMemoryGroup:
    """One rank's end of a group.

    Args:
        segment: `segment_bytes(size)` bytes of memory that every rank maps, zero at first.
        timeout_s: Deadline of each collective.
    """

    def __init__(self, kernels: NativeKernels, segment: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
            raise ValueError(f"rank {rank} of size {size}: a group has at most {MAX_RANKS} ranks, numbered from 0")
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._library = kernels.library
        self._segment = torch.frombuffer(segment, dtype=torch.uint8)
        self._handle = self._library.ea_group_create(
            self._segment.data_ptr(), rank, size, SLOT_BYTES, int(timeout_s * 1e9)
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place, in their order and in float32, rounded once. float32 or bfloat16."""
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"tensor must be one of {REDUCIBLE}, got {tensor.dtype}")
        data = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._check(
            self._library.ea_group_all_reduce(self._handle, data.data_ptr(), data.numel(), data.dtype == torch.bfloat16)
        )
        return tensor if data is tensor else tensor.copy_(data)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' equally shaped tensors, stacked: [size, *shape]."""
        data = tensor.contiguous()
        out = torch.empty(self.size, *data.shape, dtype=data.dtype)
        self._check(self._library.ea_group_all_gather(self._handle, data.data_ptr(), data.nbytes, out.data_ptr()))
        return out

    def _check(self, status: int) -> None:
        if status:
            raise SharedMemoryPeerLostError(
                f"rank {status - 1} of the group did not come to a collective within {self._timeout_s:g} s"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ea_group_destroy(self._handle)


def segment_bytes(kernels: NativeKernels, size: int) -> int:
    return int(kernels.library.ea_group_segment_bytes(size, SLOT_BYTES))


def join_group(process_group: Any, rank: int, size: int, timeout_s: float) -> SharedMemoryGroup | None:
    """A segment shared by all ranks of a gloo group, or None on all of them where some cannot map it.

    That is so across machines, in containers that do not share memory, and without the native kernels. Nothing is left
    in the file system.

    Args:
        rank: In the group.
    """
    kernels = native_kernels() if size <= MAX_RANKS else None
    path, token = "", secrets.token_hex(_TOKEN_BYTES)
    try:
        if rank == 0 and kernels is not None:
            path = _create(segment_bytes(kernels, size), token)
        offer: list[str] = [path, token]
        dist.broadcast_object_list(offer, src=dist.get_global_rank(process_group, 0), group=process_group)
        segment = None
        if kernels is not None and offer[0]:
            segment = _map(offer[0], offer[1], segment_bytes(kernels, size))
        mapped = torch.tensor([segment is not None], dtype=torch.int32)
        dist.all_reduce(mapped, op=dist.ReduceOp.MIN, group=process_group)
    finally:
        if path:
            os.unlink(path)
    if not mapped.item() or segment is None or kernels is None:
        return None
    return SharedMemoryGroup(kernels, segment, rank, size, timeout_s)


def _create(size: int, token: str) -> str:
    """A file of `size` bytes of memory, which are reserved, with the token behind them; "" if there is no room."""
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="engine-actors-", dir=SHARED_DIR)
        try:
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, token.encode(), size)
        finally:
            os.close(descriptor)
        return path
    except OSError as error:
        logger.info("no shared memory for collectives: %s", error)
        if path:
            os.unlink(path)
        return ""


def _map(path: str, token: str, size: int) -> mmap.mmap | None:
    """The segment, if it is the one that rank 0 made and not another machine's of the same name."""
    try:
        with open(path, "r+b") as file:
            if os.pread(file.fileno(), len(token), size) != token.encode():
                return None
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None
