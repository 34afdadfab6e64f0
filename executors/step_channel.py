"""Steps to a worker process on the same machine, and their results back, over a Unix socket.

Both ends, `executors.ray_transport` in the executor's process and `executors.ray_worker` in the worker's, use a
StepChannel. Packets keep their order and their boundaries. Waiting costs nothing, a packet wakes its reader and nobody
else, and either end sees when the other's process is gone.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

INLINE_BYTES = 16 * 1024
"""Larger payloads travel as a memory file's descriptor, so that a few packets always fit into the socket's buffer and
sending never waits for the reader."""

_HEADER = struct.Struct("<BBq")
_PEER_CREDENTIALS = struct.Struct("3i")
_NAME = "engine-actors/steps"


class PacketKind(IntEnum):
    """EXECUTE and SAMPLE ask for what the Worker methods of these names do; RESULT answers one of them, in order.

    PAUSE ends the worker's serving for now: calls of other methods come next, and then it goes on.
    """

    EXECUTE = 0
    SAMPLE = 1
    PAUSE = 2
    RESULT = 3


class _Place(IntEnum):
    """Where a packet's payload is."""

    NOWHERE = 0
    INLINE = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class Packet:
    """Attributes:
    payload: None is not the same as empty.
    """

    kind: PacketKind
    payload: bytes | None


class StepChannel:
    """One end. Sending and receiving may happen in two threads, each in one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        """
        Raises:
            PermissionError: The other end belongs to another user.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        if uid != os.geteuid():
            connection.close()
            raise PermissionError(f"the other end of a step channel belongs to user {uid}, not {os.geteuid()}")
        self._socket = connection

    @classmethod
    def connect(cls, name: str) -> StepChannel:
        """To the `StepListener` of this name.

        Raises:
            OSError: There is none that this process can reach: it runs on another machine, or in another network
                namespace.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{name}")
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def send(self, kind: PacketKind, payload: bytes | None = None) -> None:
        """
        Raises:
            ConnectionError: The other end is gone, or this one was closed.
            OSError: The packet cannot be sent.
        """
        if self._socket.fileno() < 0:
            raise BrokenPipeError("the step channel was closed")
        if payload is None:
            self._socket.send(_HEADER.pack(kind, _Place.NOWHERE, 0))
        elif len(payload) <= INLINE_BYTES:
            self._socket.send(_HEADER.pack(kind, _Place.INLINE, len(payload)) + payload)
        else:
            with open(os.memfd_create(_NAME), "w+b", buffering=0) as file:
                _write_all(file.fileno(), payload)
                header = _HEADER.pack(kind, _Place.FILE, len(payload))
                socket.send_fds(self._socket, [header], [file.fileno()])

    def receive(self) -> Packet | None:
        """The next packet, waited for. None when the other end is gone, or this one was closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size + INLINE_BYTES, 1)
        except OSError:
            return None
        if not data:
            return None
        kind, place, size = _HEADER.unpack_from(data)
        payload: bytes | None = None
        if place == _Place.INLINE:
            payload = data[_HEADER.size :]
        elif place == _Place.FILE:
            with open(descriptors[0], "rb") as file:
                file.seek(0)  # the offset is shared with the writer, which is at the end
                payload = file.read(size)
        return Packet(PacketKind(kind), payload)

    def fileno(self) -> int:
        """For event loops: readable when `receive` does not wait."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """Send and receive no more: a `receive` that waits, in another thread or in a loop, gets None. Idempotent."""
        with suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """`shut_down`, and give the descriptor back. Idempotent."""
        self.shut_down()
        self._socket.close()


class StepListener:
    """Where the executor finds a worker's end of the channel, while this object lives.

    Attributes:
        name: For `StepChannel.connect`. In the abstract namespace: nothing is left behind however the process ends.
    """

    def __init__(self) -> None:
        self.name = f"{_NAME}/{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1)

    def accept(self) -> StepChannel:
        """The first connection; no other one is taken."""
        connection, _ = self._socket.accept()
        self._socket.close()
        return StepChannel(connection)


def has_step_channels() -> bool:
    """Whether this system knows all that a channel needs."""
    return sys.platform == "linux"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
