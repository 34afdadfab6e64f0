"""Messages between EngineCore (`compiler.Compiler`) and the compiler process (`compile_server`), and their framing."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from scheduler.structured_params import GrammarSpec

_HEADER = struct.Struct("<Q")


class CompileLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one compilation may take.

    Attributes:
        cpu_s: Processor time. Realistic grammars take milliseconds to a second; long counted repeats of wide sets
            with a vocabulary of 256k take several.
        timeout_s: Wall time, for what is stuck without computing, and for machines that are too busy.
        memory_bytes: Private memory on top of what the compiler starts with.
        grammar_bytes: Size of the compiled grammar as it is sent.
        mask_cpu_s: The longest that one token may take to match, tried on random texts of the grammar.
        num_workers: Compilations at once.
    """

    cpu_s: float = 15.0
    timeout_s: float = 60.0
    memory_bytes: int = 2 * 1024**3
    grammar_bytes: int = 128 * 1024**2
    mask_cpu_s: float = 0.1
    num_workers: int = 4


# EngineCore → compiler process


class Start(msgspec.Struct, tag=True, array_like=True):
    """First of all: whose vocabulary to compile for.

    Attributes:
        tokenizer: Name or directory for `AutoTokenizer.from_pretrained`.
        vocab_size: Tokens the model has logits for.
        stop_token_ids: Ids that end a text; at least one.
    """

    tokenizer: str
    trust_remote_code: bool
    vocab_size: int
    stop_token_ids: list[int]
    limits: CompileLimits


class Compile(msgspec.Struct, tag=True, array_like=True):
    job: int
    spec: GrammarSpec


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for the job any more. It is not answered."""

    job: int


Request = Start | Compile | Cancel

# Compiler process → EngineCore


class Started(msgspec.Struct, tag=True, array_like=True):
    """`tokenizer_info`: xgrammar's TokenizerInfo as JSON."""

    tokenizer_info: str


class NotStarted(msgspec.Struct, tag=True, array_like=True):
    """No grammar can be compiled for this vocabulary, or there is no xgrammar."""

    error: str


class Compiled(msgspec.Struct, tag=True, array_like=True):
    """The grammar has been compiled and tried out.

    Attributes:
        source: The text it was compiled from.
        grammar: xgrammar's CompiledGrammar as JSON; empty if compiling again takes less than reading that.
    """

    job: int
    source: str
    is_structural_tag: bool
    grammar: str = ""


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The grammar's own fault. `is_timeout`: it might have passed on an idle machine."""

    job: int
    error: str
    is_timeout: bool = False


Reply = Started | NotStarted | Compiled | Refused


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return frame(msgspec.msgpack.encode(message))


def frame(body: bytes) -> bytes:
    """`body` with its length before it."""
    return _HEADER.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with `data`."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return bodies


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next body from a blocking stream; None at its end."""
    header = _read_exactly(read, _HEADER.size)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    return _read_exactly(read, length)


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    parts = []
    while size:
        part = read(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
