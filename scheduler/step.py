"""One step while it is decided (`StepPlan`), the message it becomes, and what is remembered until its result is back.

Used by scheduler.scheduler only.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler.output import BlockAppends, NewRequestData, SchedulerOutput, pack_int32
from scheduler.request import Request, RequestStatus
from scheduler.sampling_params import SamplingParams


class StepPlan:
    """What one call of `Scheduler.schedule` has decided so far.

    Attributes:
        step: Number of the step, if it comes to one.
        budget: Tokens that may still be scheduled.
        decodes: Requests that compute one token, which samples the next.
        chunks: Other requests, with the number of tokens each computes.
        sampling_chunks: Requests of the chunks that sample, because no token is left to compute.
        admitted: Requests of the chunks that enter the batch with this step.
        grown: Requests already in the batch whose block tables got longer, with the blocks appended per KV group.
        short_of_blocks: A running request found too few free blocks: someone was preempted, or it must wait.
    """

    __slots__ = ("admitted", "budget", "chunks", "decodes", "grown", "sampling_chunks", "short_of_blocks", "step")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.decodes: list[Request] = []
        self.chunks: list[tuple[Request, int]] = []
        self.sampling_chunks: list[Request] = []
        self.admitted: list[Request] = []
        self.grown: list[tuple[Request, list[list[int]]]] = []
        self.short_of_blocks = False

    def drop_decode(self, request: Request) -> None:
        """Take a request out again and give its budget back."""
        if request in self.decodes:
            self.decodes.remove(request)
            self.budget += 1

    def to_message(self, num_groups: int, known: KnownTokens | None) -> SchedulerOutput:
        """The step as workers see it. All requests of the plan must be up to date for the end of the step."""
        rows = [request.row for request in self.decodes]
        counts = b""
        if self.chunks:
            rows += [request.row for request, _ in self.chunks]
            if any(count != 1 for _, count in self.chunks):
                counts = pack_int32([1] * len(self.decodes) + [count for _, count in self.chunks])
        output = SchedulerOutput(step=self.step, rows=pack_int32(rows), num_scheduled_tokens=counts)
        if self.admitted:
            output.new_requests = [self._new_request(request) for request in self.admitted]
        if self.grown:
            output.new_blocks = self._block_appends(num_groups)
        if known is not None:
            output.known_rows, output.known_tokens = known.take(self.step)
        return output

    def _new_request(self, request: Request) -> NewRequestData:
        count = next(count for chunk, count in self.chunks if chunk is request)
        return NewRequestData(
            row=request.row,
            request_id=request.request_id,
            token_ids=pack_int32(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens - count,
            block_ids=[pack_int32(table) for table in request.kv.tables],
            sampling_params=self._params(request),
            stop_ids_until_min_tokens=request.stop_ids_until_min_tokens,
        )

    @staticmethod
    def _params(request: Request) -> SamplingParams:
        params = request.sampling_params
        if request.has_grammar:
            params = params.clone(structured_outputs=None)  # Workers get masks; a schema may be long.
        if params.prompt_logprobs is not None and not request.needs_prompt_logprobs:
            # It resumes after its first token: they are delivered.
            params = params.clone(prompt_logprobs=None)
        return params

    def prompt_logprobs_of(self) -> dict[int, Request]:
        """By row, the requests whose prompt log-probabilities this step may compute."""
        return {request.row: request for request, _ in self.chunks if request.needs_prompt_logprobs}

    def _block_appends(self, num_groups: int) -> list[BlockAppends]:
        rows: list[int] = []
        blocks: list[list[int]] = [[] for _ in range(num_groups)]
        for request, appended in self.grown:
            # A request that grew may have been preempted afterwards for one of higher rank.
            if request.status is RequestStatus.RUNNING:
                rows += [request.row] * len(appended[0])
                for column, ids in zip(blocks, appended, strict=True):
                    column += ids
        if not rows:
            return []
        packed_rows = pack_int32(rows)
        return [BlockAppends(packed_rows, pack_int32(column)) for column in blocks]


@dataclass(slots=True)
class DispatchedStep:
    """A step whose result is not back yet.

    Attributes:
        sampling: Requests that sample in it, in batch order.
        has_late: Some of them ended meanwhile; their results are dropped.
        prompt_logprobs_of: By row, requests whose prompt log-probabilities it may bring.
        with_grammar: Those of `sampling` that have a grammar.
    """

    step: int
    sampling: list[Request]
    prompt_logprobs_of: dict[int, Request]
    with_grammar: list[Request]
    has_late: bool = False


@dataclass(slots=True)
class KnownTokens:
    """Tokens learnt since the last dispatched step, to be told to pipeline stages that do not sample."""

    requests: list[Request] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("i"))

    def learn(self, requests: list[Request], tokens: array[int]) -> None:
        """Note one token for each request."""
        self.requests += requests
        self.tokens += tokens

    def take(self, step: int) -> tuple[bytes, bytes]:
        """Rows and tokens columns for the message of `step`; nothing is kept.

        Left out are requests without a row, and those that enter the batch with this step: their NewRequestData
        has all tokens.
        """
        rows, tokens = array("i"), array("i")
        for request, token in zip(self.requests, self.tokens, strict=True):
            if request.status is RequestStatus.RUNNING and request.admitted_step != step:
                rows.append(request.row)
                tokens.append(token)
        self.requests, self.tokens = [], array("i")
        return pack_int32(rows), pack_int32(tokens)
