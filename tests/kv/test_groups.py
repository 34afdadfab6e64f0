"""Which prefix hits each attention type may use, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv.block_pool import BlockPool
from kv.groups import make_group
from kv.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

BLOCK_SIZE = 4


def readable_blocks(spec: KVCacheSpec, num_blocks: int) -> set[int]:
    """Blocks among the first `num_blocks` that later tokens read, position by position."""
    next_position = num_blocks * BLOCK_SIZE
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else next_position + 1
    return {p // BLOCK_SIZE for p in range(max(0, next_position - window + 1), next_position)}


specs = st.one_of(
    st.just(FullAttentionSpec(BLOCK_SIZE, 1, 1, 1)),
    st.integers(1, 20).map(lambda window: SlidingWindowSpec(BLOCK_SIZE, 1, 1, 1, window)),
)


@given(specs, st.lists(st.booleans(), max_size=12))
def test_a_hit_is_the_longest_whose_readable_blocks_are_all_cached(spec: KVCacheSpec, is_cached: list[bool]) -> None:
    pool = BlockPool(20, 1)
    names = [bytes([index]) for index in range(len(is_cached))]
    blocks = pool.allocate(len(is_cached))
    for block, name, cached in zip(blocks, names, is_cached, strict=True):
        if cached:
            pool.register(block, 0, name)
    group = make_group(0, spec)

    usable = [n for n in range(len(names) + 1) if all(is_cached[block] for block in readable_blocks(spec, n))]
    hit = group.num_hit_blocks(pool, names, len(names))

    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window == 1:
        # Nothing before is read, so any length would do; whatever is found is right.
        assert hit in usable
    else:
        assert hit == max(usable)
    readable = readable_blocks(spec, hit)
    expected = [blocks[index] if index in readable else 0 for index in range(hit)]
    assert group.hit_blocks(pool, names, hit) == expected


@given(specs, st.integers(0, 60))
def test_the_first_needed_block_is_the_first_that_is_read(spec: KVCacheSpec, num_computed: int) -> None:
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else num_computed + 1
    first_read = max(0, num_computed - window + 1)
    assert make_group(0, spec).first_needed_block(num_computed) == first_read // BLOCK_SIZE
