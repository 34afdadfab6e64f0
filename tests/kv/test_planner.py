"""The planner: groups, memory layout, number of blocks, and refusals with numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.config import CacheConfig
from kv.planner import KVCachePlan, plan_kv_cache
from kv.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

FULL = FullAttentionSpec(16, 2, 64, 2)
WINDOW = SlidingWindowSpec(16, 2, 64, 2, 512)
PAGE = FULL.page_size_bytes
MIB = 2**20


def plan(specs: list[dict[str, KVCacheSpec]], available: list[int], max_model_len: int = 1024, budget: int = 512,
         auto_fit: bool = False, **cache: object) -> KVCachePlan:  # fmt: skip
    return plan_kv_cache(
        specs, available, CacheConfig(**cache), max_model_len=max_model_len, max_num_batched_tokens=budget,  # type: ignore[arg-type]
        auto_fit=auto_fit,
    )  # fmt: skip


def layers(count: int, first: int = 0) -> dict[str, KVCacheSpec]:
    return {f"layers.{index}": FULL for index in range(first, first + count)}


def gemma(count: int) -> dict[str, KVCacheSpec]:
    """Every sixth layer has full attention."""
    return {f"layers.{index}": FULL if index % 6 == 5 else WINDOW for index in range(count)}


def test_a_page_holds_keys_and_values_of_a_block() -> None:
    assert PAGE == 2 * 16 * 2 * 64 * 2


def test_a_uniform_model_has_one_group_and_a_tensor_per_layer() -> None:
    (config,) = plan([layers(4)], [4 * PAGE * 100 + 1]).configs
    assert config.num_blocks == 100
    assert [group.layer_names for group in config.groups] == [tuple(layers(4))]
    assert [(tensor.layer_names, tensor.page_size_bytes) for tensor in config.tensors] == [
        ((name,), PAGE) for name in layers(4)
    ]


def test_the_worker_with_least_room_decides_for_all() -> None:
    configs = plan([layers(4), layers(4)], [4 * PAGE * 100, 4 * PAGE * 90]).configs
    assert [config.num_blocks for config in configs] == [90, 90]


def test_pipeline_stages_list_their_own_layers_in_the_same_groups() -> None:
    model = gemma(12)
    first = {name: spec for name, spec in model.items() if int(name.split(".")[1]) < 7}
    second = {name: spec for name, spec in model.items() if name not in first}
    configs = plan([first, first, second, second], [100 * MIB] * 4).configs
    assert len({config.num_blocks for config in configs}) == 1
    assert all([group.spec for group in config.groups] == [group.spec for group in configs[0].groups]
               for config in configs)  # fmt: skip
    assert configs[0] == configs[1]
    assert configs[2] == configs[3]
    for config, specs in ((configs[0], first), (configs[2], second)):
        assert sorted(name for group in config.groups for name in group.layer_names) == sorted(specs)
        assert all(specs[name] == group.spec for group in config.groups for name in group.layer_names)


def test_a_stage_without_attention_layers_has_empty_groups_and_needs_no_memory() -> None:
    configs = plan([layers(2), {}], [2 * PAGE * 100, 0]).configs
    assert [config.num_blocks for config in configs] == [100, 100]
    assert [group.layer_names for group in configs[1].groups] == [()]
    assert configs[1].tensors == ()


def test_window_layers_are_split_into_groups_of_the_size_of_the_full_ones() -> None:
    # Gemma 3 270M: with one group per type, a block of full attention would waste 12 of its 15 pages.
    (config,) = plan([gemma(18)], [1000 * MIB], max_model_len=32768).configs
    assert [len(group.layer_names) for group in config.groups] == [3] * 6
    assert sum(group.spec == FULL for group in config.groups) == 1
    assert len(config.tensors) == 3
    assert all(len(tensor.layer_names) == 6 for tensor in config.tensors)


def test_a_little_padding_is_taken_for_fewer_groups() -> None:
    # 7 window layers and 2 full ones: groups of 2 pad one page; groups of 1 would be 9 block tables.
    specs: dict[str, KVCacheSpec] = {f"w{index}": WINDOW for index in range(7)} | {"f0": FULL, "f1": FULL}
    (config,) = plan([specs], [1000 * MIB], max_model_len=32768).configs
    assert [len(group.layer_names) for group in config.groups] == [2, 2, 2, 1, 2]
    assert [len(tensor.layer_names) for tensor in config.tensors] == [5, 4]


def test_layers_with_smaller_pages_share_the_tensor_of_the_larger() -> None:
    small = SlidingWindowSpec(16, 1, 64, 2, 512)
    (config,) = plan([{"a": FULL, "b": small}], [PAGE * 100], max_model_len=256).configs
    assert [(tensor.layer_names, tensor.page_size_bytes) for tensor in config.tensors] == [(("a", "b"), PAGE)]
    assert config.num_blocks == 100


def test_an_override_fixes_the_number_of_blocks() -> None:
    assert plan([layers(2)], [0], num_gpu_blocks_override=65).configs[0].num_blocks == 65


def test_given_bytes_replace_what_workers_found() -> None:
    (config,) = plan([layers(2)], [10**15], kv_cache_memory_bytes=2 * PAGE * 70).configs
    assert config.num_blocks == 70


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    # 1024 tokens take 64 blocks of 16, and the null block.
    plan([layers(2)], [0], num_gpu_blocks_override=65)
    with pytest.raises(ValueError, match=r"max_model_len 1024: that takes 65 blocks .* there are 64 .* 1008 tokens"):
        plan([layers(2)], [0], num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match=r"there are 0 .* enough for 0 tokens; lower max_model_len"):
        plan([layers(2)], [0])


def test_auto_fit_takes_the_largest_length_that_fits() -> None:
    fitted = plan([layers(2)], [0], auto_fit=True, num_gpu_blocks_override=64)
    assert fitted.max_model_len == 63 * 16
    assert fitted.report.max_concurrency == 1.0
    assert plan([layers(2)], [0], auto_fit=True, num_gpu_blocks_override=640).max_model_len == 1024
    with pytest.raises(ValueError, match="enough for 0 tokens"):
        plan([layers(2)], [0], auto_fit=True, num_gpu_blocks_override=1)


def test_windows_need_room_for_a_step_besides_the_window() -> None:
    window = {"w": SlidingWindowSpec(16, 1, 1, 1, 64)}
    # 63 + 32 positions touch at most 7 blocks.
    assert plan([window], [0], max_model_len=10_000, budget=32, num_gpu_blocks_override=8).max_model_len == 10_000
    with pytest.raises(ValueError, match="takes 8 blocks"):
        plan([window], [0], max_model_len=10_000, budget=32, num_gpu_blocks_override=7)


def test_the_report_says_what_fits() -> None:
    report = plan([layers(2)], [0], num_gpu_blocks_override=161).report
    assert report.num_tokens == 2560
    assert report.max_concurrency == 2.5
    assert report.bytes_per_worker == (161 * 2 * PAGE,)
    assert str(report) == (
        "KV cache: 160 blocks of 16 tokens, 3 MiB per worker; room for 2,560 tokens, "
        "2.5 requests of 1,024 tokens at once"
    )


def test_windows_raise_the_concurrency() -> None:
    full = plan([layers(6)], [200 * MIB], max_model_len=16384)
    hybrid = plan([gemma(6)], [200 * MIB], max_model_len=16384)
    assert hybrid.report.max_concurrency > 3 * full.report.max_concurrency


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="2 workers gave specs, 1 gave"):
        plan([layers(1), layers(1)], [MIB])
    with pytest.raises(ValueError, match=r"layers\.0: worker 1 has"):
        plan([layers(1), {"layers.0": WINDOW}], [MIB, MIB])
    with pytest.raises(ValueError, match="no worker has an attention layer"):
        plan([{}], [MIB])
    with pytest.raises(ValueError, match=r"one block size, got \[16, 32\]"):
        plan([{"a": FULL, "b": FullAttentionSpec(32, 2, 64, 2)}], [MIB])


def test_non_causal_layers_are_noticed() -> None:
    specs = {"a": FULL, "b": FullAttentionSpec(16, 2, 64, 2, non_causal=True)}
    assert plan([specs], [MIB * 100]).configs[0].has_non_causal_layers
    assert not plan([layers(2)], [MIB * 100]).configs[0].has_non_causal_layers


kinds = st.sampled_from([FULL, WINDOW, SlidingWindowSpec(16, 1, 64, 2, 128), FullAttentionSpec(16, 1, 64, 2)])


@given(st.lists(kinds, min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 400))
def test_every_layout_is_sound(model: list[KVCacheSpec], num_stages: int, num_mib: int) -> None:
    size = -(-len(model) // num_stages)
    specs = [
        {f"layers.{i}": model[i] for i in range(stage * size, min((stage + 1) * size, len(model)))}
        for stage in range(num_stages)
    ]
    result = plan(specs, [num_mib * MIB] * num_stages, max_model_len=16, auto_fit=True)
    for worker_specs, config in zip(specs, result.configs, strict=True):
        grouped = [name for group in config.groups for name in group.layer_names]
        assert sorted(grouped) == sorted(worker_specs)
        assert all(worker_specs[name] == group.spec for group in config.groups for name in group.layer_names)
        placed = [name for tensor in config.tensors for name in tensor.layer_names]
        assert sorted(placed) == sorted(worker_specs)
        for tensor in config.tensors:
            groups = [index for index, group in enumerate(config.groups)
                      if set(tensor.layer_names) & set(group.layer_names)]  # fmt: skip
            assert len(groups) == len(tensor.layer_names), "two layers of a group share memory"
            assert tensor.page_size_bytes == max(worker_specs[name].page_size_bytes for name in tensor.layer_names)
        assert config.num_blocks * sum(tensor.page_size_bytes for tensor in config.tensors) <= num_mib * MIB
        assert config.num_blocks == result.configs[0].num_blocks
