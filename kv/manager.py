"""KVCacheManager: the one object the scheduler asks for KV memory.

It joins the block pool, the prefix cache and the rules of each KV group. It knows sequences of tokens, not requests,
and nothing of steps: the scheduler says when a sequence may grow, what of it is computed, and when it may go.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kv.block_pool import NULL_BLOCK, BlockPool
from kv.groups import FullAttentionGroup, make_group
from kv.hashing import extend_block_hashes
from kv.spec import KVCacheConfig


class KVSequence:
    """The KV of one sequence: its block tables. Made by the scheduler's request, filled only by the manager.

    Attributes:
        token_ids: The request's tokens; the scheduler appends to it as they become known.
        root: `hashing.root_hash` of the request.
        block_hashes: Of the first blocks of `token_ids`, computed when first needed.
        tables: Per KV group the blocks in token order, all of one length; null where behind a window.
    """

    __slots__ = ("block_hashes", "num_registered", "root", "tables", "token_ids")

    def __init__(self, token_ids: array[int], root: bytes, block_hashes: list[bytes] | None = None) -> None:
        self.token_ids = token_ids
        self.root = root
        self.block_hashes = block_hashes if block_hashes is not None else []
        self.tables: list[list[int]] = []
        self.num_registered = 0  # leading blocks whose content is in the prefix cache, or came from it

    def restarted(self) -> KVSequence:
        """The same tokens without KV, to begin anew while the blocks of this one still wait to be freed."""
        return KVSequence(self.token_ids, self.root, self.block_hashes)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache holds of a sequence's beginning. Valid until the pool changes: `start` pins it.

    Attributes:
        num_tokens: Length of the hit, whole blocks, less than the sequence.
        tables: Per group, the blocks of the hit.
    """

    num_tokens: int
    tables: list[list[int]]


class KVCacheManager:
    """Blocks for sequences, from one pool for all KV groups.

    Attributes:
        pool: For reading only (usage, tests).
    """

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool, max_num_batched_tokens: int) -> None:
        block_sizes = {group.spec.block_size for group in config.groups}
        if len(block_sizes) != 1:
            raise ValueError(f"all KV groups must have one block size, got {sorted(block_sizes) or 'no groups'}")
        (self.block_size,) = block_sizes
        self.pool = BlockPool(config.num_blocks, len(config.groups))
        self._config = config
        self._enable_prefix_caching = enable_prefix_caching
        self._max_num_batched_tokens = max_num_batched_tokens
        self._groups = [make_group(index, group.spec) for index, group in enumerate(config.groups)]
        self._full = [group for group in self._groups if isinstance(group, FullAttentionGroup)]
        self._windows = [group for group in self._groups if not isinstance(group, FullAttentionGroup)]

    @property
    def num_groups(self) -> int:
        """KV groups, each with a block table per sequence."""
        return len(self._groups)

    @property
    def num_growing_groups(self) -> int:
        """KV groups that need one more block for every block of tokens; window groups soon give one back for each."""
        return max(1, len(self._full))

    @property
    def usage(self) -> float:
        """Share of the pool that has an owner, 0 to 1."""
        return self.pool.num_used / (self.pool.num_blocks - 1)

    def max_tokens_alone(self, at_most: int) -> int:
        """Tokens, up to `at_most`, whose KV a sequence can have when it is the only one."""
        return self._config.max_tokens_per_sequence(self._max_num_batched_tokens, at_most)

    def look_up(self, sequence: KVSequence) -> PrefixHit:
        """The longest prefix of the sequence that every group can use. Never covers the last token, whose logits
        are needed."""
        num_blocks = (len(sequence.token_ids) - 1) // self.block_size
        if not self._enable_prefix_caching or num_blocks == 0:
            return self.no_hit()
        hashes = self._hashes(sequence, num_blocks)
        for group in self._full:
            num_blocks = group.num_hit_blocks(self.pool, hashes, num_blocks)
        # Any beginning of a full-attention hit is one, but a shorter window hit may not be: shrink until all agree.
        agreed = False
        while not agreed:
            before = num_blocks
            for window in self._windows:
                num_blocks = window.num_hit_blocks(self.pool, hashes, num_blocks)
            agreed = num_blocks == before or len(self._windows) == 1
        if num_blocks == 0:
            return self.no_hit()
        tables = [group.hit_blocks(self.pool, hashes, num_blocks) for group in self._groups]
        return PrefixHit(num_blocks * self.block_size, tables)

    def no_hit(self) -> PrefixHit:
        """The hit of a sequence that must not read the cache."""
        return PrefixHit(0, [[] for _ in self._groups])

    def blocks_to_finish(self, sequence: KVSequence, num_tokens: int) -> int:
        """Upper bound of the blocks a started sequence still takes until `num_tokens` of it are computed."""
        return sum(
            max(0, group.spec.max_blocks(num_tokens, self._max_num_batched_tokens) - _num_owned(table))
            for group, table in zip(self._config.groups, sequence.tables, strict=True)
        )

    def fits(self, hit: PrefixHit, num_tokens: int, reserved: int) -> bool:
        """Can a sequence of `num_tokens` start from `hit` and be computed, with `reserved` free blocks left over?"""
        needed = reserved
        for group, table in zip(self._config.groups, hit.tables, strict=True):
            pinned = [block for block in table if block != NULL_BLOCK]
            needed += sum(map(self.pool.is_free, pinned))
            needed += max(0, group.spec.max_blocks(num_tokens, self._max_num_batched_tokens) - len(pinned))
        return needed <= self.pool.num_free

    def start(self, sequence: KVSequence, hit: PrefixHit, num_tokens: int) -> None:
        """Pin the hit's blocks and allocate up to position `num_tokens`. `fits` must have said yes."""
        for table in hit.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.acquire(block)
        sequence.tables = [list(table) for table in hit.tables]
        sequence.num_registered = hit.num_tokens // self.block_size
        if self.grow(sequence, hit.num_tokens, num_tokens) is None:
            raise RuntimeError(f"no blocks for a sequence of {num_tokens} tokens that was found to fit")

    def grow(self, sequence: KVSequence, num_computed_tokens: int, num_tokens: int) -> list[list[int]] | None:
        """Give the sequence slots for its first `num_tokens` tokens, and take back blocks behind windows.

        Args:
            num_computed_tokens: Tokens before this step; those from here on are computed next.

        Returns:
            Per group, the blocks appended (as many in each); None when there are too few free blocks.
        """
        count = -(-num_tokens // self.block_size) - len(sequence.tables[0])
        for window in self._windows:
            self._release_before(sequence.tables[window.index], window.first_needed_block(num_computed_tokens))
        if count * len(self._groups) > self.pool.num_free:
            return None
        appended = []
        for table in sequence.tables:
            blocks = self.pool.allocate(count) if count > 0 else []
            table += blocks
            appended.append(blocks)
        return appended

    def num_blocks_of(self, sequence: KVSequence) -> int:
        """Blocks the sequence holds, shared ones included."""
        return sum(map(_num_owned, sequence.tables))

    def num_missing_blocks(self, sequence: KVSequence, num_tokens: int) -> int:
        """Blocks that `grow` to `num_tokens` would have to wait for."""
        count = -(-num_tokens // self.block_size) - len(sequence.tables[0])
        return count * len(self._groups) - self.pool.num_free

    def num_slots(self, sequence: KVSequence) -> int:
        """Tokens that the sequence's blocks can hold."""
        return len(sequence.tables[0]) * self.block_size

    def register(self, sequence: KVSequence, num_computed_tokens: int) -> None:
        """Let others find the sequence's full blocks.

        Args:
            num_computed_tokens: Tokens whose KV is there or comes with a step that will certainly run.
        """
        if not self._enable_prefix_caching:
            return
        # Tokens may be computed that are not known here yet (async scheduling): their blocks wait.
        num_full = min(num_computed_tokens, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_registered:
            return
        hashes = self._hashes(sequence, num_full)
        for position in range(sequence.num_registered, num_full):
            for group, table in enumerate(sequence.tables):
                if table[position] != NULL_BLOCK:
                    self.pool.register(table[position], group, hashes[position])
        sequence.num_registered = num_full

    def free(self, sequence: KVSequence) -> None:
        """Give all blocks back, later ones first: so they are evicted first, and short prefixes live longer."""
        for blocks in zip(*map(reversed, sequence.tables), strict=True):
            for block in blocks:
                if block != NULL_BLOCK:
                    self.pool.release(block)
        sequence.tables = []

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content (after a change of weights). False, and nothing done, while blocks are in use."""
        if self.pool.num_used:
            return False
        self.pool.forget_all()
        return True

    def _hashes(self, sequence: KVSequence, num_blocks: int) -> list[bytes]:
        extend_block_hashes(sequence.block_hashes, sequence.root, sequence.token_ids, self.block_size, num_blocks)
        return sequence.block_hashes

    def _release_before(self, table: list[int], first_needed: int) -> None:
        # Going back from the first unneeded block: whatever lies before a null block is null already.
        for position in range(min(first_needed, len(table)) - 1, -1, -1):
            if table[position] == NULL_BLOCK:
                break
            self.pool.release(table[position])
            table[position] = NULL_BLOCK


def _num_owned(table: list[int]) -> int:
    return len(table) - table.count(NULL_BLOCK)
