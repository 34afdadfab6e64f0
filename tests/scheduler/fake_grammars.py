"""Grammars without a language, for scheduler tests: a form says when it is compiled and complete, and what fails.

`form(delay=2, end=7)` is ready at the second look and complete after seven tokens; `fails_at=3` makes the matcher fail
when the mask of the fourth token is wanted, and `refused=True` the compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.output import pack_int32
from scheduler.structured_output import GrammarBitmask, GrammarFailure, GrammarManager, GrammarStatus
from scheduler.structured_params import StructuredOutputsParams

REFUSED = "refused by the test"
MATCHER_FAILED = "failed by the test"


def form(
    *, delay: int = 0, end: int = 1000, fails_at: int | None = None, refused: bool = False
) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"{delay} {end} {-1 if fails_at is None else fails_at} {int(refused)}")


@dataclass
class Form:
    """What `form` was given."""

    delay: int
    end: int
    fails_at: int
    refused: bool

    @staticmethod
    def of(params: StructuredOutputsParams) -> Form:
        delay, end, fails_at, refused = map(int, (params.regex or "").split())
        return Form(delay, end, fails_at, bool(refused))


@dataclass
class _State:
    form: Form
    num_tokens: int
    is_ready: bool = False


class FakeGrammars(GrammarManager):
    """See the module.

    Attributes:
        filled: The rows and requests of the last `fill_bitmask`.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _State] = {}
        self._failures: list[GrammarFailure] = []
        self.filled: list[tuple[int, str]] = []

    def request_grammar(
        self,
        request_id: str,
        params: StructuredOutputsParams,
        *,
        stop_token_ids: Sequence[int],
        ignore_eos: bool = False,
        output_token_ids: Sequence[int] = (),
    ) -> GrammarStatus:
        assert request_id not in self._requests
        self._requests[request_id] = _State(Form.of(params), len(output_token_ids))
        return self._look(request_id)

    def status(self, request_id: str) -> GrammarStatus:
        return GrammarStatus.READY if self._requests[request_id].is_ready else GrammarStatus.COMPILING

    def take_ready(self) -> list[str]:
        waiting = [request_id for request_id, state in self._requests.items() if not state.is_ready]
        return [request_id for request_id in waiting if self._look(request_id) is GrammarStatus.READY]

    def take_failures(self) -> list[GrammarFailure]:
        failures, self._failures = self._failures, []
        return failures

    def accept_tokens(self, request_id: str, token_ids: Sequence[int]) -> bool:
        state = self._requests[request_id]
        assert state.is_ready
        state.num_tokens += len(token_ids)
        assert state.num_tokens <= state.form.end, "a token after the text is complete"
        return state.num_tokens == state.form.end

    def fill_bitmask(self, rows: Iterable[tuple[int, str]]) -> GrammarBitmask | None:
        self.filled = list(rows)
        for _, request_id in self.filled:
            state = self._requests[request_id]
            assert state.is_ready
            if state.num_tokens == state.form.fails_at:
                self._fail(request_id, MATCHER_FAILED)
        return GrammarBitmask(pack_int32(row for row, _ in self.filled), b"") if self.filled else None

    def release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._failures = [failure for failure in self._failures if failure.request_id != request_id]

    def close(self) -> None:
        pass

    def num_tokens(self, request_id: str) -> int:
        """Tokens its matcher has seen."""
        return self._requests[request_id].num_tokens

    @property
    def is_empty(self) -> bool:
        return not self._requests and not self._failures

    def _look(self, request_id: str) -> GrammarStatus:
        state = self._requests[request_id]
        state.form.delay -= 1
        if state.form.delay >= 0:
            return GrammarStatus.COMPILING
        if state.form.refused:
            self._fail(request_id, REFUSED)
            return GrammarStatus.FAILED
        state.is_ready = True
        return GrammarStatus.READY

    def _fail(self, request_id: str, error: str) -> None:
        del self._requests[request_id]
        self._failures.append(GrammarFailure(request_id, error, "InvalidRequestError"))
