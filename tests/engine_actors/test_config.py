"""EngineConfig from flat keywords: vLLM's names, sensible defaults, and refusals that name field, value and choice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_actors.config import EngineConfig
from tests.fakes import MAX_MODEL_LEN


def make(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(str(folder), **options)


def test_defaults_come_from_the_model_and_fit_together(fake_model_dir: Path) -> None:
    config = make(fake_model_dir)
    assert config.engine_core == "actor"
    assert config.parallel_config.distributed_executor_backend == "ray"
    assert config.scheduler_config.max_model_len == MAX_MODEL_LEN
    assert config.scheduler_config.max_num_batched_tokens == 2048
    assert config.scheduler_config.max_num_seqs == 256


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"tensor_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2}, False),
        ({"distributed_executor_backend": "uni"}, False),
        ({"async_scheduling": False}, False),
        ({"distributed_executor_backend": "uni", "async_scheduling": True}, True),
    ],
    ids=str,
)
def test_async_scheduling_is_on_where_steps_cross_to_worker_actors(
    fake_model_dir: Path, options: dict[str, Any], expected: bool
) -> None:
    assert make(fake_model_dir, **options).scheduler_config.async_scheduling is expected


def test_each_option_reaches_its_own_config(fake_model_dir: Path) -> None:
    config = make(
        fake_model_dir,
        dtype="float32",
        block_size=8,
        policy="priority",
        tensor_parallel_size=2,
        shutdown_timeout_s=3,
        max_model_len=100,
        seed=7,
    )
    assert (config.model_config.dtype, config.model_config.seed) == ("float32", 7)
    assert config.cache_config.block_size == 8
    assert (config.scheduler_config.policy, config.scheduler_config.max_model_len) == ("priority", 100)
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.shutdown_timeout_s == 3


def test_vllms_names_are_known(fake_model_dir: Path) -> None:
    config = make(fake_model_dir, scheduling_policy="priority", kv_cache_dtype="bfloat16")
    assert config.scheduler_config.policy == "priority"
    assert config.cache_config.cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "budget", "rows"),
    [
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_seqs": 3000}, 3000, 3000),
        ({"max_num_seqs": 8}, 2048, 8),
        ({"enable_chunked_prefill": False}, 2048, 256),
        ({"max_num_batched_tokens": 4096}, 4096, 256),
    ],
)
def test_budget_and_rows_suit_each_other(fake_model_dir: Path, options: dict[str, Any], budget: int, rows: int) -> None:
    config = make(fake_model_dir, **options).scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (budget, rows)


def test_length_minus_one_is_settled_at_start_up(fake_model_dir: Path) -> None:
    config = make(fake_model_dir, max_model_len=-1)
    assert config.model_config.max_model_len == -1
    assert config.scheduler_config.max_model_len == MAX_MODEL_LEN
    assert config.with_max_model_len(64).scheduler_config.max_model_len == 64


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"tensor_paralel_size": 2}, TypeError, "'tensor_paralel_size'; did you mean 'tensor_parallel_size'"),
        ({"zzz": 2}, TypeError, "'zzz'; known are async_scheduling, attention_backend"),
        ({"tensor_parallel_size": "2"}, ValueError, "tensor_parallel_size must be of type int, got '2'"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"gpu_memory_utilization": "all"}, ValueError, "gpu_memory_utilization must be of type float, got 'all'"),
        ({"dtype": "float8"}, ValueError, r"dtype must be one of .*bfloat16.*, got 'float8'"),
        ({"engine_core": "process"}, ValueError, r"engine_core must be one of .*inproc.*, got 'process'"),
        ({"generation_config": "none"}, ValueError, "generation_config must be one of"),
        ({"shutdown_timeout_s": -1}, ValueError, "shutdown_timeout_s must be at least 0, got -1"),
        ({"shutdown_timeout_s": "soon"}, ValueError, "shutdown_timeout_s must be of type float, got 'soon'"),
        ({"skip_tokenizer_init": 3}, ValueError, "skip_tokenizer_init must be of type bool, got 3"),
        ({"executor_class": 3}, ValueError, "executor_class must be an Executor class, got 3"),
        ({"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size 3"),
        ({"pipeline_parallel_size": 3}, ValueError, "pipeline_parallel_size 3 is larger than the 2 layers"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, ValueError, "'uni' runs one worker"),
        ({"max_model_len": 512}, ValueError, "max_model_len 512 is larger than the 256 tokens"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ValueError, "at least max_num_seqs"),
        ({"async_scheduling": True, "pipeline_parallel_size": 2}, ValueError, "async_scheduling"),
    ],
)
def test_wrong_options_are_refused_by_name(
    fake_model_dir: Path, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make(fake_model_dir, **options)


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "nowhere"))):
        make(tmp_path / "nowhere")


def test_importing_the_package_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, engine_actors, engine_actors.config\nfrom engine_actors import SamplingParams, RequestOutput\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_all_exist_and_no_others() -> None:
    import engine_actors

    for name in engine_actors.__all__:
        assert getattr(engine_actors, name) is not None
    with pytest.raises(AttributeError, match="'Engin'"):
        engine_actors.Engin  # noqa: B018
