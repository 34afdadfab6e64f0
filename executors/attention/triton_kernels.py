"""The Triton kernels of `executors.attention.triton_backend`: writing the cache, attention, and joining split results.

The softmax is computed online over tiles of keys (arXiv:2205.14135). A long cache of a few decodes is divided among
programs, whose partial results a second kernel joins (as in Flash-Decoding).
"""

# mypy: ignore-errors
# Kernels are compiled by Triton: their arguments and values have its types, not Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_cache_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slot_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_value_offset,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per new token: all its keys and values. WIDTH: power of two from NUM_KV_HEADS × HEAD_SIZE on."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    element = tl.arange(0, WIDTH)
    inside = element < NUM_KV_HEADS * HEAD_SIZE
    head, dim = element // HEAD_SIZE, element % HEAD_SIZE
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim, mask=inside)
    value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + dim, mask=inside)
    target = cache_ptr + slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_SIZE)
    tl.store(target + element, key.to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(target + cache_value_offset + element, value.to(cache_ptr.dtype.element_ty), mask=inside)


# These vary from step to step; specialising on their divisibility would compile again in the middle of serving.
@triton.jit(do_not_specialize=["num_reqs", "table_stride"])
def attention_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_ptr,
    cache_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    prompt_len_ptr,
    scale,
    soft_cap,
    num_reqs,
    query_token_stride,
    query_head_stride,
    cache_block_stride,
    cache_value_offset,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    NON_CAUSAL: tl.constexpr,
    HAS_PROMPT_LENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """BLOCK_Q new tokens of one request, for the query heads of one KV head, over one of NUM_SPLITS parts of the keys.

    Row r of the BLOCK_M rows is token r // group, query head r % group. Grid: (query blocks, KV heads, splits), where
    request i owns the query blocks from query_start[i] // BLOCK_Q + i on: at least as many as it needs, so the host
    need not know the lengths.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # The last request whose first query block is not after this one.
    low = query_block * 0
    high = low + num_reqs
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle
    request = low
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    first_query = (query_block - query_start // BLOCK_Q - request) * BLOCK_Q
    if first_query < num_queries:
        seq_len = tl.load(seq_len_ptr + request)
        position_offset = seq_len - num_queries

        row = tl.arange(0, BLOCK_M)
        query_index = first_query + row // GROUP
        row_inside = (row < BLOCK_Q * GROUP) & (query_index < num_queries)
        position = position_offset + query_index
        dim = tl.arange(0, HEAD_PADDED)
        dim_inside = dim < HEAD_SIZE
        token = (query_start + query_index).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        query = tl.load(
            query_ptr + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=row_inside[:, None] & dim_inside[None, :],
            other=0.0,
        )

        # Keys that any row reads: no others are loaded.
        end_key = position_offset + tl.minimum(first_query + BLOCK_Q, num_queries)
        prompt_end = 0
        if NON_CAUSAL:
            prompt_end = seq_len
            if HAS_PROMPT_LENS:
                prompt_end = tl.minimum(seq_len, tl.load(prompt_len_ptr + request))
            if position_offset + first_query < prompt_end:
                end_key = tl.maximum(end_key, prompt_end)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(0, position_offset + first_query - WINDOW + 1)
        split_begin = first_key
        split_end = end_key
        if NUM_SPLITS > 1:
            share = tl.cdiv(tl.cdiv(end_key - first_key, TILE), NUM_SPLITS) * TILE
            split_begin = first_key + split * share
            split_end = tl.minimum(end_key, split_begin + share)

        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        accumulated = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
        for tile_begin in range(split_begin, split_end, TILE):
            key_index = tile_begin + tl.arange(0, TILE)
            key_inside = key_index < split_end
            block = tl.load(
                table_ptr + request.to(tl.int64) * table_stride + key_index // BLOCK_SIZE, mask=key_inside, other=0
            ).to(tl.int64)
            location = (
                block * cache_block_stride + key_index % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
            )
            loaded = key_inside[:, None] & dim_inside[None, :]
            key = tl.load(cache_ptr + location[:, None] + dim[None, :], mask=loaded, other=0.0)
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
            if HAS_SOFT_CAP:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities.
                scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
            readable = key_index[None, :] <= position[:, None]
            if NON_CAUSAL:
                readable = readable | ((position[:, None] < prompt_end) & (key_index[None, :] < prompt_end))
            if WINDOW > 0:
                readable = readable & (key_index[None, :] > position[:, None] - WINDOW)
                if NON_CAUSAL:
                    readable = readable & (key_index[None, :] < position[:, None] + WINDOW)
            scores = tl.where(readable & key_inside[None, :], scores, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            # Rows that have read nothing yet stay at -inf; subtracting that from itself would give NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp(scores - shift[:, None])
            rescale = tl.exp(maximum - shift)
            maximum = new_maximum
            total = total * rescale + tl.sum(weights, axis=1)
            value = tl.load(
                cache_ptr + cache_value_offset + location[:, None] + dim[None, :], mask=loaded, other=0.0
            ).to(query.dtype)
            accumulated = accumulated * rescale[:, None] + tl.dot(
                weights.to(query.dtype), value, input_precision="ieee"
            )

        out_row = token * NUM_HEADS + head
        out_mask = row_inside[:, None] & dim_inside[None, :]
        if NUM_SPLITS == 1:
            result = accumulated / total[:, None]
            tl.store(
                out_ptr + out_row[:, None] * HEAD_SIZE + dim[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=out_mask,
            )
        else:
            split_row = out_row * NUM_SPLITS + split
            tl.store(partial_ptr + split_row[:, None] * HEAD_SIZE + dim[None, :], accumulated, mask=out_mask)
            tl.store(stats_ptr + split_row * 2, maximum, mask=row_inside)
            tl.store(stats_ptr + split_row * 2 + 1, total, mask=row_inside)


@triton.jit
def join_splits_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One program per token and head. NUM_SPLITS is a power of two; splits without keys have maximum -inf, total 0."""
    row = tl.program_id(0).to(tl.int64)
    split_row = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    maxima = tl.load(stats_ptr + split_row * 2)
    totals = tl.load(stats_ptr + split_row * 2 + 1)
    weights = tl.exp(maxima - tl.max(maxima, axis=0))
    dim = tl.arange(0, HEAD_PADDED)
    inside = dim < HEAD_SIZE
    partials = tl.load(partial_ptr + split_row[:, None] * HEAD_SIZE + dim[None, :], mask=inside[None, :], other=0.0)
    result = tl.sum(partials * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    tl.store(out_ptr + row * HEAD_SIZE + dim, result.to(out_ptr.dtype.element_ty), mask=inside)
