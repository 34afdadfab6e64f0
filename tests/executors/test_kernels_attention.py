"""Paged attention: right in mixed batches, and the same bits through prefill, chunks, decode, splits and sharing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import ops
from executors.kernels.library import NativeKernels
from tests.executors.kernel_cases import kernels, random_bf16

__all__ = ["kernels"]

PARAMS = [
    pytest.param(AttentionParams(9, 3, 64, 0.125), 16, id="smollm2"),
    pytest.param(AttentionParams(4, 1, 256, 0.0625, sliding_window=100), 16, id="gemma3-window"),
    pytest.param(AttentionParams(4, 2, 128, 0.1, logits_soft_cap=5.0), 32, id="soft-cap"),
    pytest.param(AttentionParams(3, 3, 80, 0.11), 64, id="head-80"),
    pytest.param(AttentionParams(3, 1, 48, 0.14, sliding_window=300), 256, id="long-window"),
    pytest.param(AttentionParams(32, 1, 32, 0.2), 128, id="multi-query"),
]


class Batcher:
    """Requests of known lengths with their blocks; steps compute any part of them."""

    def __init__(self, params: AttentionParams, lengths: list[int], block_size: int, shared_tokens: int = 0) -> None:
        self.params, self.block_size, self.lengths = params, block_size, lengths
        rng = random.Random(0)
        counts = [-(-length // block_size) for length in lengths]
        free = list(range(1, sum(counts) + 1))
        rng.shuffle(free)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            for block in range(count):
                shared = request > 0 and block < shared_tokens // block_size
                self.table[request, block] = self.table[0, block] if shared else free.pop()
        self.num_blocks = sum(counts) + 1
        columns = (params.num_heads + 2 * params.num_kv_heads) * params.head_size
        self.qkv = [random_bf16(length, columns, seed=request) for request, length in enumerate(lengths)]
        for request in range(1, len(lengths)):
            self.qkv[request][:shared_tokens] = self.qkv[0][:shared_tokens]
        self.computed = [0] * len(lengths)

    def new_cache(self) -> torch.Tensor:
        params = self.params
        shape = ops.kv_cache_shape(self.num_blocks, self.block_size, params.num_kv_heads, params.head_size)
        return torch.zeros(shape, dtype=torch.bfloat16)

    def metadata(self, requests: list[int], spans: list[tuple[int, int]]) -> AttentionMetadata:
        slots = [
            int(self.table[request, token // self.block_size]) * self.block_size + token % self.block_size
            for request, (start, stop) in zip(requests, spans, strict=True)
            for token in range(start, stop)
        ]
        starts = [0]
        for start, stop in spans:
            starts.append(starts[-1] + stop - start)
        return AttentionMetadata(
            len(requests), starts[-1], max(b - a for a, b in spans), max(b for _, b in spans),
            torch.tensor(starts, dtype=torch.int32), torch.tensor([b for _, b in spans], dtype=torch.int32),
            self.table[requests].contiguous(), torch.tensor(slots), self.block_size,
        )  # fmt: skip

    def compute(
        self, kernels: NativeKernels, cache: torch.Tensor, requests: list[int], spans: list[tuple[int, int]],
        num_threads: int = 0,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Output rows [tokens, heads * head_size] of each request."""
        parts = [self.qkv[request][start:stop] for request, (start, stop) in zip(requests, spans, strict=True)]
        out = ops.attention(
            kernels, self.params, torch.cat(parts), cache, self.metadata(requests, spans), num_threads=num_threads
        )
        return list(out.split([stop - start for start, stop in spans]))

    def dense(self, request: int, readable: torch.Tensor) -> torch.Tensor:
        """float64 attention of all tokens; `readable` [tokens, tokens]."""
        params = self.params
        sizes = [n * params.head_size for n in (params.num_heads, params.num_kv_heads, params.num_kv_heads)]
        q, k, v = (part.double().unflatten(1, (-1, params.head_size)) for part in self.qkv[request].split(sizes, 1))
        group = params.num_heads // params.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
        if params.logits_soft_cap is not None:
            scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
        scores = scores.masked_fill(~readable, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def causal(length: int, window: int | None) -> torch.Tensor:
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    readable = key <= query
    return readable if window is None else readable & (key > query - window)


@pytest.mark.parametrize(("params", "block_size"), PARAMS)
def test_a_batch_of_prompts_matches_dense_attention(
    kernels: NativeKernels, params: AttentionParams, block_size: int
) -> None:
    batch = Batcher(params, [300, 1, 33, 16, 530], block_size)
    outs = batch.compute(kernels, batch.new_cache(), list(range(5)), [(0, n) for n in batch.lengths])
    for request, out in enumerate(outs):
        exact = batch.dense(request, causal(batch.lengths[request], params.sliding_window))
        # Weights are rounded to bfloat16 (2^-9 of each), the result once more (2^-9); values are below 5.
        assert (out.double() - exact).abs().max() < 5 * 2.0**-8


@pytest.mark.parametrize(("params", "block_size"), PARAMS)
def test_a_token_has_the_same_bits_through_prefill_chunks_and_decode(
    kernels: NativeKernels, params: AttentionParams, block_size: int
) -> None:
    batch = Batcher(params, [280, 33, 70, 1], block_size)
    whole = batch.compute(kernels, batch.new_cache(), list(range(4)), [(0, n) for n in batch.lengths])
    rng, cache = random.Random(1), batch.new_cache()
    done, pieces = [0] * 4, [[] for _ in range(4)]
    while any(a < b for a, b in zip(done, batch.lengths, strict=True)):
        requests = [r for r in range(4) if done[r] < batch.lengths[r] and rng.random() < 0.8]
        if not requests:
            continue
        spans = []
        for request in requests:
            size = rng.choice([1, 1, 2, 5, 31, 120])
            spans.append((done[request], min(done[request] + size, batch.lengths[request])))
            done[request] = spans[-1][1]
        outs = batch.compute(kernels, cache, requests, spans, num_threads=rng.choice([1, 2]))
        for request, out in zip(requests, outs, strict=True):
            pieces[request].append(out)
    for request in range(4):
        assert torch.equal(torch.cat(pieces[request]), whole[request])


def test_a_lone_long_request_is_split_without_changing_a_bit(kernels: NativeKernels) -> None:
    """With two threads its chunks are computed apart and merged; with one they are not."""
    batch = Batcher(AttentionParams(4, 1, 64, 0.125), [1100], 16)
    cache = batch.new_cache()
    batch.compute(kernels, cache, [0], [(0, 1099)])
    split = batch.compute(kernels, cache, [0], [(1099, 1100)], num_threads=2)
    whole = batch.compute(kernels, cache, [0], [(1099, 1100)], num_threads=1)
    assert torch.equal(split[0], whole[0])
    exact = batch.dense(0, causal(1100, None))[-1:]
    assert (split[0].double() - exact).abs().max() < 2.0**-8


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_requests_behind_a_shared_prefix_have_the_bits_they_have_alone(kernels: NativeKernels, new_tokens: int) -> None:
    lengths = [600, 545, 1000, 513 + new_tokens, 300]
    batch = Batcher(AttentionParams(6, 2, 64, 0.125), lengths, 16, shared_tokens=256)
    batch.table[3, : 512 // 16] = batch.table[0, : 512 // 16]  # two members share more than the others
    batch.qkv[3][:512] = batch.qkv[0][:512]
    cache = batch.new_cache()
    for request, length in enumerate(lengths):
        batch.compute(kernels, cache, [request], [(0, length - new_tokens)])
    spans = [(length - new_tokens, length) for length in lengths]
    together = batch.compute(kernels, cache, list(range(5)), spans)
    for request in range(5):
        alone = batch.compute(kernels, cache, [request], [spans[request]], num_threads=1)
        assert torch.equal(together[request], alone[0]), request


@pytest.mark.parametrize("window", [None, 20])
def test_prompt_tokens_of_a_prefix_lm_read_later_ones(kernels: NativeKernels, window: int | None) -> None:
    batch = Batcher(AttentionParams(2, 1, 32, 0.2, sliding_window=window, non_causal=True), [50], 16)
    metadata = replace(batch.metadata([0], [(0, 50)]), prompt_lens=torch.tensor([37], dtype=torch.int32))
    out = ops.attention(kernels, batch.params, batch.qkv[0].clone(), batch.new_cache(), metadata)
    query, key = torch.arange(50)[:, None], torch.arange(50)[None]
    readable = (key <= query) | ((query < 37) & (key < 37))
    if window is not None:
        readable &= (key > query - window) & (key < query + window)
    assert (out.double() - batch.dense(0, readable)).abs().max() < 5 * 2.0**-8


def test_pages_may_lie_further_apart_than_they_are_long(kernels: NativeKernels) -> None:
    batch = Batcher(AttentionParams(4, 2, 32, 0.2), [60], 16)
    dense = batch.new_cache()
    padded = torch.zeros(dense.shape[0], 5000, dtype=torch.bfloat16)
    view = padded.as_strided(dense.shape, (5000, *dense.stride()[1:]))
    same = batch.compute(kernels, dense, [0], [(0, 60)]), batch.compute(kernels, view, [0], [(0, 60)])
    assert torch.equal(same[0][0], same[1][0])
    assert torch.equal(view, dense)


def test_impossible_batches_are_refused(kernels: NativeKernels) -> None:
    batch = Batcher(AttentionParams(2, 1, 32, 0.2), [40], 16)
    cache = batch.new_cache()
    good = batch.metadata([0], [(0, 40)])
    for change, message in (
        ({"slot_mapping": good.slot_mapping + 100}, "slot lies outside the KV cache"),
        ({"block_table": good.block_table + 100}, "block id lies outside the KV cache"),
        ({"seq_lens": torch.tensor([30], dtype=torch.int32)}, "shorter than its queries"),
        ({"query_start_loc": torch.tensor([0, 41], dtype=torch.int32)}, "query_start_loc"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.attention(kernels, batch.params, batch.qkv[0].clone(), cache, replace(good, **change))
    with pytest.raises(ValueError, match="block_size must be one of"):
        ops.kv_cache_shape(10, 8, 1, 32)
    with pytest.raises(ValueError, match="head_size must be a multiple of 16"):
        ops.kv_cache_shape(10, 16, 1, 40)
