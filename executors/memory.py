"""How much memory a worker may give to its KV cache, and the KV cache itself. Called by `executors.worker`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from executors.kernels.memory import huge_zeros
from executors.layers.attention import Attention
from kv.spec import KVCacheConfig

MAX_CPU_KV_BYTES = 4 << 30
"""Default limit on CPU, per node and engine: host memory is shared with everything else that runs there."""

CPU_KV_SHARE = 0.5
"""Default limit on CPU, as a share of the memory that is free when the engine starts."""


def default_cpu_kv_bytes(num_workers_on_node: int) -> int:
    """KV bytes of one CPU worker where `kv_cache_memory_bytes` is not set.

    The workers of a node divide half of its available memory (after weights are loaded), and at most 4 GiB.
    """
    return int(min(CPU_KV_SHARE * available_host_memory(), MAX_CPU_KV_BYTES)) // num_workers_on_node


def available_host_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process could still allocate: what the kernel has available, within its control groups' limits."""
    available = [_meminfo_bytes(proc / "meminfo", "MemAvailable")]
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            available += _free_in_groups(cgroup_root, relative, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            available += _free_in_groups(
                cgroup_root / "memory", relative, "memory.limit_in_bytes", "memory.usage_in_bytes",
                "total_inactive_file",
            )  # fmt: skip
    return max(0, min(available))


def _free_in_groups(root: Path, relative: str, limit_name: str, usage_name: str, reclaimable_name: str) -> list[int]:
    """Free bytes in the group and each of its parents that has a limit; a container may not see its parents."""
    free = []
    group = root / relative
    for directory in (group, *group.parents):
        limit, usage = directory / limit_name, directory / usage_name
        if limit.is_file() and usage.is_file():
            text = limit.read_text().strip()
            if text != "max":
                reclaimable = _stat_value(directory / "memory.stat", reclaimable_name)
                free.append(int(text) - int(usage.read_text()) + reclaimable)
        if directory == root:
            break
    return free


def _stat_value(path: Path, name: str) -> int:
    for line in path.read_text().splitlines() if path.is_file() else ():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _meminfo_bytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{path} has no {name}")


def allocate_kv_caches(
    config: KVCacheConfig, layers: Iterable[Attention], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Zeroed caches by layer name, in the layers' backend layouts, over the shared allocations of `config.tensors`.

    On CPU they lie on huge pages, which take memory only once they are written.

    Raises:
        ValueError: The config does not cover the layers, or a layer's page is larger than its tensor's.
    """
    by_name = {layer.layer_name: layer for layer in layers}
    specs = {name: group.spec for group in config.groups for name in group.layer_names}
    caches: dict[str, torch.Tensor] = {}
    for tensor in config.tensors:
        size = (config.num_blocks * tensor.page_size_bytes,)
        if device.type == "cpu":
            memory = huge_zeros(size, torch.uint8)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        for name in tensor.layer_names:
            if name not in by_name or name not in specs:
                raise ValueError(f"KV cache layer {name!r} is not one of this worker's: {sorted(by_name)}")
            spec = specs[name]
            shape = by_name[name].backend.kv_cache_shape(
                config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
            )
            caches[name] = _paged_view(memory.view(dtype), shape, tensor.page_size_bytes // dtype.itemsize, name)
    missing = by_name.keys() - caches.keys()
    if missing:
        raise ValueError(f"the KV cache config has no memory for layers {sorted(missing)}")
    return caches


def _paged_view(memory: torch.Tensor, shape: tuple[int, ...], page_elements: int, name: str) -> torch.Tensor:
    """`memory` as `shape` [num_blocks, ...], block b at the beginning of page b."""
    block_elements = math.prod(shape[1:])
    if block_elements > page_elements:
        raise ValueError(f"layer {name}: a block has {block_elements} elements, its page {page_elements}")
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return memory.as_strided(shape, (page_elements, *strides[1:]))
