"""Beam search over an engine: each step is one token for every live beam, with the most likely ones' log-probabilities.

Used by `LLM.beam_search` and `AsyncLLM.beam_search`, which run the steps. The search is that of transformers'
`generate(num_beams=..., early_stopping=False)`. Beams share their beginnings through the prefix cache, so a step
computes little more than one token for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_actors.input_processor import InputProcessor
from engine_actors.outputs import RequestOutput, TokenLogprobsByID
from scheduler.sampling_params import MAX_N, SamplingParams
from scheduler.values import check_float, check_int, is_finite


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


class BeamSearches:
    """Searches from several prompts side by side: run `next_prompts` with `step_params`, pass the outputs to `advance`,
    until there are no more prompts."""

    def __init__(
        self,
        prompts: Sequence[BeamPrompt],
        params: BeamSearchParams,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        tokenizer: Any | None,
    ) -> None:
        ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        # So many that as many as the beam width remain when each beam's likeliest continuations are its ends.
        self._num_candidates = max(2, 1 + len(ends)) * params.beam_width
        self._searches = [_Search(prompt, params, ends) for prompt in prompts]
        self._params = params
        self._tokenizer = tokenizer
        self.step_params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=min(self._num_candidates, vocab_size),
            detokenize=tokenizer is not None,
        )

    def next_prompts(self) -> list[dict[str, Any]]:
        """One prompt for each live beam; none when all is found."""
        return [_as_prompt(search, beam) for search in self._searches for beam in search.live]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """One token further.

        Args:
            outputs: Finished, one for each of `next_prompts`.

        Raises:
            Exception: What a request of the search failed with.
        """
        positions = iter([_next_position(output) for output in outputs])
        for search in self._searches:
            if search.live:
                search.advance([next(positions) for _ in search.live], self._num_candidates)

    def results(self) -> list[BeamSearchOutput]:
        """What was found from each prompt."""
        if self._tokenizer is not None:
            skip = self._params.skip_special_tokens
            for search in self._searches:
                for sequence in search.finished:
                    sequence.text = self._tokenizer.decode(sequence.tokens, skip_special_tokens=skip)
        return [BeamSearchOutput(search.finished) for search in self._searches]


def plan_beam_searches(
    prompts: Sequence[Any], params: BeamSearchParams, processor: InputProcessor, concurrency_limit: int | None
) -> list[BeamSearches]:
    """Checks all prompts; the searches come one after the other, each of up to `concurrency_limit` prompts.

    Raises:
        InvalidRequestError: A prompt is wrong; the text names field, value and what is allowed.
        ValueError: concurrency_limit is not positive.
    """
    if concurrency_limit is not None:
        check_int("concurrency_limit", concurrency_limit, 1, None)
    length = SamplingParams(max_tokens=params.max_tokens)
    ids = [str(index) for index in range(len(prompts))]
    requests = processor.process_batch(ids, prompts, [length] * len(prompts), [0] * len(prompts))
    starts = [
        BeamPrompt(
            request.parent.prompt_token_ids,
            request.children[0].sampling_params.max_tokens or 1,
            request.children[0].cache_salt,
        )
        for request in requests
    ]
    size = concurrency_limit or max(1, len(starts))
    return [
        BeamSearches(
            starts[first : first + size],
            params,
            eos_token_ids=processor.eos_token_ids,
            vocab_size=processor.vocab_size,
            tokenizer=processor.tokenizer,
        )
        for first in range(0, len(starts), size)
    ]


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
