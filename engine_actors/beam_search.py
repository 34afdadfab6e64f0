"""Beam search over an engine: each step is one token for every live beam, with the most likely ones' log-probabilities.

Called by `LLM.beam_search`. The search is that of transformers' `generate(num_beams=..., early_stopping=False)`. Beams
share their beginnings through the prefix cache, so a step computes little more than one token for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_actors.outputs import RequestOutput, TokenLogprobsByID
from scheduler.sampling_params import MAX_N, SamplingParams
from scheduler.values import check_float, check_int, is_finite

GenerateTokens = Callable[[list[Any], SamplingParams], list[RequestOutput]]
"""Prompts as token ids, and parameters, to one finished output for each."""


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Options of one beam search; names and defaults are vLLM's. Violations raise ValueError.

    Attributes:
        beam_width: Beams kept at each step, and sequences returned.
        max_tokens: Most tokens of a sequence.
        ignore_eos: Go on past the end-of-sequence token.
        temperature: Only 0: beams are ranked by the model's own probabilities.
        length_penalty: A finished beam's score is its log-probability over (generated tokens) ** length_penalty.
        include_stop_str_in_output: Keep the end-of-sequence token in `tokens`.
        skip_special_tokens: Leave special tokens out of `text`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, None)
        check_float("temperature", self.temperature, 0.0, 0.0)
        if not is_finite(self.length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty!r}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence found.

    Attributes:
        tokens: The prompt's, then the generated ones.
        logprobs: One for each generated token, as `CompletionOutput.logprobs`; the end-of-sequence token's included.
        cum_logprob: Log-probability of the generated tokens.
        score: What sequences are ordered by: `cum_logprob` with the length penalty.
        text: Of all `tokens`; None without a tokenizer.
        finish_reason: "stop" (end of sequence) or "length".
    """

    tokens: list[int]
    logprobs: list[TokenLogprobsByID] = field(default_factory=list)
    cum_logprob: float = 0.0
    score: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class BeamPrompt:
    """A prompt to search from.

    Attributes:
        max_tokens: As the context allows.
    """

    token_ids: list[int]
    max_tokens: int
    cache_salt: str | None = None


class _Search:
    """One prompt's search."""

    def __init__(self, prompt: BeamPrompt, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self.prompt = prompt
        self.live = [BeamSearchSequence(list(prompt.token_ids))]
        self.finished: list[BeamSearchSequence] = []
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._num_generated = 0

    def advance(self, positions: Sequence[TokenLogprobsByID], num_candidates: int) -> None:
        """One token further.

        Args:
            positions: The most likely next tokens of each live beam.
            num_candidates: Continuations looked at, the likeliest of all beams'.
        """
        self._num_generated += 1
        candidates = [
            (beam.cum_logprob + entry.logprob, index, token_id)
            for index, (beam, position) in enumerate(zip(self.live, positions, strict=True))
            for token_id, entry in position.items()
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        live: list[BeamSearchSequence] = []
        for order, (cum_logprob, index, token_id) in enumerate(candidates[:num_candidates]):
            is_eos = token_id in self._eos_token_ids
            is_last = self._num_generated == self.prompt.max_tokens
            if is_eos or is_last:
                # An end that is not among the first does not count: livelier beams come before it.
                if order < self._params.beam_width:
                    self._finish(self._extended(index, token_id, cum_logprob, positions[index]), is_eos)
            elif len(live) < self._params.beam_width:
                live.append(self._extended(index, token_id, cum_logprob, positions[index]))
        self.live = live if self._can_improve(live) else []

    def _extended(
        self, index: int, token_id: int, cum_logprob: float, position: TokenLogprobsByID
    ) -> BeamSearchSequence:
        beam = self.live[index]
        return BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, position], cum_logprob)

    def _finish(self, beam: BeamSearchSequence, is_eos: bool) -> None:
        beam.score = self._score(beam.cum_logprob)
        beam.finish_reason = "stop" if is_eos else "length"
        if is_eos and not self._params.include_stop_str_in_output:
            del beam.tokens[-1]
        self.finished.append(beam)
        self.finished.sort(key=lambda found: -found.score)
        del self.finished[self._params.beam_width :]

    def _can_improve(self, live: list[BeamSearchSequence]) -> bool:
        if not live or len(self.finished) < self._params.beam_width:
            return bool(live)
        return self._score(live[0].cum_logprob) > self.finished[-1].score

    def _score(self, cum_logprob: float) -> float:
        return cum_logprob / self._num_generated**self._params.length_penalty


def beam_search(
    prompts: Sequence[BeamPrompt],
    params: BeamSearchParams,
    *,
    generate: GenerateTokens,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    tokenizer: Any | None,
) -> list[BeamSearchOutput]:
    """Search from all prompts side by side.

    Raises:
        Exception: What a request of the search failed with.
    """
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    # So many that as many as the beam width remain when each beam's likeliest continuations are its ends.
    num_candidates = max(2, 1 + len(ends)) * params.beam_width
    step = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=min(num_candidates, vocab_size), detokenize=tokenizer is not None
    )
    searches = [_Search(prompt, params, ends) for prompt in prompts]
    while running := [search for search in searches if search.live]:
        inputs = [_as_prompt(search, beam) for search in running for beam in search.live]
        outputs = iter(generate(inputs, step))
        for search in running:
            search.advance([_next_position(next(outputs)) for _ in search.live], num_candidates)
    for search in searches:
        for sequence in search.finished:
            if tokenizer is not None:
                sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
    return [BeamSearchOutput(search.finished) for search in searches]


def _as_prompt(search: _Search, beam: BeamSearchSequence) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": beam.tokens}
    if search.prompt.cache_salt is not None:
        prompt["cache_salt"] = search.prompt.cache_salt
    return prompt


def _next_position(output: RequestOutput) -> TokenLogprobsByID:
    if output.error is not None:
        raise output.error
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise RuntimeError(f"a beam's request ended ({output.outputs[0].finish_reason}) without a token")
    return logprobs[0]
