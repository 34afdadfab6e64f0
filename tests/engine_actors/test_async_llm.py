"""AsyncLLM: one generator per request; leaving it aborts; nothing outlives the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_actors.async_llm import AsyncLLM
from engine_actors.config import EngineConfig
from engine_actors.errors import EngineDeadError, InvalidRequestError, QueueFullError
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.engine_actors.conftest import until
from tests.fakes import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
DELTA = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
Make = Callable[..., AsyncLLM]


@pytest.fixture
async def make_llm(fake_config: Callable[..., EngineConfig]) -> AsyncIterator[Make]:
    engines: list[AsyncLLM] = []

    def make(executor: dict[str, Any] | None = None, **options: Any) -> AsyncLLM:
        engines.append(AsyncLLM.from_config(fake_config(executor, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.shutdown_async()


async def tokens_of(engine: AsyncLLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(prompt, params):
        new = output.outputs[0].token_ids
        tokens = tokens + new if params.output_kind is RequestOutputKind.DELTA else new
    return tokens


async def test_many_requests_at_once_get_their_own_tokens(make_llm: Make) -> None:
    engine = make_llm()
    prompts = [[3 + i, 4, 5] for i in range(50)]
    for params in (GREEDY, DELTA):
        results = await asyncio.gather(*(tokens_of(engine, prompt, params) for prompt in prompts))
        assert results == [expected_tokens(prompt, 20) for prompt in prompts]


async def test_generate_all_keeps_the_order_and_checks_everything_first(make_llm: Make) -> None:
    engine = make_llm()
    outputs = await engine.generate_all([[5], [6, 7]], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected_tokens([5], 20),
        expected_tokens([6, 7], 20),
    ]
    with pytest.raises(InvalidRequestError, match="token id 9999"):
        await engine.generate_all([[5], [9999]], GREEDY)
    assert engine.output_processor.num_unfinished == 0


async def test_wrong_request_raises_and_the_others_go_on(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.005})
    good = asyncio.create_task(tokens_of(engine, [5, 6]))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        await tokens_of(engine, [])
    assert await good == expected_tokens([5, 6], 20)


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_a_generator_aborts_in_the_engine(make_llm: Make, how: str) -> None:
    engine = make_llm({"step_s": 0.002})
    long = GREEDY.clone(max_tokens=200, ignore_eos=True)
    if how == "close":
        generator = engine.generate([5], long)
        await anext(generator)
        await generator.aclose()
    else:
        task = asyncio.create_task(tokens_of(engine, [5], long))
        await until(lambda: engine.output_processor.num_unfinished)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.output_processor.num_unfinished == 0
    # The engine is idle, with all blocks free, long before the request could have finished by itself.
    steps_before = (await engine.client.link.health_async()).num_steps
    while not await engine.reset_prefix_cache():
        pass
    assert (await engine.client.link.health_async()).num_steps <= steps_before + 20


async def test_abort_by_id_ends_the_stream_with_its_reason(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.002})
    stream = await engine.add_request([5], GREEDY.clone(max_tokens=200), "mine")
    await anext(stream)
    await engine.abort("mine")
    await engine.abort(["mine", "unknown"])
    last = None
    async for output in stream:
        last = output
    assert last is not None
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"


async def test_id_in_use_is_refused_and_free_again_afterwards(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.002})
    stream = await engine.add_request([5], GREEDY, "mine")
    with pytest.raises(InvalidRequestError, match="request_id 'mine' is in use"):
        await engine.add_request([5], GREEDY, "mine")
    async for _ in stream:
        pass
    assert [o async for o in await engine.add_request([5], GREEDY, "mine")][-1].finished


async def test_queue_limit_is_the_callers_error(make_llm: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = make_llm({"hold_file": str(hold)}, max_num_seqs=1, max_num_queued_requests=0)
    hold.touch()
    first = asyncio.create_task(tokens_of(engine, [5]))
    while not (await engine.client.link.health_async()).oldest_step_age_s:
        pass
    with pytest.raises(QueueFullError, match="max_num_queued_requests is 0"):
        await tokens_of(engine, [6])
    hold.unlink()
    assert await first == expected_tokens([5], 20)


async def test_slow_reader_gets_merged_deltas_and_misses_nothing(make_llm: Make) -> None:
    engine = make_llm()
    stream = await engine.add_request([5], DELTA)
    await until(lambda: stream.finished)
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert outputs[0].outputs[0].token_ids == expected_tokens([5], 20)
    assert outputs[0].outputs[0].text == engine.tokenizer.decode(expected_tokens([5], 20), skip_special_tokens=True)


async def test_killed_core_ends_all_streams_and_later_calls(make_llm: Make, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = make_llm({"hold_file": str(hold)})
    (pid,) = await engine.collective_rpc(lambda worker: os.getpid())
    hold.touch()
    pending = [asyncio.create_task(tokens_of(engine, [5, i])) for i in range(8)]
    utility = asyncio.create_task(engine.collective_rpc(lambda worker: time.sleep(60)))
    await until(lambda: engine.output_processor.num_unfinished == 8)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    results = await asyncio.gather(*pending, utility, return_exceptions=True)
    assert time.monotonic() - started < 2
    assert all(isinstance(r, EngineDeadError) and "EngineCore's process died" in str(r) for r in results), results
    assert engine.errored
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        await tokens_of(engine, [5])
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_worker_failure_reaches_every_stream_with_its_text(make_llm: Make) -> None:
    engine = make_llm({"fail_at_step": 4})
    results = await asyncio.gather(*(tokens_of(engine, [5, i]) for i in range(8)), return_exceptions=True)
    assert all("worker rank 0 failed in step 4: boom" in str(r) for r in results), results
    assert {type(r) for r in results} == {EngineDeadError}
    with pytest.raises(EngineDeadError, match="boom"):
        await engine.wait_for_requests_to_drain()


async def test_idle_client_has_no_stream_and_both_goes_on_and_notices_a_death(make_llm: Make) -> None:
    engine = make_llm()
    (pid,) = await engine.collective_rpc(lambda worker: os.getpid())
    for _ in range(2):
        await until(lambda: not engine.client.link.has_stream)
        assert await tokens_of(engine, [5, 6]) == expected_tokens([5, 6], 20)
    await until(lambda: not engine.client.link.has_stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        await tokens_of(engine, [5, 6])


@pytest.mark.parametrize("who", ["EngineCore", "worker"])
async def test_idle_client_learns_of_a_death_without_a_call(make_llm: Make, who: str) -> None:
    engine = make_llm()
    (pid,) = await engine.collective_rpc(lambda worker: os.getpid())
    if who == "worker":  # It dies later, of itself.
        await engine.collective_rpc(
            lambda worker: threading.Timer(1.0, worker.fail_now, ("worker rank 0 died",)).start()
        )
    await until(lambda: not engine.client.link.has_stream)
    if who == "EngineCore":
        os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.errored)
    with pytest.raises(EngineDeadError, match="EngineCore's process died" if who == "EngineCore" else "rank 0 died"):
        await tokens_of(engine, [5, 6])


async def test_health_is_true_while_busy(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.001})
    pending = [asyncio.create_task(tokens_of(engine, [5, i])) for i in range(200)]
    for _ in range(5):
        await engine.check_health()
    await asyncio.gather(*pending)


async def test_shutdown_aborts_what_is_in_flight_and_delivers_it(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.002})
    stream = await engine.add_request([5], GREEDY.clone(max_tokens=200))
    await anext(stream)
    await engine.shutdown_async()
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await engine.shutdown_async()
    with pytest.raises(EngineDeadError, match="shut down"):
        await tokens_of(engine, [5])


async def test_shutdown_with_a_timeout_drains_and_refuses_new_work(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.005})
    stream = await engine.add_request([5], GREEDY)
    await anext(stream)
    stopping = asyncio.create_task(engine.shutdown_async(30.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shut down"):
        await tokens_of(engine, [6])
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].token_ids == expected_tokens([5], 20)
    await stopping


async def test_drain_deadline_aborts_what_is_left(make_llm: Make) -> None:
    engine = make_llm({"step_s": 0.02})
    stream = await engine.add_request([5], GREEDY.clone(max_tokens=250))
    await anext(stream)
    await engine.shutdown_async(0.1)
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_one_engine_serves_one_event_loop_after_another(
    ray_cluster: None, fake_config: Callable[..., EngineConfig]
) -> None:
    engine = AsyncLLM.from_config(fake_config())
    for _ in range(3):
        assert asyncio.run(tokens_of(engine, [5, 6])) == expected_tokens([5, 6], 20)
    engine.shutdown()


async def test_in_process_core_is_refused(fake_config: Callable[..., EngineConfig]) -> None:
    with pytest.raises(ValueError, match="engine_core='actor'"):
        AsyncLLM.from_config(fake_config(engine_core="inproc"))


async def test_a_second_reader_of_a_stream_is_refused_and_the_first_goes_on(make_llm: Make) -> None:
    engine = make_llm()
    await engine.pause_generation("keep")
    stream = await engine.add_request([9], GREEDY.clone(max_tokens=400))
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)  # It runs until it has to wait.
    with pytest.raises(RuntimeError, match="is being read by another task"):
        await anext(stream)
    await engine.resume_generation()
    assert (await reading).outputs[0].token_ids
    engine.drop(stream)


async def test_draining_waits_for_every_request_and_no_longer(make_llm: Make) -> None:
    engine = make_llm()
    await engine.wait_for_requests_to_drain()
    tasks = [asyncio.create_task(tokens_of(engine, [5 + i], GREEDY)) for i in range(3)]
    stream = await engine.add_request([9], GREEDY.clone(max_tokens=400))
    await anext(stream)
    with pytest.raises(TimeoutError, match="requests are unfinished after 0 s"):
        await engine.wait_for_requests_to_drain(0)
    waiting = asyncio.create_task(engine.wait_for_requests_to_drain())
    assert await asyncio.gather(*tasks) == [expected_tokens([5 + i], 20) for i in range(3)]
    engine.drop(stream)
    await waiting
    assert engine.output_processor.num_unfinished == 0
    last = await engine.add_request([9], GREEDY.clone(max_tokens=400))
    waiting = asyncio.create_task(engine.wait_for_requests_to_drain())
    await asyncio.sleep(0)
    await engine.shutdown_async()
    await waiting
    assert last.finished
