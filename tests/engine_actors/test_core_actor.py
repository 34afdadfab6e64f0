"""EngineCoreActor with several clients, driven on this process's event loop without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_actors import core_streams
from engine_actors.config import EngineConfig
from engine_actors.core_actor import EngineCoreActor
from engine_actors.messages import (
    AbortMessage,
    AddMessage,
    ClientMessage,
    OutputBatch,
    ShutdownMessage,
    decode_batch,
    encode_messages,
)
from engine_actors.ray_utilities import utility_message, utility_value
from scheduler.output import FinishedRequest, FinishReason, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from tests.engine_actors.conftest import until
from tests.fakes import expected_tokens

MakeConfig = Callable[..., EngineConfig]


class Client:
    """One client: sends in order, collects what its stream brings."""

    def __init__(self, actor: EngineCoreActor, index: int) -> None:
        self.actor, self.index = actor, index
        self.sequence = 0
        self.stream = actor.outputs(index)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.last: OutputBatch | None = None

    async def send(self, *messages: ClientMessage) -> None:
        await self.actor.send(self.index, self.sequence, encode_messages(list(messages)))
        self.sequence += 1

    async def add(self, *names: str, max_tokens: int = 20) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
        await self.send(AddMessage([EngineCoreRequest(name, pack_int32([5, self.index]), params) for name in names]))

    async def read(self) -> OutputBatch:
        batch = decode_batch(await anext(self.stream))
        for outputs in batch.outputs:
            for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self.tokens.setdefault(request_id, []).append(token)
            self.finished |= {ended.request_id: ended for ended in outputs.finished}
        if batch.is_last:
            self.last = batch
        return batch

    async def read_until_finished(self, *names: str) -> None:
        while not self.finished.keys() >= set(names):
            await self.read()


@pytest.fixture
async def make_actor(fake_config: MakeConfig) -> AsyncIterator[Callable[..., Any]]:
    actors: list[EngineCoreActor] = []

    async def make(executor: dict[str, Any] | None = None, **options: Any) -> EngineCoreActor:
        actor = EngineCoreActor(fake_config(executor, **options))
        await actor.start()
        actors.append(actor)
        return actor

    yield make
    for actor in actors:
        actor._core.shutdown()
        actor._busy_loop_task.cancel()


async def test_each_client_gets_its_own_outputs(make_actor: Any) -> None:
    actor = await make_actor()
    clients = [Client(actor, index) for index in range(3)]
    for client in clients:
        await client.add(f"{client.index}-a", f"{client.index}-b")
    for client in clients:
        await client.read_until_finished(f"{client.index}-a", f"{client.index}-b")
        expected = expected_tokens([5, client.index], 20)
        assert client.tokens == {f"{client.index}-a": expected, f"{client.index}-b": expected}


async def test_client_whose_stream_closes_has_its_requests_aborted(make_actor: Any) -> None:
    actor = await make_actor({"step_s": 0.002})
    gone, stays = Client(actor, 0), Client(actor, 1)
    await gone.add("gone", max_tokens=250)
    await stays.add("stays")
    await gone.read()
    await gone.stream.aclose()
    await stays.read_until_finished("stays")
    assert stays.tokens["stays"] == expected_tokens([5, 1], 20)
    assert not actor._core.has_requests()


async def test_unreadable_messages_end_that_client_alone(make_actor: Any) -> None:
    actor = await make_actor({"step_s": 0.002})
    bad, good = Client(actor, 0), Client(actor, 1)
    await bad.add("x", max_tokens=250)
    await actor.send(0, 1, b"\xc1 nonsense")
    await good.add("y")
    while bad.last is None:
        await bad.read()
    assert "cannot read" in (bad.last.engine_core_dead or "")
    await good.read_until_finished("y")
    assert not actor._core.has_requests()


async def test_abort_counts_before_the_tokens_of_the_step_in_flight(make_actor: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    actor = await make_actor({"hold_file": str(hold)})
    client = Client(actor, 0)
    hold.touch()
    await client.add("a", "b")
    await until(lambda: actor._in_flight)
    await client.send(AbortMessage(["a"]))
    hold.unlink()
    await client.read_until_finished("a", "b")
    assert client.finished["a"].reason is FinishReason.ABORT
    assert client.tokens == {"b": expected_tokens([5, 0], 20)}


async def test_utilities_run_in_order_while_no_step_is_dispatched(make_actor: Any) -> None:
    actor = await make_actor()
    client = Client(actor, 0)
    calls = [utility_message(i, "collective_rpc", ("echo", None, (i,)), {}) for i in range(5)]
    await client.send(*calls)
    await client.add("a")
    answers = []
    while len(answers) < 5 or "a" not in client.finished:
        answers += (await client.read()).utilities
    assert [answer.call_id for answer in answers] == list(range(5))
    assert [utility_value(answer) for answer in answers] == [[i] for i in range(5)]


async def test_draining_engine_refuses_new_work_and_utilities(make_actor: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    actor = await make_actor({"hold_file": str(hold)})
    client = Client(actor, 0)
    hold.touch()
    await client.add("old")
    await client.send(ShutdownMessage(30.0))
    await client.add("new")
    await client.send(utility_message(1, "reset_prefix_cache", (), {}))
    answers = []
    while not answers or "new" not in client.finished:
        answers += (await client.read()).utilities
    assert client.finished["new"].error_type == "EngineDeadError"
    assert client.finished["new"].error == "the engine is shutting down"
    with pytest.raises(RuntimeError, match="shutting down; reset_prefix_cache is not run"):
        utility_value(answers[0])
    hold.unlink()
    await client.read_until_finished("old")
    assert client.tokens == {"old": expected_tokens([5, 0], 20)}
    while client.last is None:
        await client.read()
    assert client.last.stopped
    assert actor._core.executor.is_shut_down


async def test_immediate_shutdown_does_not_wait_for_a_step_that_hangs(make_actor: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    actor = await make_actor({"hold_file": str(hold)})
    client = Client(actor, 0)
    hold.touch()
    await client.add("a")
    await until(lambda: actor._in_flight)
    await client.send(ShutdownMessage(0.0))
    await client.read_until_finished("a")
    assert client.finished["a"].reason is FinishReason.ABORT
    while client.last is None:
        await client.read()
    assert hold.exists()


async def test_dead_engine_tells_clients_that_come_later(make_actor: Any) -> None:
    actor = await make_actor({"fail_at_step": 1})
    early = Client(actor, 0)
    await early.add("a")
    while early.last is None:
        await early.read()
    late = Client(actor, 1)
    await late.read()
    for client in (early, late):
        assert client.last is not None
        assert "worker rank 0 failed in step 1: boom" in (client.last.engine_core_dead or "")
    report = await actor.health()
    assert report.state == "dead"
    assert "boom" in (report.cause or "")


async def test_stream_pauses_when_its_client_has_nothing_under_way(
    make_actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_streams, "LINGER_S", 0.01)
    actor = await make_actor({"step_s": 0.005})
    busy, idle = Client(actor, 0), Client(actor, 1)
    await busy.add("a")
    await idle.send(utility_message(1, "reset_prefix_cache", (), {}))
    while idle.last is None:
        await idle.read()
    assert idle.last.paused_after == 1
    with pytest.raises(StopAsyncIteration):
        await idle.read()
    await busy.read_until_finished("a")
    while busy.last is None:
        await busy.read()
    assert busy.last.paused_after == 1
    assert busy.tokens == {"a": expected_tokens([5, 0], 20)}
    # A new stream goes on where the old one stopped.
    busy.stream, busy.last = actor.outputs(0), None
    await busy.add("b")
    await busy.read_until_finished("b")
    assert busy.tokens["b"] == expected_tokens([5, 0], 20)


async def test_idle_loop_sleeps(make_actor: Any) -> None:
    actor = await make_actor()
    client = Client(actor, 0)
    await client.add("a")
    await client.read_until_finished("a")
    await asyncio.sleep(0)
    # Nothing is left to wake the loop: it waits on its event alone.
    assert not actor._changed.is_set()
    assert not actor._in_flight
    before = actor._progress_s
    await asyncio.sleep(0.02)
    assert actor._progress_s == before
