"""Collectives over a mapped segment: right sums in the order of ranks, any size, peers that sleep or never come."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from executors.shared_memory import SLOT_BYTES, SharedMemoryGroup, SharedMemoryPeerLostError, segment_bytes
from tests.executors.kernel_cases import kernels_or_skip

T = TypeVar("T")


def on_ranks(size: int, body: Callable[[SharedMemoryGroup], T], timeout_s: float = 60.0) -> list[T]:
    """`body` on threads with one segment, as processes have it; results in rank order."""
    kernels = kernels_or_skip()
    segment = mmap.mmap(-1, segment_bytes(kernels, size))
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda rank: body(SharedMemoryGroup(kernels, segment, rank, size, timeout_s)), range(size))
        )


def part(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 1000, SLOT_BYTES // 4, SLOT_BYTES + 13])
def test_all_reduce_sums_in_the_order_of_ranks_in_float32(size: int, dtype: torch.dtype, count: int) -> None:
    results = on_ranks(size, lambda group: group.all_reduce(part(group.rank, count, dtype)))
    expected = torch.zeros(count)
    for rank in range(size):
        expected = expected + part(rank, count, dtype).float()
    for result in results:
        assert torch.equal(result, expected.to(dtype))


def test_all_reduce_writes_through_views_and_keeps_what_is_not_a_number() -> None:
    def body(group: SharedMemoryGroup) -> torch.Tensor:
        wide = torch.zeros(4, 6)
        wide[:, 1:3] = group.rank + 1.0
        wide[2, 1] = float("nan")
        group.all_reduce(wide[:, 1:3])
        return wide

    first, second = on_ranks(2, body)
    assert torch.equal(first[:2, 1:3], torch.full((2, 2), 3.0))
    assert first[2, 1].isnan()
    assert not first[:, 3:].any()
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    nans = on_ranks(2, lambda group: group.all_reduce(torch.tensor([float("nan"), float("inf")]).bfloat16()))
    assert nans[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("count", [3, SLOT_BYTES])
def test_all_gather_stacks_tensors_of_any_type(count: int) -> None:
    for result in on_ranks(3, lambda group: group.all_gather(torch.arange(count) * (group.rank + 1))):
        assert torch.equal(result, torch.arange(count) * torch.tensor([[1], [2], [3]]))


def test_many_collectives_in_a_row_do_not_mix() -> None:
    def body(group: SharedMemoryGroup) -> list[bool]:
        outcomes = []
        for step in range(300):
            total = group.all_reduce(part(group.rank, 17, torch.float32, step))
            outcomes.append(torch.equal(total, part(0, 17, torch.float32, step) + part(1, 17, torch.float32, step)))
            outcomes.append(group.all_gather(torch.tensor([step])).tolist() == [[step], [step]])
        return outcomes

    assert all(all(outcomes) for outcomes in on_ranks(2, body))


def test_a_rank_that_comes_late_finds_the_others_asleep_and_wakes_them() -> None:
    asleep = threading.Event()

    def body(group: SharedMemoryGroup) -> float:
        if group.rank == 1:
            while not int(group._segment[68:72].view(torch.int32)):
                pass  # until rank 0 counts as a sleeper at this rank's line
            asleep.set()
        return group.all_reduce(torch.ones(1)).item()

    assert on_ranks(2, body) == [2.0, 2.0]
    assert asleep.is_set()


def test_a_rank_that_never_comes_is_named() -> None:
    def body(group: SharedMemoryGroup) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(SharedMemoryPeerLostError) as error:
            group.all_reduce(torch.ones(1))
        return str(error.value)

    assert on_ranks(2, body, timeout_s=0.2)[0] == "rank 1 of the group did not come to a collective within 0.2 s"


def test_types_and_places_are_checked() -> None:
    with pytest.raises(ValueError, match="tensor must be one of"):
        on_ranks(1, lambda group: group.all_reduce(torch.ones(1, dtype=torch.int64)))
    with pytest.raises(ValueError, match="rank 2 of size 2"):
        SharedMemoryGroup(kernels_or_skip(), mmap.mmap(-1, 4096), 2, 2, 1.0)
