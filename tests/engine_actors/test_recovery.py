"""recovery="replay" over the fake executor: failures of workers and of EngineCore cost a pause, and no token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_actors.async_llm import AsyncLLM
from engine_actors.config import EngineConfig
from engine_actors.errors import EngineDeadError, EngineRecoveredError, RequestFailedError
from engine_actors.llm_engine import LLMEngine
from engine_actors.request_stream import RequestStream
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.engine_actors.conftest import until
from tests.fakes import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
NUM_TOKENS = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, output_kind=RequestOutputKind.DELTA)
PROMPTS = [[5, 6, 7], [8] * 40, [100, 101], [9]]
POISON = 400

MakeConfig = Callable[..., EngineConfig]
Start = Callable[..., AsyncLLM]


@pytest.fixture
async def start(fake_config: MakeConfig) -> AsyncIterator[Start]:
    engines: list[AsyncLLM] = []

    def make(executor: dict[str, Any] | None = None, **options: Any) -> AsyncLLM:
        engines.append(AsyncLLM.from_config(fake_config(executor, **{"recovery": "replay", **options})))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.shutdown_async()


class Switch:
    """A file that makes FakeExecutor fail."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def turn_on(self) -> None:
        Path(self.path).touch()


@pytest.fixture
def failure(tmp_path: Path) -> Switch:
    return Switch(tmp_path / "fail")


@pytest.fixture
def refusal(tmp_path: Path) -> Switch:
    return Switch(tmp_path / "refuse")


async def submit(engine: AsyncLLM, params: SamplingParams = GREEDY) -> list[RequestStream]:
    return [await engine.add_request(prompt, params, str(index)) for index, prompt in enumerate(PROMPTS)]


async def read(stream: RequestStream) -> list[int]:
    tokens: list[int] = []
    async for output in stream:
        tokens += output.outputs[0].token_ids
    return tokens


async def core_pid(engine: AsyncLLM) -> int:
    return (await engine.collective_rpc(lambda worker: os.getpid()))[0]


async def kill_core(engine: AsyncLLM) -> None:
    os.kill(await core_pid(engine), signal.SIGKILL)


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_streams_go_on_after_a_worker_failed(start: Start, failure: Switch, async_scheduling: bool) -> None:
    engine = start({"step_s": 0.002, "fail_file": failure.path}, async_scheduling=async_scheduling)
    streams = await submit(engine)
    firsts = [(await anext(stream)).outputs[0].token_ids for stream in streams]
    failure.turn_on()
    rest = await asyncio.gather(*map(read, streams))
    assert [a + b for a, b in zip(firsts, rest, strict=True)] == [expected_tokens(p, NUM_TOKENS) for p in PROMPTS]
    stats = engine.recovery_stats
    assert (stats.recoveries, stats.last_cause, stats.since_s) == (1, "worker rank 0 died: SIGKILL", None)
    assert stats.lost_s > 0
    await engine.check_health()


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_streams_go_on_after_the_core_was_killed(start: Start, async_scheduling: bool) -> None:
    engine = start({"step_s": 0.002}, async_scheduling=async_scheduling)
    await kill_core(engine)  # idle: the next call finds out
    seeded = GREEDY.clone(temperature=1.0, seed=3)
    for _ in range(2):
        streams = await submit(engine, seeded)
        firsts = [(await anext(stream)).outputs[0].token_ids for stream in streams]
        await kill_core(engine)
        rest = await asyncio.gather(*map(read, streams))
        expected = [expected_tokens(p, NUM_TOKENS, seed=3, greedy=False) for p in PROMPTS]
        assert [a + b for a, b in zip(firsts, rest, strict=True)] == expected
    assert engine.recovery_stats.recoveries == 3
    assert engine.dead_error is None


async def test_calls_made_during_a_recovery_are_served_after_it(start: Start) -> None:
    engine = start({"step_s": 0.002})
    streams = await submit(engine)
    await anext(streams[0])
    await kill_core(engine)
    await until(lambda: engine.recovery_stats.since_s is not None)
    await engine.check_health()  # a recovery is no failure
    late = await engine.add_request([77], GREEDY)
    await engine.abort("1")
    utility = asyncio.create_task(engine.reset_prefix_cache())
    assert await read(late) == expected_tokens([77], NUM_TOKENS)
    outputs = [output async for output in streams[1]]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert await utility in (True, False)
    assert await read(streams[2]) == expected_tokens(PROMPTS[2], NUM_TOKENS)


async def test_a_utility_under_way_is_not_repeated(start: Start) -> None:
    engine = start()

    def suicide(worker: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(EngineRecoveredError, match="call it again"):
        await engine.collective_rpc(suicide)
    assert await read(await engine.add_request([5], GREEDY)) == expected_tokens([5], NUM_TOKENS)


async def test_workers_that_fail_asleep_are_replaced_by_sleeping_ones(start: Start) -> None:
    engine = start()
    await engine.sleep(1)

    def die(worker: Any) -> None:
        worker.fail_now("worker rank 0 died: SIGKILL")

    await engine.collective_rpc(die)
    with contextlib.suppress(EngineRecoveredError):  # when it comes before the failure is known
        await engine.collective_rpc("echo", args=(1,))
    assert await engine.collective_rpc(lambda worker: worker.asleep) == [1]
    assert engine.recovery_stats.recoveries == 1
    assert await engine.is_sleeping()
    await engine.wake_up()
    assert await read(await engine.add_request([5], GREEDY)) == expected_tokens([5], NUM_TOKENS)


@pytest.mark.parametrize("death", ["fail_on", "exit_on"])
async def test_a_request_that_keeps_killing_the_engine_ends_alone(start: Start, death: str) -> None:
    engine = start({"step_s": 0.001, death: POISON})
    poison = await engine.add_request([POISON], GREEDY, "poison")
    streams = await submit(engine)
    with pytest.raises(RequestFailedError, match=r"crash|dies whenever"):
        await read(poison)
    results = await asyncio.gather(*map(read, streams))
    assert results == [expected_tokens(p, NUM_TOKENS) for p in PROMPTS]
    assert 3 <= engine.recovery_stats.recoveries <= 4  # as one or two crashes had others in the engine
    assert await read(await engine.add_request([5], GREEDY)) == expected_tokens([5], NUM_TOKENS)


async def test_recovery_that_fails_ends_every_call_with_both_causes(
    start: Start, failure: Switch, refusal: Switch
) -> None:
    engine = start({"step_s": 0.002, "fail_file": failure.path, "refuse_file": refusal.path}, max_recovery_attempts=2)
    streams = await submit(engine)
    await anext(streams[0])
    refusal.turn_on()
    failure.turn_on()
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"SIGKILL.*2 times.*no room"):
            await read(stream)
    with pytest.raises(EngineDeadError, match="no room"):
        await engine.add_request([5], GREEDY)
    with pytest.raises(EngineDeadError, match="no room"):
        await engine.check_health()


async def test_core_that_cannot_be_replaced_ends_every_call_with_both_causes(start: Start, refusal: Switch) -> None:
    engine = start({"step_s": 0.002, "refuse_file": refusal.path}, max_recovery_attempts=1)
    streams = await submit(engine)
    await anext(streams[0])
    refusal.turn_on()
    await kill_core(engine)
    for stream in streams:
        with pytest.raises(EngineDeadError, match=r"process died.*another EngineCore could not be started.*no room"):
            await read(stream)
    with pytest.raises(EngineDeadError, match="no room"):
        await engine.add_request([5], GREEDY)


async def test_shutdown_during_a_recovery_ends_the_streams(start: Start) -> None:
    engine = start({"step_s": 0.002})
    streams = await submit(engine)
    await anext(streams[0])
    await kill_core(engine)
    await until(lambda: engine.recovery_stats.since_s is not None)
    await engine.shutdown_async()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="shut down"):
            await read(stream)


def test_synchronous_caller_sees_a_pause(
    fake_config: MakeConfig, failure: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LLMEngine(fake_config({"step_s": 0.002, "fail_file": failure.path}, recovery="replay"))
    try:
        pid = engine.collective_rpc(lambda worker: os.getpid())[0]
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, GREEDY)
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
        num_steps = 0
        with caplog.at_level(logging.WARNING, logger="engine_actors"):
            while engine.has_unfinished_requests():
                num_steps += 1
                if num_steps == 5:
                    failure.turn_on()
                if num_steps == 15:
                    os.kill(pid, signal.SIGKILL)
                if num_steps == 20:
                    engine.abort_requests(["3"])
                for output in engine.step():
                    tokens[output.request_id] += output.outputs[0].token_ids
        for index, prompt in enumerate(PROMPTS[:3]):
            assert tokens[str(index)] == expected_tokens(prompt, NUM_TOKENS)
        aborted = tokens["3"]
        assert aborted == expected_tokens(PROMPTS[3], len(aborted))
        assert engine.client.recovery_stats.recoveries == 2
        assert "3 requests go on" in caplog.text or "4 requests go on" in caplog.text
        assert engine.reset_prefix_cache() is True
        engine.check_health()
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("recovery", "restart", "recovery must be one of"),
        ("recovery_timeout_s", 0.0, "recovery_timeout_s must be positive"),
        ("max_recovery_attempts", 0, "max_recovery_attempts must be at least 1"),
    ],
)
def test_wrong_recovery_options_are_refused(fake_config: MakeConfig, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fake_config(**{option: value})


def test_recovery_needs_an_actor(fake_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="engine_core='actor'"):
        fake_config(recovery="replay", engine_core="inproc")


async def test_a_new_core_is_asleep_paused_and_set_as_the_old_one_was(start: Start) -> None:
    engine = start()
    stream = await engine.add_request(PROMPTS[0], GREEDY)
    first = await anext(stream)
    await engine.update_config({"max_num_queued_requests": 7})
    await engine.pause("keep")
    await engine.sleep(1, mode="keep")
    await kill_core(engine)
    await until(lambda: engine.recovery_stats.recoveries == 1)
    assert (await engine.is_sleeping(), await engine.is_paused()) == (True, True)
    assert (await engine.update_config({}))["max_num_queued_requests"] == 7
    await engine.wake_up()
    assert (await engine.is_sleeping(), await engine.is_paused()) == (False, True)
    await kill_core(engine)  # awake again, and still paused
    await until(lambda: engine.recovery_stats.recoveries == 2)
    assert (await engine.is_sleeping(), await engine.is_paused()) == (False, True)
    await engine.resume()
    assert first.outputs[0].token_ids + await read(stream) == expected_tokens(PROMPTS[0], NUM_TOKENS)


def test_synchronous_engine_stays_paused_when_its_core_dies(fake_config: MakeConfig) -> None:
    engine = LLMEngine(fake_config(None, recovery="replay"))
    try:
        engine.pause("keep")
        engine.add_request("a", PROMPTS[0], GREEDY)
        os.kill(engine.collective_rpc(lambda worker: os.getpid())[0], signal.SIGKILL)
        with contextlib.suppress(EngineRecoveredError):
            engine.is_paused()
        assert engine.is_paused()
        engine.resume()
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += output.outputs[0].token_ids
        assert tokens == expected_tokens(PROMPTS[0], NUM_TOKENS)
    finally:
        engine.shutdown()
