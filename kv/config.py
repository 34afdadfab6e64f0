"""Settings of the KV cache. Owned by kv/, composed into EngineConfig by engine_actors/."""

from __future__ import annotations

from dataclasses import dataclass

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CacheConfig:
    """How KV memory is sized, divided and shared.

    Attributes:
        block_size: Tokens per KV block. A power of two from 1 to 256.
        gpu_memory_utilization: Share (0, 1] of a CUDA device's memory the engine may use, weights included.
        kv_cache_memory_bytes: KV bytes per worker; overrides `gpu_memory_utilization` and any profiling.
        num_gpu_blocks_override: Exact number of blocks (any device); overrides every memory estimate.
        enable_prefix_caching: Share the KV blocks of equal prompt prefixes.
        cache_dtype: Element type of the KV cache; "auto" follows the model's dtype.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        size = self.block_size
        if not isinstance(size, int) or not 1 <= size <= 256 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two from 1 to 256, got {size!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive or None, got {value!r}")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype must be one of {CACHE_DTYPES}, got {self.cache_dtype!r}")
