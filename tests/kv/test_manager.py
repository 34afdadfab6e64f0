"""The KV manager: tables of the right length, hits, windows, and what a sequence needs at most."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.hashing import root_hash
from kv.manager import KVCacheManager, KVSequence
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec

BLOCK_SIZE = 4


def manager(num_blocks: int = 50, windows: tuple[int | None, ...] = (None,), caching: bool = True,
            budget: int = 64) -> KVCacheManager:  # fmt: skip
    def spec(window: int | None) -> KVCacheSpec:
        if window is None:
            return FullAttentionSpec(BLOCK_SIZE, 1, 1, 1)
        return SlidingWindowSpec(BLOCK_SIZE, 1, 1, 1, window)

    groups = tuple(KVCacheGroup((str(index),), spec(window)) for index, window in enumerate(windows))
    return KVCacheManager(
        KVCacheConfig(num_blocks, groups), enable_prefix_caching=caching, max_num_batched_tokens=budget
    )


def sequence(length: int, first: int = 0) -> KVSequence:
    return KVSequence(array("i", range(first, first + length)), root_hash(BLOCK_SIZE))


def compute(kv: KVCacheManager, tokens: KVSequence, step: int = 1000) -> int:
    """Start the sequence and compute it all; returns the tokens that were cached."""
    hit = kv.look_up(tokens)
    done, total = hit.num_tokens, len(tokens.token_ids)
    kv.start(tokens, hit, min(total, done + step))
    while done < total:
        count = min(step, total - done)
        assert kv.grow(tokens, done, done + count) is not None
        done += count
        kv.register(tokens, done)
    return hit.num_tokens


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 36), (41, 40)]
)
def test_a_hit_is_whole_blocks_and_never_covers_the_last_token(length: int, hit: int) -> None:
    kv = manager()
    compute(kv, sequence(41))
    assert kv.look_up(sequence(length)).num_tokens == hit


def test_a_hit_ends_where_tokens_differ() -> None:
    kv = manager()
    compute(kv, sequence(20))
    other = sequence(20)
    other.token_ids[9] = 999
    assert kv.look_up(other).num_tokens == 8


def test_without_caching_nothing_is_found() -> None:
    kv = manager(caching=False)
    compute(kv, sequence(20))
    assert kv.look_up(sequence(20)).num_tokens == 0
    assert kv.pool.num_cached == 0


def test_a_block_is_found_only_when_it_is_full_and_its_tokens_are_known() -> None:
    kv = manager()
    tokens = sequence(7)
    kv.start(tokens, kv.no_hit(), 9)
    kv.register(tokens, 9)  # positions 7 and 8 belong to tokens still in flight
    assert kv.look_up(sequence(20)).num_tokens == 4
    tokens.token_ids.append(7)
    kv.register(tokens, 9)
    assert kv.look_up(sequence(20)).num_tokens == 8


def test_a_hit_is_pinned_before_anything_is_allocated() -> None:
    kv = manager(num_blocks=6)
    first = sequence(8)
    compute(kv, first)
    kv.free(first)
    second = sequence(20)
    hit = kv.look_up(second)
    assert hit.num_tokens == 8
    assert kv.fits(hit, 20, reserved=0)
    kv.start(second, hit, 20)  # takes the three blank blocks, not the two it hit
    assert second.tables[0][:2] == hit.tables[0]
    assert len(set(second.tables[0])) == 5


def test_free_hit_blocks_count_as_needed() -> None:
    kv = manager(num_blocks=6)
    first = sequence(8)
    compute(kv, first)
    kv.free(first)
    other = sequence(8, first=500)
    kv.start(other, kv.no_hit(), 8)
    hit = kv.look_up(sequence(16))  # 2 of its 4 blocks cached, 3 blocks free, these two among them
    assert hit.num_tokens == 8
    assert not kv.fits(hit, 16, reserved=0)
    assert kv.fits(kv.look_up(sequence(12)), 12, reserved=0)
    assert not kv.fits(kv.look_up(sequence(12)), 12, reserved=1)


def test_later_blocks_of_a_sequence_are_evicted_first() -> None:
    kv = manager(num_blocks=6)
    tokens = sequence(20)
    compute(kv, tokens)
    kv.free(tokens)
    kv.start(sequence(8, first=500), kv.no_hit(), 8)
    assert kv.look_up(sequence(20)).num_tokens == 12


def test_grow_that_does_not_fit_allocates_nothing() -> None:
    kv = manager(num_blocks=4, windows=(None, None))
    tokens = sequence(8)
    kv.start(tokens, kv.no_hit(), 4)
    assert kv.grow(tokens, 4, 8) is None
    assert kv.pool.num_free == 1
    assert [len(table) for table in tokens.tables] == [1, 1]


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
def test_blocks_behind_the_window_are_given_back(window: int) -> None:
    kv = manager(windows=(None, window))
    tokens = sequence(64)
    kv.start(tokens, kv.no_hit(), 4)
    for done in range(4, 64, 4):
        kv.grow(tokens, done, done + 4)
        first = max(0, done - window + 1) // BLOCK_SIZE
        assert [block != 0 for block in tokens.tables[1]] == [i >= first for i in range(len(tokens.tables[1]))]
    assert 0 not in tokens.tables[0]
    kv.free(tokens)
    assert kv.pool.num_used == 0


def test_a_window_hit_needs_the_last_window_only() -> None:
    kv = manager(windows=(6,))
    first = sequence(24)
    compute(kv, first, step=4)
    assert kv.look_up(sequence(25)).tables == [[0, 0, 0, 0, *first.tables[0][4:]]]


def test_a_hybrid_hit_is_the_longest_that_all_groups_agree_on() -> None:
    # The window groups have lost different blocks, so each allows other lengths.
    kv = manager(windows=(None, 5, 9))
    first = sequence(40)
    compute(kv, first)
    hashes = first.block_hashes
    lost = {1: {7}, 2: {4, 8}}
    for group, positions in lost.items():
        for position in positions:
            kv.pool._forget(first.tables[group][position])

    def usable(num_blocks: int) -> bool:
        return all(
            kv.pool.find(group, hashes[position]) is not None
            for group, window in ((0, None), (1, 5), (2, 9))
            for position in range(0 if window is None else max(0, 4 * num_blocks - window + 1) // 4, num_blocks)
        )

    for length in range(5, 41):
        expected = max(n for n in range((length - 1) // 4 + 1) if usable(n))
        assert kv.look_up(sequence(length)).num_tokens == 4 * expected, length


@given(
    windows=st.tuples(st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 20)),
    chunks=st.lists(st.integers(1, 16), min_size=1, max_size=12),
)
def test_a_sequence_never_holds_more_than_the_planner_reserved(
    windows: tuple[int | None, ...], chunks: list[int]
) -> None:
    kv = manager(num_blocks=400, windows=windows, budget=16)
    total = sum(chunks)
    tokens = sequence(total)
    bound = kv._config.blocks_per_sequence(total, 16)
    done = 0
    for chunk in chunks:
        if done == 0:
            kv.start(tokens, kv.no_hit(), chunk)
        else:
            kv.grow(tokens, done, done + chunk)
        done += chunk
        assert kv.pool.num_used <= bound
        assert kv.blocks_to_finish(tokens, total) == sum(
            max(0, group.spec.max_blocks(total, 16) - sum(block != 0 for block in table))
            for group, table in zip(kv._config.groups, tokens.tables, strict=True)
        )


def test_the_bound_of_a_window_is_reached() -> None:
    # Window 6 and steps of 4: 9 positions from the last one of a block on touch 3 blocks of 4, and no step needs more.
    spec = SlidingWindowSpec(BLOCK_SIZE, 1, 1, 1, 6)
    assert [spec.max_blocks(length, 4) for length in (1, 4, 5, 8, 9, 12, 1000)] == [1, 1, 2, 2, 3, 3, 3]
    kv = manager(windows=(6,), budget=4)
    tokens = sequence(12)
    kv.start(tokens, kv.no_hit(), 4)
    kv.grow(tokens, 4, 8)
    kv.grow(tokens, 8, 12)
    assert kv.pool.num_used == 3


def test_reset_is_refused_while_blocks_are_in_use() -> None:
    kv = manager()
    tokens = sequence(9)
    compute(kv, tokens)
    assert not kv.reset_prefix_cache()
    assert kv.look_up(sequence(9)).num_tokens == 8
    kv.free(tokens)
    assert kv.reset_prefix_cache()
    assert kv.look_up(sequence(9)).num_tokens == 0


def test_all_groups_must_have_one_block_size() -> None:
    groups = (KVCacheGroup(("a",), FullAttentionSpec(4, 1, 1, 1)), KVCacheGroup(("b",), FullAttentionSpec(8, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"one block size, got \[4, 8\]"):
        KVCacheManager(KVCacheConfig(9, groups), enable_prefix_caching=True, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="no groups"):
        KVCacheManager(KVCacheConfig(9, ()), enable_prefix_caching=True, max_num_batched_tokens=8)
