"""What a request asks of sampling and output. Public API, and a wire type from the front end to the workers.

Names, defaults and ranges are vLLM's (0.32); violations raise `ValueError` naming the field, the value and what is
allowed. Checks that need a model (vocabulary ranges, context length) belong to `engine_actors.input_processor`.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this: smaller ones overflow the scaled logits."""
MAX_N = 16384


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput carries: everything so far, only what is new, or one final output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sampling and output options of one request.

    Attributes:
        n: Completions per prompt.
        temperature: Divides the logits; below 1e-5 the most likely token is taken.
        top_k: Sample among the k most likely tokens; 0 or -1 is off.
        top_p: Sample among the most likely tokens whose probabilities first reach this sum, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: Picks the random numbers; the same seed gives the same tokens. None: chosen at admission.
        stop: Strings that end the text. stop_token_ids: tokens that end it.
        ignore_eos: Go on past the end-of-sequence token.
        max_tokens: Most tokens to generate; None is the rest of the context.
        min_tokens: EOS and stop tokens are not sampled before so many tokens.
        detokenize: Turn tokens into text; False leaves `text` empty.
        output_kind: See RequestOutputKind.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced."""
        return msgspec.structs.replace(self, **changes)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0

    def _check_ranges(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        _check_int("top_k", self.top_k, 0, None, allowed="-1 (off), 0 (off) or at least 1")
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, allowed="0 to max_tokens")
        self.output_kind = RequestOutputKind(self.output_kind)

    def _check_stops(self) -> None:
        if not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))


def _check_int(name: str, value: Any, low: int, high: int | None, allowed: str | None = None) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < low or (high is not None and value > high):
        limits = allowed or (f"{low} to {high}" if high is not None else f"at least {low}")
        raise ValueError(f"{name} must be an integer, {limits}; got {value!r}")


def _check_float(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value > high or value < low or (above and value == low):
        raise ValueError(f"{name} must be a number in {'(' if above else '['}{low}, {high}], got {value!r}")
