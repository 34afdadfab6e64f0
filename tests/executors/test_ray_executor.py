"""RayExecutor on real actors: the same tokens in every layout, and every failure ends every call, names its cause, and
leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executors import placement_guard
from executors.base import ExecutorFailedError, ResourcesUnavailableError
from executors.config import ModelConfig, ParallelConfig
from executors.input_batch import InvalidStepError
from executors.model_config import resolve_model_config, with_resolution
from executors.placement import remove_orphaned_placement_groups, remove_placement_groups_of
from executors.ray_executor import RayExecutor
from executors.ray_transport import ActorCalls, Channels, StepTransport
from executors.uniproc import UniProcExecutor
from executors.worker import Worker
from kv.config import CacheConfig
from scheduler.config import SchedulerConfig
from scheduler.output import SchedulerOutput, unpack_int32
from scheduler.sampling_params import SamplingParams
from tests.executors.step_driver import StepDriver, only_tokens, transformers_greedy

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CACHE = CacheConfig(block_size=8, num_gpu_blocks_override=200)
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=256)
PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 8, 9, 40, 100)]
SAMPLED = SamplingParams(temperature=1.4, top_k=50, top_p=0.95, seed=7)


def make_executor(model: Path, tp: int = 1, pp: int = 1, **parallel: Any) -> RayExecutor:
    config = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu", **{"torch_num_threads": 1, **parallel}
    )
    return RayExecutor(with_resolution(resolve_model_config(ModelConfig(str(model)))), CACHE, SCHEDULER, config)


def make_driver(executor: RayExecutor) -> StepDriver:
    return StepDriver(executor, CACHE, SCHEDULER, known_tokens=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def live_groups() -> list[str]:
    return [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    cpus = ray.cluster_resources()["CPU"]
    yield
    wait_until(lambda: ray.available_resources().get("CPU") == cpus)
    assert live_groups() == []
    wait_until(lambda: not any(thread.name == "executor-monitor" for thread in threading.enumerate()))


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> dict[str, list[list[int]]]:
    config = ParallelConfig(distributed_executor_backend="uni", device="cpu", torch_num_threads=1)
    executor = UniProcExecutor(ModelConfig(model=str(tiny_llama_dir)), CACHE, SCHEDULER, config)
    sampled = StepDriver(executor, CACHE, SCHEDULER).generate(PROMPTS, 8, SAMPLED)
    executor.shutdown()
    return {"greedy": transformers_greedy(tiny_llama_dir, PROMPTS, 12), "sampled": sampled}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_layout_gives_the_same_greedy_and_sampled_tokens(
    tiny_llama_dir: Path, expected: dict[str, list[list[int]]], tp: int, pp: int
) -> None:
    executor = make_executor(tiny_llama_dir, tp, pp)
    try:
        driver = make_driver(executor)
        assert driver.generate(PROMPTS, 12) == expected["greedy"]
        assert driver.generate(PROMPTS, 8, SAMPLED, chunk=6) == expected["sampled"]
        ranks = [(d["rank"], d["pp_rank"], d["tp_rank"]) for d in executor.collective_rpc("describe")]
        assert ranks == [(rank, rank // tp, rank % tp) for rank in range(tp * pp)]
        transports = {d["collectives"] for d in executor.collective_rpc("describe")}
        assert transports == ({"shared memory"} if tp > 1 else {"none"})
        executor.check_health()
    finally:
        executor.shutdown()


def test_bfloat16_ranks_and_stages_use_the_kernels_and_give_a_prompt_the_same_tokens_in_any_batch(
    tiny_llama_dir: Path,
) -> None:
    cache = CacheConfig(block_size=16, num_gpu_blocks_override=200)
    tokens = {}
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        config = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu", torch_num_threads=1)
        executor = RayExecutor(ModelConfig(str(tiny_llama_dir), dtype="bfloat16"), cache, SCHEDULER, config)
        try:
            names = [d["compute"] for d in executor.collective_rpc("describe")]
            how = "whole steps" if tp == pp == 1 else "layer by layer"
            assert all(name.startswith("native kernels") and how in name for name in names)
            driver = StepDriver(executor, cache, SCHEDULER, known_tokens=True)
            tokens[tp, pp] = driver.generate(PROMPTS, 12)
            assert driver.generate([PROMPTS[4]], 12, chunk=7) == [tokens[tp, pp][4]]
        finally:
            executor.shutdown()
    # Stages round where a whole step does; sums over ranks round once more.
    assert tokens[1, 2] == tokens[1, 1]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_and_stages_quantise_their_shares(tiny_llama_dir: Path, tp: int, pp: int) -> None:
    cache = CacheConfig(block_size=16, num_gpu_blocks_override=200)
    config = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu", torch_num_threads=1)
    model = ModelConfig(str(tiny_llama_dir), dtype="bfloat16", quantization="int4")
    executor = RayExecutor(model, cache, SCHEDULER, config)
    try:
        assert all("int4 weights" in d["compute"] for d in executor.collective_rpc("describe"))
        driver = StepDriver(executor, cache, SCHEDULER, known_tokens=True)
        tokens = driver.generate(PROMPTS, 8)
        assert driver.generate([PROMPTS[4]], 8, chunk=7) == [tokens[4]]
    finally:
        executor.shutdown()


@pytest.mark.parametrize("transport", [Channels, ActorCalls])
async def test_steps_calls_and_errors_of_a_healthy_executor(
    tiny_llama_dir: Path,
    expected: dict[str, list[list[int]]],
    transport: type[StepTransport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executors.ray_transport.has_step_channels", lambda: transport is Channels)
    executor = make_executor(tiny_llama_dir, tp=2, torch_num_threads=1)
    try:
        assert type(executor._transport) is transport
        driver = make_driver(executor)
        request = driver.add(PROMPTS[4])
        # The second step is dispatched before the first one's token is known here.
        futures = [driver.dispatch([request])]
        request.num_computed = len(request.token_ids)
        request.token_ids.append(-1)
        futures.append(driver.dispatch([request]))
        assert executor.collective_rpc(lambda worker: worker.runner._batch._last_step) == [2, 2], "calls queue behind"
        outputs = [await future for future in futures]
        tokens = [unpack_int32(output.sampled_token_ids)[0] for output in outputs if output]
        assert tokens == expected["greedy"][4][:2]
        assert futures[0].result(1) == outputs[0]
        assert isinstance(await futures[0].object_ref, bytes)  # type: ignore[attr-defined]

        with pytest.raises(ZeroDivisionError):
            executor.collective_rpc(lambda worker: 1 / 0)
        with pytest.raises(AttributeError, match="no_such_method"):
            executor.collective_rpc("no_such_method")
        with pytest.raises(TimeoutError, match=r"no answer within 0.1 s from worker rank 0 .*, worker rank 1"):
            executor.collective_rpc(lambda worker: time.sleep(1), timeout_s=0.1)
        ranks = executor.collective_rpc(lambda worker, a, b: (worker.rank, a + b), args=(1,), kwargs={"b": 2})
        assert ranks == [(0, 3), (1, 3)]
        assert [d["num_threads"] for d in executor.collective_rpc("describe")] == [1, 1]

        structured = driver.add(PROMPTS[2])
        assert await executor.execute_model(driver.schedule([structured], 1000, structured=True)) is None
        output = await executor.sample_tokens(only_tokens({structured.row: [65]}, 9))
        assert list(unpack_int32(output.sampled_token_ids)) == [65]
    finally:
        executor.shutdown()
        executor.shutdown()
    with pytest.raises(ExecutorFailedError, match="shut down"):
        driver.dispatch([request])
    with pytest.raises(ExecutorFailedError, match="shut down"):
        executor.collective_rpc("describe")


class Failure:
    """Collects what the failure callback gets."""

    def __init__(self, executor: RayExecutor) -> None:
        self.errors: list[ExecutorFailedError] = []
        self.seen = threading.Event()
        self.pids = [d["pid"] for d in executor.collective_rpc("describe")]
        executor.register_failure_callback(self)

    def __call__(self, error: ExecutorFailedError) -> None:
        self.errors.append(error)
        self.seen.set()


def expect_failed(executor: RayExecutor, failure: Failure, driver: StepDriver, match: str, pending: Any = None) -> None:
    """The callback ran once, pending and later calls raise, and every worker process is gone."""
    assert failure.seen.wait(20)
    with pytest.raises(ExecutorFailedError, match=match):
        raise failure.errors[0]
    if pending is not None:
        with pytest.raises(ExecutorFailedError, match=match):
            pending.result(20)
    with pytest.raises(ExecutorFailedError, match=match):
        driver.dispatch(driver.requests[:1])
    for call in (lambda: executor.collective_rpc("describe"), executor.check_health):
        with pytest.raises(ExecutorFailedError, match=match):
            call()
    for pid in failure.pids:
        wait_until(lambda pid=pid: not is_running(pid))
    assert len(failure.errors) == 1
    late: list[ExecutorFailedError] = []
    executor.register_failure_callback(late.append)
    assert len(late) == 1
    executor.shutdown()


def hang_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        worker.execute_model = lambda output: time.sleep(60)  # type: ignore[assignment, method-assign, return-value]


def test_a_worker_killed_while_idle_is_noticed_and_ends_everything(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir, pp=2)
    driver = make_driver(executor)
    driver.generate([[5, 6]], 2)
    failure = Failure(executor)
    os.kill(failure.pids[0], signal.SIGKILL)
    expect_failed(executor, failure, driver, rf"worker rank 0 \(node .*, pid {failure.pids[0]}\) died")


def test_a_worker_killed_in_a_step_is_named_though_the_collective_it_left_fails_too(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir, tp=2)
    driver = make_driver(executor)
    request = driver.add([5, 6])
    driver.run_step([request])
    failure = Failure(executor)
    executor.collective_rpc(hang_on_rank_1)
    pending = driver.dispatch([request])
    os.kill(failure.pids[1], signal.SIGKILL)
    expect_failed(executor, failure, driver, rf"worker rank 1 \(node .*, pid {failure.pids[1]}\) died", pending)


def test_an_exception_on_one_rank_ends_the_others_that_wait_for_it_in_a_collective(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir, tp=2)
    driver = make_driver(executor)
    request = driver.add([5, 6])
    driver.run_step([request])
    failure = Failure(executor)

    def fail_on_rank_1(worker: Worker) -> None:
        def execute_model(output: bytes) -> None:
            raise OverflowError("this rank is full")

        if worker.rank == 1:
            worker.execute_model = execute_model  # type: ignore[assignment, method-assign]

    executor.collective_rpc(fail_on_rank_1)
    pending = driver.dispatch([request])
    expect_failed(
        executor, failure, driver, r"worker rank 1 .*failed in a step: OverflowError: this rank is full", pending
    )
    cause = failure.errors[0].__cause__
    assert isinstance(cause, OverflowError)
    assert any("in execute_model" in note for note in cause.__notes__)


@pytest.mark.parametrize("transport", [Channels, ActorCalls])
def test_an_exception_in_a_step_is_the_cause_of_its_failure(
    tiny_llama_dir: Path, transport: type[StepTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.ray_transport.has_step_channels", lambda: transport is Channels)
    executor = make_executor(tiny_llama_dir)
    make_driver(executor).generate([[5, 6]], 2)
    failure = Failure(executor)
    pending = executor.execute_model(SchedulerOutput(step=7, rows=b""))
    with pytest.raises(ExecutorFailedError, match=r"worker rank 0 .*step.*: step 7 came after step 2") as error:
        pending.result(20)
    assert type(error.value.__cause__) is InvalidStepError
    assert failure.seen.wait(20)
    executor.shutdown()


def test_a_stopped_worker_misses_the_step_deadline_and_is_named(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir, tp=2, step_timeout_s=2.0)
    driver = make_driver(executor)
    request = driver.add([5, 6])
    driver.run_step([request])
    failure = Failure(executor)
    os.kill(failure.pids[1], signal.SIGSTOP)
    pending = driver.dispatch([request])
    match = rf"step 2 is not finished after step_timeout_s = 2 s: .*pid {failure.pids[1]}\), which does not answer"
    expect_failed(executor, failure, driver, match, pending)


@ray.remote(num_cpus=0)
class Owner:
    """An actor that owns an executor, as EngineCoreActor does."""

    def start(self, model: Path, tp: int, **parallel: Any) -> list[dict[str, Any]]:
        self.executor = make_executor(model, tp, **parallel)
        self.driver = make_driver(self.executor)
        return self.executor.collective_rpc("describe")

    def block_in_a_collective(self) -> None:
        self.executor.collective_rpc(hang_on_rank_1)
        self.driver.dispatch([self.driver.add([5, 6])])

    def generate(self) -> list[list[int]]:
        return self.driver.generate(PROMPTS, 12)

    def bundles(self) -> list[int]:
        return [place.bundle_index for place in self.executor.placement.places]

    def guard(self) -> int:
        return self.executor.placement.guard.pid

    def shutdown(self) -> None:
        self.executor.shutdown()

    def die(self) -> None:
        os._exit(1)


def test_workers_blocked_in_a_collective_exit_when_their_owner_dies(tiny_llama_dir: Path) -> None:
    owner = Owner.remote()
    pids = [d["pid"] for d in ray.get(owner.start.remote(tiny_llama_dir, 2))]
    ray.get(owner.block_in_a_collective.remote())
    owner.die.remote()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid))
    # Ray keeps an actor's placement group until the job ends; its guard does not.
    wait_until(lambda: not live_groups(), timeout_s=60)


def test_whoever_sees_an_actor_die_can_remove_its_group_at_once(tiny_llama_dir: Path) -> None:
    owner = Owner.remote()
    ray.get(owner.start.remote(tiny_llama_dir, 1))
    os.kill(ray.get(owner.guard.remote()), signal.SIGKILL)
    owner.die.remote()
    remove_placement_groups_of(owner._actor_id.hex())
    assert live_groups() == []


def test_guard_ends_when_the_cluster_has_ended_with_the_actor() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # nobody listens
        command = [sys.executable, "-I", "-S", placement_guard.__file__, address, "00" * 18, *filter(None, sys.path)]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        guard.communicate()  # Its standard output ends with the process that has left us.
    assert guard.returncode == 0


def test_guard_of_a_group_ends_with_it(tiny_llama_dir: Path) -> None:
    owner = Owner.remote()
    ray.get(owner.start.remote(tiny_llama_dir, 1))
    guard = ray.get(owner.guard.remote())
    assert is_running(guard)
    ray.get(owner.shutdown.remote())
    while is_running(guard):  # It has closed its pipe, which is the last it does. pytest's timeout is the limit.
        time.sleep(0.01)
    assert live_groups() == []
    ray.kill(owner)


def test_the_next_engine_clears_away_what_a_dead_one_left(tiny_llama_dir: Path) -> None:
    owner = Owner.remote()
    ray.get(owner.start.remote(tiny_llama_dir, 1))
    os.kill(ray.get(owner.guard.remote()), signal.SIGKILL)
    remove_orphaned_placement_groups()
    assert len(live_groups()) == 1, "the owner is alive"
    owner.die.remote()

    def is_cleared() -> bool:
        remove_orphaned_placement_groups()
        return not live_groups()

    wait_until(is_cleared)


def test_workers_use_the_callers_placement_group_around_its_cpu_only_first_bundle(
    tiny_llama_dir: Path, expected: dict[str, list[list[int]]]
) -> None:
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 2}, {"CPU": 1}])
    assert group.wait(20)
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    owner = Owner.options(num_cpus=1, scheduling_strategy=strategy).remote()
    ray.get(owner.start.remote(tiny_llama_dir, 2))
    assert ray.get(owner.bundles.remote()) == [1, 1]
    assert ray.get(owner.generate.remote()) == expected["greedy"]
    assert len(live_groups()) == 1
    ray.get(owner.shutdown.remote())
    assert len(live_groups()) == 1, "the caller's group is the caller's to remove"
    with pytest.raises(ResourcesUnavailableError, match=r"3 CPU each do not fit into the current placement group"):
        ray.get(owner.start.remote(tiny_llama_dir, 1, num_cpus_per_worker=3))
    ray.kill(owner)
    ray.util.remove_placement_group(group)


def test_resources_the_cluster_does_not_have_are_refused_at_once_with_the_numbers(tiny_llama_dir: Path) -> None:
    total = f"{ray.cluster_resources()['CPU']:g}"
    with pytest.raises(ResourcesUnavailableError) as error:
        make_executor(tiny_llama_dir, tp=2, num_cpus_per_worker=6, startup_timeout_s=600)
    assert "2 workers with 6 CPU each" in str(error.value)
    assert f": {total} CPU ({total} CPU free)" in str(error.value)
    with pytest.raises(ResourcesUnavailableError, match=r"1 CPU and 1 antimatter each"):
        make_executor(tiny_llama_dir, worker_resources={"antimatter": 1.0})
    with pytest.raises(ResourcesUnavailableError, match=r"STRICT_SPREAD needs a node for each"):
        make_executor(tiny_llama_dir, pp=2, placement_strategy="STRICT_SPREAD")


def test_resources_in_use_are_waited_for_until_the_deadline(tiny_llama_dir: Path) -> None:
    group = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"] - 1}])
    assert group.wait(20)
    with pytest.raises(ResourcesUnavailableError, match=r"the rest is in use; it has node .*\(1 CPU free\); waited"):
        make_executor(tiny_llama_dir, tp=2, startup_timeout_s=1.0)
    ray.util.remove_placement_group(group)


def test_a_rank_that_cannot_load_fails_the_start_with_rank_node_and_cause(tiny_llama_dir: Path, tmp_path: Path) -> None:
    for file in tiny_llama_dir.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(
        ExecutorFailedError, match=r"worker rank \d \(node .*, pid \d+\) could not load the model: "
    ) as error:
        make_executor(tmp_path, tp=2)
    assert "model.safetensors" in str(error.value)
    assert error.value.__cause__ is not None


def test_a_start_that_takes_too_long_is_given_up_and_cleaned_up(tiny_llama_dir: Path) -> None:
    with pytest.raises(ExecutorFailedError, match=r"worker rank 0 .*did not .* within startup_timeout_s = 0.3 s"):
        make_executor(tiny_llama_dir, startup_timeout_s=0.3)


def test_shutdown_works_after_ray_has_been_shut_down(tiny_llama_dir: Path) -> None:
    code = f"""
        import ray, threading
        from pathlib import Path
        from tests.executors.test_ray_executor import make_driver, make_executor
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        executor = make_executor(Path({str(tiny_llama_dir)!r}))
        make_driver(executor).generate([[5, 6]], 2)
        ray.shutdown()
        executor.shutdown()
        assert not any(thread.name == "executor-monitor" for thread in threading.enumerate())
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip().endswith("done"), done.stderr
