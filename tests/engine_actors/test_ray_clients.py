"""Clients of an EngineCore actor: same tokens, utilities, and a clear end of everything when something dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray._private.state

from engine_actors.config import EngineConfig
from engine_actors.core_streams import LINGER_S
from engine_actors.errors import EngineDeadError, EngineStartupError
from engine_actors.llm import LLM
from engine_actors.llm_engine import LLMEngine
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes import FakeExecutor, expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPTS = [[5, 6, 7], [8] * 40, [100, 101]]

Make = Callable[..., LLMEngine]


@pytest.fixture
def make_engine(fake_config: Callable[..., EngineConfig]) -> Iterator[Make]:
    engines: list[LLMEngine] = []

    def make(executor: dict[str, Any] | None = None, **options: Any) -> LLMEngine:
        engines.append(LLMEngine(fake_config(executor, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def live_core_actors() -> list[str]:
    actors = ray._private.state.actors().values()
    return [a["ActorID"] for a in actors if a["ActorClassName"] == "EngineCoreActor" and a["State"] != "DEAD"]


def run(engine: LLMEngine, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output.outputs[0].token_ids
    return [outputs[str(index)] for index in range(len(prompts))]


def core_pid(engine: LLMEngine) -> int:
    return engine.collective_rpc(lambda worker: os.getpid())[0]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_through_the_actor_are_the_executors(make_engine: Make, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    assert run(engine) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    assert run(engine) == [expected_tokens(prompt, 20) for prompt in PROMPTS]


def test_engine_left_idle_goes_on_where_it_stopped(make_engine: Make) -> None:
    engine = make_engine()
    assert run(engine) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    time.sleep(LINGER_S + 0.3)  # the stream has ended, unread
    assert run(engine) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    time.sleep(LINGER_S + 0.3)
    assert engine.reset_prefix_cache() is True


def test_utilities_answer_and_their_errors_are_the_callers(make_engine: Make) -> None:
    engine = make_engine()
    assert engine.reset_prefix_cache() is True
    assert engine.collective_rpc("echo", args=("x",)) == ["x"]
    assert engine.collective_rpc(lambda worker, n: worker.echo(n + 1), args=(1,)) == [2]
    with pytest.raises(AttributeError, match="nonsense"):
        engine.collective_rpc("nonsense")
    with pytest.raises(
        ValueError, match="unknown utility 'nonsense'; known are check_admission, collective_rpc, execute_dummy_batch"
    ):
        engine.client.call_utility("nonsense")
    assert run(engine) == [expected_tokens(prompt, 20) for prompt in PROMPTS]


def test_result_that_cannot_be_sent_is_an_error_of_the_call_alone(make_engine: Make) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="cannot be sent"):
        engine.collective_rpc(lambda worker: (i for i in range(3)))
    engine.check_health()


def test_killed_core_ends_a_pending_call_with_the_cause(make_engine: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = make_engine({"hold_file": str(hold)})
    pid = core_pid(engine)
    hold.touch()
    engine.add_request("a", [5], GREEDY)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        engine.step()
    assert time.monotonic() - started < 2
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        engine.add_request("b", [5], GREEDY)
    with pytest.raises(EngineDeadError):
        engine.check_health()


def test_core_killed_while_idle_is_noticed_by_the_next_call(make_engine: Make) -> None:
    engine = make_engine()
    os.kill(core_pid(engine), signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        run(engine)


def test_worker_failing_in_a_step_ends_everything_with_its_text(make_engine: Make) -> None:
    engine = make_engine({"fail_at_step": 3})
    with pytest.raises(EngineDeadError, match="worker rank 0 failed in step 3: boom"):
        run(engine)
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="worker rank 0 failed in step 3: boom"):
        engine.reset_prefix_cache()
    assert live_core_actors() == []


def test_worker_failing_while_idle_is_told_by_the_next_call(make_engine: Make) -> None:
    engine = make_engine()
    with contextlib.suppress(EngineDeadError):  # the answer may still come, or not
        engine.collective_rpc("fail_now", args=("worker rank 1 died",))
    with pytest.raises(EngineDeadError, match="worker rank 1 died"):
        run(engine)


def test_failing_start_raises_the_root_cause_and_leaves_nothing(make_engine: Make) -> None:
    with pytest.raises(EngineStartupError, match="ValueError: weights are truncated"):
        make_engine({"startup_error": ValueError("weights are truncated")})
    assert live_core_actors() == []
    with pytest.raises(EngineStartupError, match="too small for one sequence of max_model_len 256"):
        make_engine(num_gpu_blocks_override=4)
    assert live_core_actors() == []


def test_shutdown_leaves_no_actor_and_may_be_repeated(make_engine: Make) -> None:
    engine = make_engine()
    run(engine)
    engine.shutdown()
    engine.shutdown()
    assert live_core_actors() == []
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        engine.add_request("a", [5], GREEDY)


def test_abort_ends_the_request_with_its_reason(make_engine: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = make_engine({"hold_file": str(hold)})
    hold.touch()
    engine.add_request("a", [5], GREEDY)
    engine.add_request("b", [6], GREEDY)
    engine.abort_requests(["a", "unknown"])
    hold.unlink()
    reasons = {}
    while engine.has_unfinished_requests():
        reasons |= {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
    assert reasons == {"a": "abort", "b": "length"}


def test_interrupt_while_waiting_aborts_and_the_next_call_is_clean(fake_model_dir: Path) -> None:
    executor = partial(FakeExecutor, step_s=0.01)
    with LLM(str(fake_model_dir), executor_class=executor) as llm:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], GREEDY.clone(max_tokens=250), use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        (output,) = llm.generate([[7]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected_tokens([7], 20)
        assert llm.reset_prefix_cache()  # nothing of the interrupted call is left in the engine


def test_dropping_the_engine_kills_its_actor(fake_config: Callable[..., EngineConfig]) -> None:
    engine = LLMEngine(fake_config())
    (actor_id,) = live_core_actors()
    del engine
    while actor_id in live_core_actors():
        time.sleep(0.01)
