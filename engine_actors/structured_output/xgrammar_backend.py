"""The xgrammar back end: its matchers behind `scheduler.structured_output.Matcher`, its compiler in another process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from engine_actors.structured_output import native
from engine_actors.structured_output.bitmask import Mask, full_mask, mask_of
from engine_actors.structured_output.compile_messages import CompileLimits, Start
from engine_actors.structured_output.compiler import Compiler
from scheduler.structured_output import CompiledGrammar, Matcher, StructuredOutputBackend
from scheduler.structured_params import GrammarSpec


class XGrammarBackend(StructuredOutputBackend):
    """Grammars for one model's vocabulary. Nothing is loaded before the first grammar, or `start`.

    Args:
        tokenizer: Name or directory, as for `AutoTokenizer.from_pretrained`.
        vocab_size: Tokens the model has logits for; may exceed the tokenizer's.
        eos_token_ids: Ids that end a text; at least one.

    Raises:
        ValueError: There is no end-of-sequence id, or one is outside of the vocabulary.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        trust_remote_code: bool = False,
        limits: CompileLimits | None = None,
    ) -> None:
        if not eos_token_ids:
            raise ValueError("structured output needs an end-of-sequence token; the model names none")
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"eos_token_ids has {token}; the model's vocabulary is 0 to {vocab_size - 1}")
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._all_tokens = full_mask(vocab_size)
        self._textless: frozenset[int] | None = None
        self._compiler = Compiler(
            Start(tokenizer, trust_remote_code, vocab_size, list(eos_token_ids), limits or CompileLimits())
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def start(self) -> None:
        self._compiler.start()

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        compiled: Future[CompiledGrammar] = Future()
        inner = self._compiler.compile(spec)

        def finish(done: Future[Any]) -> None:
            if done.cancelled():
                compiled.cancel()
                return
            if not compiled.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                compiled.set_exception(error)
            else:
                grammar = done.result()
                if self._textless is None:
                    self._textless = frozenset(grammar.tokenizer_info().special_token_ids())
                compiled.set_result(_XGrammar(grammar, self._eos_token_ids, self._textless, self._all_tokens))

        inner.add_done_callback(finish)
        compiled.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        return compiled

    def close(self) -> None:
        self._compiler.close()


class _XGrammar(CompiledGrammar):
    def __init__(
        self, grammar: Any, eos_token_ids: tuple[int, ...], textless: frozenset[int], all_tokens: Mask
    ) -> None:
        self._grammar = grammar
        self._eos_token_ids = eos_token_ids
        self._textless = textless
        self._all_tokens = all_tokens

    def new_matcher(self, stop_token_ids: Sequence[int], ignore_eos: bool) -> Matcher:
        # A stop token with text is part of the text like any other; that it stops is the scheduler's business.
        stops = sorted({*self._eos_token_ids, *self._textless.intersection(stop_token_ids)})
        return _XGrammarMatcher(self._grammar, stops, self._all_tokens, ignore_eos)

    @property
    def size_bytes(self) -> int:
        return int(self._grammar.memory_size_bytes())


class _XGrammarMatcher(Matcher):
    """xgrammar's matcher, and the mask of the current place once it is known."""

    def __init__(self, grammar: Any, stops: list[int], all_tokens: Mask, ignore_eos: bool) -> None:
        self._matcher = native.new_matcher(grammar, stops)
        self._all_tokens = all_tokens
        vocab_size = grammar.tokenizer_info().vocab_size()
        self._text_tokens = all_tokens & ~mask_of(stops, vocab_size)
        self._ignore_eos = ignore_eos
        self._mask: Mask | None = None

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        matcher = self._matcher
        accepted = 0
        for token in token_ids:
            if matcher.is_terminated() or not native.accept_token(matcher, token):
                break
            accepted += 1
        if accepted:
            self._mask = None
        return accepted

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        mask = self._mask
        accepted = self.accept_tokens(token_ids)
        if accepted:
            self._matcher.rollback(accepted)
        self._mask = mask
        return accepted

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._mask = None

    def fill_bitmask(self, bitmask: Mask, row: int) -> bool:
        mask = self._current_mask()
        bitmask[row] = mask
        return bool(mask.any())

    @property
    def is_finished(self) -> bool:
        if self._matcher.is_terminated():
            return True
        # Complete, and no token with text goes on. The mask is kept: the next step needs it anyway.
        return bool(self._matcher.is_completed()) and not (self._current_mask() & self._text_tokens).any()

    def _current_mask(self) -> Mask:
        """The mask of the next token; after a stop token nothing is constrained any more."""
        if self._mask is None:
            mask = self._all_tokens.copy()
            if not self._matcher.is_terminated():
                native.fill_bitmask(self._matcher, mask.reshape(1, -1), 0)
                mask &= self._all_tokens  # xgrammar leaves the bits beyond the vocabulary as they were
                if self._ignore_eos:
                    texts = mask & self._text_tokens
                    mask = texts if texts.any() else mask
            self._mask = mask
        return self._mask
