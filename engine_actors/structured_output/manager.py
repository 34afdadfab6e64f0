"""`StructuredOutputManager`: the grammars and matchers of one EngineCore.

A grammar is compiled once for all requests that ask for the same, and kept while there is room. A request's matcher
stays where it is while the request is preempted: it only ever advances by tokens that were sampled and kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine_actors.structured_output.bitmask import Mask, full_mask, num_words
from scheduler.output import pack_int32
from scheduler.structured_output import (
    CompiledGrammar,
    CompileTimeoutError,
    GrammarBitmask,
    GrammarFailure,
    GrammarManager,
    GrammarStatus,
    Matcher,
    StructuredOutputBackend,
    StructuredOutputError,
)
from scheduler.structured_params import GrammarSpec, StructuredOutputsParams

logger = logging.getLogger(__name__)

INVALID = "InvalidRequestError"
FAILED = "RequestFailedError"
"""Classes in `engine_actors.errors`: the request's own fault, or not."""


@dataclass
class _Request:
    spec: GrammarSpec
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    num_tokens: int = 0
    replay: tuple[int, ...] = ()
    matcher: Matcher | None = None


@dataclass
class _Compilation:
    """A grammar on its way, and who waits for it."""

    future: Future[CompiledGrammar]
    waiting: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Refusal:
    """A grammar that is known not to compile. A time-out is forgotten after a while: the machine may be idle then."""

    error: str
    until_s: float | None = None


class StructuredOutputManager(GrammarManager):
    """See `GrammarManager`. All methods but `wait` and `close` belong to one thread and do not block.

    Args:
        backend: Closed by `close`.
        max_num_rows: Rows of the masks that are allocated at once; more are allocated when needed.
        on_change: Called from any thread when a request became ready or failed, so that an idle loop can wake up.
        cache_bytes: Most memory for grammars that no running request need use.
        cache_entries: Most grammars, those that were refused included.
        timeout_memory_s: How long a grammar that timed out is refused without another try.
        token_limit_s: A request whose token takes longer to match ends with an error.
    """

    def __init__(
        self,
        backend: StructuredOutputBackend,
        *,
        max_num_rows: int = 256,
        on_change: Callable[[], Any] | None = None,
        cache_bytes: int = 256 * 1024**2,
        cache_entries: int = 1024,
        timeout_memory_s: float = 60.0,
        token_limit_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._on_change = on_change
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar | _Refusal] = OrderedDict()
        self._cache_bytes, self._cache_entries = cache_bytes, cache_entries
        self._cached_bytes = 0
        self._timeout_memory_s = timeout_memory_s
        self._token_limit_s = token_limit_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._compilations: dict[GrammarSpec, _Compilation] = {}
        self._ready: list[str] = []
        self._failures: list[GrammarFailure] = []
        # What other threads hand over: grammars that are done.
        self._arrived: list[tuple[GrammarSpec, _Compilation]] = []
        self._arrival = threading.Condition()
        self._any_token = full_mask(backend.vocab_size)
        self._masks: Mask = np.zeros((max_num_rows, num_words(backend.vocab_size)), dtype=np.int32)

    # Grammars come

    def warm_up(self) -> None:
        """Load the back end in the background, before there is a request that waits for it."""
        self._backend.start()

    def request_grammar(
        self,
        request_id: str,
        params: StructuredOutputsParams,
        *,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        output_token_ids: Sequence[int] = (),
    ) -> GrammarStatus:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} has a grammar already")
        spec = params.spec()
        request = _Request(spec, tuple(stop_token_ids), ignore_eos, replay=tuple(output_token_ids))
        self._requests[request_id] = request
        known = self._cached(spec)
        if isinstance(known, CompiledGrammar):
            return GrammarStatus.READY if self._begin(request_id, request, known) else GrammarStatus.FAILED
        if known is not None:
            self._fail(request_id, known.error, INVALID)
            return GrammarStatus.FAILED
        compilation = self._compilations.get(spec)
        if compilation is None:
            compilation = self._compilations[spec] = _Compilation(self._backend.compile(spec))
            compilation.future.add_done_callback(partial(self._arrive, spec, compilation))
        compilation.waiting.add(request_id)
        return GrammarStatus.COMPILING

    def status(self, request_id: str) -> GrammarStatus:
        self._settle()
        if any(failure.request_id == request_id for failure in self._failures):
            return GrammarStatus.FAILED
        return GrammarStatus.COMPILING if self._requests[request_id].matcher is None else GrammarStatus.READY

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return sum(len(each.waiting) for each in self._compilations.values())

    def take_ready(self) -> list[str]:
        self._settle()
        ready, self._ready = self._ready, []
        return ready

    def take_failures(self) -> list[GrammarFailure]:
        self._settle()
        failures, self._failures = self._failures, []
        return failures

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a grammar is done (True), for callers that have nothing else to do."""
        with self._arrival:
            return self._arrival.wait_for(lambda: bool(self._arrived), timeout_s)

    def _arrive(self, spec: GrammarSpec, compilation: _Compilation, _: Future[CompiledGrammar]) -> None:
        """On whatever thread finished the grammar."""
        with self._arrival:
            self._arrived.append((spec, compilation))
            self._arrival.notify_all()
        if self._on_change is not None and not compilation.future.cancelled():
            self._on_change()

    def _settle(self) -> None:
        """Give grammars that are done to the requests that wait for them."""
        if not self._arrived:
            return
        with self._arrival:
            arrived, self._arrived = self._arrived, []
        for spec, compilation in arrived:
            if self._compilations.get(spec) is not compilation:
                continue  # given up, and perhaps begun anew
            del self._compilations[spec]
            self._take_result(spec, compilation)

    def _take_result(self, spec: GrammarSpec, compilation: _Compilation) -> None:
        waiting = sorted(compilation.waiting)
        try:
            grammar = compilation.future.result()
        except StructuredOutputError as error:
            is_timeout = isinstance(error, CompileTimeoutError)
            until_s = self._clock() + self._timeout_memory_s if is_timeout else None
            self._keep(spec, _Refusal(str(error), until_s))
            for request_id in waiting:
                self._fail(request_id, str(error), INVALID)
        except (Exception, CancelledError) as error:  # the back end's own trouble
            logger.warning("a grammar could not be compiled: %s", error)
            for request_id in waiting:
                self._fail(request_id, f"the grammar could not be compiled: {error}", FAILED)
        else:
            self._keep(spec, grammar)
            for request_id in waiting:
                if self._begin(request_id, self._requests[request_id], grammar):
                    self._ready.append(request_id)

    # The cache

    def _cached(self, spec: GrammarSpec) -> CompiledGrammar | _Refusal | None:
        self._settle()
        known = self._cache.get(spec)
        if isinstance(known, _Refusal) and known.until_s is not None and known.until_s <= self._clock():
            del self._cache[spec]
            return None
        if known is not None:
            self._cache.move_to_end(spec)
        return known

    def _keep(self, spec: GrammarSpec, result: CompiledGrammar | _Refusal) -> None:
        self._cache[spec] = result
        self._cached_bytes += _size(spec, result)
        while self._cached_bytes > self._cache_bytes or len(self._cache) > self._cache_entries:
            oldest, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest, evicted)

    # Requests run

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> bool:
        request = self._requests.get(request_id)
        if request is None or request.matcher is None:
            return False
        started = time.thread_time()
        try:
            accepted = request.matcher.accept_tokens(token_ids)
            is_finished = accepted == len(token_ids) and request.matcher.is_finished
        except RuntimeError as error:  # the back end's
            self._fail(request_id, f"the grammar's matcher failed: {error}", FAILED)
            return False
        request.num_tokens += accepted
        if accepted < len(token_ids):
            position = request.num_tokens
            self._fail(
                request_id, f"token {token_ids[accepted]} at position {position} does not fit the grammar", FAILED
            )
            return False
        return is_finished if self._is_fast(request_id, started) else False

    def fill_bitmask(self, rows: Iterable[tuple[int, str]]) -> GrammarBitmask | None:
        filled: list[int] = []
        for row, request_id in rows:
            request = self._requests.get(request_id)
            if request is None or request.matcher is None:
                continue
            index = len(filled)
            if index == len(self._masks):
                self._masks = np.concatenate([self._masks, np.zeros_like(self._masks)])
            filled.append(row)
            started = time.thread_time()
            try:
                if request.matcher.fill_bitmask(self._masks, index):
                    self._is_fast(request_id, started)
                    continue
                self._fail(request_id, "no token of the vocabulary continues the text by the grammar", FAILED)
            except RuntimeError as error:  # the back end's
                self._fail(request_id, f"the grammar's matcher failed: {error}", FAILED)
            # The request has failed, but its row is in the step: it needs some token, whichever.
            self._masks[index] = self._any_token
        if not filled:
            return None
        return GrammarBitmask(pack_int32(filled), self._masks[: len(filled)].tobytes())

    def release(self, request_id: str) -> None:
        self._failures = [each for each in self._failures if each.request_id != request_id]
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._ready = [each for each in self._ready if each != request_id]
        compilation = self._compilations.get(request.spec)
        if compilation is None or request_id not in compilation.waiting:
            return
        compilation.waiting.discard(request_id)
        if not compilation.waiting and not compilation.future.done():
            del self._compilations[request.spec]
            compilation.future.cancel()

    def close(self) -> None:
        self._compilations.clear()
        self._backend.close()

    def _begin(self, request_id: str, request: _Request, grammar: CompiledGrammar) -> bool:
        """Make the matcher. False: the tokens to replay do not fit, the request has failed."""
        request.matcher = grammar.new_matcher(request.stop_token_ids, request.ignore_eos)
        replay, request.replay = request.replay, ()
        if not replay:
            return True
        self.accept_tokens(request_id, replay)
        return request_id in self._requests

    def _fail(self, request_id: str, error: str, error_type: str) -> None:
        self._requests.pop(request_id, None)
        self._failures.append(GrammarFailure(request_id, error, error_type))

    def _is_fast(self, request_id: str, started_s: float) -> bool:
        """False: the request has failed, since the others would have to wait for each of its tokens."""
        taken = time.thread_time() - started_s
        if taken <= self._token_limit_s:
            return True
        self._fail(
            request_id, f"a token took {taken:.1f} s to match by the grammar; at most {self._token_limit_s} s", FAILED
        )
        return False


def _size(spec: GrammarSpec, result: CompiledGrammar | _Refusal) -> int:
    return len(spec.text) + (result.size_bytes if isinstance(result, CompiledGrammar) else len(result.error))
