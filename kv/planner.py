"""From layer specs and memory to one KVCacheConfig per worker. Called by EngineCore once, at start-up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv.config import CacheConfig
from kv.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor

logger = logging.getLogger(__name__)

MAX_PADDING = 1.1
"""Memory a grouping may cost relative to the cheapest one. Fewer, larger groups mean fewer block tables."""


@dataclass(frozen=True)
class CapacityReport:
    """What the pool holds.

    Attributes:
        num_blocks: Usable blocks.
        num_tokens: Tokens of KV when every sequence is `max_model_len` long.
        max_concurrency: Sequences of `max_model_len` tokens that fit at once.
        bytes_per_worker: KV memory of each worker.
    """

    num_blocks: int
    block_size: int
    num_tokens: int
    max_model_len: int
    max_concurrency: float
    bytes_per_worker: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{max(self.bytes_per_worker) / 2**20:,.0f} MiB per worker; room for {self.num_tokens:,} tokens, "
            f"{self.max_concurrency:.1f} requests of {self.max_model_len:,} tokens at once"
        )


@dataclass(frozen=True)
class KVCachePlan:
    """The planner's result.

    Attributes:
        configs: One per worker, in rank order.
        max_model_len: As asked, or the largest that fits when auto-fit was asked.
        report: For the log and the metrics.
    """

    configs: list[KVCacheConfig]
    max_model_len: int
    report: CapacityReport


def plan_kv_cache(
    specs: Sequence[Mapping[str, KVCacheSpec]],
    available_bytes: Sequence[int],
    cache_config: CacheConfig,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    auto_fit: bool = False,
) -> KVCachePlan:
    """Divide memory into blocks.

    Args:
        specs: Per worker (rank order), the spec of each attention layer it holds.
        available_bytes: Per worker, memory for KV. `cache_config.kv_cache_memory_bytes` replaces all of them, and
            `num_gpu_blocks_override` makes them unneeded.
        max_model_len: Longest sequence; at least one of these must fit.
        max_num_batched_tokens: Of one step; sliding-window layers need room for it besides the window.
        auto_fit: Take the largest length that fits, up to `max_model_len`, instead of refusing.

    Raises:
        ValueError: No attention layers, contradicting specs, or a pool too small; the text has the numbers.
    """
    if len(specs) != len(available_bytes):
        raise ValueError(f"{len(specs)} workers gave specs, {len(available_bytes)} gave available memory")
    layers = _all_layers(specs)
    groups = _group_layers(layers, max_model_len, max_num_batched_tokens)
    tensors = [_worker_tensors(groups, worker_specs) for worker_specs in specs]
    page_bytes = [sum(tensor.page_size_bytes for tensor in worker_tensors) for worker_tensors in tensors]
    num_blocks = _num_blocks(page_bytes, available_bytes, cache_config)
    configs = [
        KVCacheConfig(
            num_blocks=num_blocks,
            groups=tuple(
                KVCacheGroup(tuple(name for name in group.layer_names if name in worker_specs), group.spec)
                for group in groups
            ),
            tensors=worker_tensors,
        )
        for worker_specs, worker_tensors in zip(specs, tensors, strict=True)
    ]
    config = configs[0]

    fits = config.max_tokens_per_sequence(max_num_batched_tokens, max_model_len) if num_blocks > 1 else 0
    if fits < max_model_len:
        if not auto_fit or fits < 1:
            raise ValueError(_too_small(config, max_model_len, max_num_batched_tokens, fits, page_bytes))
        logger.info("max_model_len set to %d of at most %d: what the KV cache holds", fits, max_model_len)
        max_model_len = fits
    concurrency = (num_blocks - 1) / config.blocks_per_sequence(max_model_len, max_num_batched_tokens)
    report = CapacityReport(
        num_blocks=num_blocks - 1,
        block_size=config.groups[0].spec.block_size,
        num_tokens=int(concurrency * max_model_len),
        max_model_len=max_model_len,
        max_concurrency=concurrency,
        bytes_per_worker=tuple(num_blocks * size for size in page_bytes),
    )
    return KVCachePlan(configs, max_model_len, report)


def _all_layers(specs: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Layers of the whole model in the order of ranks, so of pipeline stages."""
    layers: dict[str, KVCacheSpec] = {}
    for rank, worker_specs in enumerate(specs):
        for name, spec in worker_specs.items():
            if layers.setdefault(name, spec) != spec:
                raise ValueError(f"layer {name}: worker {rank} has {spec}, another worker {layers[name]}")
    if not layers:
        raise ValueError("no worker has an attention layer with a KV cache")
    sizes = {spec.block_size for spec in layers.values()}
    if len(sizes) > 1:
        raise ValueError(f"all layers must have one block size, got {sorted(sizes)}")
    return layers


def _group_layers(
    layers: Mapping[str, KVCacheSpec], max_model_len: int, max_num_batched_tokens: int
) -> list[KVCacheGroup]:
    """Groups of layers of one spec, with about as many layers in each.

    A block has one page for each tensor, and as many tensors as the largest group has layers: smaller groups waste
    the rest. So many window layers and few full ones (5 to 1 in Gemma 3) are better several groups of the few.
    """
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        kinds.setdefault(spec, []).append(name)
    counts = {spec: len(names) for spec, names in kinds.items()}

    def pages_per_sequence(group_size: int) -> int:
        return sum(
            -(-count // group_size) * group_size * spec.max_blocks(max_model_len, max_num_batched_tokens)
            for spec, count in counts.items()
        )

    sizes = range(1, max(counts.values()) + 1)
    cheapest = min(map(pages_per_sequence, sizes))
    group_size = max(size for size in sizes if pages_per_sequence(size) <= MAX_PADDING * cheapest)
    groups = []
    for spec, names in kinds.items():
        # Dealt out in turn, so that each pipeline stage has its share of each group.
        num_groups = -(-len(names) // group_size)
        groups += [KVCacheGroup(tuple(names[first::num_groups]), spec) for first in range(num_groups)]
    return groups


def _worker_tensors(
    groups: Sequence[KVCacheGroup], worker_specs: Mapping[str, KVCacheSpec]
) -> tuple[KVCacheTensor, ...]:
    columns = [[name for name in group.layer_names if name in worker_specs] for group in groups]
    tensors = []
    for index in range(max(map(len, columns))):
        names = tuple(column[index] for column in columns if index < len(column))
        tensors.append(KVCacheTensor(names, max(worker_specs[name].page_size_bytes for name in names)))
    return tuple(tensors)


def _num_blocks(page_bytes: Sequence[int], available_bytes: Sequence[int], cache_config: CacheConfig) -> int:
    if cache_config.num_gpu_blocks_override is not None:
        return cache_config.num_gpu_blocks_override
    if cache_config.kv_cache_memory_bytes is not None:
        available_bytes = [cache_config.kv_cache_memory_bytes] * len(page_bytes)
    return min(
        max(0, available) // size for available, size in zip(available_bytes, page_bytes, strict=True) if size > 0
    )


def _too_small(
    config: KVCacheConfig, max_model_len: int, max_num_batched_tokens: int, fits: int, page_bytes: Sequence[int]
) -> str:
    needed = config.blocks_per_sequence(max_model_len, max_num_batched_tokens) + 1
    size = max(page_bytes)
    return (
        f"the KV cache is too small for one sequence of max_model_len {max_model_len}: that takes {needed} blocks "
        f"({needed * size / 2**20:,.1f} MiB per worker), and there are {config.num_blocks} "
        f"({config.num_blocks * size / 2**20:,.1f} MiB), enough for {fits} tokens; lower max_model_len (-1 fits it "
        f"to memory), or raise kv_cache_memory_bytes or gpu_memory_utilization"
    )
