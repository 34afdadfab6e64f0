"""The pool of KV blocks: who uses each, which are free, which free ones still hold reusable content.

Owned by kv.manager, which alone calls it. Blocks are plain integers, their state is kept in columns, so a pool of
a million blocks costs a few machine words each and nothing per step.
"""

from __future__ import annotations

from array import array

NULL_BLOCK = 0
"""Stands for "no block" in block tables. Never owned, never read."""


class BlockPool:
    """Reference counts, free blocks, and the map from content hash to block.

    A block is *used* (reference count above 0) or *free*. A free block is *blank* or *cached*: it keeps its content
    and its hash until it is given out anew. Blank blocks are given out first, then the cached block that has
    been free the longest, so content is lost only when nothing else is left.

    Content is found per KV group: the same tokens have different KV in each group.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        """`num_blocks` counts the null block."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = bytearray(num_blocks)
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Blank blocks: those never given out yet, from _next_fresh on, and a stack of returned ones.
        self._next_fresh = 1
        self._returned: list[int] = []
        # Cached free blocks: a ring in the order of their becoming free, linked by block id; block 0 is its anchor.
        self._older = array("i", bytes(4 * num_blocks))
        self._newer = array("i", bytes(4 * num_blocks))

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks, used or free, whose content can be found by hash."""
        return sum(len(by_hash) for by_hash in self._by_hash)

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block that holds this content for this group, used or free."""
        return self._by_hash[group].get(block_hash)

    def is_free(self, block: int) -> bool:
        """No owner."""
        return self._ref_counts[block] == 0

    def ref_count(self, block: int) -> int:
        """Number of owners."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, evicting the content of cached ones as needed. The caller is the only owner.

        Raises:
            RuntimeError: Fewer than `count` are free; the caller must look at `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked of a pool with {self.num_free} free")
        self.num_free -= count
        blocks = []
        for _ in range(count):
            if self._returned:
                block = self._returned.pop()
            elif self._next_fresh < self.num_blocks:
                block = self._next_fresh
                self._next_fresh += 1
            else:
                block = self._newer[NULL_BLOCK]
                self._unlink(block)
                self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Add an owner to a block found by hash; it cannot be given out until released."""
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self.num_free -= 1
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove an owner. Without any left the block is free, the last to be evicted if it is cached."""
        count = self._ref_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} released more often than acquired")
        self._ref_counts[block] = count
        if count == 0:
            self.num_free += 1
            if self._hash_of[block] is None:
                self._returned.append(block)
            else:
                newest = self._older[NULL_BLOCK]
                self._older[block], self._newer[block] = newest, NULL_BLOCK
                self._newer[newest] = self._older[NULL_BLOCK] = block

    def register(self, block: int, group: int, block_hash: bytes) -> None:
        """Make the content of a used block findable, unless another block with the same content already is."""
        if self._hash_of[block] is None and block_hash not in self._by_hash[group]:
            self._by_hash[group][block_hash] = block
            self._hash_of[block] = block_hash
            self._group_of[block] = group

    def forget_all(self) -> None:
        """Drop all content, so that nothing is found any more. Owners keep their blocks."""
        while (block := self._newer[NULL_BLOCK]) != NULL_BLOCK:
            self._unlink(block)
            self._returned.append(block)
        for by_hash in self._by_hash:
            for block in by_hash.values():
                self._hash_of[block] = None
            by_hash.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._by_hash[self._group_of[block]][block_hash]
            self._hash_of[block] = None

    def _unlink(self, block: int) -> None:
        older, newer = self._older[block], self._newer[block]
        self._newer[older] = newer
        self._older[newer] = older
