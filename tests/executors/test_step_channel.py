"""StepChannel: packets of any size arrive as they were sent, in order, and either end sees the other's end."""

from __future__ import annotations

import os
import threading

import pytest

from executors.step_channel import INLINE_BYTES, Packet, PacketKind, StepChannel, StepListener


@pytest.fixture
def ends() -> tuple[StepChannel, StepChannel]:
    listener = StepListener()
    executor = StepChannel.connect(listener.name)
    return executor, listener.accept()


def test_packets_of_every_size_arrive_in_order_in_both_directions(ends: tuple[StepChannel, StepChannel]) -> None:
    executor, worker = ends
    sizes = [0, 1, INLINE_BYTES, INLINE_BYTES + 1]
    sent = [Packet(PacketKind.EXECUTE, os.urandom(size)) for size in sizes] + [Packet(PacketKind.SAMPLE, None)]
    for there, back in ((executor, worker), (worker, executor)):
        for packet in sent:
            there.send(packet.kind, packet.payload)
        assert [back.receive() for _ in sent] == sent


def test_sending_does_not_wait_for_a_reader_that_is_busy(ends: tuple[StepChannel, StepChannel]) -> None:
    executor, worker = ends
    payloads = [os.urandom(5_000_000), os.urandom(INLINE_BYTES), os.urandom(3_000_000), os.urandom(INLINE_BYTES)]
    for payload in payloads:
        executor.send(PacketKind.EXECUTE, payload)
    assert [worker.receive() for _ in payloads] == [Packet(PacketKind.EXECUTE, payload) for payload in payloads]


def test_what_was_sent_before_the_end_still_arrives(ends: tuple[StepChannel, StepChannel]) -> None:
    executor, worker = ends
    executor.send(PacketKind.PAUSE)
    executor.close()
    executor.close()
    assert worker.receive() == Packet(PacketKind.PAUSE, None)
    assert worker.receive() is None
    for end in (worker, executor):
        with pytest.raises(ConnectionError):
            end.send(PacketKind.RESULT, b"")


def test_close_ends_a_receive_that_waits_in_another_thread(ends: tuple[StepChannel, StepChannel]) -> None:
    executor, _ = ends
    received: list[Packet | None] = []
    thread = threading.Thread(target=lambda: received.append(executor.receive()))
    thread.start()
    executor.close()
    thread.join(20)
    assert received == [None]


def test_nobody_is_found_where_nobody_listens() -> None:
    with pytest.raises(OSError):
        StepChannel.connect("engine-actors/steps/nobody")


def test_an_end_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = StepListener()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {own}, not {own + 1}"):
        StepChannel.connect(listener.name)
