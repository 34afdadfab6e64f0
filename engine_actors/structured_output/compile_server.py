"""The compiler process: loads the vocabulary once, and hands each grammar to a forked worker under limits.

Started by `compiler.Compiler` as `python -m engine_actors.structured_output.compile_server`; messages come in on
standard input and go out on standard output. One thread: it only forks, passes messages on and watches the clock, so
nothing a grammar does can stop it. A worker that exceeds the time limit is killed; the next grammar gets a new one.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from engine_actors.structured_output.compile_messages import (
    Cancel,
    Compile,
    CompileLimits,
    Frames,
    NotStarted,
    Refused,
    Request,
    Start,
    Started,
    encode,
    frame,
    read_frame,
)

_READ_BYTES = 1 << 20
_CLOCK_INTERVAL_S = 0.1
_MAX_JOBS_PER_WORKER = 200
_PR_SET_PDEATHSIG = 1


class _Worker:
    """A forked worker, and the job it is on."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.frames = Frames()
        self.job: int | None = None
        self.started_s = 0.0
        self.started_cpu_s = 0.0
        self.num_jobs = 0


class Server:
    """Passes jobs to workers.

    Args:
        tokenizer_info: xgrammar's; shared with the workers by the fork.
        requests: File descriptor that messages come from.
        send: Takes one frame to EngineCore.
    """

    def __init__(
        self, tokenizer_info: Any, limits: CompileLimits, requests: int, send: Callable[[bytes], None]
    ) -> None:
        self._requests = requests
        self._send = send
        self._tokenizer_info = tokenizer_info
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._input = Frames()
        self._queue: deque[Compile] = deque()
        self._workers: list[_Worker] = []

    def run(self) -> None:
        """Until the requests end."""
        self._selector.register(self._requests, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select(self._clock_interval_s()):
                    if key.data is None:
                        data = os.read(self._requests, _READ_BYTES)
                        if not data:
                            return
                        for body in self._input.feed(data):
                            self._take(msgspec.msgpack.decode(body, type=Request))
                    else:
                        self._receive(key.data)
                self._watch_clock()
                self._dispatch()
        finally:
            for worker in list(self._workers):
                self._kill(worker)

    def _clock_interval_s(self) -> float | None:
        return _CLOCK_INTERVAL_S if any(worker.job is not None for worker in self._workers) else None

    def _take(self, request: Request) -> None:
        if isinstance(request, Compile):
            self._queue.append(request)
        elif isinstance(request, Cancel):
            self._queue = deque(each for each in self._queue if each.job != request.job)
            for worker in list(self._workers):
                if worker.job == request.job:
                    self._kill(worker)

    def _dispatch(self) -> None:
        while self._queue:
            worker = next((each for each in self._workers if each.job is None), None)
            if worker is None:
                if len(self._workers) >= self._limits.num_workers:
                    return
                worker = self._fork()
            request = self._queue.popleft()
            worker.job = request.job
            worker.started_s, worker.started_cpu_s = time.monotonic(), _cpu_seconds(worker.pid)
            worker.num_jobs += 1
            try:
                worker.connection.sendall(encode(request))
            except OSError:  # it died since its last job
                self._report_death(worker)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs)
        theirs.close()
        worker = _Worker(pid, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _become_worker(self, connection: socket.socket) -> None:
        """Never returns. The other workers' connections are closed, so that they end with the server."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            run_when_idle()
            self._selector.close()
            for worker in self._workers:
                worker.connection.close()
            os.close(self._requests)
            from engine_actors.structured_output.compile_worker import serve

            serve(connection, self._tokenizer_info, self._limits)
        finally:
            os._exit(0)

    def _receive(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return  # killed by an earlier event of the same round
        try:
            data = worker.connection.recv(_READ_BYTES)
        except ConnectionResetError:  # it died with a message unread
            data = b""
        if not data:
            self._report_death(worker)
            return
        for body in worker.frames.feed(data):
            self._send(frame(body))
            worker.job = None
            if worker.num_jobs >= _MAX_JOBS_PER_WORKER:
                self._kill(worker)
                return

    def _report_death(self, worker: _Worker) -> None:
        job = worker.job
        status = self._kill(worker)
        if job is None:
            return
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
        self._send(encode(Refused(job, f"the grammar made its compiler crash ({how})")))

    def _watch_clock(self) -> None:
        for worker in list(self._workers):
            if worker.job is None:
                continue
            cpu_s = _cpu_seconds(worker.pid) - worker.started_cpu_s
            if cpu_s >= self._limits.cpu_s:
                self._time_out(worker, f"{self._limits.cpu_s:g} s of processor time")
            elif time.monotonic() - worker.started_s >= self._limits.timeout_s:
                self._time_out(worker, f"{self._limits.timeout_s:g} s")

    def _time_out(self, worker: _Worker, limit: str) -> None:
        job = worker.job
        self._kill(worker)
        if job is not None:
            self._send(encode(Refused(job, f"the grammar did not compile within {limit}", is_timeout=True)))

    def _kill(self, worker: _Worker) -> int:
        """End a worker; returns its wait status."""
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        os.kill(worker.pid, signal.SIGKILL)
        return os.waitpid(worker.pid, 0)[1]


def _cpu_seconds(pid: int) -> float:
    """Processor time a process has used."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_when_idle() -> None:
    """From now on this thread runs only when nothing else wants a processor: requests leave time between their steps.

    Unlike a low priority this lets a thread that wakes up take this one's processor as if that were idle.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def load_vocabulary(start: Start) -> Any:
    """xgrammar's TokenizerInfo.

    Raises:
        StructuredOutputError: The tokenizer's spelling is not known.
    """
    if not start.trust_remote_code:
        # Neither tokenizers nor xgrammar need torch; importing it takes longer than all the rest. Only a tokenizer of
        # the model's own code may want it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    from engine_actors.structured_output import native
    from engine_actors.structured_output.vocabulary import token_texts

    tokenizer = AutoTokenizer.from_pretrained(start.tokenizer, trust_remote_code=start.trust_remote_code)
    texts = token_texts(tokenizer, start.vocab_size)
    for token in start.stop_token_ids:
        texts[token] = b""
    return native.new_tokenizer_info(texts, start.stop_token_ids)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; EngineCore decides when to stop
    requests, replies = 0, os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get between the messages

    def send(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(replies, view) :]

    body = read_frame(lambda size: os.read(requests, size))
    if body is None:
        return
    start = msgspec.msgpack.decode(body, type=Start)
    try:
        # The thread has ended when workers are forked; this one must answer at once whatever the machine does.
        with ThreadPoolExecutor(1, initializer=run_when_idle) as loader:
            tokenizer_info = loader.submit(load_vocabulary, start).result()
    except Exception as error:  # transformers and xgrammar raise many types
        send(encode(NotStarted(f"structured output is not available: {error}")))
        return
    send(encode(Started(str(tokenizer_info.serialize_json()))))
    Server(tokenizer_info, start.limits, requests, send).run()


if __name__ == "__main__":
    main()
