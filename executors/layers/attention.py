"""The attention layer: what the model calls, what the planner and the runner know by name."""

from __future__ import annotations

import torch
from torch import nn

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.layers.context import LayerContext
from kv.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


class Attention(nn.Module):
    """Holds this rank's heads of one layer.

    Attributes:
        layer_name: Key of its spec, its KV cache and its metadata.
        kv_cache: Bound by `CausalLM.bind_kv_caches`, in the backend's layout.
    """

    def __init__(self, context: LayerContext, layer_name: str, params: AttentionParams) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.params = params
        self.backend = context.attention_backend
        self.kv_cache: torch.Tensor | None = None

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        params = self.params
        if params.sliding_window is not None and not params.non_causal:
            return SlidingWindowSpec(
                block_size, params.num_kv_heads, params.head_size, dtype_bytes, params.sliding_window
            )
        return FullAttentionSpec(block_size, params.num_kv_heads, params.head_size, dtype_bytes, params.non_causal)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: dict[str, AttentionMetadata],
    ) -> torch.Tensor:
        """query [n, num_heads, head_size], key and value [n, num_kv_heads, head_size] → [n, num_heads × head_size]."""
        if self.kv_cache is None:
            raise RuntimeError(f"layer {self.layer_name!r} has no KV cache: call bind_kv_caches first")
        out = self.backend.forward(self.params, query, key, value, self.kv_cache, metadata[self.layer_name])
        return out.reshape(out.shape[0], -1)
