"""What differs between attention types: which prefix hits are usable, and which blocks may be let go.

One object per KV group, made by `make_group`, used by kv.manager. They hold no state of requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kv.block_pool import NULL_BLOCK, BlockPool
from kv.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


class AttentionGroup(ABC):
    """Rules of one KV group. `index` is the group's place in KVCacheConfig.groups."""

    def __init__(self, index: int, spec: KVCacheSpec) -> None:
        self.index = index
        self.block_size = spec.block_size

    @abstractmethod
    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that tokens from position `num_computed_tokens` on can read."""

    @abstractmethod
    def num_hit_blocks(self, pool: BlockPool, hashes: list[bytes], max_blocks: int) -> int:
        """Largest n up to `max_blocks` so that a sequence may start after n blocks: what it then reads is cached."""

    def hit_blocks(self, pool: BlockPool, hashes: list[bytes], num_blocks: int) -> list[int]:
        """The block table of a hit of `num_blocks` blocks that `num_hit_blocks` allowed; null where never read."""
        first = self.first_needed_block(num_blocks * self.block_size)
        table = [NULL_BLOCK] * min(first, num_blocks)
        for position in range(first, num_blocks):
            block = pool.find(self.index, hashes[position])
            if block is None:
                raise RuntimeError(f"group {self.index}: block {position} of a hit of {num_blocks} is not cached")
            table.append(block)
        return table


class FullAttentionGroup(AttentionGroup):
    """Every token reads all before it: all blocks stay, and a hit is an unbroken chain from the first block."""

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return 0

    def num_hit_blocks(self, pool: BlockPool, hashes: list[bytes], max_blocks: int) -> int:
        for position in range(max_blocks):
            if pool.find(self.index, hashes[position]) is None:
                return position
        return max_blocks


class SlidingWindowGroup(AttentionGroup):
    """A token reads the last `sliding_window` tokens: older blocks go, and a hit needs one window's blocks only."""

    def __init__(self, index: int, spec: SlidingWindowSpec) -> None:
        super().__init__(index, spec)
        self.sliding_window = spec.sliding_window

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size

    def num_hit_blocks(self, pool: BlockPool, hashes: list[bytes], max_blocks: int) -> int:
        # Walk back from the end; `end` is a candidate as long as all blocks from the walker to it are cached.
        end = max_blocks
        first_needed = self.first_needed_block(end * self.block_size)
        for position in range(max_blocks - 1, -1, -1):
            if position < first_needed:
                return end
            if pool.find(self.index, hashes[position]) is None:
                end = position
                first_needed = self.first_needed_block(end * self.block_size)
        return end


def make_group(index: int, spec: KVCacheSpec) -> AttentionGroup:
    """The rules for a spec."""
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowGroup(index, spec)
    if isinstance(spec, FullAttentionSpec):
        return FullAttentionGroup(index, spec)
    raise TypeError(f"KV group {index}: no rules for a spec of type {type(spec).__name__}")
