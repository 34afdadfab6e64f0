"""Sleep with real models: memory really comes back, and the tokens afterwards are the same."""

from __future__ import annotations

import gzip
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import LLM, SamplingParams
from executors.worker import Worker
from tests.fakes import CONFIG

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, top_k=40, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 500 + 2 for j in range(3 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def heavy_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 50 MB of bfloat16 weights: far more than what a process's memory varies by."""
    folder = tmp_path_factory.mktemp("models") / "heavy-llama"
    torch.manual_seed(0)
    config = {**CONFIG, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}
    LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def resident_bytes(worker: Any = None) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def storages(worker: Worker) -> tuple[list[Any], list[Any]]:
    """Weak references to the storages of weights and of KV caches."""
    weights = [*worker.model.parameters(), *worker.model.buffers()]
    caches = [layer.kv_cache for layer in worker.model.attention_layers()]
    return [weakref.ref(t) for t in weights], [weakref.ref(t) for t in caches]


@pytest.mark.parametrize(
    ("dtype", "eager", "compute"),
    [("float32", False, "torch"), ("bfloat16", False, "whole steps"), ("bfloat16", True, "layer by layer")],
)
def test_memory_comes_back_and_tokens_are_the_same(
    heavy_llama_dir: Path, dtype: str, eager: bool, compute: str
) -> None:
    options: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni", "torch_num_threads": 1}
    with LLM(
        str(heavy_llama_dir),
        dtype=dtype,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=256,
        **options,
    ) as llm:
        worker = llm.llm_engine.client.core.executor._live_worker  # type: ignore[attr-defined]
        assert compute in worker.compute_name

        def tokens() -> list[list[int]]:
            # Long prompts, so that much of the KV cache is written and so takes memory.
            params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
            long = [prompt * (200 // len(prompt)) for prompt in PROMPTS]
            return [o.outputs[0].token_ids for o in llm.generate(long, params, use_tqdm=False)]

        expected = tokens()
        weight_bytes = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(heavy_llama_dir).parameters())
        weight_bytes *= 2 if dtype == "bfloat16" else 4
        weights, caches = storages(worker)
        awake = resident_bytes()

        llm.sleep(1)
        assert all(cache() is None for cache in caches)
        assert all(weight() is not None for weight in weights)
        with pytest.raises(RuntimeError, match="KV cache was given back; wake_up"):
            llm.execute_dummy_batch()
        llm.wake_up()
        assert tokens() == expected

        weights, caches = storages(worker)
        llm.sleep(2)
        assert all(reference() is None for reference in (*weights, *caches))
        asleep = resident_bytes()
        assert awake - asleep > 0.9 * weight_bytes, f"{awake - asleep} bytes of {weight_bytes} came back"
        with pytest.raises(RuntimeError, match="weights were given back; wake_up"):
            llm.execute_dummy_batch()
        llm.wake_up(["weights"])
        with pytest.raises(RuntimeError, match="KV cache was given back; wake_up"):
            llm.execute_dummy_batch()
        llm.wake_up(["kv_cache"])
        assert tokens() == expected


def move(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        path.rename(target / path.name)


@pytest.mark.ray
def test_ranks_sleep_and_wake_together_and_survive_a_failed_waking(
    ray_cluster: None, random_llama_dir: Path, tmp_path: Path
) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    model.mkdir()
    away.mkdir()
    for path in random_llama_dir.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    traces = tmp_path / "traces"
    with LLM(
        str(model),
        tensor_parallel_size=2,
        num_gpu_blocks_override=200,
        torch_num_threads=1,
        torch_profiler_dir=str(traces),
    ) as llm:

        def tokens() -> list[list[int]]:
            params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]

        expected = tokens()
        for level in (0, 1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens() == expected

        llm.sleep(2)
        move(model, away)
        with pytest.raises(Exception, match="model"):
            llm.wake_up()
        assert llm.is_sleeping()
        llm.llm_engine.check_health()
        move(away, model)
        llm.wake_up()
        assert tokens() == expected
        llm.execute_dummy_batch()
        assert tokens() == expected

        # The same engine records what its workers compute.
        with pytest.raises(RuntimeError, match="recording nothing"):
            llm.stop_profile()
        llm.start_profile("mine")
        with pytest.raises(RuntimeError, match=r"is recording mine-rank.* already"):
            llm.start_profile()
        assert tokens() == expected
        paths = [Path(path) for path in llm.stop_profile()]
        assert [path.name.split("-")[:2] for path in paths] == [["mine", "rank0"], ["mine", "rank1"]]
        assert {path.parent for path in paths} == {traces}
        for path in paths:
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            assert any(event.get("name") == "aten::linear" for event in events)

        def num_linears(max_iterations: int) -> int:
            llm.start_profile("few", delay_iterations=1, max_iterations=max_iterations)
            assert tokens() == expected
            path = Path(llm.stop_profile()[0])
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            return sum(event.get("name") == "aten::linear" for event in events)

        one = num_linears(1)
        assert one > 0
        assert num_linears(3) == 3 * one
        llm.start_profile(delay_iterations=1000)
        with pytest.raises(RuntimeError, match=r"recorded nothing: \d+ more steps"):
            llm.stop_profile()
        num_parameters = llm.apply_model(lambda module: sum(p.numel() for p in module.parameters()))
        assert len(num_parameters) == 2
        assert all(count > 0 for count in num_parameters)


def test_profile_without_a_directory_is_refused(random_llama_dir: Path) -> None:
    with LLM(
        str(random_llama_dir), engine_core="inproc", distributed_executor_backend="uni", num_gpu_blocks_override=50
    ) as llm:
        with pytest.raises(RuntimeError, match="no torch_profiler_dir is configured: start the engine with"):
            llm.start_profile()
        assert llm.generate([[5]], GREEDY, use_tqdm=False)[0].finished
