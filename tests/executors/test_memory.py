"""Free memory within control groups, and KV caches that share allocations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executors.attention.torch_backend import TorchAttentionBackend
from executors.memory import MAX_CPU_KV_BYTES, allocate_kv_caches, available_host_memory, default_cpu_kv_bytes
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheTensor, SlidingWindowSpec

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 * 1024**2} kB\nMemAvailable: {8 * 1024**2} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/user/job\n")
    return tmp_path / "proc"


def test_without_limits_what_the_kernel_has_available_counts(proc: Path, tmp_path: Path) -> None:
    write(tmp_path / "cgroup/user/job/memory.max", "max\n")
    write(tmp_path / "cgroup/user/job/memory.current", f"{GIB}\n")
    assert available_host_memory(proc, tmp_path / "cgroup") == 8 * GIB


def test_the_tightest_control_group_on_the_way_up_counts_and_page_cache_is_free(proc: Path, tmp_path: Path) -> None:
    for group, limit, used in (("user/job", 6, 1), ("user", 5, 3)):
        write(tmp_path / "cgroup" / group / "memory.max", f"{limit * GIB}\n")
        write(tmp_path / "cgroup" / group / "memory.current", f"{used * GIB}\n")
    write(tmp_path / "cgroup/user/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    assert available_host_memory(proc, tmp_path / "cgroup") == 3 * GIB


def test_version_1_groups_count_too(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "3:cpu:/\n5:memory:/docker/abc\n")
    # A container sees its own group at the root of the mount.
    write(tmp_path / "cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(tmp_path / "cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert available_host_memory(proc, tmp_path / "cgroup") == GIB


def test_the_default_is_bounded_and_divided_among_the_workers_of_a_node() -> None:
    assert 0 < default_cpu_kv_bytes(1) <= MAX_CPU_KV_BYTES
    assert default_cpu_kv_bytes(4) <= MAX_CPU_KV_BYTES // 4


def layer(name: str) -> Any:
    return SimpleNamespace(layer_name=name, backend=TorchAttentionBackend())


def test_layers_of_different_groups_share_pages_and_smaller_pages_begin_each() -> None:
    full = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=4, dtype_bytes=4)
    window = SlidingWindowSpec(block_size=2, num_kv_heads=1, head_size=4, dtype_bytes=4, sliding_window=8)
    config = KVCacheConfig(
        num_blocks=3,
        groups=(KVCacheGroup(("f0", "f1"), full), KVCacheGroup(("w0",), window)),
        tensors=(
            KVCacheTensor(("f0", "w0"), full.page_size_bytes),
            KVCacheTensor(("f1",), full.page_size_bytes),
        ),
    )
    caches = allocate_kv_caches(config, [layer(n) for n in ("f0", "f1", "w0")], torch.float32, torch.device("cpu"))
    assert caches["f0"].shape == (3, 2, 2, 2, 4)
    assert caches["w0"].shape == (3, 2, 2, 1, 4)
    assert not any(cache.any() for cache in caches.values())
    caches["w0"][1] = 1.0
    assert caches["f0"][1].flatten()[: window.page_size_bytes // 4].eq(1).all()
    assert not caches["f0"][[0, 2]].any()
    assert not caches["f1"].any()


def test_a_config_that_does_not_cover_the_layers_is_refused() -> None:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=4, dtype_bytes=4)
    config = KVCacheConfig(1, (KVCacheGroup(("a",), spec),), (KVCacheTensor(("a",), spec.page_size_bytes),))
    with pytest.raises(ValueError, match=r"no memory for layers \['b'\]"):
        allocate_kv_caches(config, [layer("a"), layer("b")], torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="layer 'a' is not one of this worker's"):
        allocate_kv_caches(config, [layer("b")], torch.float32, torch.device("cpu"))
    small = KVCacheConfig(1, config.groups, (KVCacheTensor(("a",), 32),))
    with pytest.raises(ValueError, match="layer a: a block has 16 elements, its page 8"):
        allocate_kv_caches(small, [layer("a")], torch.float32, torch.device("cpu"))
