"""The block pool: owners, free blocks, eviction order, content by hash."""

from __future__ import annotations

import pytest

from kv.block_pool import BlockPool


def cached(pool: BlockPool, names: str) -> dict[str, int]:
    """Blocks in use, registered under one-letter hashes."""
    blocks = dict(zip(names, pool.allocate(len(names)), strict=True))
    for name, block in blocks.items():
        pool.register(block, 0, name.encode())
    return blocks


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5, 1)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match=r"at least 2.*got 1"):
        BlockPool(1, 1)


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4, 1)
    with pytest.raises(RuntimeError, match="4 blocks asked of a pool with 3 free"):
        pool.allocate(4)
    assert len(pool.allocate(3)) == 3


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(4, 1)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(RuntimeError, match=f"block {block} released more often"):
        pool.release(block)


def test_cached_content_survives_as_long_as_blank_blocks_are_left() -> None:
    pool = BlockPool(6, 1)
    kept = cached(pool, "a")["a"]
    pool.release(kept)
    others = pool.allocate(4)
    assert kept not in others
    pool.release(others[0])  # blank again, and newer than the cached one
    assert pool.allocate(1) == [others[0]]
    assert pool.find(0, b"a") == kept
    assert pool.allocate(1) == [kept]
    assert pool.find(0, b"a") is None


def test_the_content_free_the_longest_is_evicted_first() -> None:
    pool = BlockPool(4, 1)
    blocks = cached(pool, "abc")
    for name in "bca":
        pool.release(blocks[name])
    pool.acquire(blocks["b"])  # used once more: now the newest
    pool.release(blocks["b"])
    assert [pool.allocate(1)[0] for _ in range(3)] == [blocks["c"], blocks["a"], blocks["b"]]


def test_an_acquired_block_cannot_be_given_out() -> None:
    pool = BlockPool(3, 1)
    blocks = cached(pool, "ab")
    for block in blocks.values():
        pool.release(block)
    pool.acquire(blocks["a"])
    assert pool.allocate(1) == [blocks["b"]]
    assert pool.num_free == 0
    assert pool.find(0, b"a") == blocks["a"]


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(3, 1)
    block = cached(pool, "a")["a"]
    pool.acquire(block)
    pool.release(block)
    assert (pool.num_free, pool.is_free(block)) == (1, False)
    pool.release(block)
    assert (pool.num_free, pool.is_free(block)) == (2, True)


def test_of_two_blocks_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(2)
    pool.register(first, 0, b"x")
    pool.register(second, 0, b"x")
    assert pool.find(0, b"x") == first
    pool.release(second)
    pool.release(first)
    # The duplicate is blank and goes first, also its eviction leaves the content findable.
    assert pool.allocate(2)[0] == second
    assert pool.find(0, b"x") == first


def test_groups_do_not_find_each_others_content() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    pool.register(first, 0, b"x")
    assert pool.find(1, b"x") is None
    pool.register(second, 1, b"x")
    assert (pool.find(0, b"x"), pool.find(1, b"x")) == (first, second)
    assert pool.num_cached == 2


def test_forgetting_everything_keeps_owners_and_free_blocks() -> None:
    pool = BlockPool(5, 1)
    blocks = cached(pool, "abc")
    pool.release(blocks["a"])
    pool.release(blocks["b"])
    pool.forget_all()
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 1, 0)
    assert all(pool.find(0, name) is None for name in (b"a", b"b", b"c"))
    assert blocks["c"] not in pool.allocate(3)
    pool.register(blocks["c"], 0, b"new")
    assert pool.find(0, b"new") == blocks["c"]
