"""Utilities over every client: pauses, sleep, changed options, and errors that are the caller's alone.

Over the fake executor, so what is tested is who waits for what; that memory comes back is tests/system/test_sleep.py's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from engine_actors import (
    LLM,
    AsyncLLM,
    Engine,
    EnginePausedError,
    LLMEngine,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from engine_actors.config import EngineConfig
from scheduler.config import SchedulerConfig
from scheduler.sampling_params import RequestOutputKind
from tests.fakes import FakeExecutor, expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
STEP_S = 0.005
PARAMS = SamplingParams(temperature=0.0, max_tokens=25)
PROMPTS = [[5, 6, 7], [8] * 40, [100, 101]]
EXPECTED = [expected_tokens(prompt, 25) for prompt in PROMPTS]


class Driver:
    """One engine, whatever the client, from a test's synchronous point of view."""

    call: Callable[..., Any]
    """`call("pause", "keep")`"""

    def submit(self, prompts: list[list[int]]) -> Callable[[], list[RequestOutput]]:
        """Start requests; returns a function that waits for their outputs."""
        raise NotImplementedError

    def until_all_have_tokens(self) -> None:
        raise NotImplementedError


class SyncDriver(Driver):
    def __init__(self, config: EngineConfig) -> None:
        self.engine = LLMEngine(config)
        self.outputs: dict[str, RequestOutput] = {}
        self.number = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, name)(*args, **kwargs)

    def submit(self, prompts: list[list[int]]) -> Callable[[], list[RequestOutput]]:
        names = []
        for prompt in prompts:
            names.append(str(self.number))
            self.number += 1
            self.engine.add_request(names[-1], prompt, PARAMS)

        def wait() -> list[RequestOutput]:
            while not all(name in self.outputs and self.outputs[name].finished for name in names):
                self.step()
            return [self.outputs[name] for name in names]

        return wait

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def until_all_have_tokens(self) -> None:
        while len(self.outputs) < self.number:
            self.step()

    def close(self) -> None:
        self.engine.shutdown()


class AsyncDriver(Driver):
    """AsyncLLM on an event loop in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = AsyncLLM.from_config(config)
        self.running: list[threading.Event] = []

    def run(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.run(getattr(self.engine, name)(*args, **kwargs)).result()

    def submit(self, prompts: list[list[int]]) -> Callable[[], list[RequestOutput]]:
        futures = []
        for prompt in prompts:
            self.running.append(threading.Event())
            futures.append(self.run(self._last_output(prompt, self.running[-1])))
        return lambda: [future.result() for future in futures]

    async def _last_output(self, prompt: list[int], running: threading.Event) -> RequestOutput:
        last = None
        async for output in self.engine.generate(prompt, PARAMS):
            last = output
            running.set()
        assert last is not None
        return last

    def until_all_have_tokens(self) -> None:
        for running in self.running:
            running.wait()

    def close(self) -> None:
        self.run(self.engine.shutdown_async()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class ActorDriver(Driver):
    def __init__(self, model: Path) -> None:
        executor = partial(FakeExecutor, step_s=STEP_S)
        self.engine = Engine.remote(model=str(model), executor_class=executor)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return ray.get(getattr(self.engine, name).remote(*args, **kwargs))

    def submit(self, prompts: list[list[int]]) -> Callable[[], list[RequestOutput]]:
        streams = [self.engine.stream.remote(prompt, PARAMS) for prompt in prompts]

        def wait() -> list[RequestOutput]:
            results = []
            for stream in streams:
                pieces = [ray.get(ref) for ref in stream]
                whole = pieces[0]
                for piece in pieces[1:]:
                    whole.merge(piece, RequestOutputKind.DELTA)
                results.append(whole)
            return results

        return wait

    def until_all_have_tokens(self) -> None:
        """Streams are read later; that steps are run for them is enough here."""
        before = num_steps(self)
        while num_steps(self) < before + 3:
            pass

    def close(self) -> None:
        ray.kill(self.engine)


@pytest.fixture(scope="module", params=["inproc", "inproc-async-scheduling", "actor", "asyncio", "engine-actor"])
def driver(request: pytest.FixtureRequest, ray_cluster: None, fake_model_dir: Path) -> Iterator[Any]:
    def config(**options: Any) -> EngineConfig:
        executor = partial(FakeExecutor, step_s=STEP_S)
        return EngineConfig.from_kwargs(str(fake_model_dir), executor_class=executor, **options)

    made: Any
    match request.param:
        case "inproc":
            made = SyncDriver(config(engine_core="inproc"))
        case "inproc-async-scheduling":
            made = SyncDriver(config(engine_core="inproc", async_scheduling=True))
        case "actor":
            made = SyncDriver(config(async_scheduling=True))
        case "asyncio":
            made = AsyncDriver(config())
        case _:
            made = ActorDriver(fake_model_dir)
    yield made
    made.close()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_steps(driver: Any) -> int:
    return int(driver.call("collective_rpc", lambda worker: worker.num_steps)[0])


def test_kept_requests_stand_still_and_go_on_with_the_same_tokens(driver: Any) -> None:
    wait = driver.submit(PROMPTS)
    driver.until_all_have_tokens()
    driver.call("pause", "keep")
    assert driver.call("is_paused") is True
    before = num_steps(driver)
    wait_for_late = driver.submit([[9]])
    assert driver.call("reset_prefix_cache") is False  # they hold their KV
    assert num_steps(driver) == before
    driver.call("resume")
    assert driver.call("is_paused") is False
    assert tokens_of(wait()) == EXPECTED
    assert tokens_of(wait_for_late()) == [expected_tokens([9], 25)]


def test_running_requests_lose_their_kv_and_go_on_with_the_same_tokens(driver: Any) -> None:
    wait = driver.submit(PROMPTS)
    driver.until_all_have_tokens()
    assert driver.call("reset_prefix_cache", reset_running_requests=True) is True
    assert driver.call("is_paused") is False
    outputs = wait()
    assert tokens_of(outputs) == EXPECTED
    assert {output.metrics.num_preemptions for output in outputs} == {1}
    driver.call("pause", "keep")
    assert driver.call("reset_prefix_cache", reset_running_requests=True) is True
    assert driver.call("is_paused") is True
    driver.call("resume")


def test_admission_is_checked_before_requests_are_sent(driver: Any) -> None:
    driver.call("pause", "keep")
    driver.call("update_config", {"max_num_queued_requests": 2})
    driver.call("check_admission", 100)
    with pytest.raises(QueueFullError, match="max_num_queued_requests is 2"):
        driver.call("check_admission", SchedulerConfig().max_num_seqs + 3)
    driver.call("update_config", {"max_num_queued_requests": None})
    driver.call("check_admission", 10_000)
    with pytest.raises(ValueError, match="num_requests must be an integer, at least 1; got 0"):
        driver.call("check_admission", 0)
    driver.call("resume")


def test_waiting_pause_returns_when_those_in_flight_have_ended(driver: Any) -> None:
    wait = driver.submit(PROMPTS)
    driver.until_all_have_tokens()
    driver.call("pause", "wait")
    before = num_steps(driver)
    wait_for_late = driver.submit([[9]])
    assert tokens_of(wait()) == EXPECTED
    assert num_steps(driver) == before
    driver.call("resume")
    assert tokens_of(wait_for_late()) == [expected_tokens([9], 25)]


def test_aborting_pause_ends_those_in_flight_with_what_they_have(driver: Any) -> None:
    wait = driver.submit([[5, 6, 7]])
    driver.until_all_have_tokens()
    driver.call("pause")
    (output,) = wait()
    assert output.outputs[0].finish_reason == "abort"
    got = output.outputs[0].token_ids
    assert got == EXPECTED[0][: len(got)]
    wait = driver.submit([[5, 6, 7]])
    driver.call("resume")
    driver.call("resume")
    assert tokens_of(wait()) == EXPECTED[:1]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleeping_engine_keeps_what_it_has_to_do(driver: Any, level: int) -> None:
    wait = driver.submit(PROMPTS)
    driver.until_all_have_tokens()
    driver.call("sleep", level, mode="keep")
    assert driver.call("is_sleeping") is True
    assert driver.call("is_paused") is True
    assert driver.call("collective_rpc", lambda worker: worker.asleep) == [level]
    driver.call("sleep", level)  # nothing more to do
    wait_for_late = driver.submit([[9]])
    with pytest.raises(RuntimeError, match="asleep; wake_up"):
        driver.call("resume")
    with pytest.raises(RuntimeError, match=f"asleep at level {level}; wake_up"):
        driver.call("sleep", 1 if level == 0 else 0)
    driver.call("wake_up", ["weights"])
    assert driver.call("is_sleeping") is True
    driver.call("wake_up", "kv_cache")
    if level == 0:
        driver.call("wake_up", ["scheduling"])
    assert driver.call("is_sleeping") is False
    assert driver.call("is_paused") is False
    assert tokens_of(wait()) == EXPECTED
    assert tokens_of(wait_for_late()) == [expected_tokens([9], 25)]
    driver.call("wake_up")  # awake already


def test_paused_engine_is_still_paused_after_its_sleep(driver: Any) -> None:
    driver.call("pause", "keep")
    driver.call("sleep")
    driver.call("wake_up")
    assert driver.call("is_sleeping") is False
    assert driver.call("is_paused") is True
    driver.call("resume")
    assert driver.call("is_paused") is False


def test_errors_are_the_callers_and_the_engine_goes_on(driver: Any) -> None:
    wait = driver.submit(PROMPTS)
    for args, error, text in (
        (("pause", "stop"), ValueError, "mode must be one of 'abort', 'wait', 'keep', got 'stop'"),
        (("sleep", 3), ValueError, "level must be one of 0, 1, 2, got 3"),
        (("wake_up", ["wieghts"]), ValueError, "tags may hold 'weights', 'kv_cache', 'scheduling', got 'wieghts'"),
        (("collective_rpc", "nonsense"), AttributeError, "nonsense"),
        (("collective_rpc", lambda worker: 1 / 0), ZeroDivisionError, "division"),
        (("update_config", {"max_num_seqs": 2}), ValueError, "'max_num_seqs' cannot be changed while the engine runs"),
        (("update_config", {"max_num_batched_tokens": 10**6}), ValueError, "to at most 2048"),
        (("update_config", {"max_num_batched_tokens": 8}), ValueError, "must be at least max_num_seqs"),
        (("update_config", {"step_timeout_s": "soon"}), ValueError, "must be a number of seconds, got 'soon'"),
        (("update_config", {"step_timeout_s": -1}), ValueError, "step_timeout_s must be positive, got -1"),
    ):
        with pytest.raises(error, match=text):
            driver.call(*args)
    assert driver.call("is_paused") is False
    assert tokens_of(wait()) == EXPECTED


def test_workers_fail_to_sleep_and_the_engine_can_be_woken(driver: Any) -> None:
    def break_sleep(worker: Any) -> None:
        worker.sleep = lambda level: 1 / 0

    def mend(worker: Any) -> None:
        del worker.sleep

    driver.call("collective_rpc", break_sleep)
    with pytest.raises(ZeroDivisionError):
        driver.call("sleep")
    driver.call("collective_rpc", mend)
    driver.call("wake_up")
    assert tokens_of(driver.submit(PROMPTS)()) == EXPECTED


def test_options_change_all_or_none_and_count_from_then_on(driver: Any) -> None:
    before = driver.call("update_config", {})
    assert before["step_timeout_s"] == 300.0
    changed = driver.call("update_config", {"max_num_batched_tokens": 256, "step_timeout_s": 60})
    assert changed == before | {"max_num_batched_tokens": 256, "step_timeout_s": 60.0}
    assert driver.call("collective_rpc", lambda worker: worker.step_timeout_s) == [60.0]
    with pytest.raises(ValueError, match="max_long_partial_prefills must be an integer of at least 1"):
        driver.call("update_config", {"step_timeout_s": 10, "max_long_partial_prefills": 0})
    assert driver.call("update_config", {}) == changed
    driver.call("update_config", before)
    assert tokens_of(driver.submit(PROMPTS)()) == EXPECTED


def test_dummy_batch_runs_between_steps(driver: Any) -> None:
    wait = driver.submit(PROMPTS)
    driver.until_all_have_tokens()
    for _ in range(3):
        driver.call("execute_dummy_batch")
    assert tokens_of(wait()) == EXPECTED


def test_utilities_of_all_front_ends_have_the_same_parameters() -> None:
    from engine_actors.utilities import AsyncUtilities, SyncUtilities

    def parameters(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        ray_adds = {"_ray_trace_ctx"}
        return {name: [p for p in inspect.signature(f).parameters if p not in ray_adds] for name, f in functions}

    assert parameters(SyncUtilities) == parameters(AsyncUtilities)


@pytest.mark.parametrize("engine_core", ["inproc", "actor"])
def test_synchronous_caller_does_not_wait_for_what_cannot_come(fake_model_dir: Path, engine_core: str) -> None:
    with LLM(str(fake_model_dir), engine_core=engine_core, executor_class=FakeExecutor) as llm:
        llm.sleep(0)
        with pytest.raises(EnginePausedError, match=r"after resume\(\) or wake_up\(\)"):
            llm.generate([[5]], PARAMS, use_tqdm=False)
        llm.wake_up()
        assert tokens_of(llm.generate([[5]], PARAMS, use_tqdm=False)) == [expected_tokens([5], 25)]


async def test_resuming_ends_a_pause_that_waits(fake_config: Callable[..., EngineConfig], tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = AsyncLLM.from_config(fake_config({"hold_file": str(hold)}))
    hold.touch()
    stream = await engine.add_request([5], PARAMS)
    pausing = asyncio.create_task(engine.pause("wait"))
    while not await engine.is_paused():
        pass
    await engine.resume()
    hold.unlink()
    await pausing
    assert await engine.is_paused() is False
    assert [output async for output in stream][-1].outputs[0].token_ids == expected_tokens([5], 25)
    await engine.shutdown_async()


async def test_shutdown_of_a_paused_engine_aborts_what_cannot_go_on(fake_config: Callable[..., EngineConfig]) -> None:
    engine = AsyncLLM.from_config(fake_config({"step_s": 0.002}))
    frozen = await engine.add_request([5], PARAMS)
    await anext(frozen)
    await engine.pause_generation("keep")
    late = await engine.add_request([6], PARAMS)
    await engine.shutdown_async(30.0)
    for stream in (frozen, late):
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
