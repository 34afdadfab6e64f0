"""EngineCoreOutputs → RequestOutputs: the front end's second half.

Owned by `LLMEngine` (returns what each step produced) and `AsyncLLM` (fills one stream per request). Keeps the state of
every unfinished request; whatever arrives for others is late and dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_actors.detokenizer import Detokenizer, TokenDecoder
from engine_actors.errors import RequestFailedError, request_error
from engine_actors.flat_logprobs import FlatLogprobs
from engine_actors.logprobs import LogprobsReader
from engine_actors.outputs import CompletionOutput, RequestOutput, RequestStateStats, TokenLogprobsByID
from scheduler.logprobs import LogprobsRow, PromptLogprobs
from scheduler.output import EngineCoreOutputs, FinishedRequest, FinishReason, RequestEvents
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

OutputSink = Callable[[RequestOutput], None]


@dataclass(slots=True)
class ParentRequest:
    """What the caller asked for; its n completions are requests of their own in the engine.

    Attributes:
        request_id: The caller's. Its children's ids derive from it.
        unfinished: Children still running, by their engine ids.
        final: Finished completions of a final-only request, until all are there.
        sink: Where outputs go as they are made; None collects them in `process`'s result.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: OutputSink | None = None
    unfinished: set[str] = field(default_factory=set)
    final: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobsByID | None] | FlatLogprobs | None = None
    error: Exception | None = None


class CompletionState:
    """One running completion: its tokens, text and times. Fed by `OutputProcessor` only."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "index",
        "logprobs",
        "metrics",
        "num_published",
        "num_summed",
        "num_taken",
        "parent",
        "token_ids",
    )

    def __init__(self, parent: ParentRequest, index: int, detokenizer: Detokenizer | None, arrival_s: float) -> None:
        self.parent = parent
        self.index = index
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.num_taken = 0
        self.num_published = 0
        self.logprobs: list[TokenLogprobsByID] | FlatLogprobs | None = None
        if parent.params.wants_logprobs:
            self.logprobs = FlatLogprobs() if parent.params.flat_logprobs else []
        self.cumulative_logprob, self.num_summed = 0.0, 0
        self.metrics = RequestStateStats(arrival_time=arrival_s)

    def is_due(self) -> bool:
        """Enough tokens are new for an output, by the request's stream_interval."""
        interval = self.parent.params.stream_interval
        if interval is None or not self.num_published:
            return True
        return len(self.token_ids) - self.num_published >= interval

    def append(self, token_ids: Sequence[int], timestamp_s: float) -> bool:
        """Take in new tokens; True when a stop string ended the text (later tokens are then dropped)."""
        metrics = self.metrics
        if not metrics.num_generation_tokens:
            metrics.first_token_ts = timestamp_s
            metrics.first_token_latency = max(0.0, time.time() - metrics.arrival_time)
        metrics.last_token_ts = timestamp_s
        detokenizer = self.detokenizer
        if detokenizer is None:
            self.token_ids.extend(token_ids)
        elif detokenizer.needs_each_token:
            self.token_ids.extend(token_ids[: detokenizer.push(token_ids)])
        else:
            self.token_ids.extend(token_ids)
            if self.parent.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                detokenizer.push(token_ids)
        metrics.num_generation_tokens = len(self.token_ids)
        return detokenizer is not None and detokenizer.stop is not None

    def finish_text(self, unpushed: Sequence[int]) -> None:
        """Complete the text: push what was held back for the end, and flush."""
        if self.detokenizer is None:
            return
        if unpushed:
            self.detokenizer.push(unpushed)
        self.detokenizer.finish()

    def completion(self, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        """All so far, or what is new, by the request's output kind."""
        detokenizer = self.detokenizer
        if self.parent.params.output_kind is RequestOutputKind.DELTA:
            text = detokenizer.take_delta() if detokenizer is not None else ""
            token_ids = self.token_ids[self.num_taken :]
            self.num_taken = len(self.token_ids)
        else:
            text = detokenizer.text_so_far() if detokenizer is not None else ""
            token_ids = self.token_ids[:]
        self.num_published = len(self.token_ids)
        completion = CompletionOutput(self.index, text, token_ids, finish_reason=finish_reason, stop_reason=stop_reason)
        if self.logprobs is not None:
            self._add_logprobs(completion)
        return completion

    def _add_logprobs(self, completion: CompletionOutput) -> None:
        """Those of the completion's tokens. There may be more: a stop string drops tokens that came with its end."""
        assert self.logprobs is not None
        num_tokens = len(self.token_ids)
        completion.logprobs = self.logprobs[num_tokens - len(completion.token_ids) : num_tokens]
        new = slice(self.num_summed, num_tokens)
        for token_id, position in zip(self.token_ids[new], self.logprobs[new], strict=False):
            self.cumulative_logprob += position[token_id].logprob
        self.num_summed = num_tokens
        completion.cumulative_logprob = self.cumulative_logprob


class ProcessedOutputs:
    """What one EngineCoreOutputs led to.

    Attributes:
        request_outputs: Outputs of requests without a sink.
        aborts: Engine ids to abort in the engine: a stop string ended them, or their processing failed.
    """

    __slots__ = ("aborts", "request_outputs")

    def __init__(self) -> None:
        self.request_outputs: list[RequestOutput] = []
        self.aborts: list[str] = []


class OutputProcessor:
    """All unfinished requests of one front end.

    Args:
        tokenizer: A transformers tokenizer; None when the front end works on token ids alone.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._logprobs = LogprobsReader(tokenizer)
        self._decoders: dict[tuple[bool, bool], TokenDecoder] = {}
        self._states: dict[str, CompletionState] = {}
        self._parents: dict[str, ParentRequest] = {}

    @property
    def num_unfinished(self) -> int:
        """Callers' requests that have not ended."""
        return len(self._parents)

    def is_unfinished(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(self, parent: ParentRequest, children: Sequence[EngineCoreRequest]) -> None:
        """Begin to expect outputs of `children`, which are about to be sent to the engine."""
        for index, child in enumerate(children):
            detokenizer = self._detokenizer(parent)
            state = CompletionState(parent, index, detokenizer, child.arrival_time_s)
            self._states[child.request_id] = state
            parent.unfinished.add(child.request_id)
        self._parents[parent.request_id] = parent
        if parent.params.prompt_logprobs is not None and len(parent.prompt_token_ids) == 1:
            parent.prompt_logprobs = self._in_asked_shape(parent, [None])  # Nothing predicts the first token.

    def take_children(self, request_ids: Iterable[str]) -> list[str]:
        """Engine ids of the unfinished completions of callers' requests; unknown ids are ignored."""
        found: list[str] = []
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            if parent is not None:
                found.extend(parent.unfinished)
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        """Expect nothing more of these callers' requests: nobody waits for them any longer."""
        for request_id in request_ids:
            parent = self._parents.pop(request_id, None)
            if parent is not None:
                for child_id in parent.unfinished:
                    self._states.pop(child_id, None)

    def finish_all(self, error: Exception | None) -> list[RequestOutput]:
        """End everything unfinished: aborted, or with `error`. The outputs of requests without a sink."""
        processed = ProcessedOutputs()
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for request_id, state in list(self._states.items()):
            self._end(request_id, state, str(reason), None, error, processed)
        return processed.request_outputs

    def process(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Take in one client's share of one step."""
        processed = ProcessedOutputs()
        for events in outputs.started:
            self._note_start(events)
        finished = {ended.request_id: ended for ended in outputs.finished}
        token_ids, timestamp_s = outputs.token_ids, outputs.timestamp_s
        logprobs = [] if outputs.logprobs is None else list(outputs.logprobs.rows())
        counts = outputs.num_tokens
        position = 0
        for index, request_id in enumerate(outputs.request_ids):
            end = position + (counts[index] if counts else 1)
            state = self._states.get(request_id)
            if state is not None:
                ended = finished.pop(request_id, None) if finished else None
                columns = logprobs[position:end], outputs.prompt_logprobs.get(request_id, ())
                self._advance(request_id, state, token_ids[position:end], ended, timestamp_s, processed, *columns)
            position = end
        for request_id, ended in finished.items():
            state = self._states.get(request_id)
            if state is not None:
                self._advance(request_id, state, [], ended, timestamp_s, processed)
        return processed

    def _note_start(self, events: RequestEvents) -> None:
        state = self._states.get(events.request_id)
        if state is None:
            return
        state.metrics.queued_ts = events.queued_s
        state.metrics.scheduled_ts = events.scheduled_s
        if state.parent.num_cached_tokens is None:
            state.parent.num_cached_tokens = events.num_cached_tokens

    def _advance(
        self,
        request_id: str,
        state: CompletionState,
        token_ids: list[int],
        ended: FinishedRequest | None,
        timestamp_s: float,
        processed: ProcessedOutputs,
        logprobs: Sequence[LogprobsRow] = (),
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        """One completion's share of a step. What goes wrong here ends this request and no other."""
        try:
            self._take_logprobs(state, logprobs, prompt_logprobs)
            if ended is not None:
                self._finish(request_id, state, token_ids, ended, timestamp_s, processed)
                return
            if token_ids and state.append(token_ids, timestamp_s):
                assert state.detokenizer is not None
                processed.aborts.append(request_id)
                self._end(request_id, state, "stop", state.detokenizer.stop, None, processed)
            elif state.parent.params.output_kind is not RequestOutputKind.FINAL_ONLY and state.is_due():
                self._publish(state, state.completion(None, None), processed)
        except Exception as error:
            logger.exception("Processing an output of request %s failed; it ends, the others go on", request_id)
            processed.aborts.append(request_id)
            failure = RequestFailedError(f"processing an output of the request failed: {error!r}")
            failure.__cause__ = error
            self._drop_text(state)
            self._end(request_id, state, "error", None, failure, processed)

    def _take_logprobs(
        self, state: CompletionState, logprobs: Sequence[LogprobsRow], prompt_logprobs: Sequence[PromptLogprobs]
    ) -> None:
        parent = state.parent
        if state.logprobs is not None:
            state.logprobs.extend(self._logprobs.read(logprobs, parent.params.detokenize))
        if prompt_logprobs:
            parent.prompt_logprobs = self._in_asked_shape(
                parent,
                self._logprobs.read_prompt(prompt_logprobs, len(parent.prompt_token_ids), parent.params.detokenize),
            )

    @staticmethod
    def _in_asked_shape(
        parent: ParentRequest, positions: list[TokenLogprobsByID | None]
    ) -> list[TokenLogprobsByID | None] | FlatLogprobs:
        if not parent.params.flat_logprobs:
            return positions
        flat = FlatLogprobs()
        flat.extend(positions)
        return flat

    def _finish(
        self,
        request_id: str,
        state: CompletionState,
        token_ids: list[int],
        ended: FinishedRequest,
        timestamp_s: float,
        processed: ProcessedOutputs,
    ) -> None:
        state.metrics.num_preemptions = ended.num_preemptions
        reason, stop_reason, error = ended.reason, ended.stop_reason, None
        if reason is FinishReason.ERROR:
            error = request_error(ended.error_type, ended.error or "the engine gave no reason", ended.error_field)
        stop_token: list[int] = []
        ends_in_text = ended.last_token_is_text or state.parent.params.include_stop_str_in_output
        if reason is FinishReason.STOP and token_ids and not ends_in_text:
            # The token that ended the text is reported, and not part of the text.
            token_ids, stop_token = token_ids[:-1], token_ids[-1:]
        stopped_by_string = bool(token_ids) and state.append(token_ids, timestamp_s)
        if stop_token and not stopped_by_string:
            if not token_ids:
                state.append([], timestamp_s)
            state.token_ids.extend(stop_token)
            state.metrics.num_generation_tokens = len(state.token_ids)
        self._end(request_id, state, str(reason), stop_reason, error, processed, len(stop_token))

    def _end(
        self,
        request_id: str,
        state: CompletionState,
        finish_reason: str,
        stop_reason: int | str | None,
        error: Exception | None,
        processed: ProcessedOutputs,
        num_stop_tokens: int = 0,
    ) -> None:
        parent, detokenizer = state.parent, state.detokenizer
        if detokenizer is not None:
            unpushed: list[int] = []
            if parent.params.output_kind is RequestOutputKind.FINAL_ONLY and not detokenizer.needs_each_token:
                unpushed = state.token_ids[: len(state.token_ids) - num_stop_tokens]
            if detokenizer.stop is None:
                state.finish_text(unpushed)
            if detokenizer.stop is not None:
                finish_reason, stop_reason = "stop", detokenizer.stop
        del self._states[request_id]
        parent.unfinished.discard(request_id)
        parent.error = parent.error or error
        if not parent.unfinished:
            self._parents.pop(parent.request_id, None)
        completion = state.completion(finish_reason, stop_reason)
        if parent.params.output_kind is RequestOutputKind.FINAL_ONLY:
            parent.final.append(completion)
            if not parent.unfinished:
                parent.final.sort(key=lambda c: c.index)
                self._publish(state, None, processed)
            return
        self._publish(state, completion, processed)

    def _publish(
        self, state: CompletionState, completion: CompletionOutput | None, processed: ProcessedOutputs
    ) -> None:
        parent = state.parent
        output = RequestOutput(
            parent.request_id,
            parent.prompt,
            parent.prompt_token_ids,
            parent.final if completion is None else [completion],
            finished=not parent.unfinished,
            prompt_logprobs=parent.prompt_logprobs,
            metrics=state.metrics,
            num_cached_tokens=parent.num_cached_tokens,
            error=parent.error,
        )
        if parent.params.output_kind is RequestOutputKind.DELTA:
            parent.prompt_logprobs = None
        if parent.sink is not None:
            parent.sink(output)
        else:
            processed.request_outputs.append(output)

    @staticmethod
    def _drop_text(state: CompletionState) -> None:
        """The detokenizer failed: what follows works without it."""
        state.detokenizer = None

    def _detokenizer(self, parent: ParentRequest) -> Detokenizer | None:
        params = parent.params
        if self._tokenizer is None or not params.detokenize:
            return None
        key = (params.skip_special_tokens, params.spaces_between_special_tokens)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = TokenDecoder(self._tokenizer, *key)
        return Detokenizer(
            decoder,
            parent.prompt_token_ids,
            params.stop,
            params.include_stop_str_in_output,
            params.min_tokens,
        )
