"""Sampling parameters against the model: vocabulary, limits, and bad words as tokens. Used by `InputProcessor`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from engine_actors.errors import InvalidRequestError
from engine_actors.structured_output.checked_forms import CheckedForms
from scheduler.sampling_params import MAX_BAD_WORDS, SamplingParams
from scheduler.structured_params import StructuredOutputsParams

MANY_TOKEN_IDS = 4096
"""Longer lists are better checked beside an event loop."""


class ParamsChecker:
    """Checks of one engine.

    Args:
        tokenizer: A transformers tokenizer; None when the engine works on token ids alone.
        eos_token_ids: Not sampled before min_tokens.
        max_logprobs: See EngineConfig.
    """

    def __init__(self, vocab_size: int, tokenizer: Any | None, eos_token_ids: Sequence[int], max_logprobs: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._forms = CheckedForms()
        self._max_logprobs = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)

    def check(self, params: SamplingParams, *, limit_logprobs: bool = True) -> None:
        """Check `params`, fill in `bad_words_token_ids`, and bring `structured_outputs` into the form it is sent in.

        Args:
            limit_logprobs: max_logprobs holds for this request.

        Raises:
            InvalidRequestError: It names the field, the value and what is allowed.
        """
        if params.token_columns is not None:
            raise InvalidRequestError(
                "token_columns must be None: what it holds comes from allowed_token_ids and logit_bias", "token_columns"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        for sequence in params.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", sequence)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer, but skip_tokenizer_init is set", "stop")
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        if not params.logprob_token_ids:
            self._check_logprobs("logprobs", params.logprobs, limit_logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs, limit_logprobs)
        if params.bad_words:
            params.bad_words_token_ids = self._tokenize_bad_words(params)
        if params.allowed_token_ids is not None:
            self._check_something_allowed(params, params.allowed_token_ids)
        if params.structured_outputs is not None:
            params.structured_outputs = self._check_form(params.structured_outputs)

    def is_quick(self, params: SamplingParams) -> bool:
        """Whether `check` is a matter of microseconds; else it had better run in a thread."""
        for ids in (params.logit_bias, params.allowed_token_ids):
            if isinstance(ids, (dict, list)) and len(ids) > MANY_TOKEN_IDS:
                return False
        return params.structured_outputs is None or self._forms.knows(params.structured_outputs)

    def _check_ids(self, field: str, token_ids: Collection[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self._vocab_size:
            raise InvalidRequestError(
                f"{field} has {largest}; the model's vocabulary is 0 to {self._vocab_size - 1}", field
            )

    def _check_logprobs(self, field: str, value: int | None, limited: bool) -> None:
        if value is None:
            return
        most = self._max_logprobs if limited else self._vocab_size
        if (self._vocab_size if value == -1 else value) > most:
            allowed = f"0 to {most}" + (", or -1 for all" if most == self._vocab_size else " (max_logprobs)")
            raise InvalidRequestError(f"{field} must be {allowed}; got {value}", field)

    def _tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The sequences given as tokens, and each word with and without a space before it."""
        if self._tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer, but skip_tokenizer_init is set", "bad_words")
        sequences = {tuple(sequence): None for sequence in params.bad_words_token_ids}
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if not ids:
                    raise InvalidRequestError(f"bad_words has {word!r}, which has no tokens", "bad_words")
                sequences[tuple(ids)] = None
        if len(sequences) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words must be at most {MAX_BAD_WORDS} token sequences, with and without a space before; "
                f"got {len(sequences)}",
                "bad_words",
            )
        return [list(sequence) for sequence in sequences]

    def _check_something_allowed(self, params: SamplingParams, allowed: list[int]) -> None:
        forbidden = {sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1}
        if params.min_tokens:
            forbidden.update(params.stop_token_ids, () if params.ignore_eos else self._eos_token_ids)
        if forbidden.issuperset(allowed):
            raise InvalidRequestError(
                f"allowed_token_ids {allowed!r} leaves no token: all are bad_words, or stop tokens before min_tokens",
                "allowed_token_ids",
            )

    def _check_form(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """The same form with JSON as text, which any number and key in it survives on its way."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs need a tokenizer, but skip_tokenizer_init is set", "structured_outputs"
            )
        if not self._eos_token_ids:
            raise InvalidRequestError(
                "structured_outputs need an end-of-sequence token; the model names none", "structured_outputs"
            )
        try:
            spec = self._forms.check(form)
        except (ValueError, TypeError) as error:  # StructuredOutputError is a ValueError
            text = str(error)
            text = text if text.startswith("structured_outputs") else f"structured_outputs: {text}"
            raise InvalidRequestError(text, "structured_outputs") from error
        if spec.kind in ("json", "structural_tag"):
            return msgspec.structs.replace(form, **{spec.kind: spec.text})
        return form
