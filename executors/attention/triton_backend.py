"""The CUDA attention backend: paged attention for mixed batches in Triton, without any host synchronisation."""

from __future__ import annotations

import torch
import triton

from executors.attention.base import AttentionBackend, AttentionMetadata, AttentionParams
from executors.attention.triton_kernels import attention_kernel, join_splits_kernel, write_cache_kernel

# tl.dot needs at least 16 rows.
_MIN_ROWS = 16
_PREFILL_ROWS = 64
_MAX_SPLITS = 16
# A split shorter than this costs more to join than it saves.
_MIN_KEYS_PER_SPLIT = 256
# Where the number of processors is unknown (the interpreter).
_DEFAULT_PROCESSORS = 108


class TritonAttentionBackend(AttentionBackend):
    """Cache layout [num_blocks, 2 (key, value), block_size, num_kv_heads, head_size], pages at any distance."""

    name = "triton"

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
        query, key, value = (_dense_heads(tensor) for tensor in (query, key, value))
        _write_cache(params, key, value, kv_cache, metadata)
        num_tokens = metadata.num_tokens
        group = params.num_heads // params.num_kv_heads
        decode_only = metadata.max_query_len == 1
        block_q = 1 if decode_only else max(1, _PREFILL_ROWS // triton.next_power_of_2(group))
        rows = max(_MIN_ROWS, triton.next_power_of_2(block_q * group))
        # Query blocks of all requests, each with one more than surely needed: an upper bound known without lengths.
        num_query_blocks = num_tokens // block_q + metadata.num_reqs
        num_splits = _num_splits(params, metadata, query.device) if decode_only else 1

        out = torch.empty((num_tokens, params.num_heads, params.head_size), dtype=query.dtype, device=query.device)
        partial = stats = out
        if num_splits > 1:
            split_rows = (num_tokens, params.num_heads, num_splits)
            partial = torch.empty((*split_rows, params.head_size), dtype=torch.float32, device=query.device)
            stats = torch.empty((*split_rows, 2), dtype=torch.float32, device=query.device)
        head_padded = max(16, triton.next_power_of_2(params.head_size))
        prompt_lens = metadata.prompt_lens
        attention_kernel[(num_query_blocks, params.num_kv_heads, num_splits)](
            out,
            partial,
            stats,
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.seq_lens if prompt_lens is None else prompt_lens,
            params.scale,
            params.logits_soft_cap or 0.0,
            metadata.num_reqs,
            query.stride(0),
            query.stride(1),
            kv_cache.stride(0),
            kv_cache.stride(1),
            metadata.block_table.stride(0),
            NUM_HEADS=params.num_heads,
            NUM_KV_HEADS=params.num_kv_heads,
            HEAD_SIZE=params.head_size,
            HEAD_PADDED=head_padded,
            BLOCK_SIZE=metadata.block_size,
            BLOCK_Q=block_q,
            BLOCK_M=rows,
            TILE=_tile(query.dtype, head_padded),
            WINDOW=params.sliding_window or 0,
            HAS_SOFT_CAP=params.logits_soft_cap is not None,
            NON_CAUSAL=params.non_causal,
            HAS_PROMPT_LENS=prompt_lens is not None,
            NUM_SPLITS=num_splits,
        )
        if num_splits > 1:
            join_splits_kernel[(num_tokens * params.num_heads,)](
                out,
                partial,
                stats,
                HEAD_SIZE=params.head_size,
                HEAD_PADDED=head_padded,
                NUM_SPLITS=num_splits,
            )
        return out


def _write_cache(
    params: AttentionParams,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    write_cache_kernel[(metadata.num_tokens,)](
        key,
        value,
        kv_cache,
        metadata.slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        BLOCK_SIZE=metadata.block_size,
        NUM_KV_HEADS=params.num_kv_heads,
        HEAD_SIZE=params.head_size,
        WIDTH=triton.next_power_of_2(params.num_kv_heads * params.head_size),
    )


def _dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels need each head's elements next to each other; views of a merged projection are so already."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tile(dtype: torch.dtype, head_padded: int) -> int:
    """Keys per tile, so that a tile of keys and one of values fit in shared memory beside the queries."""
    return max(16, min(64, 16384 // (head_padded * dtype.itemsize)))


def _num_splits(params: AttentionParams, metadata: AttentionMetadata, device: torch.device) -> int:
    """Programs that share the keys of one decode: enough to fill the device, each with work worth its cost."""
    num_keys = min(metadata.max_seq_len, params.sliding_window or metadata.max_seq_len)
    programs = metadata.num_reqs * params.num_kv_heads
    wanted = 2 * _num_processors(device) // programs
    useful = num_keys // _MIN_KEYS_PER_SPLIT
    limit = max(1, min(wanted, useful, _MAX_SPLITS))
    return 1 << (limit.bit_length() - 1)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
