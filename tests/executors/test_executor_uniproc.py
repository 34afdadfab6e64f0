"""UniProcExecutor: right tokens, and a failing worker ends every call with its cause."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.base import ExecutorFailedError
from executors.config import ModelConfig, ParallelConfig
from executors.input_batch import InvalidStepError
from executors.uniproc import UniProcExecutor
from executors.worker import Worker
from kv.config import CacheConfig
from scheduler.config import SchedulerConfig
from scheduler.output import SchedulerOutput, pack_int32, unpack_int32
from scheduler.sampling_params import SamplingParams
from tests.executors.step_driver import StepDriver, only_tokens, save_tiny_gemma, transformers_greedy

CACHE = CacheConfig(block_size=8, num_gpu_blocks_override=200)
SCHEDULER = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=256)
PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 8, 9, 40, 100)]


def make_executor(model: Path | str, **parallel: float) -> UniProcExecutor:
    config = ParallelConfig(distributed_executor_backend="uni", device="cpu", torch_num_threads=1, **parallel)
    return UniProcExecutor(ModelConfig(model=str(model)), CACHE, SCHEDULER, config)


@pytest.fixture
def executor(tiny_llama_dir: Path) -> Iterator[UniProcExecutor]:
    executor = make_executor(tiny_llama_dir)
    yield executor
    executor.shutdown()


@pytest.mark.parametrize("chunk", [1000, 5])
def test_greedy_tokens_equal_transformers(executor: UniProcExecutor, tiny_llama_dir: Path, chunk: int) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    assert driver.generate(PROMPTS, 12, chunk=chunk) == transformers_greedy(tiny_llama_dir, PROMPTS, 12)


def test_window_and_full_attention_layers_share_the_pool_and_give_transformers_tokens(tmp_path: Path) -> None:
    """Several KV groups, each with blocks of its own in the same memory; texts of many windows."""
    executor = make_executor(save_tiny_gemma(tmp_path))
    driver = StepDriver(executor, CACHE, SCHEDULER)
    assert driver.num_groups == 3
    assert driver.generate(PROMPTS, 12, chunk=7) == transformers_greedy(tmp_path, PROMPTS, 12)
    executor.shutdown()


def test_a_seeded_request_draws_the_same_alone_in_a_batch_and_resumed(executor: UniProcExecutor) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=11)
    driver = StepDriver(executor, CACHE, SCHEDULER)
    (alone,) = driver.generate([PROMPTS[3]], 10, params)
    assert driver.generate(PROMPTS, 10, params)[3] == alone

    request = driver.add(PROMPTS[3], params)
    for _ in range(4):
        driver.run_step([request])
    # Preempted by recompute: another row, all tokens anew.
    resumed = driver.add(request.token_ids, params)
    resumed.num_prompt_tokens = request.num_prompt_tokens
    for _ in range(6):
        driver.run_step([resumed], chunk=3000)
    assert resumed.token_ids[request.num_prompt_tokens :] == alone


def test_min_tokens_masks_the_stop_ids_until_they_are_generated(executor: UniProcExecutor) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    (plain,) = driver.generate([PROMPTS[1]], 4)
    request = driver.add(PROMPTS[1], SamplingParams(temperature=0, min_tokens=2))
    output = driver.schedule([request], 1000)
    fields = {name: getattr(output.new_requests[0], name) for name in output.new_requests[0].__struct_fields__}
    output.new_requests = [type(output.new_requests[0])(**{**fields, "stop_ids_until_min_tokens": [plain[0]]})]
    first = executor.execute_model(output).result(60)
    assert first is not None
    assert unpack_int32(first.sampled_token_ids)[0] != plain[0]


def test_with_structured_output_the_second_call_samples_within_the_bitmask(executor: UniProcExecutor) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    request = driver.add(PROMPTS[2])
    assert executor.execute_model(driver.schedule([request], 1000, structured=True)).result(60) is None
    output = executor.sample_tokens(only_tokens({request.row: [77]}, 9)).result(60)
    assert output.step == 1
    assert list(unpack_int32(output.sampled_token_ids)) == [77]
    driver.finish([request], 1000, output)
    driver.run_step([request])


async def test_a_step_can_be_awaited_while_the_next_is_dispatched(executor: UniProcExecutor) -> None:
    """Step N+1 needs step N's token, which stays at the worker."""
    driver = StepDriver(executor, CACHE, SCHEDULER)
    (expected,) = driver.generate([PROMPTS[4]], 3)
    request = driver.add(PROMPTS[4])
    futures = [driver.dispatch([request])]
    for _ in range(2):
        request.num_computed = len(request.token_ids)
        request.token_ids.append(-1)
        futures.append(driver.dispatch([request]))
    outputs = [await future for future in futures]
    assert [list(unpack_int32(o.sampled_token_ids)) for o in outputs if o] == [[token] for token in expected]
    assert all(future.done() for future in futures)


def test_a_worker_that_raises_fails_this_and_every_later_call_once(executor: UniProcExecutor) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    failures: list[ExecutorFailedError] = []
    called = threading.Event()
    executor.register_failure_callback(lambda error: (failures.append(error), called.set()))
    gap = SchedulerOutput(step=5, rows=pack_int32([0]))
    pending = [executor.execute_model(gap), driver.dispatch([driver.add([5])])]
    for future in pending:
        with pytest.raises(ExecutorFailedError, match=r"rank 0.*step 5 came after step 0") as error:
            future.result(60)
        assert isinstance(error.value.__cause__, InvalidStepError)
    assert called.wait(10)
    with pytest.raises(ExecutorFailedError, match="step 5"):
        driver.dispatch([driver.requests[0]])
    with pytest.raises(ExecutorFailedError, match="step 5"):
        executor.collective_rpc("describe")
    with pytest.raises(ExecutorFailedError, match="step 5"):
        executor.check_health()
    assert len(failures) == 1
    late: list[ExecutorFailedError] = []
    executor.register_failure_callback(late.append)
    assert len(late) == 1


def test_no_step_behind_a_failed_one_succeeds(executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    report = executor._monitor.report
    monkeypatch.setattr(executor._monitor, "report", lambda failure: threading.Timer(0.3, report, [failure]).start())
    failing = executor.execute_model(SchedulerOutput(step=5, rows=pack_int32([0])))
    behind = driver.dispatch([driver.add([5])])
    for future in (behind, failing):
        with pytest.raises(ExecutorFailedError, match="step 5 came after step 0"):
            future.result(60)


def test_a_step_beyond_its_deadline_fails_the_executor(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir, step_timeout_s=0.3)
    StepDriver(executor, CACHE, SCHEDULER)
    release = threading.Event()

    def hang(worker: Worker) -> None:
        worker.execute_model = lambda output: release.wait(60)  # type: ignore[assignment, method-assign, return-value]

    executor.collective_rpc(hang)
    future = executor.execute_model(SchedulerOutput(step=1, rows=b""))
    with pytest.raises(
        ExecutorFailedError, match=r"step 1 is not finished after step_timeout_s = 0.3 s: the worker hangs"
    ):
        future.result(60)
    release.set()
    executor.shutdown()


def test_rpc_errors_reach_the_caller_and_the_executor_goes_on(executor: UniProcExecutor) -> None:
    driver = StepDriver(executor, CACHE, SCHEDULER)
    with pytest.raises(AttributeError, match="no_such_method"):
        executor.collective_rpc("no_such_method")
    with pytest.raises(ZeroDivisionError):
        executor.collective_rpc(lambda worker: 1 / 0)
    (describe,) = executor.collective_rpc("describe")
    assert describe["num_threads"] == 1
    assert executor.collective_rpc(lambda worker, a, b: (worker.rank, a + b), args=(1,), kwargs={"b": 2}) == [(0, 3)]
    driver.generate([[4, 5]], 1)
    executor.check_health()


def test_a_worker_that_cannot_start_raises_with_the_cause(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ExecutorFailedError, match=r"could not start: ModelConfigError: .*does not exist"):
        make_executor(tmp_path / "missing")
    for thread in threading.enumerate():
        if thread.name.startswith("executor-"):
            thread.join(10)
    assert threading.active_count() <= threads


def test_shutdown_is_idempotent_ends_pending_steps_and_calls_no_failure_callback(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir)
    driver = StepDriver(executor, CACHE, SCHEDULER)
    failures: list[ExecutorFailedError] = []
    executor.register_failure_callback(failures.append)
    entered, release = threading.Event(), threading.Event()

    def hang(worker: Worker) -> None:
        def execute_model(output: bytes) -> None:
            entered.set()
            release.wait(60)

        worker.execute_model = execute_model  # type: ignore[assignment, method-assign]

    executor.collective_rpc(hang)
    future = driver.dispatch([driver.add([3])])
    assert entered.wait(10)
    threading.Timer(0.2, release.set).start()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ExecutorFailedError, match="shut down"):
        future.result(10)
    with pytest.raises(ExecutorFailedError, match="shut down"):
        driver.dispatch([driver.requests[0]])
    assert failures == []
