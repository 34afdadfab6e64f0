"""The Scheduler: which requests there are, when they may run, and what the results of steps mean for their clients.

Owned by EngineCore, which calls `schedule`, sends the message to the workers, and gives the result to
`update_from_output`; with several steps in flight it schedules ahead and updates in the same order. Which requests
compute how many tokens in a step is decided in `scheduler.batch`.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import compress

from kv.config import CacheConfig
from kv.manager import KVCacheManager
from kv.spec import KVCacheConfig
from scheduler.admission import AdmissionLimits
from scheduler.batch import Batch
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
from scheduler.queues import RANKS
from scheduler.request import EngineCoreRequest, Request, RequestStatus
from scheduler.results import collect_outputs, complete, end_of_request, failed, finished
from scheduler.step import DispatchedStep
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
        self._send_known_tokens = send_known_tokens
        self._rank = RANKS[config.policy]
        self._clock = clock

        self._requests: dict[str, Request] = {}
        self._requests_of_client: dict[int, int] = {}
        self._num_requests_ever = 0
        self._probation = Probation()
        self._gate = PauseGate()
        self._batch = self._make_batch(kv_cache_config, SchedulerStats())
        self._limits = self._make_limits()

        self._ended_without_step: dict[int, list[FinishedRequest]] = {}
        # The client that is owed stats: a request ended, and no output since has told what that freed.
        self._stats_due: int | None = None
        self._grammars: GrammarRequests | None = None
        if grammars is not None:
            self.use_grammars(grammars)

    def _make_batch(self, kv_cache_config: KVCacheConfig, stats: SchedulerStats) -> Batch:
        kv = KVCacheManager(
            kv_cache_config,
            enable_prefix_caching=self.prefix_caching_enabled,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        return Batch(
            self.config,
            kv,
            num_interleaved=self._num_interleaved_batches,
            chunked_prefill_enabled=self.chunked_prefill_enabled,
            prefix_caching_enabled=self.prefix_caching_enabled,
            send_known_tokens=self._send_known_tokens,
            stats=stats,
            clock=self._clock,
        )

    def _make_limits(self) -> AdmissionLimits:
        config = self.config
        return AdmissionLimits(
            max_model_len=config.max_model_len,
            pool_tokens=self._batch.kv.max_tokens_alone(config.max_model_len),
            max_prompt_tokens=None if self.chunked_prefill_enabled else config.max_num_batched_tokens,
            max_num_queued_requests=config.max_num_queued_requests,
        )

    def use_grammars(self, manager: GrammarManager) -> None:
        """Accept requests with structured output from now on. Until the first of them nobody needs a manager."""
        self._grammars = GrammarRequests(manager)
        self._batch.has_grammars = True

    # ---- requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefusedError: It can never run; the text has the numbers.
            QueueFullError: Too many are waiting.
        """
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request_id {request.request_id!r} is in use by an unfinished request")
        state = Request(request, self._num_requests_ever, self._batch.kv.block_size, self._clock())
        self._limits.check_request(state)
        self._limits.check_queue(self._num_waiting, len(self._batch.rows.free))
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

    def check_admission(self, num_requests: int) -> None:
        """Raise QueueFullError if the last of so many more requests would not be queued now."""
        self._limits.check_queue(self._num_waiting + num_requests - 1, len(self._batch.rows.free))

    def _enqueue(self, state: Request) -> None:
        if self._grammars is None or not state.has_grammar or self._grammars.begin(state):
            self._batch.waiting.add(state)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests now. Ids that are unknown, or have ended already, are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end_now(request, finished(request, FinishReason.ABORT))
        self._batch.drop_finished()

    def _end_now(self, request: Request, end: FinishedRequest) -> None:
        """End a request by no step's result. `Batch.drop_finished` must follow."""
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
        if self._stats_due is not None and not self._batch.in_flight:
            outputs.setdefault(self._stats_due, EngineCoreOutputs(timestamp_s=now)).stats = self.make_stats()
            self._stats_due = None
        return outputs

    def has_requests(self) -> bool:
        """There is an unfinished request, or a dispatched step whose result is not back."""
        return bool(self._requests or self._batch.in_flight)

    @property
    def num_unfinished_requests(self) -> int:
        """Waiting and running ones."""
        return len(self._requests)

    @property
    def waits_for_grammars_only(self) -> bool:
        """There are requests, and nothing can happen before a grammar is compiled (or a new request comes)."""
        num_open = len(self._requests) - len(self._gate.held)
        return self._grammars is not None and not self._batch.in_flight and 0 < self._grammars.num_waiting == num_open

    @property
    def _num_waiting(self) -> int:
        num_held_back = 0 if self._grammars is None else self._grammars.num_waiting
        return len(self._batch.waiting) + len(self._gate.held) + num_held_back

    @property
    def has_steps_in_flight(self) -> bool:
        """Some dispatched step's result is not back."""
        return bool(self._batch.in_flight)

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
        if self._batch.in_flight:
            raise RuntimeError(f"{len(self._batch.in_flight)} steps are in flight")
        for request in list(self._batch.running):
            self._batch.put_back(request)

    def reset_prefix_cache(self) -> bool:
        """Forget cached KV. False, and nothing done, while any request holds blocks."""
        return self._batch.kv.reset_prefix_cache()

    def update_config(self, config: SchedulerConfig) -> None:
        """Other limits from now on: of tokens per step (at most those of the start), of the queue, of long prompts."""
        self.config = self._batch.config = config
        self._limits = self._make_limits()

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counters since the last call."""
        stats, self._batch.stats = self._batch.stats, SchedulerStats()
        stats.num_running = len(self._batch.running)
        stats.num_waiting = self._num_waiting
        stats.kv_cache_usage = self._batch.kv.usage
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
        old = self._batch
        computed = [request.request_id for request in old.running if request.last_step > old.rows.completed_step]
        culprit = self._probation.crash(computed)
        self._batch = self._make_batch(kv_cache_config, old.stats)
        self._batch.not_started = old.not_started
        self._batch.has_grammars = old.has_grammars
        self._limits = self._make_limits()
        for request in self._requests.values():
            request.max_total_tokens = self._limits.max_total_tokens(request)
            if request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
                request.restart()
                request.rank = self._rank(request)
                if request.request_id in self._gate.held:
                    continue
                self._batch.waiting.add(request)
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
        trial = self._probation.trial if self._probation else None
        plan = self._batch.plan_step(None if trial is None else self._requests[trial])
        return None if plan is None else self._batch.dispatch(plan)

    # ---- grammars

    def fill_bitmask(self) -> GrammarBitmask | None:
        """The masks of the step dispatched last, if it has structured output: while the workers run the forward.

        None: no row needs one after all, since those requests have failed.
        """
        if self._grammars is None or not self._batch.in_flight:
            return None
        return self._grammars.fill_bitmask(self._batch.in_flight[-1].with_grammar)

    def _settle_grammars(self, grammars: GrammarRequests) -> None:
        """Queue requests whose grammar has come, and end those whose grammar or matcher failed."""
        ready, failures = grammars.settle()
        for request in ready:
            self._batch.waiting.add(request)
        for request, failure in failures:
            self._end_now(request, failed(request, failure))
        if failures:
            self._batch.drop_finished()

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

    # ---- results

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take the result of the oldest step in flight. Returns, by client, new tokens and ends.

        Raises:
            RuntimeError: The result is of another step, or has another number of tokens: the workers are out of step.
        """
        if self._grammars is not None:
            self._settle_grammars(self._grammars)  # The tokens of those that failed count no more.
        step = self._batch.take_oldest(scheduled, output)
        requests, tokens = step.sampling, unpack_int32(output.sampled_token_ids)
        if len(tokens) != len(requests):
            raise RuntimeError(
                f"step {step.step}: {len(requests)} requests sample, the workers returned {len(tokens)} tokens"
            )
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
        if self._batch.not_started:
            started = [request for request in requests if request in self._batch.not_started]
            self._batch.not_started.difference_update(started)
            for request in started:
                request.has_started = True
        for request, _ in ended:
            self._finish(request)
        if ended:
            self._batch.drop_finished()
        if self._grammars is not None and step.with_grammar:
            self._settle_grammars(self._grammars)
        if self._probation:
            self._acquit(requests)
        outputs = collect_outputs(
            requests, tokens, logprobs, ended, started, clients[0] if len(clients) == 1 else None, self._clock()
        )
        for first in outputs.values():
            first.stats = self.make_stats()
            if not self._batch.rows.retired:
                self._stats_due = None
            break
        return outputs

    def _acquit(self, requests: list[Request]) -> None:
        """These got a token and so did not crash the workers. Whoever was tried makes room for the next."""
        for request in requests:
            self._probation.clear(request.request_id)
        trial = self._probation.trial
        if trial is not None:
            for request in [other for other in self._batch.running if other.request_id != trial]:
                self._batch.put_back(request)

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
        self._batch.drop_finished()
        step.has_late = True

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
        if self._batch.known_tokens is not None:
            self._batch.known_tokens.learn(requests, tokens)
        return ended

    def _finish(self, request: Request) -> None:
        """Forget a request. The caller reports its end, and has the batch drop those that it has finished."""
        del self._requests[request.request_id]
        self._stats_due = request.client_index
        left = self._requests_of_client[request.client_index] - 1
        if left:
            self._requests_of_client[request.client_index] = left
        else:
            del self._requests_of_client[request.client_index]
        self._probation.clear(request.request_id)
        was_held = self._gate.held.pop(request.request_id, None) is not None
        if self._grammars is not None:
            self._grammars.release(request)
        self._batch.finish(request, is_queued=request.status is RequestStatus.WAITING and not was_held)
