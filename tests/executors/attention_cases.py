"""Mixed batches for attention backends, and the plain dense attention they are held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from executors.attention.base import AttentionBackend, AttentionMetadata, AttentionParams

# (cached tokens, new tokens) per request: decodes of very different lengths, first and later prompt chunks, block
# boundaries on both sides.
MIXED = [(0, 1), (300, 1), (15, 1), (16, 1), (17, 1), (0, 37), (31, 5), (290, 20), (0, 2), (64, 1)]


@dataclass
class Case:
    """One batch: all keys and values by request, and the inputs of the new tokens."""

    params: AttentionParams
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    metadata: AttentionMetadata
    spans: list[tuple[int, int]]


def make_case(
    params: AttentionParams,
    spans: list[tuple[int, int]],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    prompt_lens: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """`spans` are (cached, new) token counts. Blocks behind a sliding window are block 0, as after being freed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    totals = [cached + new for cached, new in spans]
    num_blocks = sum(-(-total // block_size) for total in totals) + 1
    order = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    table = torch.zeros(len(spans), max(-(-total // block_size) for total in totals), dtype=torch.int32)
    slots: list[int] = []
    starts = [0]
    for request, (cached, new) in enumerate(spans):
        first = 0 if params.sliding_window is None else max(0, cached - params.sliding_window + 1)
        for block in range(first // block_size, -(-(cached + new) // block_size)):
            table[request, block] = next(order)
        slots += [
            int(table[request, token // block_size]) * block_size + token % block_size
            for token in range(cached, cached + new)
        ]
        starts.append(starts[-1] + new)
    metadata = AttentionMetadata(
        num_reqs=len(spans),
        num_tokens=starts[-1],
        max_query_len=max(new for _, new in spans),
        max_seq_len=max(totals),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(totals, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=block_size,
        prompt_lens=None if prompt_lens is None else torch.tensor(prompt_lens, dtype=torch.int32),
    )
    shape = (params.num_kv_heads, params.head_size)
    return Case(
        params,
        [random(total, *shape) for total in totals],
        [random(total, *shape) for total in totals],
        random(starts[-1], params.num_heads, params.head_size),
        metadata,
        spans,
    )


def run(
    backend: AttentionBackend,
    case: Case,
    *,
    cache_dtype: torch.dtype | None = None,
    unused: float = 0.0,
    extra_page_elements: int = 0,
) -> torch.Tensor:
    """Fill a cache with the cached tokens (slots of no token hold `unused`), then attend over the whole batch."""
    params, metadata = case.params, case.metadata
    num_blocks = int(metadata.block_table.max()) + 2
    shape = backend.kv_cache_shape(num_blocks, metadata.block_size, params.num_kv_heads, params.head_size)
    page = torch.Size(shape[1:]).numel()
    memory = torch.full((num_blocks, page + extra_page_elements), unused, dtype=cache_dtype or case.query.dtype)
    cache = memory[:, :page].unflatten(1, shape[1:])
    _write_cached(backend, case, cache)
    new = [slice(cached, cached + count) for cached, count in case.spans]
    return backend.forward(
        params,
        case.query,
        torch.cat([keys[span] for keys, span in zip(case.keys, new, strict=True)]),
        torch.cat([values[span] for values, span in zip(case.values, new, strict=True)]),
        cache,
        metadata,
    )


def _write_cached(backend: AttentionBackend, case: Case, cache: torch.Tensor) -> None:
    """Through the backend itself, request by request, as earlier steps would have; what they read does not matter."""
    writing = replace(case.params, sliding_window=1, non_causal=False)
    size = case.metadata.block_size
    for request, (cached, _) in enumerate(case.spans):
        window = case.params.sliding_window
        first = 0 if window is None else max(0, cached - window + 1) // size * size
        if cached == first:
            continue
        slots = [int(case.metadata.block_table[request, t // size]) * size + t % size for t in range(first, cached)]
        count = cached - first
        backend.forward(
            writing,
            torch.zeros(count, case.params.num_heads, case.params.head_size, dtype=case.query.dtype),
            case.keys[request][first:cached],
            case.values[request][first:cached],
            cache,
            AttentionMetadata(
                num_reqs=1,
                num_tokens=count,
                max_query_len=count,
                max_seq_len=cached,
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=torch.tensor([cached], dtype=torch.int32),
                block_table=case.metadata.block_table[request : request + 1],
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                block_size=size,
            ),
        )


def dense_attention(case: Case) -> torch.Tensor:
    """Each request on its own, in float64, by definition."""
    params, out, start = case.params, [], 0
    prompt_lens = case.metadata.prompt_lens
    for request, (cached, new) in enumerate(case.spans):
        group = params.num_heads // params.num_kv_heads
        q = case.query[start : start + new].double().transpose(0, 1)
        k = case.keys[request].double().transpose(0, 1).repeat_interleave(group, 0)
        v = case.values[request].double().transpose(0, 1).repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * params.scale
        if params.logits_soft_cap is not None:
            scores = torch.tanh(scores / params.logits_soft_cap) * params.logits_soft_cap
        position = torch.arange(cached, cached + new).unsqueeze(1)
        key = torch.arange(cached + new).unsqueeze(0)
        readable = key <= position
        if params.non_causal:
            prompt_len = cached + new if prompt_lens is None else int(prompt_lens[request])
            readable |= (position < prompt_len) & (key < prompt_len)
        if params.sliding_window is not None:
            readable &= (position - key).abs() < params.sliding_window
        scores = scores.masked_fill(~readable, float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += new
    return torch.cat(out)
