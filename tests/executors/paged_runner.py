"""Drives a CausalLM by hand: block tables, slots and metadata of mixed batches, without scheduler or worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from executors.attention.base import AttentionMetadata
from executors.config import ModelConfig
from executors.loader import load_model
from executors.model_config import ResolvedModelConfig, resolve_model_config
from executors.models.base import CausalLM
from executors.parallel_state import ParallelState


class PagedRequest:
    """A token sequence that is computed chunk by chunk into its own blocks."""

    def __init__(self, tokens: Sequence[int], prompt_len: int | None = None) -> None:
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens) if prompt_len is None else prompt_len
        self.num_computed = 0
        self.blocks: list[int] = []
        self.logits: list[torch.Tensor] = []


class PagedRunner:
    """Owns the KV caches of one model. Blocks are handed out in a shuffled order, block 0 never."""

    def __init__(self, model: CausalLM, *, num_blocks: int = 128, block_size: int = 4, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free = order.tolist()
        self.specs = model.kv_cache_specs(block_size, 4)
        self.caches = {}
        for layer in model.attention_layers():
            shape = layer.backend.kv_cache_shape(
                num_blocks, block_size, layer.params.num_kv_heads, layer.params.head_size
            )
            # Stale numbers, to prove that no weight is given to slots that were not written.
            self.caches[layer.layer_name] = torch.full(shape, 1e4)
        model.bind_kv_caches(self.caches)

    def metadata(self, batch: Sequence[tuple[PagedRequest, int]]) -> AttentionMetadata:
        """For (request, number of new tokens) pairs, whose blocks are allocated here."""
        starts, seq_lens, slots = [0], [], []
        for request, count in batch:
            end = request.num_computed + count
            while len(request.blocks) * self.block_size < end:
                request.blocks.append(self.free.pop())
            slots += [
                request.blocks[t // self.block_size] * self.block_size + t % self.block_size
                for t in range(request.num_computed, end)
            ]
            starts.append(starts[-1] + count)
            seq_lens.append(end)
        width = max(len(request.blocks) for request, _ in batch)
        table = [request.blocks + [0] * (width - len(request.blocks)) for request, _ in batch]
        return AttentionMetadata(
            num_reqs=len(batch),
            num_tokens=starts[-1],
            max_query_len=max(count for _, count in batch),
            max_seq_len=max(seq_lens),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_size=self.block_size,
            prompt_lens=torch.tensor([request.prompt_len for request, _ in batch], dtype=torch.int32),
        )

    def inputs(self, batch: Sequence[tuple[PagedRequest, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, positions) of the same pairs."""
        ids, positions = [], []
        for request, count in batch:
            span = range(request.num_computed, request.num_computed + count)
            ids += [request.tokens[t] for t in span]
            positions += list(span)
        return torch.tensor(ids), torch.tensor(positions)

    @torch.inference_mode()
    def step(
        self, batch: Sequence[tuple[PagedRequest, int]], hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one mixed batch; returns the hidden states and, on the last stage, appends logits to the requests."""
        metadata = self.metadata(batch)
        ids, positions = self.inputs(batch)
        hidden = self.model(ids, positions, dict.fromkeys(self.caches, metadata), hidden_states)
        logits = self.model.compute_logits(hidden) if self.model.is_last_stage else None
        start = 0
        for request, count in batch:
            if logits is not None:
                request.logits += list(logits[start : start + count])
            request.num_computed += count
            start += count
        return hidden

    def run_schedule(self, requests: Sequence[PagedRequest], chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """`chunks[s][r]` new tokens of request r in step s (0: not in the batch); returns all logits per request."""
        for counts in chunks:
            self.step([(request, count) for request, count in zip(requests, counts, strict=True) if count])
        return [torch.stack(request.logits) for request in requests]


def random_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def resolve(model_dir: Path, **settings: object) -> ResolvedModelConfig:
    return resolve_model_config(ModelConfig(str(model_dir), **settings))  # type: ignore[arg-type]


def load(model_dir: Path, parallel: ParallelState | None = None, **settings: object) -> CausalLM:
    return load_model(
        resolve(model_dir, **settings), parallel or ParallelState(), torch.device("cpu"), show_progress=False
    )
