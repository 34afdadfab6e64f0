"""EngineCore's end of the compiler process: starts it, sends it grammars, and hands out futures.

Two threads do what may block: one writes (and starts the process), one reads. A process that dies fails what it was
working on; the next grammar starts a new one.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from engine_actors.structured_output import native
from engine_actors.structured_output.compile_messages import (
    Cancel,
    Compile,
    Compiled,
    NotStarted,
    Refused,
    Reply,
    Start,
    Started,
    encode,
    read_frame,
)
from scheduler.structured_output import CompileTimeoutError, StructuredOutputError
from scheduler.structured_params import GrammarSpec

logger = logging.getLogger(__name__)

_SERVER = "engine_actors.structured_output.compile_server"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Threads do not survive a fork, and locks they hold would."""
_QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""It would say that there is no torch, which is as it should be."""
_JOIN_S = 5.0


class CompilerDiedError(RuntimeError):
    """The compiler process ended by itself. Nobody's grammar need be at fault; the request may be tried again."""


class Compiler:
    """Compiles GrammarSpecs for one vocabulary in a process of its own. Thread-safe.

    Args:
        start: The process's first message.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._jobs: dict[int, Future[Any]] = {}
        self._next_job = 0
        self._sent: set[int] = set()  # jobs that the process has been told of, and that end with it
        self._outbox: queue.SimpleQueue[Compile | Cancel | Literal["start"] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tokenizer_info: Any = None
        self._own_compiler: Any = None  # for what the process found to be cheap and safe
        self._unavailable: str | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process now, in the background, so that the first grammar need not wait for it."""
        self._send("start")

    def compile(self, spec: GrammarSpec) -> Future[Any]:
        """A future of xgrammar's CompiledGrammar. Cancelling it stops the work.

        It fails with StructuredOutputError if the grammar is refused, CompileTimeoutError if it takes too long,
        CompilerDiedError if the process ended.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed or self._unavailable is not None:
                reason = self._unavailable or "the engine is shutting down"
                future.set_exception(StructuredOutputError(reason))
                return future
            job = self._next_job
            self._next_job += 1
            self._jobs[job] = future
        future.add_done_callback(lambda done: self._forget(job, done))
        self._send(Compile(job, spec))
        return future

    def close(self) -> None:
        """End the process; futures that are pending are cancelled. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pending = list(self._jobs.values())
            writer, process, reader = self._writer, self._process, self._reader
        for future in pending:
            future.cancel()
        if process is not None:
            process.kill()
        self._outbox.put(None)
        for thread in (writer, reader):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    # Sending

    def _send(self, message: Compile | Cancel | Literal["start"]) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="grammar-compiler-writer", daemon=True)
                self._writer.start()
        self._outbox.put(message)

    def _forget(self, job: int, future: Future[Any]) -> None:
        with self._lock:
            self._jobs.pop(job, None)
            self._sent.discard(job)
        if future.cancelled():
            self._send(Cancel(job))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._write_one(message)
            except OSError as error:
                # The process has died. Its reader fails what it was working on; this message never reached it.
                logger.warning("the grammar compiler cannot be reached: %s", error)
                self._see_the_process_end()
                self._write_again(message)

    def _write_again(self, message: Compile | Cancel | Literal["start"]) -> None:
        try:
            self._write_one(message)
        except OSError as error:
            self._fail(list(self._jobs), CompilerDiedError(f"the grammar compiler cannot be reached: {error}"))

    def _write_one(self, message: Compile | Cancel | Literal["start"]) -> None:
        with self._lock:
            is_wanted = not self._is_closed
            if isinstance(message, Compile):
                is_wanted &= message.job in self._jobs
            elif isinstance(message, Cancel):
                is_wanted &= self._process is not None
        if not is_wanted:
            return
        process = self._running_process()
        if message == "start" or process.stdin is None:
            return
        if isinstance(message, Compile):
            with self._lock:
                self._sent.add(message.job)
        try:
            process.stdin.write(encode(message))
            process.stdin.flush()
        except OSError:
            if isinstance(message, Compile):
                with self._lock:
                    self._sent.discard(message.job)
            raise

    def _see_the_process_end(self) -> None:
        """Returns when the reader has failed the jobs of a process that cannot be written to."""
        with self._lock:
            process, reader = self._process, self._reader
        if process is not None:
            process.kill()
        if reader is not None:
            reader.join(_JOIN_S)

    def _running_process(self) -> subprocess.Popen[bytes]:
        with self._lock:
            process = self._process
        if process is not None:
            return process
        environment = {**os.environ, **_ONE_THREAD, **_QUIET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-m", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        reader = threading.Thread(target=self._read, args=(process,), name="grammar-compiler-reader", daemon=True)
        with self._lock:
            is_closed = self._is_closed
            self._process, self._reader = process, reader
        if is_closed:
            process.kill()
        reader.start()
        if process.stdin is not None:
            process.stdin.write(encode(self._start))
            process.stdin.flush()
        return process

    # Receiving

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        stdout = process.stdout
        if stdout is None:
            raise RuntimeError("the compiler process was started without a pipe")
        try:
            native.load()  # While the process starts.
            while (body := read_frame(stdout.read)) is not None:
                self._receive(msgspec.msgpack.decode(body, type=Reply))
        except Exception:  # nothing may wait for a reader that has gone
            logger.exception("the grammar compiler's answer cannot be read")
            process.kill()
        status = process.wait()
        with self._lock:
            self._process = None
            lost, self._sent = self._sent, set()
            is_expected = self._is_closed or self._unavailable is not None
        if not is_expected:
            logger.warning("the grammar compiler ended with status %d", status)
        self._fail(lost, CompilerDiedError(f"the grammar compiler ended with status {status}"))

    def _receive(self, reply: Reply) -> None:
        if isinstance(reply, Started):
            self._tokenizer_info = native.read_tokenizer_info(reply.tokenizer_info)
            self._own_compiler = native.new_compiler(self._tokenizer_info)
        elif isinstance(reply, NotStarted):
            logger.warning("%s", reply.error)
            with self._lock:
                self._unavailable = reply.error
            self._fail(list(self._jobs), StructuredOutputError(reply.error))
        elif isinstance(reply, Refused):
            error = CompileTimeoutError if reply.is_timeout else StructuredOutputError
            self._finish(reply.job, error(reply.error))
        else:
            self._finish(reply.job, self._load(reply))

    def _load(self, reply: Compiled) -> Any:
        try:
            if reply.grammar:
                return native.read_grammar(reply.grammar, self._tokenizer_info)
            return native.compile_grammar(self._own_compiler, reply.source, is_structural_tag=reply.is_structural_tag)
        except RuntimeError as error:  # xgrammar's own errors are RuntimeErrors
            return CompilerDiedError(f"the compiled grammar cannot be read: {error}")

    def _finish(self, job: int, result: Any) -> None:
        with self._lock:
            future = self._jobs.get(job)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _fail(self, jobs: Iterable[int], error: Exception) -> None:
        for job in jobs:
            self._finish(job, error)
