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


class SlidingWindowSpec(msgspec.Struct, frozen=True, tag="sliding_window"):
    """A layer where a token reads itself and the `sliding_window - 1` tokens before it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    sliding_window: int

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def non_causal(self) -> bool:
        return False


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table: same spec, same blocks.

    The i-th layers of all groups use the same memory (a pool block holds one page for each "layer slot"), so a
    block belongs to one group at a time and `num_blocks` counts blocks of the whole pool.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The planner's decision, equal on every rank of one pipeline stage and alike in `num_blocks` on all.

    Attributes:
        num_blocks: Blocks in the pool, block 0 included. Block 0 is the null block: never owned, never read.
        groups: One per attention type. Order gives the group index in block tables.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
