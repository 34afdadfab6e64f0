"""What one attention layer needs from the KV cache, and what the planner made of all layers.

Workers report a spec per attention layer; `kv.planner` turns specs and memory into a `KVCacheConfig`, which
the scheduler's KVCacheManager and every worker then obey. Wire types: they travel between actors.
"""

from __future__ import annotations

import msgspec


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full"):
    """A layer whose every token may be read by all later tokens.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: KV heads held by one rank.
        head_size: Elements per head.
        dtype_bytes: Bytes per KV element.
        non_causal: Prompt tokens also attend to later prompt tokens (prefix LM). Chunked prefill and prefix
            caching would then be wrong, and are switched off.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    non_causal: bool = False

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Most blocks a sequence ever holds while its first `num_tokens` tokens are computed."""
        return -(-num_tokens // self.block_size)


class SlidingWindowSpec(msgspec.Struct, frozen=True, tag="sliding_window"):
    """A layer where a token reads itself and the `sliding_window - 1` tokens before it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    sliding_window: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def non_causal(self) -> bool:
        """Windows are causal."""
        return False

    def max_blocks(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Most blocks a sequence ever holds while its first `num_tokens` tokens are computed.

        A step of up to `max_num_batched_tokens` tokens needs these and the `sliding_window - 1` before them: so many
        consecutive positions, which at the worst alignment begin with the last position of a block.
        """
        all_blocks = -(-num_tokens // self.block_size)
        positions = self.sliding_window - 1 + max_num_batched_tokens
        return min(all_blocks, -(-(positions - 1) // self.block_size) + 1)


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table: same spec, same blocks.

    Attributes:
        layer_names: The worker's own layers of this group, in model order; a pipeline stage may have none.
        spec: Of each of these layers.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


class KVCacheTensor(msgspec.Struct, frozen=True):
    """One allocation of `num_blocks` pages, shared by at most one layer of each group.

    Page b is the memory of block b. A block has one owner, in one group, at a time, so layers of different groups
    never use the same page at once.

    Attributes:
        layer_names: Layers that view this memory as their cache.
        page_size_bytes: Of one page: the largest among these layers. A layer with smaller pages uses the beginning of
            each (a view with stride `page_size_bytes` over blocks).
    """

    layer_names: tuple[str, ...]
    page_size_bytes: int


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The planner's decision for one worker; `num_blocks` and the groups' order and specs are equal on all.

    Memory layout: a pool block is one page in each of `tensors`. The i-th layer of every group lives in tensor i, so a
    block given to group g holds g's KV of block_size tokens for all of g's layers.

    Attributes:
        num_blocks: Blocks in the pool, block 0 included. Block 0 is the null block: never owned, never read.
        groups: Each with its own block table per request. The order gives the group index in messages.
        tensors: What the worker allocates: `num_blocks * page_size_bytes` bytes each.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...] = ()

    @property
    def has_non_causal_layers(self) -> bool:
        """Chunked prefill and prefix caching are wrong for this model."""
        return any(group.spec.non_causal for group in self.groups)

    def blocks_per_sequence(self, num_tokens: int, max_num_batched_tokens: int) -> int:
        """Most pool blocks that one sequence holds at once while `num_tokens` tokens are computed."""
        return sum(group.spec.max_blocks(num_tokens, max_num_batched_tokens) for group in self.groups)

    def max_tokens_per_sequence(self, max_num_batched_tokens: int, at_most: int) -> int:
        """Largest number of tokens, up to `at_most`, whose KV the pool holds for a sequence that runs alone."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_sequence(middle, max_num_batched_tokens) <= self.num_blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low
