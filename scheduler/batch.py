"""The batch: who runs, who waits for room in it, and how many tokens each computes in the next step.

Owned by `scheduler.scheduler`, which knows what requests are to their clients. A Batch belongs to one set of workers:
it has their rows, their KV blocks and the steps they are sent. Workers that replace them get another Batch.

There are no phases: a request has tokens, some of them computed, and every step it catches up under one token
budget. Running requests come first: those that need one token (decodes), then those that need more (prefills); what
budget is left goes to waiting ones. When blocks run out, the running request of lowest rank is preempted: it gives back
everything and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kv.manager import KVCacheManager, PrefixHit
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput, SchedulerStats
from scheduler.queues import RANKS, WaitingQueue
from scheduler.request import Request, RequestStatus
from scheduler.rows import BatchRows
from scheduler.step import DispatchedStep, KnownTokens, StepPlan


class Batch:
    """Rows, blocks and steps of one set of workers. Not thread-safe.

    Args:
        num_interleaved: Batches that running requests are spread over (pipeline parallelism without async scheduling).
        send_known_tokens: See Scheduler.
        stats: Counters that go on from the batch before.

    Attributes:
        waiting: Requests without a row.
        running: Requests with one.
        not_started: Admitted, but without a first token.
        step: Number of the last dispatched step.
        in_flight: Dispatched steps whose results are not back, oldest first.
        known_tokens: What pipeline stages that do not sample have yet to be told.
        has_grammars: Some request may have a grammar.
        headroom_blocks: Blocks per running request and growing KV group that an admission leaves free: each needs one
            before long, and an admission that takes them is soon preempted. Judged with benchmarks/simulate.py.
    """

    headroom_blocks = 2

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        num_interleaved: int,
        chunked_prefill_enabled: bool,
        prefix_caching_enabled: bool,
        send_known_tokens: bool,
        stats: SchedulerStats,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.kv = kv
        self._is_async = bool(config.async_scheduling)
        self._num_interleaved_batches = num_interleaved
        self._chunked_prefill_enabled = chunked_prefill_enabled
        self._prefix_caching_enabled = prefix_caching_enabled
        self._rank = RANKS[config.policy]
        self._clock = clock
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.not_started: set[Request] = set()
        self.rows = BatchRows(config.max_num_seqs, kv)
        self.step = 0
        self.in_flight: deque[DispatchedStep] = deque()
        self.known_tokens = KnownTokens() if send_known_tokens else None
        self.has_grammars = False
        self.stats = stats

    # ---- one step

    def plan_step(self, trial: Request | None = None) -> StepPlan | None:
        """Decide the next step; `dispatch` it. None: nothing can run now (perhaps after the next result).

        Args:
            trial: The one request that may be started, alone (see scheduler.probation).
        """
        plan = StepPlan(self.step + 1, self.config.max_num_batched_tokens)
        decodes, prefills = self._sort_running()
        self._schedule_decodes(plan, decodes)
        self._schedule_prefills(plan, prefills)
        # From here on nobody is preempted: what is planned will run, so the blocks it fills may be shared at once.
        self._advance_decodes(plan)
        for request, count in plan.chunks:
            self._advance_chunk(plan, request, count)
        if not plan.short_of_blocks:
            self._admit_waiting(plan, prefills, trial)
        return plan if plan.decodes or plan.chunks else None

    def _sort_running(self) -> tuple[list[Request], list[Request]]:
        """The running requests that need one token, and by rank those that need more. Others wait for a result."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            remaining = request.num_schedulable_tokens - request.num_computed_tokens
            if remaining == 1:
                decodes.append(request)
            elif remaining:
                prefills.append(request)
        prefills.sort(key=lambda request: request.rank)
        return decodes, prefills

    def _schedule_decodes(self, plan: StepPlan, candidates: list[Request]) -> None:
        """Give each candidate its token; with several batches in the pipeline, only this batch's share of them."""
        share = len(candidates)
        if self._num_interleaved_batches > 1:
            candidates.sort(key=lambda request: request.last_step)
            share = -(-len(self.running) // self._num_interleaved_batches)
        while candidates and not plan.decodes:
            plan.decodes, candidates = candidates[:share], candidates[share:]
            plan.budget -= len(plan.decodes)
            self._grow_decodes(plan)
            if plan.short_of_blocks:
                candidates = [request for request in candidates if request.status is RequestStatus.RUNNING]

    def _grow_decodes(self, plan: StepPlan) -> None:
        """Allocate the blocks that decodes begin with this step; those that must wait for one are dropped."""
        growing = [request for request in plan.decodes if request.num_computed_tokens == request.num_slots]
        if len(growing) > 1:
            growing.sort(key=lambda request: request.rank)
        for request in growing:
            if request.status is RequestStatus.RUNNING and not self._grow(
                plan, request, request.num_computed_tokens + 1
            ):
                plan.drop_decode(request)

    def _schedule_prefills(self, plan: StepPlan, prefills: list[Request]) -> None:
        """Give running prefills what is left of the budget."""
        if not prefills:
            return
        contended = len(prefills) > 1 or self.waiting.first(self._long_allowed(prefills)) is not None
        for request in prefills:
            if request.status is not RequestStatus.RUNNING:  # preempted for one of lower rank value
                continue
            count = min(request.num_remaining_tokens, self._prefill_limit(plan, request, contended))
            if count and self._grow(plan, request, request.num_computed_tokens + count):
                plan.chunks.append((request, count))
                plan.budget -= count

    def _admit_waiting(self, plan: StepPlan, prefills: list[Request], trial: Request | None) -> None:
        """Start waiting requests in rank order, until budget, rows or blocks run out."""
        prefills = [request for request in prefills if request.num_remaining_tokens]
        reserved = sum(map(self._blocks_to_finish, prefills))
        while plan.budget and self.rows.free:
            request = self._next_waiting(prefills, trial)
            # A request preempted with a step in flight may get one more token from it; it starts with all its tokens.
            if request is None or request.last_step > self.rows.completed_step:
                return
            hit = self.kv.no_hit() if request.skip_reading_prefix_cache else self.kv.look_up(request.kv)
            headroom = reserved + len(self.running) * self.kv.num_growing_groups * self.headroom_blocks
            if not self.kv.fits(hit, len(request.token_ids), headroom):
                return
            contended = bool(plan.chunks) or len(self.waiting) > 1
            remaining = len(request.token_ids) - hit.num_tokens
            count = min(remaining, self._prefill_limit(plan, request, contended))
            if not self._chunked_prefill_enabled and hit.num_tokens + count < request.num_prompt_tokens:
                return
            self._start(plan, request, hit, count)
            if count < remaining:
                prefills.append(request)
                reserved += self._blocks_to_finish(request)

    def _next_waiting(self, prefills: list[Request], trial: Request | None) -> Request | None:
        if trial is not None:
            # Nothing else may be in the workers when they crash.
            return None if self.running or self.in_flight else trial
        return self.waiting.first(self._long_allowed(prefills))

    def _start(self, plan: StepPlan, request: Request, hit: PrefixHit, count: int) -> None:
        """Move a request from the waiting queue into the batch; `count` tokens after the hit are computed."""
        self.waiting.remove(request)
        self.kv.start(request.kv, hit, hit.num_tokens + count)
        if request.admitted_step == 0 and not request.has_started:
            request.scheduled_s = self._clock()
            request.num_cached_tokens = hit.num_tokens
            self.not_started.add(request)
            if self._prefix_caching_enabled and not request.skip_reading_prefix_cache:
                self.stats.prefix_cache_queries += request.num_prompt_tokens
                self.stats.prefix_cache_hits += hit.num_tokens
        request.status = RequestStatus.RUNNING
        request.row = self.rows.take()
        request.admitted_step = plan.step
        request.num_slots = self.kv.num_slots(request.kv)
        request.num_computed_tokens = hit.num_tokens
        request.num_schedulable_tokens = len(request.token_ids)
        self.running.append(request)
        plan.admitted.append(request)
        plan.chunks.append((request, count))
        plan.budget -= count
        self._advance_chunk(plan, request, count)

    def _advance_decodes(self, plan: StepPlan) -> None:
        step = plan.step
        for request in plan.decodes:
            request.num_computed_tokens += 1
            request.last_step = step
        if self._is_async:
            for request in plan.decodes:
                self._expect_token(request)
        for request, _ in plan.grown:
            if request.status is RequestStatus.RUNNING:
                self.kv.register(request.kv, request.num_computed_tokens)

    def _advance_chunk(self, plan: StepPlan, request: Request, count: int) -> None:
        request.num_computed_tokens += count
        request.last_step = plan.step
        self.kv.register(request.kv, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_schedulable_tokens:
            plan.sampling_chunks.append(request)
            if self._is_async:
                self._expect_token(request)

    @staticmethod
    def _expect_token(request: Request) -> None:
        """Let the next step go out before the token of this one is known; but a grammar's mask depends on the token."""
        if not request.has_grammar and request.num_schedulable_tokens < request.max_total_tokens - 1:
            request.num_schedulable_tokens += 1

    def dispatch(self, plan: StepPlan) -> SchedulerOutput:
        """The message of a planned step, which is in flight from now on."""
        self.step = plan.step
        sampling = plan.decodes + plan.sampling_chunks if plan.sampling_chunks else plan.decodes
        with_grammar = [] if not self.has_grammars else [request for request in sampling if request.has_grammar]
        self.in_flight.append(DispatchedStep(plan.step, sampling, plan.prompt_logprobs_of(), with_grammar))
        self.stats.num_scheduled_tokens += self.config.max_num_batched_tokens - plan.budget
        message = plan.to_message(self.kv.num_groups, self.known_tokens)
        message.has_structured_output = bool(with_grammar)
        return message

    # ---- limits

    def _long_allowed(self, prefills: list[Request]) -> bool:
        """May another long prompt be started beside these?"""
        threshold = self.config.long_prefill_token_threshold
        num_long = sum(request.is_long and request.num_remaining_tokens > threshold for request in prefills)
        return num_long < self.config.max_long_partial_prefills

    def _prefill_limit(self, plan: StepPlan, request: Request, contended: bool) -> int:
        """Most tokens a prefill may compute in this step; `contended` when another prompt could use the budget."""
        if request.is_long and contended and self._chunked_prefill_enabled:
            return min(plan.budget, self.config.long_prefill_token_threshold)
        return plan.budget

    def _blocks_to_finish(self, request: Request) -> int:
        return self.kv.blocks_to_finish(request.kv, len(request.token_ids))

    # ---- blocks

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Allocate slots up to `num_tokens`, preempting requests of higher rank value. False: it must wait."""
        while True:
            appended = self.kv.grow(request.kv, request.num_computed_tokens, num_tokens)
            if appended is not None:
                if appended[0]:
                    plan.grown.append((request, appended))
                    request.num_slots = self.kv.num_slots(request.kv)
                return True
            plan.short_of_blocks = True
            if self._retired_blocks_suffice(request, num_tokens):
                return False
            victim = max(self.running, key=lambda candidate: candidate.rank)
            if victim is request:
                if len(self.running) == 1 and not self.rows.retired:
                    raise RuntimeError(f"request {request.request_id} alone finds no blocks for {num_tokens} tokens")
                return False
            self.preempt(plan, victim)

    def _retired_blocks_suffice(self, request: Request, num_tokens: int) -> bool:
        """Enough blocks will come back with the steps in flight; taking more from others would be for nothing."""
        return bool(self.rows.retired) and (
            self.rows.num_retired_blocks() >= self.kv.num_missing_blocks(request.kv, num_tokens)
        )

    def preempt(self, plan: StepPlan, request: Request) -> None:
        """Take everything from a running request; it waits to be computed anew. Tokens in flight still reach it."""
        plan.drop_decode(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let a running request wait: it loses row and blocks."""
        self.running.remove(request)
        self.rows.retire(request)
        request.num_preemptions += 1
        request.wait()
        request.rank = self._rank(request)
        self.waiting.add(request)
        self.stats.num_preemptions += 1

    def take_oldest(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> DispatchedStep:
        """The oldest step in flight, whose result is `output`; rows and blocks that waited for it come back."""
        expected = self.in_flight[0].step if self.in_flight else None
        if not expected == scheduled.step == output.step:
            raise RuntimeError(
                f"the result of step {output.step} was given for step {scheduled.step}, while the oldest "
                f"step in flight is {expected}"
            )
        self.rows.complete(scheduled.step)
        return self.in_flight.popleft()

    # ---- ends

    def finish(self, request: Request, *, is_queued: bool) -> None:
        """Take a request out: its row and blocks, or its place in the queue. Then `drop_finished` must follow."""
        self.not_started.discard(request)
        if request.status is RequestStatus.RUNNING:
            self.rows.retire(request)
        elif is_queued:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        if request.last_step > self.rows.completed_step:
            for step in self.in_flight:
                step.has_late = True

    def drop_finished(self) -> None:
        """Clear the requests that have finished from `running`."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
