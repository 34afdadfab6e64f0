"""How heads, features and vocabulary divide over TP ranks, and layers over PP stages; and which sizes are legal.

Sizes that do not divide are padded with zero weights where that is exact, so every rank of a stage has equal
shapes: a padded head has zero values and zero output columns, a padded feature has a zero gate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Rows start:stop of a full dimension that one rank holds, in `size` rows of its own (the rest is padding)."""

    start: int
    stop: int
    size: int

    @property
    def padded(self) -> bool:
        return self.stop - self.start < self.size

    def times(self, width: int) -> Shard:
        """The same share counted in elements, each unit being `width` of them."""
        return Shard(self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True)
class HeadShard:
    """The query and KV heads of one rank, in heads. query.size is a multiple of key_value.size."""

    query: Shard
    key_value: Shard


def shard_in_order(full: int, rank: int, num_ranks: int) -> Shard:
    """ceil(full / num_ranks) rows each, so that in the concatenation of all ranks the padding comes last."""
    size = -(-full // num_ranks)
    start = min(rank * size, full)
    return Shard(start, min(start + size, full), size)


def shard_balanced(full: int, rank: int, num_ranks: int) -> Shard:
    """Real rows differ by at most one between ranks: none is left without as long as there are num_ranks of them."""
    base, remainder = divmod(full, num_ranks)
    start = rank * base + min(rank, remainder)
    return Shard(start, start + base + (rank < remainder), base + (remainder > 0))


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> HeadShard:
    """Whole KV heads with their query heads; with more ranks than KV heads, a KV head's queries are divided.

    Raises:
        ValueError: A rank would hold no head, or KV heads cannot be replicated equally.
    """
    if not _heads_divide(num_heads, num_kv_heads, num_ranks):
        raise ValueError(
            f"tensor_parallel_size {num_ranks} does not suit {num_heads} attention heads with {num_kv_heads} KV heads"
        )
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv = shard_balanced(num_kv_heads, rank, num_ranks)
        return HeadShard(Shard(kv.start * group, kv.stop * group, kv.size * group), kv)
    replicas = num_ranks // num_kv_heads
    kv_head, replica = divmod(rank, replicas)
    part = shard_balanced(group, replica, replicas)
    first = kv_head * group
    return HeadShard(Shard(first + part.start, first + part.stop, part.size), Shard(kv_head, kv_head + 1, 1))


def legal_tensor_parallel_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Every tensor_parallel_size at which each rank has at least one real head and one real MLP feature."""
    return [
        size
        for size in range(1, num_heads + 1)
        if _heads_divide(num_heads, num_kv_heads, size) and size <= intermediate_size
    ]


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Consecutive layers of one stage. A remainder goes to the stages after the first, the last one first spared:
    it also holds the LM head.

    Raises:
        ValueError: There are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(f"pipeline_parallel_size {num_stages} is larger than the model's {num_layers} layers")
    base, remainder = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0, num_stages - 1] if num_stages > 1 else [0]
    sizes = [base] * num_stages
    for index in order[:remainder]:
        sizes[index] += 1
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def _heads_divide(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    return num_ranks <= num_kv_heads or (num_ranks % num_kv_heads == 0 and num_ranks <= num_heads)
