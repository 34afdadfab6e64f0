"""The attention backend over the native CPU kernels, for layers computed one by one: bfloat16, any place in the grid.

Chosen by `executors.kernels.choice`; a model on one rank runs whole steps instead (`executors.kernels.step`).
"""

from __future__ import annotations

import torch

from executors.attention.base import AttentionBackend, AttentionMetadata, AttentionParams
from executors.kernels import ops
from executors.kernels.library import native_kernels


class NativeAttentionBackend(AttentionBackend):
    """Cache layout: `executors.kernels.ops.kv_cache_shape`. Everything must be bfloat16.

    All of a step's keys and values are in the cache before any query is computed: a request may read a prefix that
    another request of the same step writes.
    """

    name = "native"

    def __init__(self) -> None:
        """
        Raises:
            ValueError: The kernels cannot be built or run here.
        """
        kernels = native_kernels()
        if kernels is None:
            raise ValueError("attention_backend 'native' cannot be used: the CPU kernels are not available here")
        self._kernels = kernels

    @staticmethod
    def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return ops.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def forward(
        self,
        params: AttentionParams,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        qkv = torch.cat([query, key, value], dim=1).flatten(1)
        out = ops.attention(self._kernels, params, qkv, kv_cache, metadata)
        return out.unflatten(1, (params.num_heads, params.head_size))
