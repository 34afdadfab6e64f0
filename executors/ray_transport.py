"""How RayExecutor's steps reach the worker actors and come back: over Unix sockets, or as plain actor calls.

Where all workers run on the executor's own node, each has a `StepChannel`: a step wakes the worker's thread, and its
result one thread here. Everywhere else a step is an actor call, which passes through several threads of Ray's in both
processes. `benchmarks/transport.py` compares them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from executors.step_channel import PacketKind, StepChannel, has_step_channels
from executors.step_monitor import PendingStep

logger = logging.getLogger(__name__)

Resolve = Callable[[PendingStep[Any], bytes | None], None]
Fail = Callable[[PendingStep[Any], BaseException], None]

_SHARED_PAYLOAD_BYTES = 64 * 1024
"""Larger payloads of actor calls are put into the object store once instead of being sent to each worker."""


class StepTransport(ABC):
    """Steps and calls run on each worker in the order in which they were sent. Thread-safe."""

    @abstractmethod
    def execute(self, payload: bytes, step: PendingStep[Any]) -> None:
        """Have every worker execute a step."""

    @abstractmethod
    def sample(self, payload: bytes | None, step: PendingStep[Any]) -> None:
        """Have the last stage's workers sample."""

    @abstractmethod
    def call(self, method: str | Callable[..., Any], arguments: Sequence[tuple[Any, ...]], kwargs: Any) -> list[Any]:
        """Object refs, by rank, of a call of each worker with its own arguments."""

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:  # noqa: B027  some need nothing of it
        """See `Executor.use_loop`."""

    @abstractmethod
    def close(self) -> None:
        """No step is sent any more; serving ends. Idempotent."""


class ActorCalls(StepTransport):
    """The future of a step is the object ref of the output rank's call."""

    def __init__(self, workers: Sequence[Any], output_rank: int, resolve: Resolve, fail: Fail) -> None:
        """
        Args:
            output_rank: Whose results are the steps'; with the ranks behind it, the last stage.
            resolve, fail: Told of each step's end, in a thread of Ray's.
        """
        self._workers, self._output_rank = workers, output_rank
        self._resolve, self._fail = resolve, fail
        self._num_sent = [0] * len(workers)

    def execute(self, payload: bytes, step: PendingStep[Any]) -> None:
        argument: Any = payload
        if len(payload) > _SHARED_PAYLOAD_BYTES and len(self._workers) > 1:
            argument = ray.put(payload)
        self._follow(step, 0, [worker.execute_model.remote(argument) for worker in self._workers])

    def sample(self, payload: bytes | None, step: PendingStep[Any]) -> None:
        workers = self._workers[self._output_rank :]
        self._follow(step, self._output_rank, [worker.sample_tokens.remote(payload) for worker in workers])

    def call(self, method: str | Callable[..., Any], arguments: Sequence[tuple[Any, ...]], kwargs: Any) -> list[Any]:
        return [
            worker.call.remote(method, args, kwargs)
            for worker, args in zip(self._workers, arguments, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        pass

    def _follow(self, step: PendingStep[Any], first_rank: int, refs: list[Any]) -> None:
        step.due = _count(self._num_sent, first_rank)
        ref = refs[self._output_rank - first_rank]
        step.set_object_ref(lambda: ref)
        ref.future().add_done_callback(partial(self._on_end, step))

    def _on_end(self, step: PendingStep[Any], future: Any) -> None:
        """In a thread of Ray's, where nothing may block and Ray must not be called."""
        error = future.exception()
        if error is None:
            self._resolve(step, future.result())
        else:
            self._fail(step, error)


class Channels(StepTransport):
    """A `StepChannel` to each worker, whose actor spends its time between calls in `serve_steps`.

    A worker's failure is not told here: its `watch` call ends.
    """

    def __init__(
        self, workers: Sequence[Any], channels: Sequence[StepChannel], output_rank: int, resolve: Resolve
    ) -> None:
        """
        Args:
            resolve: Told of each step's result, in a thread of this object's, or in the loop's.
        """
        self._workers, self._channels, self._output_rank = workers, channels, output_rank
        self._resolve = resolve
        self._num_sent = [0] * len(workers)
        self._waiting: deque[PendingStep[Any]] = deque()
        # Of what all workers must get in one order.
        self._lock = threading.Lock()
        # Who reads results: a loop, or, from the first step on, a thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._serve()

    def execute(self, payload: bytes, step: PendingStep[Any]) -> None:
        self._send(PacketKind.EXECUTE, payload, step, 0)

    def sample(self, payload: bytes | None, step: PendingStep[Any]) -> None:
        self._send(PacketKind.SAMPLE, payload, step, self._output_rank)

    def call(self, method: str | Callable[..., Any], arguments: Sequence[tuple[Any, ...]], kwargs: Any) -> list[Any]:
        with self._lock:
            self._pause()
            refs = [
                worker.call.remote(method, args, kwargs)
                for worker, args in zip(self._workers, arguments, strict=True)
            ]  # fmt: skip
            self._serve()
        return refs

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is not None:
            raise RuntimeError("steps have been sent before the executor was given to a loop")
        self._loop = loop
        channel = self._channels[self._output_rank]
        loop.add_reader(channel.fileno(), self._receive_one, channel, loop)

    def close(self) -> None:
        for rank, channel in enumerate(self._channels):
            channel.shut_down()
            if self._loop is None or rank != self._output_rank:
                channel.close()  # a loop's channel is closed by its reader
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, kind: PacketKind, payload: bytes | None, step: PendingStep[Any], first_rank: int) -> None:
        with self._lock:
            if self._loop is None and self._thread is None:
                self._thread = threading.Thread(target=self._receive, name="executor-step-results", daemon=True)
                self._thread.start()
            step.due = _count(self._num_sent, first_rank)
            worker, number = self._workers[self._output_rank], step.due[self._output_rank]
            step.set_object_ref(lambda: worker.result_of.remote(number))
            self._waiting.append(step)
            for channel in self._channels[first_rank:]:
                with suppress(ConnectionError):  # The worker is gone, which its `watch` tells.
                    channel.send(kind, payload)

    def _receive(self) -> None:
        channel = self._channels[self._output_rank]
        while (packet := channel.receive()) is not None:
            self._resolve(self._waiting.popleft(), packet.payload)

    def _receive_one(self, channel: StepChannel, loop: asyncio.AbstractEventLoop) -> None:
        """In the loop, when there is something to read, or the worker or this object has closed the channel."""
        packet = channel.receive()
        if packet is not None:
            self._resolve(self._waiting.popleft(), packet.payload)
            return
        loop.remove_reader(channel.fileno())
        channel.close()

    def _pause(self) -> None:
        for channel in self._channels:
            with suppress(ConnectionError):
                channel.send(PacketKind.PAUSE)

    def _serve(self) -> None:
        for worker in self._workers:
            worker.serve_steps.remote()


def make_step_transport(
    workers: Sequence[Any], nodes: Sequence[str], output_rank: int, resolve: Resolve, fail: Fail
) -> StepTransport:
    """The fastest there is. Blocks: in an asyncio actor, call it from a thread.

    Args:
        nodes: Ray's id of each worker's node.
        resolve, fail: See `ActorCalls`.

    Raises:
        RayError: A worker is gone.
    """
    own_node = ray.get_runtime_context().get_node_id()
    if has_step_channels() and all(node == own_node for node in nodes):
        names = ray.get([worker.listen_for_steps.remote() for worker in workers])
        try:
            channels = [StepChannel.connect(name) for name in names]
        except OSError as error:
            logger.info("Steps go by actor calls: the workers' sockets cannot be reached (%s)", error)
        else:
            return Channels(workers, channels, output_rank, resolve)
    return ActorCalls(workers, output_rank, resolve, fail)


def _count(num_sent: list[int], first_rank: int) -> dict[int, int]:
    """Count one more packet, or call, for each rank from `first_rank` on; the counts, by rank."""
    for rank in range(first_rank, len(num_sent)):
        num_sent[rank] += 1
    return {rank: num_sent[rank] for rank in range(first_rank, len(num_sent))}
