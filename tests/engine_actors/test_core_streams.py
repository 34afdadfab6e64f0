"""The two directions of one client at EngineCoreActor."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine_actors import core_streams
from engine_actors.core_actor import _may_wait
from engine_actors.core_streams import Inbox, Outbox
from engine_actors.messages import (
    AbortMessage,
    AddMessage,
    ClientMessage,
    DisconnectMessage,
    OutputBatch,
    ShutdownMessage,
    UtilityMessage,
    UtilityOutput,
    decode_batch,
    decode_messages,
    encode_messages,
)
from scheduler.output import EngineCoreOutputs, FinishedRequest, FinishReason, RequestEvents, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams


def test_messages_survive_the_wire() -> None:
    request = EngineCoreRequest("a", pack_int32([1, 2]), SamplingParams(seed=3, stop=["x"]), [1], priority=2)
    messages: list[ClientMessage] = [
        AddMessage([request]),
        AbortMessage(["a"]),
        UtilityMessage(7, "echo", b"arguments"),
        ShutdownMessage(1.5),
        DisconnectMessage(),
    ]
    assert decode_messages(encode_messages(messages)) == messages


def test_calls_that_arrive_in_any_order_are_handled_in_theirs() -> None:
    rng = random.Random(1)
    for _ in range(100):
        order = list(range(20))
        rng.shuffle(order)
        inbox = Inbox()
        handled = [data for sequence in order for data in inbox.accept(sequence, str(sequence).encode())]
        assert handled == [str(sequence).encode() for sequence in range(20)]


async def read_all(outbox: Outbox) -> list[OutputBatch]:
    return [decode_batch(data) async for data, _ in outbox.batches(lambda: False, Inbox())]


async def test_what_gathers_goes_out_as_one_batch_and_the_end_comes_last() -> None:
    outbox = Outbox()
    first = EngineCoreOutputs(["a"], [5])
    second = EngineCoreOutputs(finished=[FinishedRequest("a", FinishReason.ABORT)])
    outbox.put_outputs(first)
    outbox.put_utility(UtilityOutput(1, result=b"x"))
    outbox.put_outputs(second)
    outbox.die("cause")
    outbox.put_outputs(first)
    outbox.stop()
    (batch,) = await read_all(outbox)
    assert batch.outputs == [first, second]
    assert batch.utilities == [UtilityOutput(1, result=b"x")]
    assert batch.engine_core_dead == "cause"


async def test_outputs_that_may_wait_go_out_with_the_next_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_streams, "PATIENCE_S", 60.0)
    outbox = Outbox()
    stream = outbox.batches(lambda: False, Inbox())
    tokens = [EngineCoreOutputs(["a"], [token]) for token in range(3)]
    for outputs in tokens:
        outbox.put_outputs(outputs, may_wait=True)
    assert not outbox.is_empty
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    end = EngineCoreOutputs(finished=[FinishedRequest("a", FinishReason.LENGTH)])
    outbox.put_outputs(end)
    assert decode_batch((await waiting)[0]).outputs == [*tokens, end]
    assert outbox.is_empty


async def test_outputs_that_may_wait_go_out_by_themselves_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_streams, "PATIENCE_S", 0.001)
    outbox = Outbox()
    stream = outbox.batches(lambda: False, Inbox())
    for token in range(2):
        outputs = EngineCoreOutputs(["a"], [token])
        outbox.put_outputs(outputs, may_wait=True)
        assert decode_batch((await anext(stream))[0]).outputs == [outputs]


@pytest.mark.parametrize(
    "outputs",
    [
        EngineCoreOutputs(["a"], [1], started=[RequestEvents("a", 0.0, 0.0)]),
        EngineCoreOutputs(["a"], [1], finished=[FinishedRequest("a", FinishReason.LENGTH)]),
    ],
)
async def test_first_tokens_and_ends_never_wait(outputs: EngineCoreOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_streams, "PATIENCE_S", 60.0)
    outbox = Outbox()
    outbox.put_outputs(outputs, may_wait=True)
    assert decode_batch((await anext(outbox.batches(lambda: False, Inbox())))[0]).outputs == [outputs]


@pytest.mark.parametrize(
    ("params", "may_wait"),
    [
        (SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), True),
        (SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stop=["x"]), False),
        (SamplingParams(output_kind=RequestOutputKind.DELTA), False),
        (SamplingParams(), False),
    ],
)
def test_tokens_wait_only_where_nobody_reads_them_before_the_end(params: SamplingParams, may_wait: bool) -> None:
    assert _may_wait(EngineCoreRequest("a", pack_int32([1]), params)) is may_wait


async def test_stream_of_a_client_that_is_gone_ends_empty() -> None:
    outbox = Outbox()
    outbox.put_outputs(EngineCoreOutputs(["a"], [5]))
    outbox.close()
    outbox.put_outputs(EngineCoreOutputs(["a"], [5]))
    assert await read_all(outbox) == [OutputBatch(stopped=True)]
