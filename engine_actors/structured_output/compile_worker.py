"""One worker of the compiler process: turns GrammarSpecs into compiled grammars, one at a time, until it is killed.

It is a fork of `compile_server`, so that a grammar that hangs, crashes or eats memory costs one worker. Before a
grammar is given out, random texts of it are matched here: what is too slow to match, or leads nowhere, is refused.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from typing import Any

import msgspec
import numpy as np

from engine_actors.structured_output import native
from engine_actors.structured_output.bitmask import full_mask, mask_of, num_words
from engine_actors.structured_output.compile_messages import (
    Compile,
    Compiled,
    CompileLimits,
    Refused,
    Reply,
    encode,
    read_frame,
)
from engine_actors.structured_output.source import GrammarSource, grammar_source
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import GrammarSpec

_TRIAL_TEXTS = 2
_TRIAL_TOKENS = 48
_CHEAP_S = 0.005
"""What compiles in less processor time is compiled again by EngineCore rather than sent: it is known to be safe now."""
_READ_S_PER_BYTE = 15e-9
"""Of a compiled grammar's JSON (xgrammar 0.2.9). EngineCore, beside whose threads steps run, does what takes less."""
_LOG_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ?(?:Warning: |Check failed: .*? is false: )?")
"""Time, source line and severity, which xgrammar puts before its messages."""


def serve(connection: socket.socket, tokenizer_info: Any, limits: CompileLimits) -> None:
    """Answer `Compile` messages until the connection ends."""
    _limit_memory(limits.memory_bytes)
    worker = _Worker(tokenizer_info, limits)
    while True:
        body = read_frame(connection.recv)
        if body is None:
            return
        request = msgspec.msgpack.decode(body, type=Compile)
        connection.sendall(encode(worker.compile(request)))


def _limit_memory(num_bytes: int) -> None:
    """RLIMIT_DATA counts private writable memory, and so not what is shared with the server."""
    with open("/proc/self/status") as status:
        used = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")), 0)
    resource.setrlimit(resource.RLIMIT_DATA, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Worker:
    def __init__(self, tokenizer_info: Any, limits: CompileLimits) -> None:
        self._limits = limits
        self._compiler = native.new_compiler(tokenizer_info)
        vocab_size = tokenizer_info.vocab_size()
        self._bitmask = np.zeros((1, num_words(vocab_size)), dtype=np.int32)
        self._texts = full_mask(vocab_size) & ~mask_of(tokenizer_info.stop_token_ids(), vocab_size)

    def compile(self, request: Compile) -> Reply:
        try:
            source = grammar_source(request.spec)
            started = time.process_time()
            grammar = self._compile(request.spec, source)
            taken = time.process_time() - started
            self._try_out(grammar)
            text = str(grammar.serialize_json()) if taken > _CHEAP_S else ""
            if len(text) * _READ_S_PER_BYTE > taken:
                text = ""
        except StructuredOutputError as error:
            return Refused(request.job, str(error))
        except MemoryError:
            return Refused(request.job, self._too_large())
        except RuntimeError as error:  # all that xgrammar raises
            if "bad_alloc" in str(error):
                return Refused(request.job, self._too_large())
            return Refused(request.job, f"{request.spec.kind}: xgrammar refuses it: {_first_line(str(error))}")
        if len(text) > self._limits.grammar_bytes:
            return Refused(
                request.job,
                f"the compiled grammar has {len(text)} bytes; at most {self._limits.grammar_bytes} are allowed",
            )
        return Compiled(request.job, source.text, source.is_structural_tag, text)

    def _too_large(self) -> str:
        return f"the grammar needs more than {self._limits.memory_bytes // 1024**2} MiB to compile"

    def _compile(self, spec: GrammarSpec, source: GrammarSource) -> Any:
        with _Messages() as messages:
            grammar = native.compile_grammar(self._compiler, source.text, is_structural_tag=source.is_structural_tag)
        # xgrammar warns where it goes on without something that was asked for.
        if messages.text:
            raise StructuredOutputError(f"{spec.kind}: {_first_line(messages.text)}")
        return grammar

    def _try_out(self, grammar: Any) -> None:
        """Match random texts.

        Raises:
            StructuredOutputError: A mask takes too long, or allows no token.
        """
        for seed in range(_TRIAL_TEXTS):
            matcher = native.new_matcher(grammar)
            choose = np.random.default_rng(seed)
            for _ in range(_TRIAL_TOKENS):
                started = time.thread_time()
                native.fill_bitmask(matcher, self._bitmask, 0)
                allowed = np.flatnonzero(np.unpackbits((self._bitmask & self._texts).view(np.uint8), bitorder="little"))
                if not allowed.size:
                    if matcher.is_completed():
                        break
                    raise StructuredOutputError("the grammar leads to where no token of the vocabulary fits")
                native.accept_token(matcher, int(choose.choice(allowed)))
                self._check_duration(time.thread_time() - started)

    def _check_duration(self, seconds: float) -> None:
        if seconds > self._limits.mask_cpu_s:
            raise StructuredOutputError(
                f"the grammar is too ambiguous to match: one token took {seconds:.2f} s, the limit is "
                f"{self._limits.mask_cpu_s} s"
            )


class _Messages:
    """What is written to standard error meanwhile, by C++ code as well."""

    text = ""

    def __enter__(self) -> _Messages:
        self._file = os.memfd_create("messages")
        self._stderr = os.dup(2)
        os.dup2(self._file, 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        os.lseek(self._file, 0, os.SEEK_SET)
        self.text = os.read(self._file, 1 << 16).decode(errors="replace")
        os.close(self._file)


def _first_line(text: str) -> str:
    return _LOG_PREFIX.sub("", text.strip().split("\n", 1)[0])[:500]
