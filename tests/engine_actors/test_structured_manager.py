"""The manager of grammars and matchers, with a back end whose grammars are fixed token sequences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine_actors.structured_output.bitmask import full_mask, mask_of
from engine_actors.structured_output.manager import StructuredOutputManager
from scheduler.output import unpack_int32
from scheduler.structured_output import (
    CompiledGrammar,
    CompileTimeoutError,
    GrammarFailure,
    GrammarStatus,
    Matcher,
    StructuredOutputBackend,
    StructuredOutputError,
)
from scheduler.structured_params import GrammarSpec, StructuredOutputsParams
from tests.engine_actors.structured_cases import FakeClock

VOCAB_SIZE = 70
STOP = 69


class SequenceMatcher(Matcher):
    """Accepts the tokens of a list in order, then the stop token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position = 0

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if token == 13:
                raise RuntimeError("unlucky")
            if self.position >= len(self.tokens) or token != self.tokens[self.position]:
                return count
            self.position += 1
        return len(token_ids)

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    def fill_bitmask(self, bitmask: Any, row: int) -> bool:
        token = self.tokens[self.position] if self.position < len(self.tokens) else STOP
        bitmask[row] = mask_of([token] if token >= 0 else [], VOCAB_SIZE)
        return token >= 0

    @property
    def is_finished(self) -> bool:
        return self.position == len(self.tokens)


class SequenceGrammar(CompiledGrammar):
    def __init__(self, tokens: list[int], size_bytes: int = 100) -> None:
        self.tokens = tokens
        self._size_bytes = size_bytes

    def new_matcher(self, stop_token_ids: Sequence[int], ignore_eos: bool) -> Matcher:
        return SequenceMatcher(self.tokens)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes


class ManualBackend(StructuredOutputBackend):
    """Grammars are done when the test says so. A regex "1 2 3" is the sequence of these tokens."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[CompiledGrammar]] = {}
        self.compiled: list[str] = []
        self.is_closed = False

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        self.compiled.append(spec.text)
        self.futures[spec.text] = Future()
        return self.futures[spec.text]

    def finish(self, text: str, error: Exception | None = None, size_bytes: int = 100) -> None:
        future = self.futures[text]
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(SequenceGrammar([int(each) for each in text.split()], size_bytes))

    def start(self) -> None: ...

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def backend() -> ManualBackend:
    return ManualBackend()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manager(backend: ManualBackend, clock: FakeClock) -> StructuredOutputManager:
    return StructuredOutputManager(backend, max_num_rows=2, clock=clock)


def params(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def ready(manager: StructuredOutputManager, backend: ManualBackend, request_id: str, text: str, **kwargs: Any) -> None:
    """A request with its grammar compiled, or taken from the cache."""
    if manager.request_grammar(request_id, params(text), **kwargs) is GrammarStatus.COMPILING:
        backend.finish(text)
        assert manager.take_ready() == [request_id]


def test_a_request_waits_until_its_grammar_is_done(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    assert manager.request_grammar("a", params("1 2")) is GrammarStatus.COMPILING
    assert manager.take_ready() == []
    assert manager.num_compiling == 1
    backend.finish("1 2")
    assert manager.status("a") is GrammarStatus.READY
    assert manager.take_ready() == ["a"]
    assert manager.take_ready() == []
    assert manager.num_compiling == 0


def test_requests_for_the_same_share_one_compilation_and_then_the_cache(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    for request_id in ("a", "b"):
        manager.request_grammar(request_id, params("1"))
    backend.finish("1")
    assert manager.take_ready() == ["a", "b"]
    assert manager.request_grammar("c", params("1")) is GrammarStatus.READY
    assert manager.take_ready() == []  # it was ready at once
    assert backend.compiled == ["1"]


def test_matchers_of_one_grammar_are_apart(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    ready(manager, backend, "a", "1 2")
    ready(manager, backend, "b", "1 2")
    assert manager.accept_tokens("a", [1]) is False
    assert manager.accept_tokens("a", [2]) is True
    assert manager.accept_tokens("b", [1]) is False


def test_masks_are_packed_with_the_rows_they_belong_to(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    for request_id, text in (("a", "1"), ("b", "33"), ("c", "68")):  # more than max_num_rows
        ready(manager, backend, request_id, text)
    bitmask = manager.fill_bitmask([(5, "a"), (9, "no grammar"), (0, "b"), (7, "c")])
    assert bitmask is not None
    assert list(unpack_int32(bitmask.rows)) == [5, 0, 7]
    masks = np.frombuffer(bitmask.mask, np.int32).reshape(3, 3)
    assert np.array_equal(masks, [mask_of([token], VOCAB_SIZE) for token in (1, 33, 68)])


def test_a_step_without_grammars_has_no_mask(manager: StructuredOutputManager) -> None:
    assert manager.fill_bitmask([]) is None
    assert manager.fill_bitmask([(0, "unconstrained")]) is None


def test_a_refused_grammar_fails_its_requests_now_and_later(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    manager.request_grammar("a", params("1"))
    manager.request_grammar("other", params("2"))
    backend.finish("1", StructuredOutputError("no such thing"))
    assert manager.status("a") is GrammarStatus.FAILED
    assert manager.take_failures() == [GrammarFailure("a", "no such thing", "InvalidRequestError")]
    assert manager.take_failures() == []
    assert manager.request_grammar("b", params("1")) is GrammarStatus.FAILED
    assert manager.take_failures() == [GrammarFailure("b", "no such thing", "InvalidRequestError")]
    assert backend.compiled == ["1", "2"]
    assert manager.status("other") is GrammarStatus.COMPILING


def test_a_time_out_is_forgotten_after_a_while(
    manager: StructuredOutputManager, backend: ManualBackend, clock: FakeClock
) -> None:
    manager.request_grammar("a", params("1"))
    backend.finish("1", CompileTimeoutError("too slow"))
    assert manager.take_failures()[0].request_id == "a"
    clock.now_s = 59.0
    assert manager.request_grammar("b", params("1")) is GrammarStatus.FAILED
    clock.now_s = 60.0
    assert manager.request_grammar("c", params("1")) is GrammarStatus.COMPILING


def test_trouble_of_the_back_end_is_not_the_requests_fault_and_not_kept(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    manager.request_grammar("a", params("1"))
    backend.finish("1", OSError("gone"))
    assert manager.take_failures() == [
        GrammarFailure("a", "the grammar could not be compiled: gone", "RequestFailedError")
    ]
    assert manager.request_grammar("b", params("1")) is GrammarStatus.COMPILING


def test_releasing_the_last_that_waits_stops_the_compilation(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    for request_id in ("a", "b"):
        manager.request_grammar(request_id, params("1"))
    manager.release("a")
    assert not backend.futures["1"].cancelled()
    manager.release("b")
    assert backend.futures["1"].cancelled()
    assert manager.take_ready() == []
    assert manager.take_failures() == []
    assert manager.request_grammar("c", params("1")) is GrammarStatus.COMPILING


def test_released_requests_are_not_reported(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    for request_id in ("a", "b"):
        manager.request_grammar(request_id, params("1"))
    backend.finish("1")
    manager.release("a")
    assert manager.take_ready() == ["b"]
    manager.request_grammar("c", params("2"))
    backend.finish("2", StructuredOutputError("no"))
    assert manager.status("c") is GrammarStatus.FAILED
    manager.release("c")
    assert manager.take_failures() == []
    manager.release("never seen")


def test_a_grammar_that_arrives_after_everyone_left_is_kept(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    manager.request_grammar("a", params("1"))
    backend.finish("1")
    manager.release("a")
    assert manager.take_ready() == []
    assert manager.request_grammar("b", params("1")) is GrammarStatus.READY


def test_output_tokens_are_replayed_after_a_recovery(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    ready(manager, backend, "a", "1 2 3", output_token_ids=[1, 2])
    assert manager.accept_tokens("a", [3]) is True
    manager.release("a")
    ready(manager, backend, "a", "1 2 3", output_token_ids=[1])  # from the cache
    assert manager.accept_tokens("a", [2, 3]) is True
    assert manager.request_grammar("b", params("1 2 3"), output_token_ids=[3]) is GrammarStatus.FAILED
    assert "token 3 at position 0" in manager.take_failures()[0].error


def test_a_token_that_does_not_fit_fails_its_request_alone(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    ready(manager, backend, "a", "1 2 3")
    ready(manager, backend, "b", "1 2 3")
    manager.accept_tokens("a", [1])
    assert manager.accept_tokens("a", [2, 7]) is False
    assert manager.take_failures() == [
        GrammarFailure("a", "token 7 at position 2 does not fit the grammar", "RequestFailedError")
    ]
    assert manager.accept_tokens("a", [3]) is False  # forgotten
    assert manager.accept_tokens("b", [1, 2, 3]) is True


def test_a_matcher_that_breaks_fails_its_request_alone(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    ready(manager, backend, "a", "1")
    ready(manager, backend, "b", "1")
    assert manager.accept_tokens("a", [13]) is False
    assert manager.take_failures() == [
        GrammarFailure("a", "the grammar's matcher failed: unlucky", "RequestFailedError")
    ]
    assert manager.accept_tokens("b", [1]) is True


def test_where_no_token_fits_the_request_fails_and_its_row_gets_any_token(
    manager: StructuredOutputManager, backend: ManualBackend
) -> None:
    ready(manager, backend, "a", "-1")
    ready(manager, backend, "b", "2")
    bitmask = manager.fill_bitmask([(0, "a"), (1, "b")])
    assert bitmask is not None
    masks = np.frombuffer(bitmask.mask, np.int32).reshape(2, 3)
    assert np.array_equal(masks, [full_mask(VOCAB_SIZE), mask_of([2], VOCAB_SIZE)])
    assert [failure.request_id for failure in manager.take_failures()] == ["a"]


def test_a_matcher_that_is_too_slow_fails_its_request(backend: ManualBackend) -> None:
    manager = StructuredOutputManager(backend, token_limit_s=-1.0)
    ready(manager, backend, "a", "1 2")
    assert manager.accept_tokens("a", [1]) is False
    assert "to match by the grammar; at most" in manager.take_failures()[0].error


def test_the_least_recently_used_grammars_go_when_memory_is_short(backend: ManualBackend) -> None:
    manager = StructuredOutputManager(backend, cache_bytes=700)
    for number, text in enumerate(("1", "2", "1", "3")):  # 1 is used again before 3 comes
        if manager.request_grammar(str(number), params(text)) is GrammarStatus.COMPILING:
            backend.finish(text, size_bytes=300)
            manager.take_ready()
    assert manager.request_grammar("4", params("1")) is GrammarStatus.READY
    assert manager.request_grammar("5", params("3")) is GrammarStatus.READY
    assert manager.request_grammar("6", params("2")) is GrammarStatus.COMPILING
    assert manager.accept_tokens("1", [2]) is True  # a request keeps what it uses


def test_an_idle_loop_is_woken_and_a_blocking_one_waits(backend: ManualBackend) -> None:
    woken = threading.Event()
    manager = StructuredOutputManager(backend, on_change=woken.set)
    manager.request_grammar("a", params("1"))
    assert manager.wait(timeout_s=0.0) is False
    threading.Thread(target=backend.finish, args=("1",)).start()
    assert woken.wait(10)
    assert manager.wait(10) is True
    assert manager.take_ready() == ["a"]


def test_a_request_id_is_used_once(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    manager.request_grammar("a", params("1"))
    with pytest.raises(ValueError, match="'a' has a grammar already"):
        manager.request_grammar("a", params("2"))


def test_closing_closes_the_back_end(manager: StructuredOutputManager, backend: ManualBackend) -> None:
    manager.request_grammar("a", params("1"))
    manager.close()
    manager.close()
    assert backend.is_closed
