"""The Scheduler: which requests compute how many tokens in each step, and what their results mean.

Owned by EngineCore, which calls `schedule`, sends the message to the workers, and gives the result to
`update_from_output`; with several steps in flight it schedules ahead and updates in the same order.

There are no phases: a request has tokens, some of them computed, and every step it catches up under one token
budget. Running requests come first: those that need one token (decodes), then those that need more (prefills); what
budget is left goes to waiting ones. When blocks run out, the running request of lowest rank is preempted: it gives back
everything and is computed again later.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress

from kv.config import CacheConfig
from kv.manager import KVCacheManager, PrefixHit
from kv.spec import KVCacheConfig
from scheduler.admission import AdmissionLimits
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestRefusedError
from scheduler.grammars import GrammarRequests
from scheduler.output import (
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    unpack_int32,
)
from scheduler.pause import PauseGate, PauseMode
from scheduler.probation import Probation
from scheduler.queues import RANKS, WaitingQueue
from scheduler.request import EngineCoreRequest, Request, RequestStatus
from scheduler.results import collect_outputs, complete, end_of_request, failed, finished
from scheduler.rows import BatchRows
from scheduler.step import DispatchedStep, KnownTokens, StepPlan
from scheduler.structured_output import GrammarBitmask, GrammarManager

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over one KV pool. Not thread-safe; all methods return at once.

    Args:
        config: `async_scheduling` must be decided: None is False.
        kv_cache_config: Any worker's; the scheduler looks at `num_blocks` and the groups' specs, equal on all.
        max_concurrent_batches: Steps that will be in flight at once. With more than one and without async scheduling
            (pipeline parallelism) running requests are spread over that many batches.
        send_known_tokens: Tell workers the sampled tokens (pipeline stages that do not sample need them).
        grammars: For requests with structured output; `use_grammars` gives it later.
        clock: Monotonic seconds, for event times.

    Raises:
        ValueError: async scheduling together with send_known_tokens: a stage would run before it knows its input.
    """

    headroom_blocks = 2
    """Blocks per running request and growing KV group that an admission leaves free: each needs one before long, and
    an admission that takes them is soon preempted. Judged with benchmarks/simulate.py."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_cache_config: KVCacheConfig,
        *,
        max_concurrent_batches: int = 1,
        send_known_tokens: bool = False,
        grammars: GrammarManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.async_scheduling and send_known_tokens:
            raise ValueError(
                "async_scheduling cannot be used where stages must be told sampled tokens (pipeline_parallel_size > 1)"
            )
        if max_concurrent_batches < 1:
            raise ValueError(f"max_concurrent_batches must be at least 1, got {max_concurrent_batches}")
        self.config = config
        self.chunked_prefill_enabled = config.enable_chunked_prefill
        self.prefix_caching_enabled = cache_config.enable_prefix_caching
        if kv_cache_config.has_non_causal_layers and (self.chunked_prefill_enabled or self.prefix_caching_enabled):
            logger.info("non-causal attention layers: chunked prefill and prefix caching are switched off")
            self.chunked_prefill_enabled = self.prefix_caching_enabled = False
        self._async = bool(config.async_scheduling)
        self._num_interleaved_batches = 1 if self._async else max_concurrent_batches
        self._rank = RANKS[config.policy]
        self._clock = clock

        self._requests: dict[str, Request] = {}
        self._requests_of_client: dict[int, int] = {}
        self._not_started: set[Request] = set()  # admitted, but without a first token
        self._num_requests_ever = 0
        self._probation = Probation()
        self._gate = PauseGate()
        self._send_known_tokens = send_known_tokens
        self._begin(kv_cache_config)

        self._ended_without_step: dict[int, list[FinishedRequest]] = {}
        # The client that is owed stats: a request ended, and no output since has told what that freed.
        self._stats_due: int | None = None
        self._stats = SchedulerStats()
        self._grammars: GrammarRequests | None = None
        if grammars is not None:
            self.use_grammars(grammars)

    def _begin(self, kv_cache_config: KVCacheConfig) -> None:
        """The state towards workers that have done no step yet."""
        config = self.config
        self._kv = KVCacheManager(
            kv_cache_config,
            enable_prefix_caching=self.prefix_caching_enabled,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._limits = AdmissionLimits(
            max_model_len=config.max_model_len,
            pool_tokens=self._kv.max_tokens_alone(config.max_model_len),
            max_prompt_tokens=None if self.chunked_prefill_enabled else config.max_num_batched_tokens,
            max_num_queued_requests=config.max_num_queued_requests,
        )
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._rows = BatchRows(config.max_num_seqs, self._kv)
        self._step = 0
        self._in_flight: deque[DispatchedStep] = deque()
        self._known_tokens = KnownTokens() if self._send_known_tokens else None

    def use_grammars(self, manager: GrammarManager) -> None:
        """Accept requests with structured output from now on. Until the first of them nobody needs a manager."""
        self._grammars = GrammarRequests(manager)

    # ---- requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: It can never run; the text has the numbers.
            QueueFullError: Too many are waiting.
        """
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request_id {request.request_id!r} is in use by an unfinished request")
        state = Request(request, self._num_requests_ever, self._kv.block_size, self._clock())
        self._limits.check_request(state)
        self._limits.check_queue(self._num_waiting, len(self._rows.free))
        if state.has_grammar and self._grammars is None:
            raise RequestRefusedError(f"request {state.request_id}: structured_outputs are not offered here")
        self._num_requests_ever += 1
        state.max_total_tokens = self._limits.max_total_tokens(state)
        state.rank = self._rank(state)
        state.is_long = 0 < self.config.long_prefill_token_threshold < state.num_prompt_tokens
        self._requests[state.request_id] = state
        self._requests_of_client[state.client_index] = self._requests_of_client.get(state.client_index, 0) + 1
        if self._gate.is_closed:
            self._gate.held[state.request_id] = state
        else:
            self._enqueue(state)

    def _enqueue(self, state: Request) -> None:
        if self._grammars is None or not state.has_grammar or self._grammars.begin(state):
            self._waiting.add(state)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests now. Ids that are unknown, or have ended already, are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end_now(request, finished(request, FinishReason.ABORT))
        self._drop_finished_from_running()

    def _end_now(self, request: Request, end: FinishedRequest) -> None:
        """End a request by no step's result. `_drop_finished_from_running` must follow."""
        self._finish(request)
        self._ended_without_step.setdefault(request.client_index, []).append(end)

    def abort_all(self) -> None:
        """End every request now."""
        self.abort_requests(list(self._requests))

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """By client, the ends that no step's result will report: aborts since the last call.

        The last stats before the engine falls idle come this way too, when no output of a step can carry them.
        """
        ended, self._ended_without_step = self._ended_without_step, {}
        now = self._clock()
        outputs = {client: EngineCoreOutputs(finished=ends, timestamp_s=now) for client, ends in ended.items()}
        if self._stats_due is not None and not self._in_flight:
            outputs.setdefault(self._stats_due, EngineCoreOutputs(timestamp_s=now)).stats = self.make_stats()
            self._stats_due = None
        return outputs

    def has_requests(self) -> bool:
        """There is an unfinished request, or a dispatched step whose result is not back."""
        return bool(self._requests or self._in_flight)

    @property
    def num_unfinished_requests(self) -> int:
        """Waiting and running ones."""
        return len(self._requests)

    @property
    def waits_for_grammars_only(self) -> bool:
        """There are requests, and nothing can happen before a grammar is compiled (or a new request comes)."""
        num_open = len(self._requests) - len(self._gate.held)
        return self._grammars is not None and not self._in_flight and 0 < self._grammars.num_waiting == num_open

    @property
    def _num_waiting(self) -> int:
        num_held_back = 0 if self._grammars is None else self._grammars.num_waiting
        return len(self._waiting) + len(self._gate.held) + num_held_back

    @property
    def has_steps_in_flight(self) -> bool:
        """Some dispatched step's result is not back."""
        return bool(self._in_flight)

    # ---- pauses

    def pause(self, mode: PauseMode) -> None:
        """Hold back what arrives from now on; what becomes of the rest is `mode`'s to say. A later call changes it.

        Steps in flight run to their end. With WAIT, call again with KEEP when `has_runnable_requests` says no.
        """
        self._gate.close(frozen=mode is not PauseMode.WAIT)
        if mode is PauseMode.ABORT:
            self.abort_all()

    def resume(self) -> None:
        """Go on, with what arrived meanwhile."""
        for request in self._gate.open():
            self._enqueue(request)

    @property
    def is_paused(self) -> bool:
        return self._gate.is_closed

    @property
    def has_runnable_requests(self) -> bool:
        """Some unfinished request is not held back by a pause."""
        return not self._gate.is_frozen and len(self._requests) > len(self._gate.held)

    def abort_paused(self) -> None:
        """End the requests that cannot go on before `resume`."""
        self.abort_requests(list(self._requests if self._gate.is_frozen else self._gate.held))

    def preempt_all(self) -> None:
        """Take rows and KV from all running requests; they will be computed anew.

        Raises:
            RuntimeError: Steps are in flight, which may write what would be given back.
        """
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight")
        for request in list(self._running):
            self._put_back(request)

    def reset_prefix_cache(self) -> bool:
        """Forget cached KV. False, and nothing done, while any request holds blocks."""
        return self._kv.reset_prefix_cache()

    def update_config(self, config: SchedulerConfig) -> None:
        """Other limits from now on: of tokens per step (at most those of the start), of the queue, of long prompts."""
        self.config = config
        self._limits = replace(
            self._limits,
            max_prompt_tokens=None if self.chunked_prefill_enabled else config.max_num_batched_tokens,
            max_num_queued_requests=config.max_num_queued_requests,
        )

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counters since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self._running)
        stats.num_waiting = self._num_waiting
        stats.kv_cache_usage = self._kv.usage
        return stats

    # ---- after a crash

    def restart(self, kv_cache_config: KVCacheConfig, cause: str) -> None:
        """Go on with new workers: every unfinished request waits to be computed anew, with the tokens it has.

        A request that is found to crash the workers ends with an error (see `scheduler.probation`), and so does one
        that the new workers' pool cannot hold.

        Args:
            kv_cache_config: Of the new workers, whose next step is step 1 again.
            cause: What happened to the old ones.
        """
        computed = [request.request_id for request in self._running if request.last_step > self._rows.completed_step]
        culprit = self._probation.crash(computed)
        self._begin(kv_cache_config)
        for request in self._requests.values():
            request.max_total_tokens = self._limits.max_total_tokens(request)
            if request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
                request.restart()
                request.rank = self._rank(request)
                if request.request_id in self._gate.held:
                    continue
                self._waiting.add(request)
        if culprit is not None:
            self._fail(self._requests[culprit], f"the workers crash whenever they compute this request: {cause}")
        for request in list(self._requests.values()):
            if len(request.token_ids) >= request.max_total_tokens:
                self._fail(
                    request, f"its {len(request.token_ids)} tokens do not fit into the KV cache any more: {cause}"
                )

    def _fail(self, request: Request, error: str) -> None:
        self._end_now(request, finished(request, FinishReason.ERROR, error=error))

    # ---- one step

    def schedule(self) -> SchedulerOutput | None:
        """Decide and dispatch the next step. None: nothing can run now (perhaps after the next update)."""
        if self._gate.is_frozen:
            return None
        if self._grammars is not None:
            self._settle_grammars(self._grammars)
        plan = StepPlan(self._step + 1, self.config.max_num_batched_tokens)
        decodes, prefills = self._sort_running()
        self._schedule_decodes(plan, decodes)
        self._schedule_prefills(plan, prefills)
        # From here on nobody is preempted: what is planned will run, so the blocks it fills may be shared at once.
        self._advance_decodes(plan)
        for request, count in plan.chunks:
            self._advance_chunk(plan, request, count)
        if not plan.short_of_blocks:
            self._admit_waiting(plan, prefills)
        if not plan.decodes and not plan.chunks:
            return None
        return self._dispatch(plan)

    def _sort_running(self) -> tuple[list[Request], list[Request]]:
        """The running requests that need one token, and by rank those that need more. Others wait for a result."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
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
            share = -(-len(self._running) // self._num_interleaved_batches)
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
        contended = len(prefills) > 1 or self._waiting.first(self._long_allowed(prefills)) is not None
        for request in prefills:
            if request.status is not RequestStatus.RUNNING:  # preempted for one of lower rank value
                continue
            count = min(request.num_remaining_tokens, self._prefill_limit(plan, request, contended))
            if count and self._grow(plan, request, request.num_computed_tokens + count):
                plan.chunks.append((request, count))
                plan.budget -= count

    def _admit_waiting(self, plan: StepPlan, prefills: list[Request]) -> None:
        """Start waiting requests in rank order, until budget, rows or blocks run out."""
        prefills = [request for request in prefills if request.num_remaining_tokens]
        reserved = sum(map(self._blocks_to_finish, prefills))
        while plan.budget and self._rows.free:
            request = self._next_waiting(prefills)
            # A request preempted with a step in flight may get one more token from it; it starts with all its tokens.
            if request is None or request.last_step > self._rows.completed_step:
                return
            hit = self._kv.no_hit() if request.skip_reading_prefix_cache else self._kv.look_up(request.kv)
            headroom = reserved + len(self._running) * self._kv.num_growing_groups * self.headroom_blocks
            if not self._kv.fits(hit, len(request.token_ids), headroom):
                return
            contended = bool(plan.chunks) or len(self._waiting) > 1
            remaining = len(request.token_ids) - hit.num_tokens
            count = min(remaining, self._prefill_limit(plan, request, contended))
            if not self.chunked_prefill_enabled and hit.num_tokens + count < request.num_prompt_tokens:
                return
            self._start(plan, request, hit, count)
            if count < remaining:
                prefills.append(request)
                reserved += self._blocks_to_finish(request)

    def _next_waiting(self, prefills: list[Request]) -> Request | None:
        if self._probation and (trial := self._probation.trial) is not None:
            # Nothing else may be in the workers when they crash.
            return None if self._running or self._in_flight else self._requests[trial]
        return self._waiting.first(self._long_allowed(prefills))

    def _start(self, plan: StepPlan, request: Request, hit: PrefixHit, count: int) -> None:
        """Move a request from the waiting queue into the batch; `count` tokens after the hit are computed."""
        self._waiting.remove(request)
        self._kv.start(request.kv, hit, hit.num_tokens + count)
        if request.admitted_step == 0 and not request.has_started:
            request.scheduled_s = self._clock()
            request.num_cached_tokens = hit.num_tokens
            self._not_started.add(request)
            if self.prefix_caching_enabled and not request.skip_reading_prefix_cache:
                self._stats.prefix_cache_queries += request.num_prompt_tokens
                self._stats.prefix_cache_hits += hit.num_tokens
        request.status = RequestStatus.RUNNING
        request.row = self._rows.take()
        request.admitted_step = plan.step
        request.num_slots = self._kv.num_slots(request.kv)
        request.num_computed_tokens = hit.num_tokens
        request.num_schedulable_tokens = len(request.token_ids)
        self._running.append(request)
        plan.admitted.append(request)
        plan.chunks.append((request, count))
        plan.budget -= count
        self._advance_chunk(plan, request, count)

    def _advance_decodes(self, plan: StepPlan) -> None:
        step = plan.step
        for request in plan.decodes:
            request.num_computed_tokens += 1
            request.last_step = step
        if self._async:
            for request in plan.decodes:
                self._expect_token(request)
        for request, _ in plan.grown:
            if request.status is RequestStatus.RUNNING:
                self._kv.register(request.kv, request.num_computed_tokens)

    def _advance_chunk(self, plan: StepPlan, request: Request, count: int) -> None:
        request.num_computed_tokens += count
        request.last_step = plan.step
        self._kv.register(request.kv, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_schedulable_tokens:
            plan.sampling_chunks.append(request)
            if self._async:
                self._expect_token(request)

    @staticmethod
    def _expect_token(request: Request) -> None:
        """Let the next step go out before the token of this one is known; but a grammar's mask depends on the token."""
        if not request.has_grammar and request.num_schedulable_tokens < request.max_total_tokens - 1:
            request.num_schedulable_tokens += 1

    def _dispatch(self, plan: StepPlan) -> SchedulerOutput:
        self._step = plan.step
        sampling = plan.decodes + plan.sampling_chunks if plan.sampling_chunks else plan.decodes
        with_grammar = [] if self._grammars is None else [request for request in sampling if request.has_grammar]
        self._in_flight.append(DispatchedStep(plan.step, sampling, plan.prompt_logprobs_of(), with_grammar))
        self._stats.num_scheduled_tokens += self.config.max_num_batched_tokens - plan.budget
        message = plan.to_message(self._kv.num_groups, self._known_tokens)
        message.has_structured_output = bool(with_grammar)
        return message

    # ---- grammars

    def fill_bitmask(self) -> GrammarBitmask | None:
        """The masks of the step dispatched last, if it has structured output: while the workers run the forward.

        None: no row needs one after all, since those requests have failed.
        """
        if self._grammars is None or not self._in_flight:
            return None
        return self._grammars.fill_bitmask(self._in_flight[-1].with_grammar)

    def _settle_grammars(self, grammars: GrammarRequests) -> None:
        """Queue requests whose grammar has come, and end those whose grammar or matcher failed."""
        ready, failures = grammars.settle()
        for request in ready:
            self._waiting.add(request)
        for request, failure in failures:
            self._end_now(request, failed(request, failure))
        if failures:
            self._drop_finished_from_running()

    def _follow_grammars(
        self, grammars: GrammarRequests, step: DispatchedStep, ended: list[tuple[Request, FinishedRequest]]
    ) -> list[tuple[Request, FinishedRequest]]:
        """Tell the grammars the tokens of `step`. Returns `ended` and the requests whose text is complete.

        As with stop tokens, a complete text goes before a length that is reached with it.
        """
        stopped = {request for request, end in ended if end.reason is FinishReason.STOP}
        unfinished = (request for request in step.with_grammar if request.status is not RequestStatus.FINISHED)
        done = grammars.complete([request for request in unfinished if request not in stopped])
        ended = [entry for entry in ended if entry[0] not in done]
        return ended + [(request, complete(request)) for request in done]

    # ---- limits

    def _long_allowed(self, prefills: list[Request]) -> bool:
        """May another long prompt be started beside these?"""
        threshold = self.config.long_prefill_token_threshold
        num_long = sum(request.is_long and request.num_remaining_tokens > threshold for request in prefills)
        return num_long < self.config.max_long_partial_prefills

    def _prefill_limit(self, plan: StepPlan, request: Request, contended: bool) -> int:
        """Most tokens a prefill may compute in this step; `contended` when another prompt could use the budget."""
        if request.is_long and contended and self.chunked_prefill_enabled:
            return min(plan.budget, self.config.long_prefill_token_threshold)
        return plan.budget

    def _blocks_to_finish(self, request: Request) -> int:
        return self._kv.blocks_to_finish(request.kv, len(request.token_ids))

    # ---- blocks

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Allocate slots up to `num_tokens`, preempting requests of higher rank value. False: it must wait."""
        while True:
            appended = self._kv.grow(request.kv, request.num_computed_tokens, num_tokens)
            if appended is not None:
                if appended[0]:
                    plan.grown.append((request, appended))
                    request.num_slots = self._kv.num_slots(request.kv)
                return True
            plan.short_of_blocks = True
            if self._retired_blocks_suffice(request, num_tokens):
                return False
            victim = max(self._running, key=lambda candidate: candidate.rank)
            if victim is request:
                if len(self._running) == 1 and not self._rows.retired:
                    raise RuntimeError(f"request {request.request_id} alone finds no blocks for {num_tokens} tokens")
                return False
            self._preempt(plan, victim)

    def _retired_blocks_suffice(self, request: Request, num_tokens: int) -> bool:
        """Enough blocks will come back with the steps in flight; taking more from others would be for nothing."""
        return bool(self._rows.retired) and (
            self._rows.num_retired_blocks() >= self._kv.num_missing_blocks(request.kv, num_tokens)
        )

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Take everything from a running request; it waits to be computed anew. Tokens in flight still reach it."""
        plan.drop_decode(request)
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        self._running.remove(request)
        self._rows.retire(request)
        request.num_preemptions += 1
        request.wait()
        request.rank = self._rank(request)
        self._waiting.add(request)
        self._stats.num_preemptions += 1

    # ---- results

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take the result of the oldest step in flight. Returns, by client, new tokens and ends.

        Raises:
            RuntimeError: The result is of another step, or has another number of tokens: the workers are out of step.
        """
        if self._grammars is not None:
            self._settle_grammars(self._grammars)  # The tokens of those that failed count no more.
        step = self._take_in_flight(scheduled, output)
        requests, tokens = step.sampling, unpack_int32(output.sampled_token_ids)
        if len(tokens) != len(requests):
            raise RuntimeError(
                f"step {step.step}: {len(requests)} requests sample, the workers returned {len(tokens)} tokens"
            )
        self._rows.complete(step.step)
        for piece in output.prompt_logprobs:
            step.prompt_logprobs_of[piece.row].prompt_logprobs.append(piece)
        logprobs = output.logprobs
        if output.without_choice or output.failures:
            self._fail_rows(step, output)
        if step.has_late:
            live = [request.status is not RequestStatus.FINISHED for request in requests]
            requests, tokens = list(compress(requests, live)), array("i", compress(tokens, live))
            if logprobs is not None:
                logprobs = logprobs.select(index for index, is_live in enumerate(live) if is_live)
        clients = list(self._requests_of_client)
        ended = self._append_tokens(requests, tokens)
        if self._grammars is not None and step.with_grammar:
            ended = self._follow_grammars(self._grammars, step, ended)
        started: list[Request] = []
        if self._not_started:
            started = [request for request in requests if request in self._not_started]
            self._not_started.difference_update(started)
            for request in started:
                request.has_started = True
        for request, _ in ended:
            self._finish(request)
        if ended:
            self._drop_finished_from_running()
        if self._grammars is not None and step.with_grammar:
            self._settle_grammars(self._grammars)
        if self._probation:
            self._acquit(requests)
        outputs = collect_outputs(
            requests, tokens, logprobs, ended, started, clients[0] if len(clients) == 1 else None, self._clock()
        )
        for first in outputs.values():
            first.stats = self.make_stats()
            if not self._rows.retired:
                self._stats_due = None
            break
        return outputs

    def _acquit(self, requests: list[Request]) -> None:
        """These got a token and so did not crash the workers. Whoever was tried makes room for the next."""
        for request in requests:
            self._probation.clear(request.request_id)
        trial = self._probation.trial
        if trial is not None:
            for request in [other for other in self._running if other.request_id != trial]:
                self._put_back(request)

    def _fail_rows(self, step: DispatchedStep, output: ModelRunnerOutput) -> None:
        """End the requests that got no token from a step."""
        errors = {failure.index: failure.error for failure in output.failures}
        for index in unpack_int32(output.without_choice):
            errors.setdefault(
                index,
                f"no token is left to sample after {step.sampling[index].num_output_tokens} generated ones: allowed_"
                f"token_ids, bad_words, min_tokens, structured_outputs and logits processors together forbid all",
            )
        for index, error in errors.items():
            if step.sampling[index].status is not RequestStatus.FINISHED:
                self._fail(step.sampling[index], error)
        self._drop_finished_from_running()
        step.has_late = True

    def _take_in_flight(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> DispatchedStep:
        expected = self._in_flight[0].step if self._in_flight else None
        if not expected == scheduled.step == output.step:
            raise RuntimeError(
                f"the result of step {output.step} was given for step {scheduled.step}, while the oldest "
                f"step in flight is {expected}"
            )
        return self._in_flight.popleft()

    def _append_tokens(self, requests: list[Request], tokens: array[int]) -> list[tuple[Request, FinishedRequest]]:
        """Give each request its token. Returns those that end by it."""
        ended = []
        for request, token in zip(requests, tokens, strict=True):
            token_ids = request.token_ids
            token_ids.append(token)
            if token in request.stop_token_ids or len(token_ids) == request.max_total_tokens:
                end = end_of_request(request, self.config.max_model_len)
                if end is not None:
                    ended.append((request, end))
        if not self._async:
            for request in requests:
                request.num_schedulable_tokens += 1
        elif self._grammars is not None:
            for request in requests:
                request.num_schedulable_tokens += request.has_grammar  # The others' tokens were expected already.
        if self._known_tokens is not None:
            self._known_tokens.learn(requests, tokens)
        return ended

    def _finish(self, request: Request) -> None:
        """Forget a request. The caller reports its end, and clears it from `_running` when it has finished them all."""
        del self._requests[request.request_id]
        self._stats_due = request.client_index
        left = self._requests_of_client[request.client_index] - 1
        if left:
            self._requests_of_client[request.client_index] = left
        else:
            del self._requests_of_client[request.client_index]
        self._not_started.discard(request)
        self._probation.clear(request.request_id)
        if request.status is RequestStatus.RUNNING:
            self._rows.retire(request)
        elif self._gate.held.pop(request.request_id, None) is None and request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        if self._grammars is not None:
            self._grammars.release(request)
        request.status = RequestStatus.FINISHED
        if request.last_step > self._rows.completed_step:
            for step in self._in_flight:
                step.has_late = True

    def _drop_finished_from_running(self) -> None:
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
