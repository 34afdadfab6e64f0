"""Tensor and pipeline parallel models give the logits of the whole model, also where sizes do not divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import transformers

from executors import shared_memory
from executors.layers.partition import (
    HeadShard,
    Shard,
    layers_of_stage,
    legal_tensor_parallel_sizes,
    shard_balanced,
    shard_heads,
    shard_in_order,
)
from executors.model_config import ModelConfigError, check_parallel
from executors.parallel_state import ParallelState
from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens, resolve
from tests.executors.test_models_gemma import FULL, SLIDING
from tests.executors.test_models_gemma import SMALL as SMALL_GEMMA
from tests.executors.test_models_llama import SMALL, reference_logits, save_random_model
from tests.executors.threaded_parallel import run_on_ranks

TOKENS = random_tokens(29, 97, seed=5)
CHUNKS = [(11,), (15,), (1,), (1,), (1,)]


def paged_logits(model_dir: Path, parallel: ParallelState) -> torch.Tensor:
    (logits,) = PagedRunner(load(model_dir, parallel)).run_schedule([PagedRequest(TOKENS)], CHUNKS)
    return logits


# (heads, KV heads, tp): divisible; KV heads padded 3 → 4; replicated 2 → 4; query heads of a KV head divided unevenly;
# a vocabulary of 97 and an intermediate size of 80 never divide by 3.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size"), [(6, 2, 2), (9, 3, 2), (8, 2, 4), (3, 1, 2), (6, 2, 4), (9, 3, 3), (6, 6, 4)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_parallel_logits_match_transformers(
    heads: int, kv_heads: int, tp_size: int, tied: bool, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        **{**SMALL, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8, "hidden_size": 72,
           "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": tied}
    )  # fmt: skip
    reference = save_random_model(config, tmp_path)
    expected = reference_logits(reference, TOKENS)
    for logits in run_on_ranks(tp_size, lambda parallel: paged_logits(tmp_path, parallel)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_tensor_parallel_gemma3_matches_transformers(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**{**SMALL_GEMMA, "layer_types": [SLIDING, FULL] * 2, "vocab_size": 97})
    reference = save_random_model(config, tmp_path)
    for logits in run_on_ranks(4, lambda parallel: paged_logits(tmp_path, parallel)):
        torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_all_ranks_of_a_stage_have_equal_specs(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SMALL, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
                                         "hidden_size": 72})  # fmt: skip
    save_random_model(config, tmp_path)
    first, second = (load(tmp_path, ParallelState(rank, 2)).kv_cache_specs(16, 4) for rank in range(2))
    assert first == second
    assert {spec.num_kv_heads for spec in first.values()} == {2}


def _distributed_worker(rank: int, directory: str) -> None:
    """One of two processes: the same models as TP=2 through shared memory, then as PP=2 over gloo."""
    root = Path(directory)
    expected = torch.load(root / "expected.pt")
    shared_memory.SHARED_DIR = root / "shared"
    tensor_parallel = ParallelState.initialize(rank=rank, tp_size=2, init_method=f"file://{root}/tp", timeout_s=240)
    assert tensor_parallel.transport == "shared memory"
    value = torch.full((3,), float(rank))
    assert tensor_parallel.broadcast(value.clone(), src_tp_rank=1).tolist() == [1.0] * 3
    for name, logits in expected.items():
        torch.testing.assert_close(paged_logits(root / name, tensor_parallel), logits, atol=1e-4, rtol=0)
    assert not list(shared_memory.SHARED_DIR.iterdir())  # rank 0 removes the file after both have opened it
    tensor_parallel.destroy()
    tensor_parallel.destroy()

    if rank == 1:  # as on another machine
        shared_memory._map = lambda *_: None
    apart = ParallelState.initialize(rank=rank, tp_size=2, init_method=f"file://{root}/apart", timeout_s=240)
    assert apart.transport == "gloo"
    assert apart.all_reduce(torch.full((3,), rank + 1.0)).tolist() == [3.0] * 3
    assert apart.all_gather(torch.full((2,), rank)).tolist() == [0, 0, 1, 1]
    assert not list(shared_memory.SHARED_DIR.iterdir())  # by now both ranks know that they share nothing
    apart.destroy()

    pipeline = ParallelState.initialize(rank=rank, pp_size=2, init_method=f"file://{root}/pp", timeout_s=240)
    for name, logits in expected.items():
        model = load(root / name, pipeline)
        runner, request = PagedRunner(model), PagedRequest(TOKENS)
        for (count,) in CHUNKS:
            received = None
            if not pipeline.is_first_stage:
                received = pipeline.recv_hidden_states((count, model.spec.hidden_size), torch.float32)
            hidden = runner.step([(request, count)], received)
            if not pipeline.is_last_stage:
                pipeline.send_hidden_states(hidden)
        if pipeline.is_last_stage:
            torch.testing.assert_close(torch.stack(request.logits), logits, atol=1e-4, rtol=0)
    pipeline.drain()
    pipeline.destroy()


def test_two_gloo_processes_match_transformers_as_tp2_and_as_pp2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes
    configs: dict[str, Any] = {
        "untied": transformers.LlamaConfig(**SMALL),
        "tied": transformers.Qwen3Config(**{**SMALL, "head_dim": 8, "tie_word_embeddings": True}),
        "gemma": transformers.Gemma3TextConfig(**{**SMALL_GEMMA, "vocab_size": 97}),
    }
    expected = {
        name: reference_logits(save_random_model(config, tmp_path / name), TOKENS) for name, config in configs.items()
    }
    torch.save(expected, tmp_path / "expected.pt")
    (tmp_path / "shared").mkdir()
    torch.multiprocessing.spawn(_distributed_worker, args=(str(tmp_path),), nprocs=2)


def test_single_rank_needs_no_process_group() -> None:
    state = ParallelState.initialize(rank=0)
    tensor = torch.ones(2)
    assert state.all_reduce(tensor) is tensor
    assert state.all_gather(tensor) is tensor
    assert state.is_first_stage
    assert state.is_last_stage
    assert not torch.distributed.is_initialized()
    state.destroy()


def test_parallel_state_refuses_wrong_ranks_and_backends() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 4\).*got 4"):
        ParallelState(4, tp_size=2, pp_size=2)
    with pytest.raises(ValueError, match=r"backend must be one of .*gloo.*got 'mpi'"):
        ParallelState.initialize(rank=0, backend="mpi")
    with pytest.raises(RuntimeError, match="no process group"):
        ParallelState(0, tp_size=2).all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="nobody to send to"):
        ParallelState(0).send_hidden_states(torch.ones(1))


def test_ranks_are_tp_fastest() -> None:
    grid = [(state.pp_rank, state.tp_rank) for state in (ParallelState(rank, 2, 3) for rank in range(6))]
    assert grid == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(9, 3, [1, 2, 3, 6, 9]), (8, 2, [1, 2, 4, 6, 8]), (4, 1, [1, 2, 3, 4]), (6, 6, [1, 2, 3, 4, 5, 6])],
)
def test_legal_sizes_leave_no_rank_without_a_head(heads: int, kv_heads: int, expected: list[int]) -> None:
    legal = legal_tensor_parallel_sizes(heads, kv_heads, 1536)
    assert legal == expected
    for size in legal:
        shards = [shard_heads(heads, kv_heads, rank, size) for rank in range(size)]
        assert all(shard.query.start < shard.query.stop for shard in shards)
        assert sorted({h for s in shards for h in range(s.query.start, s.query.stop)}) == list(range(heads))
        assert len({(s.query.size, s.key_value.size) for s in shards}) == 1


def test_padded_and_replicated_head_shards() -> None:
    assert [shard_heads(9, 3, rank, 2) for rank in range(2)] == [
        HeadShard(Shard(0, 6, 6), Shard(0, 2, 2)),
        HeadShard(Shard(6, 9, 6), Shard(2, 3, 2)),
    ]
    assert [shard_heads(8, 2, rank, 4) for rank in (1, 2)] == [
        HeadShard(Shard(2, 4, 2), Shard(0, 1, 1)),
        HeadShard(Shard(4, 6, 2), Shard(1, 2, 1)),
    ]
    with pytest.raises(ValueError, match="tensor_parallel_size 5 does not suit 8 attention heads with 2 KV heads"):
        shard_heads(8, 2, 0, 5)


def test_shards_cover_everything_once() -> None:
    assert [shard_in_order(10, rank, 4) for rank in range(4)] == [
        Shard(0, 3, 3), Shard(3, 6, 3), Shard(6, 9, 3), Shard(9, 10, 3)
    ]  # fmt: skip
    assert [shard_balanced(10, rank, 4) for rank in range(4)] == [
        Shard(0, 3, 3), Shard(3, 6, 3), Shard(6, 8, 3), Shard(8, 10, 3)
    ]  # fmt: skip
    assert [shard_in_order(5, rank, 4) for rank in (2, 3)] == [Shard(4, 5, 2), Shard(5, 5, 2)]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(30, 2, [15, 15]), (7, 2, [4, 3]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (18, 4, [4, 5, 5, 4]), (3, 3, [1, 1, 1])],
)
def test_stages_hold_consecutive_layers_and_spare_the_last(layers: int, stages: int, sizes: list[int]) -> None:
    ranges = [layers_of_stage(layers, stage, stages) for stage in range(stages)]
    assert [len(r) for r in ranges] == sizes
    assert [index for r in ranges for index in r] == list(range(layers))


def test_layouts_the_model_cannot_take_are_refused_with_the_legal_ones(tmp_path: Path) -> None:
    save_random_model(transformers.LlamaConfig(**SMALL), tmp_path)
    resolved = resolve(tmp_path)
    check_parallel(resolved, 4, 3)
    with pytest.raises(ModelConfigError, match=r"tensor_parallel_size 5 .*legal sizes are 1, 2, 4, 6$"):
        check_parallel(resolved, 5)
    with pytest.raises(ModelConfigError, match="pipeline_parallel_size 4 is larger than the 3 layers"):
        check_parallel(resolved, 1, 4)
