"""What callers get back: `RequestOutput` and its parts, with vLLM's field names.

Made by `engine_actors.output_processor`; plain picklable data, so that they travel through Ray as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from engine_actors.flat_logprobs import FlatLogprobs


@dataclass(slots=True)
class RequestStateStats:
    """When a request passed which point.

    Attributes:
        arrival_time: Wall time (`time.time()`) at the front end.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: Seconds on EngineCore's monotonic clock; 0 before.
        first_token_latency: Seconds from arrival until the first token reached the front end; 0 before.
        num_generation_tokens: Tokens generated so far.
        num_preemptions: Times the request lost its KV blocks and was recomputed; known when it has finished.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Logprob:
    """One token at one position.

    Attributes:
        logprob: Natural logarithm of its probability by the model's own logits: before temperature, penalties, masks.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: Its text alone; None without a tokenizer or with detokenize=False.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobsByID = dict[int, Logprob]
"""Token id → Logprob at one position: the generated (or prompt) token first, then the most likely ones in order."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n completions.

    Attributes:
        index: 0 to n - 1.
        text, token_ids: All so far, or only what is new, by `SamplingParams.output_kind`. The token that ended the
            text is among `token_ids` and not in `text`.
        cumulative_logprob: Sum over all tokens so far; None unless `SamplingParams.logprobs` is set.
        logprobs: One for each of `token_ids`; None unless asked for. `FlatLogprobs` with `flat_logprobs`.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: The stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobsByID] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request, or what is new of it.

    Attributes:
        prompt: The prompt's text; None when token ids were given.
        prompt_logprobs: One for each prompt token, None for the first. Only if asked for, and once they are there.
        outputs: The completions this output is about, by index; all n of them in a final-only output.
        finished: Every one of the n completions has ended.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache; None before the first token.
        error: Why `finish_reason` is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobsByID | None] | FlatLogprobs | None = None
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    num_cached_tokens: int | None = None
    error: Exception | None = None

    def merge(self, newer: RequestOutput, kind: RequestOutputKind) -> None:
        """Take in the output that follows this one, which nobody has read yet."""
        self.finished |= newer.finished
        self.metrics = newer.metrics
        self.prompt_logprobs = newer.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = newer.num_cached_tokens
        self.error = self.error or newer.error
        for completion in newer.outputs:
            mine = next((c for c in self.outputs if c.index == completion.index), None)
            if mine is None:
                self.outputs.append(completion)
                continue
            if kind is RequestOutputKind.DELTA:
                mine.text += completion.text
                mine.token_ids = mine.token_ids + completion.token_ids
                if mine.logprobs is None:
                    mine.logprobs = completion.logprobs
                elif completion.logprobs is not None:
                    mine.logprobs = mine.logprobs[:]
                    mine.logprobs.extend(completion.logprobs)
            else:
                mine.text, mine.token_ids = completion.text, completion.token_ids
                mine.logprobs = completion.logprobs
            mine.cumulative_logprob = completion.cumulative_logprob
            mine.finish_reason, mine.stop_reason = completion.finish_reason, completion.stop_reason
