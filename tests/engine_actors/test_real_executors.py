"""A small random Llama through every client and executor: the tokens of transformers, and real deaths of workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import Engine
from engine_actors.async_llm import AsyncLLM
from engine_actors.errors import EngineDeadError, EngineStartupError
from engine_actors.llm import LLM
from scheduler.sampling_params import SamplingParams
from tests.fakes import CONFIG, byte_level_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
PROMPTS = [[(7 * i + j) % 500 + 2 for j in range(1 + 9 * i)] for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 200, "num_cpus_per_worker": 1}


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def reference(llama_dir: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        outputs = [
            model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=12, pad_token_id=0) for p in PROMPTS
        ]
    return [output[0, len(p) :].tolist() for output, p in zip(outputs, PROMPTS, strict=True)]


@pytest.fixture
def no_groups_left(ray_cluster: None) -> Iterator[None]:
    yield
    assert all_groups_removed()


def all_groups_removed() -> bool:
    return all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


async def generate_until_it_fails(engine: AsyncLLM) -> None:
    while True:
        await engine.generate_all([[5]], GREEDY)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"engine_core": "inproc", "distributed_executor_backend": "uni"}, id="inproc-uni"),
        pytest.param({"engine_core": "inproc"}, id="inproc-ray"),
        pytest.param({"distributed_executor_backend": "uni"}, id="actor-uni"),
        pytest.param({}, id="actor-ray"),
        pytest.param({"async_scheduling": True}, id="actor-ray-async"),
        pytest.param({"tensor_parallel_size": 2, "max_num_batched_tokens": 16}, id="tp2-chunked"),
        pytest.param({"pipeline_parallel_size": 2}, id="pp2"),
    ],
)
def test_every_way_gives_the_tokens_of_transformers(
    no_groups_left: None, llama_dir: Path, reference: list[list[int]], options: dict[str, Any]
) -> None:
    with LLM(str(llama_dir), **OPTIONS, **options) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == reference


async def test_async_client_gives_the_tokens_of_transformers(
    no_groups_left: None, llama_dir: Path, reference: list[list[int]]
) -> None:
    engine = AsyncLLM(str(llama_dir), **OPTIONS)
    assert tokens_of(await engine.generate_all(PROMPTS, GREEDY)) == reference
    await engine.shutdown_async()


@pytest.mark.parametrize("busy", [False, True])
async def test_killed_worker_ends_every_call_within_two_seconds(
    no_groups_left: None, llama_dir: Path, busy: bool
) -> None:
    engine = AsyncLLM(str(llama_dir), tensor_parallel_size=2, **OPTIONS)
    pids = await engine.collective_rpc(lambda worker: os.getpid())
    long = GREEDY.clone(max_tokens=200)
    streams = [await engine.add_request([5, i], long) for i in range(8)] if busy else []
    for stream in streams:
        await anext(stream)
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()

    async def drain(stream: Any) -> None:
        async for _ in stream:
            pass

    results = await asyncio.gather(*map(drain, streams), return_exceptions=True)
    with pytest.raises(EngineDeadError, match="worker rank 1"):
        await generate_until_it_fails(engine)
    assert time.monotonic() - started < 2
    assert all(isinstance(r, EngineDeadError) and "worker rank 1" in str(r) for r in results), results
    await engine.shutdown_async()


async def test_killed_core_takes_workers_and_placement_group_along(no_groups_left: None, llama_dir: Path) -> None:
    engine = AsyncLLM(str(llama_dir), tensor_parallel_size=2, **OPTIONS)
    pids = await engine.collective_rpc(lambda worker: os.getpid())
    place = await engine.client.link.actor.where.remote()
    os.kill(int(place.rsplit(" ", 1)[1]), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        await generate_until_it_fails(engine)
    await engine.shutdown_async()
    deadline_s = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "workers outlive their core"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["handle dropped", "terminated", "killed"])
def test_engine_that_is_let_go_gives_everything_back(no_groups_left: None, llama_dir: Path, how: str) -> None:
    engine = Engine.remote(model=str(llama_dir), **OPTIONS)
    pids = [int(place.split("pid ")[1].split(",")[0]) for place in ray.get(engine.where.remote()).values()]
    if how == "handle dropped":
        del engine
    else:
        os.kill(pids[0], signal.SIGTERM if how == "terminated" else signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while any(map(is_alive, pids)) or not all_groups_removed():
        assert time.monotonic() < deadline_s, "something is left behind"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cluster_without_room_is_an_error_with_the_numbers(no_groups_left: None, llama_dir: Path) -> None:
    with pytest.raises(EngineStartupError, match="64"):
        LLM(str(llama_dir), **{**OPTIONS, "num_cpus_per_worker": 64})


def test_truncated_weights_are_an_error_with_the_file(no_groups_left: None, llama_dir: Path, tmp_path: Path) -> None:
    for path in llama_dir.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:-100] if path.suffix == ".safetensors" else data)
    with pytest.raises(EngineStartupError, match=r"model\.safetensors"):
        LLM(str(tmp_path), **OPTIONS)
