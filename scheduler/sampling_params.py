"""What a request asks of sampling and output. Public API, and a wire type from the front end to the workers.

Names, defaults and ranges are vLLM's (0.32); violations raise `ValueError` naming the field, the value and what is
allowed. Checks that need a model (vocabulary ranges, context length) belong to `engine_actors.input_processor`.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import msgspec

from scheduler.logprobs import pack_column
from scheduler.structured_params import StructuredOutputsParams
from scheduler.values import MAX_INT, check_float, check_int, check_token_ids, is_finite, is_text, shown

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this: smaller ones overflow the scaled logits."""
MAX_N = 16384
MAX_BAD_WORDS = 128
"""Token sequences of bad_words, after tokenisation."""
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
"""And its inverse is the least. Beyond, float32 logits overflow; so they do with larger biases."""
MAX_LOGIT_BIAS = 1e30
MAX_EXTRA_ARGS_DEPTH = 32
MAX_LOGPROB_TOKEN_IDS = 128
FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "flat_logprobs",
)  # fmt: skip
LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids")


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput carries: everything so far, only what is new, or one final output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class TokenColumns(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """`allowed_token_ids` and `logit_bias` on their way to the workers: tens of thousands of them cost a copy of bytes.

    Attributes:
        allowed: int32 column; None is all.
        biased, biases: int32 and float32 columns of equal length.
    """

    allowed: bytes | None = None
    biased: bytes = b""
    biases: bytes = b""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling and output options of one request.

    Attributes:
        n: Completions per prompt.
        temperature: Divides the logits; below 1e-5 the most likely token is taken.
        top_k: Sample among the k most likely tokens; 0 or -1 is off.
        top_p: Sample among the most likely tokens whose probabilities first reach this sum, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        presence_penalty: Subtracted from the logit of each token generated before, in [-2, 2].
        frequency_penalty: Subtracted once for each time it was generated, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; above 0.
        seed: Picks the random numbers; the same seed gives the same tokens. None: chosen at admission.
        stop: Strings that end the text. stop_token_ids: tokens that end it.
        ignore_eos: Go on past the end-of-sequence token.
        max_tokens: Most tokens to generate; None is the rest of the context.
        min_tokens: EOS and stop tokens are not sampled before so many tokens.
        bad_words: Texts that are never generated, at the start of a word or after other text.
        bad_words_token_ids: The same as token sequences: the last token is masked where the others come before it. The
            front end adds those of `bad_words`.
        allowed_token_ids: Only these are sampled; None is all.
        logit_bias: Token id → what is added to its logit.
        logprobs: Report the log-probability of each generated token, and of so many most likely ones; -1 is all. By the
            model's own logits, before anything else here changes them. None: nothing is reported.
        prompt_logprobs: Same for the prompt's tokens after the first.
        logprob_token_ids: Report the log-probabilities of these tokens with each generated token's, instead of those of
            the most likely ones. `logprobs` may be left out, or is their number.
        flat_logprobs: Return log-probabilities as `FlatLogprobs`: a few lists instead of an object for each entry.
        structured_outputs: The form the text must take; a dictionary of its fields will do. None: any text.
        detokenize: Turn tokens into text; False leaves `text` empty.
        output_kind: See RequestOutputKind.
        stream_interval: Tokens between two outputs; the first and the last come at once.
        skip_reading_prefix_cache: Compute the whole prompt anew. None: only where prompt_logprobs need it.
        extra_args: For logits processors of your own; plain data (str, int, float, bool, None, lists, dictionaries).
        token_columns: Not yours to set: the front end sends `allowed_token_ids` and `logit_bias` in it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    token_columns: TokenColumns | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_stops()
        self._check_penalties()
        self._check_token_limits()
        self._check_logprobs()
        self._check_output()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def wants_logprobs(self) -> bool:
        """Of generated tokens."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced."""
        return msgspec.structs.replace(self, **changes)

    def with_output_kind(self, kind: RequestOutputKind) -> SamplingParams:
        """A copy with another output kind. It is not checked again: a front end checks what it admits."""
        params = copy.copy(self)
        params.output_kind = kind
        return params

    def for_engine(self) -> SamplingParams:
        """A copy as it is sent: without what the front end alone needs, long lists as columns. Not checked again."""
        params = copy.copy(self)
        params.stop, params.bad_words = [], []
        allowed, biases = self.allowed_token_ids, self.logit_bias
        if allowed is not None or biases:
            biases = biases or {}
            params.token_columns = TokenColumns(
                None if allowed is None else pack_column("i", allowed),
                pack_column("i", biases),
                pack_column("f", biases.values()),
            )
            params.allowed_token_ids = params.logit_bias = None
        return params

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in LISTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
                raise ValueError(f"{name} must be a list, got {shown(value)}")
            setattr(self, name, [] if value is None else list(value))
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):  # As vLLM: True is 1.
                setattr(self, name, 1 if getattr(self, name) else None)
        if self.seed == -1:
            self.seed = None
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = _structured_outputs(self.structured_outputs)
        if self.top_k == -1:
            self.top_k = 0

    def _check_ranges(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, 2.0)
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        check_int("top_k", self.top_k, 0, None, allowed="-1 (off), 0 (off) or at least 1")
        check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens, allowed="0 to max_tokens")

    def _check_stops(self) -> None:
        if not all(is_text(s) and s for s in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {shown(self.stop)}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        check_token_ids("stop_token_ids", self.stop_token_ids)
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            check_float(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        check_float("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)

    def _check_token_limits(self) -> None:
        """What may be sampled: bad words, allowed tokens, biases."""
        if not all(is_text(word) and word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words must be a list of strings that are not blank, got {shown(self.bad_words)}")
        self.bad_words = list(dict.fromkeys(self.bad_words))
        for sequence in self.bad_words_token_ids:
            if not isinstance(sequence, list) or not sequence:
                raise ValueError(f"bad_words_token_ids must hold non-empty lists of token ids, got {shown(sequence)}")
            check_token_ids("bad_words_token_ids", sequence)
        if len(self.bad_words_token_ids) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words must be at most {MAX_BAD_WORDS} token sequences (a word may be several: with and without a "
                f"space before it), got {len(self.bad_words_token_ids)}"
            )
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list) or not self.allowed_token_ids:
                raise ValueError(
                    f"allowed_token_ids must be a non-empty list or None, got {shown(self.allowed_token_ids)}"
                )
            check_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}")
            check_token_ids("logit_bias", self.logit_bias, allowed="a token id, for each key")
            _check_biases(self.logit_bias)
        if not isinstance(self.token_columns, (TokenColumns, type(None))):
            raise ValueError(f"token_columns must be None, got {shown(self.token_columns)}")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), -1, None, allowed="at least 0, or -1 (the whole vocabulary)")
        ids = self.logprob_token_ids
        if ids is not None:
            if not isinstance(ids, list) or not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS:
                raise ValueError(
                    f"logprob_token_ids must be a list of 1 to {MAX_LOGPROB_TOKEN_IDS} token ids or None, got "
                    f"{shown(ids)}"
                )
            check_token_ids("logprob_token_ids", ids)
            if self.logprobs is not None and self.logprobs != len(ids):
                raise ValueError(f"logprob_token_ids must be as many as logprobs says, {self.logprobs}; got {len(ids)}")
        skip = self.skip_reading_prefix_cache
        if skip is not None and not isinstance(skip, bool):
            raise ValueError(f"skip_reading_prefix_cache must be True, False or None, got {shown(skip)}")
        if skip is False and self.prompt_logprobs is not None:
            raise ValueError(
                "skip_reading_prefix_cache must be True or None with prompt_logprobs, got False: a cached prompt token "
                "has no logits"
            )

    def _check_output(self) -> None:
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        kinds = list(RequestOutputKind)
        if self.output_kind not in kinds:  # Compares with numbers too.
            allowed = ", ".join(f"{kind.value} ({kind.name})" for kind in kinds)
            raise ValueError(f"output_kind must be one of {allowed}; got {shown(self.output_kind)}")
        self.output_kind = RequestOutputKind(self.output_kind)
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams or None, got {shown(form)}")
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, None)
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict):
                raise ValueError(f"extra_args must be a dictionary or None, got {shown(self.extra_args)}")
            _check_plain("extra_args", self.extra_args)


def _structured_outputs(fields: dict[str, Any]) -> StructuredOutputsParams:
    known = StructuredOutputsParams.__struct_fields__
    for name in fields:
        if name not in known:
            raise ValueError(f"structured_outputs must not hold {shown(name)}; known are {', '.join(known)}")
    return StructuredOutputsParams(**fields)


def _check_biases(biases: dict[int, float]) -> None:
    values = biases.values()
    # All at once first, as in check_token_ids. A sum with a NaN among its terms is NaN, and so less than nothing.
    kinds = set(map(type, values))
    if kinds in ({int}, {float}) and sum(map(abs, values)) <= MAX_LOGIT_BIAS:
        return
    for token, bias in biases.items():
        if not is_finite(bias) or abs(bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias must map token ids to numbers of at most {MAX_LOGIT_BIAS:g} in size, "
                f"got {shown(bias)} for {token}"
            )


def _check_plain(where: str, value: Any, depth: int = 0) -> None:
    """Refuse what cannot travel to the workers."""
    if depth > MAX_EXTRA_ARGS_DEPTH:
        raise ValueError(f"extra_args must be nested at most {MAX_EXTRA_ARGS_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not is_text(key):
                raise ValueError(f"{where} must have strings as keys, got {shown(key)}")
            _check_plain(f"{where}[{key!r:.100}]", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(where, item, depth + 1)
    elif isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
        raise ValueError(f"{where} must hold integers of 64 bits, got {shown(value)}")
    elif value is not None and not (is_text(value) or isinstance(value, (bool, int, float))):
        raise ValueError(
            f"{where} must be plain data (str, int, float, bool, None, lists, dictionaries), got {type(value).__name__}"
        )
