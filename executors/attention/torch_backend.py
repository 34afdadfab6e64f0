"""The reference attention backend: plain torch operations over paged KV, exact in float32, on any device.

Single-token queries are batched by similar length (padding bounded to a quarter), longer queries run one request
at a time in blocks of query rows, so memory and work follow the tokens really read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executors.attention.base import AttentionBackend, AttentionMetadata, AttentionParams

# Rows of a long query that share one mask. Larger blocks compute more masked scores, smaller ones call more kernels.
QUERY_BLOCK = 256
# Decodes share a padded batch while the longest is at most this multiple of the shortest, or this much longer.
MAX_LENGTH_RATIO = 1.25
MAX_LENGTH_SLACK = 32
# Tokens gathered at once for decodes, to bound temporary memory.
MAX_GATHERED_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class _CacheLayout:
    """A layer's cache seen as rows of `width` elements, whatever the distance between its pages.

    Pages may be further apart than they are long (layers with larger pages share the memory), so `width` is the
    greatest that divides both that distance and a token's keys; mostly it is a token's keys.

    Attributes:
        rows_per_block: From one block's first row to the next block's.
        rows_per_token: Of a token's keys; its values take as many, `block_size * rows_per_token` rows further.
    """

    width: int
    block_size: int
    rows_per_block: int
    rows_per_token: int

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> _CacheLayout:
        _, _, block_size, num_kv_heads, head_size = kv_cache.shape
        token_size = num_kv_heads * head_size
        width = math.gcd(kv_cache.stride(0), token_size)
        return cls(width, block_size, kv_cache.stride(0) // width, token_size // width)

    def view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[rows, width], sharing memory."""
        rows = (kv_cache.shape[0] - 1) * self.rows_per_block + 2 * self.block_size * self.rows_per_token
        return kv_cache.as_strided((rows, self.width), (self.width, 1))

    def rows(self, slots: torch.Tensor) -> _Rows:
        first = slots // self.block_size * self.rows_per_block + slots % self.block_size * self.rows_per_token
        if self.rows_per_token > 1:
            first = (first.unsqueeze(-1) + torch.arange(self.rows_per_token, device=slots.device)).flatten()
        return _Rows(first, first + self.block_size * self.rows_per_token)


@dataclass(slots=True)
class _Rows:
    """Indices of the rows that hold some tokens' keys and values."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class _QueryBlock:
    """Query rows start:stop of the flattened batch, which read keys first_key:end_key of those gathered."""

    start: int
    stop: int
    first_key: int
    end_key: int
    # True where a key may be read, [stop - start, end_key - first_key].
    mask: torch.Tensor


@dataclass(slots=True)
class _LongQuery:
    """One request with several new tokens, and the cache rows of all tokens they read."""

    rows: _Rows
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _DecodeBatch:
    """Requests with one new token each. Shorter ones repeat their last token as padding, masked out."""

    token_index: torch.Tensor
    rows: _Rows
    length: int
    # True where a key may be read, [requests, 1, 1, length]; None when all have the same length.
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Plan:
    """All that follows from the batch and not from the layer's numbers."""

    write: _Rows
    long_queries: list[_LongQuery]
    decodes: list[_DecodeBatch]


class TorchAttentionBackend(AttentionBackend):
    """Cache layout [num_blocks, 2 (key, value), block_size, num_kv_heads, head_size]."""

    name = "torch"

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        layout = _CacheLayout.of(kv_cache)
        plan_key = (layout, params.sliding_window, params.non_causal)
        plan = metadata.plans.get(plan_key)
        if plan is None:
            plan = metadata.plans[plan_key] = _make_plan(params, layout, metadata)
        cache = layout.view(kv_cache)
        cache.index_copy_(0, plan.write.keys, key.reshape(-1, layout.width).to(cache.dtype))
        cache.index_copy_(0, plan.write.values, value.reshape(-1, layout.width).to(cache.dtype))

        grouped = query.unflatten(1, (params.num_kv_heads, params.num_heads // params.num_kv_heads))
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        for long_query in plan.long_queries:
            _attend_long(params, grouped, out, cache, long_query)
        for batch in plan.decodes:
            _attend_decodes(params, grouped, out, cache, batch)
        return out.flatten(1, 2)


def _attend_long(
    params: AttentionParams, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, long_query: _LongQuery
) -> None:
    keys = _gather(params, cache, long_query.rows.keys, query.dtype).transpose(0, 1)
    values = _gather(params, cache, long_query.rows.values, query.dtype).transpose(0, 1)
    group = query.shape[2]
    for block in long_query.blocks:
        # Batch dimension: KV heads; head dimension: the query heads that read one of them.
        q = query[block.start : block.stop].permute(1, 2, 0, 3)
        k = keys[:, block.first_key : block.end_key].unsqueeze(1).expand(-1, group, -1, -1)
        v = values[:, block.first_key : block.end_key].unsqueeze(1).expand(-1, group, -1, -1)
        out[block.start : block.stop] = _attend(params, q, k, v, block.mask).permute(2, 0, 1, 3)


def _attend_decodes(
    params: AttentionParams, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: _DecodeBatch
) -> None:
    shape = (-1, batch.length, params.num_kv_heads, params.head_size)
    k = _gather(params, cache, batch.rows.keys, query.dtype).view(shape).transpose(1, 2)
    v = _gather(params, cache, batch.rows.values, query.dtype).view(shape).transpose(1, 2)
    # The query heads of one KV head take the place of query positions: they read the same keys.
    out[batch.token_index] = _attend(params, query[batch.token_index], k, v, batch.mask)


def _gather(params: AttentionParams, cache: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cache rows → [tokens, num_kv_heads, head_size]."""
    return cache.index_select(0, rows).view(-1, params.num_kv_heads, params.head_size).to(dtype)


def _attend(
    params: AttentionParams, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    if params.logits_soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=params.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * params.scale
    scores = torch.tanh(scores / params.logits_soft_cap) * params.logits_soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _make_plan(params: AttentionParams, layout: _CacheLayout, metadata: AttentionMetadata) -> _Plan:
    starts = metadata.query_start_loc.tolist()
    seq_lens = metadata.seq_lens.tolist()
    prompt_lens = seq_lens if metadata.prompt_lens is None else metadata.prompt_lens.tolist()
    long_queries: list[_LongQuery] = []
    singles: list[tuple[int, int]] = []
    for request in range(metadata.num_reqs):
        start, stop, seq_len = starts[request], starts[request + 1], seq_lens[request]
        if stop - start == 1:
            singles.append((_window_start(params, seq_len - 1), request))
        elif stop > start:
            long_queries.append(
                _plan_long(params, layout, metadata, request, start, stop, seq_len, prompt_lens[request])
            )
    # Requests of similar length next to each other.
    singles.sort(key=lambda item: seq_lens[item[1]] - item[0])
    decodes = [_plan_decodes(layout, metadata, bucket, starts, seq_lens) for bucket in _bucket(singles, seq_lens)]
    return _Plan(layout.rows(metadata.slot_mapping), long_queries, decodes)


def _plan_long(
    params: AttentionParams,
    layout: _CacheLayout,
    metadata: AttentionMetadata,
    request: int,
    start: int,
    stop: int,
    seq_len: int,
    prompt_len: int,
) -> _LongQuery:
    num_cached = seq_len - (stop - start)
    first = _window_start(params, num_cached)
    blocks = [
        _plan_block(params, metadata, block_start, min(block_start + QUERY_BLOCK, stop), num_cached - start, first,
                    min(prompt_len, seq_len))
        for block_start in range(start, stop, QUERY_BLOCK)
    ]  # fmt: skip
    tokens = torch.arange(first, seq_len, device=metadata.block_table.device)
    slots = _slots(metadata, metadata.block_table[request], tokens)
    return _LongQuery(layout.rows(slots), blocks)


def _plan_block(
    params: AttentionParams,
    metadata: AttentionMetadata,
    start: int,
    stop: int,
    position_offset: int,
    first: int,
    prompt_end: int,
) -> _QueryBlock:
    """Rows start:stop, at positions `position_offset` further; the request's gathered keys begin at token `first`."""
    first_position, end_position = start + position_offset, stop + position_offset
    end_key = max(end_position, prompt_end) if params.non_causal and first_position < prompt_end else end_position
    first_key = max(_window_start(params, first_position), first)
    device = metadata.block_table.device
    position = torch.arange(first_position, end_position, device=device).unsqueeze(1)
    key = torch.arange(first_key, end_key, device=device).unsqueeze(0)
    readable = key <= position
    if params.non_causal:
        readable = readable | ((position < prompt_end) & (key < prompt_end))
    if params.sliding_window is not None:
        readable = readable & (key > position - params.sliding_window)
        if params.non_causal:
            readable = readable & (key < position + params.sliding_window)
    return _QueryBlock(start, stop, first_key - first, end_key - first, readable)


def _bucket(singles: list[tuple[int, int]], seq_lens: list[int]) -> list[list[tuple[int, int]]]:
    """Split (first token read, request) pairs, sorted by tokens read, so that padding stays small."""
    buckets: list[list[tuple[int, int]]] = []
    shortest = 0
    for first, request in singles:
        length = seq_lens[request] - first
        limit = max(shortest * MAX_LENGTH_RATIO, shortest + MAX_LENGTH_SLACK)
        if not buckets or length > limit or (len(buckets[-1]) + 1) * length > MAX_GATHERED_TOKENS:
            buckets.append([])
            shortest = length
        buckets[-1].append((first, request))
    return buckets


def _plan_decodes(
    layout: _CacheLayout,
    metadata: AttentionMetadata,
    bucket: list[tuple[int, int]],
    starts: list[int],
    seq_lens: list[int],
) -> _DecodeBatch:
    device = metadata.block_table.device
    requests = torch.tensor([request for _, request in bucket], device=device)
    first = torch.tensor([token for token, _ in bucket], device=device).unsqueeze(1)
    last = torch.tensor([seq_lens[request] - 1 for _, request in bucket], device=device).unsqueeze(1)
    lengths = [seq_lens[request] - token for token, request in bucket]
    length = max(lengths)
    tokens = first + torch.arange(length, device=device)
    mask = None if min(lengths) == length else (tokens <= last)[:, None, None, :]
    slots = _slots(metadata, metadata.block_table[requests], torch.minimum(tokens, last))
    token_index = torch.tensor([starts[request] for _, request in bucket], device=device)
    return _DecodeBatch(token_index, layout.rows(slots.flatten()), length, mask)


def _window_start(params: AttentionParams, position: int) -> int:
    """First token that `position` reads."""
    return 0 if params.sliding_window is None else max(0, position - params.sliding_window + 1)


def _slots(metadata: AttentionMetadata, block_table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Slots of `tokens` [..., n], by the block tables [..., max_blocks] of their requests."""
    blocks = block_table.long().gather(-1, tokens // metadata.block_size)
    return blocks * metadata.block_size + tokens % metadata.block_size
