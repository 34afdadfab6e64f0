"""Engines come and go: everything they held is there for the next, wherever they ran and however they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine_actors import LLM, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [100, 101]]
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 50, "torch_num_threads": 1}


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition not met in time"
        time.sleep(0.05)


def live_actors() -> set[str]:
    return {a["ActorID"] for a in ray._private.state.actors().values() if a["State"] != "DEAD"}


def live_groups() -> set[str]:
    table = ray.util.placement_group_table()
    return {group_id for group_id, group in table.items() if group["state"] != "REMOVED"}


def shared_memory() -> set[str]:
    """What engines left in shared memory; Ray's own store has other names."""
    return {path.name for path in Path("/dev/shm").iterdir() if "engine" in path.name or path.name.startswith("ea")}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(autouse=True)
def everything_is_given_back(ray_cluster: None) -> Iterator[None]:
    cpus = ray.cluster_resources()["CPU"]
    before = live_actors(), live_groups(), shared_memory()
    yield
    wait_until(lambda: ray.available_resources().get("CPU") == cpus)
    wait_until(lambda: live_actors() <= before[0])
    wait_until(lambda: live_groups() <= before[1])
    wait_until(lambda: shared_memory() <= before[2])


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_engines_one_after_another_where_there_is_room_for_one(random_llama_dir: Path, count: int) -> None:
    cpus = ray.cluster_resources()["CPU"]
    expected: list[list[int]] = []
    num_threads: list[int] = []
    num_files: list[int] = []
    for _ in range(count):
        with LLM(str(random_llama_dir), num_cpus_per_worker=cpus, **OPTIONS) as llm:
            tokens = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        expected = expected or tokens
        assert tokens == expected
        num_threads.append(threading.active_count())
        num_files.append(len(os.listdir("/proc/self/fd")))
    # Connections to actors' processes are closed when Ray gets to it.
    assert num_threads[-1] <= num_threads[1]
    assert num_files[-1] <= num_files[1] + 5


def test_two_engines_side_by_side_do_not_touch_each_other(random_llama_dir: Path) -> None:
    first = LLM(str(random_llama_dir), tensor_parallel_size=2, **OPTIONS)
    expected = tokens_of(first.generate(PROMPTS, GREEDY, use_tqdm=False))
    with LLM(str(random_llama_dir), tensor_parallel_size=2, **OPTIONS) as second:
        assert tokens_of(second.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert tokens_of(first.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        first.shutdown()
        assert tokens_of(second.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


WITHOUT_A_CLUSTER = """
import asyncio, os, sys, threading, ray
from engine_actors import LLM, AsyncLLM, SamplingParams

OPTIONS = {"num_gpu_blocks_override": 50, "torch_num_threads": 1}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
made = []

async def main():
    llm = AsyncLLM(sys.argv[1], **OPTIONS)
    async for output in llm.generate([5, 6, 7], PARAMS):
        pass
    await llm.shutdown_async()
    print("tokens", *output.outputs[0].token_ids)

thread = threading.Thread(target=lambda: made.append(LLM(sys.argv[1], **OPTIONS)))
thread.start()
thread.join()
print("tokens", *made[0].generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
made[0].shutdown()
ray.shutdown()
asyncio.run(main())
"""


def test_ray_that_an_engine_starts_outlives_the_thread_that_made_the_engine(random_llama_dir: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    program = [sys.executable, "-c", WITHOUT_A_CLUSTER, str(random_llama_dir)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    from_thread, from_loop = [line for line in done.stdout.splitlines() if line.startswith("tokens")]
    assert from_thread == from_loop
    assert len(from_loop.split()) == 1 + 6


DRIVER = """
import os, sys, ray
from engine_actors import LLM, SamplingParams
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
llm = LLM(sys.argv[2], tensor_parallel_size=2, num_gpu_blocks_override=50, torch_num_threads=1)
print("pids", *llm.collective_rpc(lambda worker: os.getpid()), flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_driver_that_dies_in_mid_generation_frees_everything(random_llama_dir: Path, how: signal.Signals) -> None:
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, str(random_llama_dir)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as driver:
        assert driver.stdout is not None
        line = next((line for line in driver.stdout if line.startswith("pids")), "")
        pids = [int(word) for word in line.split()[1:]]
        assert len(pids) == 2
        driver.send_signal(how)
        driver.wait(60)
    wait_until(lambda: not any(map(is_alive, pids)))


@ray.remote(num_cpus=0)
class Holder:
    """A user's actor, without devices, that holds an engine."""

    def generate(self, model: Path, options: dict[str, Any]) -> list[list[int]]:
        self.llm = LLM(str(model), **OPTIONS, **options)
        return tokens_of(self.llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    def pids(self) -> list[int]:
        return [os.getpid(), *self.llm.collective_rpc(lambda worker: os.getpid())]


def test_engine_in_an_actor_in_a_placement_group_with_a_first_bundle_for_itself(random_llama_dir: Path) -> None:
    with LLM(str(random_llama_dir), **OPTIONS) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 1}, {"CPU": 1}])
    assert group.wait(30)
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    holder = Holder.options(scheduling_strategy=strategy).remote()
    assert ray.get(holder.generate.remote(random_llama_dir, {"tensor_parallel_size": 2})) == expected
    assert live_groups() >= {group.id.hex()}
    ray.kill(holder)
    ray.util.remove_placement_group(group)


def test_engine_in_an_actor_that_is_killed_is_gone_with_it(random_llama_dir: Path) -> None:
    holder = Holder.remote()
    ray.get(holder.generate.remote(random_llama_dir, {}))
    pids = ray.get(holder.pids.remote())
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))
