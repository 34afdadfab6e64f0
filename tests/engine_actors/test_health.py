"""Health: true while the engine is busy, false when a part of it does not answer, with real stopped processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_actors import AsyncLLM, EngineDeadError, InvalidRequestError, SamplingParams, ray_core_link
from engine_actors.config import EngineConfig
from tests.fakes import expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_well(engine: AsyncLLM) -> None:
    while True:
        try:
            return await engine.check_health()
        except EngineDeadError as error:
            assert "answer" in str(error)  # noqa: PT017  anything else would be for good


@pytest.fixture
async def fake(fake_config: Callable[..., EngineConfig]) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_config(fake_config({"step_s": 0.001}))
    yield engine
    await engine.shutdown_async()


async def test_burst_of_a_thousand_requests_is_no_trouble(fake: AsyncLLM) -> None:
    burst = asyncio.create_task(fake.generate_all([[5, 6 + i % 400] for i in range(1000)], GREEDY))
    num_checks = 0
    while not burst.done():
        await fake.check_health()
        num_checks += 1
    assert num_checks > 1
    assert [o.outputs[0].token_ids for o in await burst][:1] == [expected_tokens([5, 6], 8)]


async def test_prompt_of_twenty_megabytes_is_refused_without_being_tokenised(fake: AsyncLLM) -> None:
    text = "lorem ipsum dolor " * 1_200_000
    real, fake.input_processor.tokenizer = fake.input_processor.tokenizer, _NoTokenizer(fake.tokenizer)
    refused = asyncio.create_task(fake.add_request(text, GREEDY))
    await fake.check_health()
    with pytest.raises(InvalidRequestError, match=r"prompt has at least \d+ tokens in 21600000 characters"):
        await refused
    fake.input_processor.tokenizer = real
    assert (await fake.add_request("lorem ipsum", GREEDY)).request_id


class _NoTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self.get_vocab = tokenizer.get_vocab


async def test_stopped_core_is_not_well_and_going_on_it_is(fake: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_core_link, "HEALTH_TIMEOUT_S", 1.0)
    pid = int((await fake.client.link.actor.where.remote()).rsplit(" ", 1)[1])
    with stopped(pid), pytest.raises(EngineDeadError, match="EngineCore does not answer"):
        await fake.check_health()
    await until_well(fake)
    (output,) = await fake.generate_all([[5, 6]], GREEDY)
    assert output.outputs[0].token_ids == expected_tokens([5, 6], 8)


async def test_stopped_worker_is_noticed_while_idle_and_named(random_llama_dir: Path) -> None:
    engine = AsyncLLM(str(random_llama_dir), num_gpu_blocks_override=100, torch_num_threads=1)
    (pid,) = await engine.collective_rpc(lambda worker: os.getpid())
    with stopped(pid):
        checks = await asyncio.gather(*(engine.check_health() for _ in range(20)), return_exceptions=True)
    for result in checks:
        assert isinstance(result, EngineDeadError)
        assert re.search(rf"worker rank 0 \(node .*, pid {pid}\): no answer within", str(result))
    await until_well(engine)
    assert (await engine.generate_all([[5, 6]], GREEDY))[0].finished
    await engine.shutdown_async()


async def test_stats_listener_that_raises_ends_no_request(fake: AsyncLLM) -> None:
    calls = []

    def broken(stats: Any) -> None:
        calls.append(stats)
        raise KeyError("my figures")

    fake.add_stats_listener(broken)
    outputs = await fake.generate_all([[5, 6], [7]], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected_tokens([5, 6], 8), expected_tokens([7], 8)]
    assert len(calls) == 1
