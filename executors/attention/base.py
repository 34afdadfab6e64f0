"""The attention interface: one step's batch layout, and what a backend does with it.

Prefill, chunked prefill and decode are one case: each request brings `query_len >= 1` new tokens, and token i of them
attends to all cached tokens before it and to itself. The model runner builds one AttentionMetadata per KV group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """The flattened batch as one KV group sees it.

    Attributes:
        num_reqs, num_tokens: Sizes of the batch.
        max_query_len, max_seq_len: Largest of each in the batch.
        query_start_loc: int32 [num_reqs + 1], offsets of each request's new tokens in the flattened batch.
        seq_lens: int32 [num_reqs], cached tokens of each request including the new ones.
        block_table: int32 [num_reqs, max_blocks], block ids in token order; 0 where none (or behind a window).
        slot_mapping: int64 [num_tokens], where each new token's K/V goes: block id × block_size + offset.
        block_size: Tokens per block.
        prompt_lens: int32 [num_reqs], prompt tokens of each request; only non-causal layers read it. None: every new
            token is a prompt token.
        plans: What a backend worked out for this batch in its first layer and reuses in the others of the group.
            The runner leaves it empty.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    prompt_lens: torch.Tensor | None = None
    plans: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What is fixed for a layer.

    Attributes:
        num_heads, num_kv_heads: On this rank. Query head h reads KV head h // (num_heads // num_kv_heads).
        scale: Multiplies q·k.
        sliding_window: Token reads itself and this many - 1 tokens before it; None is all.
        logits_soft_cap: cap * tanh(score / cap) before softmax; None is off.
        non_causal: Prompt tokens of the same step also attend to later ones of their request.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    non_causal: bool = False


class AttentionBackend(ABC):
    """Stateless. The cache of a layer is one tensor of `kv_cache_shape`, whose layout the backend owns.

    Its dtype may differ from the model's. Allocate it zeroed: a backend may read slots no token was written to yet,
    whose numbers it gives no weight but which must be finite.
    """

    name: str

    @staticmethod
    @abstractmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape whose first dimension is num_blocks, holding keys and values."""

    @abstractmethod
    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write key/value [num_tokens, num_kv_heads, head_size] into the cache, then attend.

        Args:
            query: [num_tokens, num_heads, head_size].

        Returns:
            [num_tokens, num_heads, head_size].
        """
