"""What travels between clients and EngineCoreActor, besides the scheduler's own wire types.

Encoded once with msgspec and sent as bytes: clients call `EngineCoreActor.send`, outputs come over one stream per
client. Ray may start two calls of one client in the wrong order, so each call carries a sequence number.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from executors.base import Executor
from scheduler.output import EngineCoreOutputs
from scheduler.request import EngineCoreRequest


class AddMessage(msgspec.Struct, array_like=True, tag="add", gc=False, frozen=True):
    """ADD. New requests, from a front end."""

    requests: list[EngineCoreRequest]


class AbortMessage(msgspec.Struct, array_like=True, tag="abort", gc=False, frozen=True):
    """ABORT. Requests nobody wants any more; unknown ids are ignored."""

    request_ids: list[str]


class UtilityMessage(msgspec.Struct, array_like=True, tag="utility", gc=False, frozen=True):
    """UTILITY. Call a utility of EngineCore by name; a UtilityOutput with this call_id answers.

    Attributes:
        arguments: cloudpickle of (args, kwargs), see `engine_actors.ray_utilities`.
    """

    call_id: int
    name: str
    arguments: bytes


class ShutdownMessage(msgspec.Struct, array_like=True, tag="shutdown", gc=False, frozen=True):
    """SHUTDOWN. Abort (timeout 0) or drain (up to the timeout) what is in flight, then stop."""

    timeout_s: float


class DisconnectMessage(msgspec.Struct, array_like=True, tag="disconnect", gc=False, frozen=True):
    """DISCONNECT. The client is gone: its requests are aborted. The actor makes one when a client's stream closes."""


ClientMessage = AddMessage | AbortMessage | UtilityMessage | ShutdownMessage | DisconnectMessage


@dataclass(frozen=True, slots=True)
class FromClient:
    """A client's message on the actor's input queue."""

    client_index: int
    message: ClientMessage


@dataclass(frozen=True, slots=True)
class ExecutorFailed:
    """EXECUTOR_FAILED. Put on the actor's input queue by the executor's failure callback; the loop raises it.

    Attributes:
        executor: Which one: after a recovery, the failure of the one before means nothing.
    """

    error: Exception
    executor: Executor


InputMessage = FromClient | ExecutorFailed


class UtilityOutput(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A utility's answer.

    Attributes:
        result: cloudpickle of the result; None when it failed.
        error: cloudpickle of the exception.
    """

    call_id: int
    result: bytes | None = None
    error: bytes | None = None


class RecoveryNotice(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The workers failed, and others have taken their place.

    Attributes:
        cause: Why the old ones failed.
        lost_s: Seconds from the failure until the new ones were ready.
        num_replayed: Unfinished requests of all clients that go on.
    """

    cause: str
    lost_s: float
    num_replayed: int


class OutputBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Everything for one client since the last batch; one item of its output stream.

    Attributes:
        engine_core_dead: ENGINE_CORE_DEAD: the engine failed, with the cause. The last batch of the stream.
        may_replay: With ENGINE_CORE_DEAD: another EngineCore may be tried. Not so when recovery itself failed.
        recoveries: Recoveries of the workers since the last batch.
        stopped: The engine was shut down in order. The last batch of the stream.
        paused_after: The stream ends because the client has nothing under way: this many of its calls have been
            handled. The client opens another with its next call, or at once if it has made more calls by now.
    """

    outputs: list[EngineCoreOutputs] = []
    utilities: list[UtilityOutput] = []
    engine_core_dead: str | None = None
    stopped: bool = False
    paused_after: int | None = None
    may_replay: bool = False
    recoveries: list[RecoveryNotice] = []

    @property
    def is_last(self) -> bool:
        return self.stopped or self.engine_core_dead is not None or self.paused_after is not None


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(list[ClientMessage])
_batch_decoder = msgspec.msgpack.Decoder(OutputBatch)


def encode_messages(messages: list[ClientMessage]) -> bytes:
    return _encoder.encode(messages)


def decode_messages(data: bytes) -> list[ClientMessage]:
    return _message_decoder.decode(data)


def encode_batch(batch: OutputBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> OutputBatch:
    return _batch_decoder.decode(data)
