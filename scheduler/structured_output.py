"""Structured output as the scheduler and EngineCore see it: interfaces and wire types, no back end.

A request with `sampling_params.structured_outputs` waits for its grammar in a state of its own; from then on a
matcher follows its tokens. The implementations are in `engine_actors.structured_output`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from scheduler.structured_params import GrammarSpec, StructuredOutputsParams


class StructuredOutputError(ValueError):
    """A grammar is invalid, cannot be enforced exactly, or is too expensive. The text says what and where."""


class CompileTimeoutError(StructuredOutputError):
    """A grammar took longer than the compile time limit. On an idle machine the same grammar might pass."""


class Matcher(ABC):
    """Follows the tokens of one request through its grammar. Not thread-safe."""

    @abstractmethod
    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Advance; returns how many of the tokens were accepted before the first that does not fit."""

    @abstractmethod
    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens `accept_tokens` would accept. The state is unchanged."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, bitmask: Any, row: int) -> bool:
        """Write the next token's mask into `bitmask[row]` (numpy int32 [rows, ceil(vocab / 32)]): bit `t % 32` of
        word `t // 32` is set where token t is allowed, bits beyond the vocabulary are clear. False: none is."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """The text is complete and can only end: nothing but a stop token may follow, or one has been accepted."""


class CompiledGrammar(ABC):
    """An immutable grammar compiled for one vocabulary, shared by requests."""

    @abstractmethod
    def new_matcher(self, stop_token_ids: Sequence[int], ignore_eos: bool) -> Matcher:
        """A matcher at the start of the text.

        Args:
            stop_token_ids: The request's. Those without text (special tokens) are allowed where the text may end, as
                end-of-sequence tokens always are; others stay what the grammar makes of their text.
            ignore_eos: Offer no stop token as long as the text can go on.
        """

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Memory it holds, about."""


class StructuredOutputBackend(ABC):
    """Compiles grammars for one vocabulary. Thread-safe; no method blocks."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar, some time later; cancelling the future stops the work.

        The future fails with StructuredOutputError when the grammar is refused, with CompileTimeoutError when it took
        too long, and with another error when the back end itself failed.
        """

    @abstractmethod
    def start(self) -> None:
        """Load what the first grammar would have to wait for, in the background."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens the model has logits for."""

    @abstractmethod
    def close(self) -> None:
        """Give processes and memory back; pending futures are cancelled. Idempotent."""


class GrammarStatus(Enum):
    """Where a request's grammar is."""

    COMPILING = 0
    READY = 1
    FAILED = 2


class GrammarFailure(NamedTuple):
    """A request that ends with an error: its grammar was refused, or its matcher met what cannot be."""

    request_id: str
    error: str
    error_type: str
    """The class in `engine_actors.errors` the front end raises."""


class GrammarBitmask(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The masks of one step, sent by EngineCore with `Executor.sample_tokens`.

    Attributes:
        rows: int32 column: the constrained requests' rows of the persistent batch. Other rows are unconstrained.
        mask: int32 [len(rows), ceil(vocab_size / 32)], row-major, native little-endian; see `Matcher.fill_bitmask`.
    """

    rows: bytes
    mask: bytes


class GrammarManager(ABC):
    """All grammars and matchers of one EngineCore; what Scheduler and EngineCore call. No call blocks."""

    @abstractmethod
    def request_grammar(
        self,
        request_id: str,
        params: StructuredOutputsParams,
        *,
        stop_token_ids: Sequence[int],
        ignore_eos: bool = False,
        output_token_ids: Sequence[int] = (),
    ) -> GrammarStatus:
        """Start compiling, or find in the cache. `output_token_ids` are replayed once ready (after a recovery)."""

    @abstractmethod
    def status(self, request_id: str) -> GrammarStatus:
        """The request's state now. KeyError: unknown, or released."""

    @abstractmethod
    def take_ready(self) -> list[str]:
        """Requests whose grammar became ready since the last call (not those ready at once)."""

    @abstractmethod
    def take_failures(self) -> list[GrammarFailure]:
        """Requests that failed since the last call. Each is forgotten: no release is needed."""

    @abstractmethod
    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Advance by sampled tokens. True: the text is complete, the request ends with FinishReason.STOP."""

    @abstractmethod
    def fill_bitmask(self, rows: Iterable[tuple[int, str]]) -> GrammarBitmask | None:
        """The masks of the next step for (row, request_id) pairs; others, and unknown ids, are left out."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """The request ended, in any state; a compilation nobody else waits for is stopped. Unknown ids are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything. Idempotent."""
