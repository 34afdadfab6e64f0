"""Drives a Scheduler with FakeWorkers and checks, after every call, what must always hold (DESIGN: the invariants)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kv.block_pool import NULL_BLOCK
from kv.config import CacheConfig
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from scheduler.config import SchedulerConfig
from scheduler.output import (
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    RequestEvents,
    SchedulerOutput,
    pack_int32,
    unpack_int32,
)
from scheduler.request import EngineCoreRequest, Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.fake_grammars import FakeGrammars, Form
from tests.scheduler.fake_worker import FakeWorker, reference_tokens, windows


def kv_config(num_blocks: int, block_size: int = 4, group_windows: tuple[int | None, ...] = (None,)) -> KVCacheConfig:
    """Groups by their windows; None is full attention."""
    return KVCacheConfig(
        num_blocks,
        tuple(
            KVCacheGroup(
                (f"layer{index}",),
                FullAttentionSpec(block_size, 1, 1, 1)
                if window is None
                else SlidingWindowSpec(block_size, 1, 1, 1, window),
            )
            for index, window in enumerate(group_windows)
        ),
    )


@dataclass
class Sent:
    """A request given to the scheduler, and what came back."""

    wire: EngineCoreRequest
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    finished: FinishedRequest | None = None
    events: RequestEvents | None = None


CRASH = "worker rank 0 died"
"""What `Harness.crash` gives as cause."""


class Harness:
    """A scheduler, its workers, and up to `depth` steps in flight.

    With `depth > 1` and no async scheduling there are two workers, as in a pipeline: the second is told the tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 200,
        block_size: int = 4,
        group_windows: tuple[int | None, ...] = (None,),
        caching: bool = True,
        depth: int = 1,
        async_scheduling: bool = False,
        **config: object,
    ) -> None:
        defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
        self.config = SchedulerConfig(**{**defaults, **config}, async_scheduling=async_scheduling)  # type: ignore[arg-type]
        self.kv_config = kv_config(num_blocks, block_size, group_windows)
        self.depth = depth
        pipeline = depth > 1 and not async_scheduling
        self.now_s = 0.0
        self.grammars = FakeGrammars()
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(block_size=block_size, enable_prefix_caching=caching),
            self.kv_config,
            max_concurrent_batches=depth,
            send_known_tokens=pipeline,
            grammars=self.grammars,
            clock=lambda: self.now_s,
        )
        self.worker = FakeWorker(self.kv_config)
        self.first_stage = FakeWorker(self.kv_config, samples=False) if pipeline else None
        self.in_flight: deque[
            tuple[SchedulerOutput, ModelRunnerOutput, dict[int, tuple[str, bool]], dict[int, str]]
        ] = deque()
        self.sent: dict[str, Sent] = {}
        self.messages: list[SchedulerOutput] = []
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0  # by the messages, less what statistics have reported

    # ---- what a test does

    def add(
        self,
        prompt: list[int] | tuple[int, ...] | range,
        request_id: str | None = None,
        *,
        priority: int = 0,
        eos: tuple[int, ...] = (),
        cache_salt: str | None = None,
        client_index: int = 0,
        **params: object,
    ) -> str:
        """Queue a request; its id is the number of its coming unless given. Refusals are raised."""
        request_id = request_id if request_id is not None else str(len(self.sent))
        wire = EngineCoreRequest(
            request_id,
            pack_int32(prompt),
            SamplingParams(**{"seed": 0, "max_tokens": 8, **params}),  # type: ignore[arg-type]
            eos_token_ids=list(eos),
            priority=priority,
            cache_salt=cache_salt,
            client_index=client_index,
        )
        self.scheduler.add_request(wire)
        self.sent[request_id] = Sent(wire, tuple(prompt))
        self.check()
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.abort_requests([request_id])
        self._take(self.scheduler.take_outputs())
        self.check()

    def schedule(self) -> SchedulerOutput | None:
        """Schedule and execute one step; its result is kept back until `update`."""
        running = {request: request.num_remaining_tokens for request in self.scheduler._batch.running}
        message = self.scheduler.schedule()
        if message is None:
            idle = not self.scheduler.has_runnable_requests or self.scheduler.waits_for_grammars_only
            assert self.in_flight or idle, "work remains, and nothing is scheduled"
        else:
            self.messages.append(message)
            self._fill_bitmask(message)
            result = self.worker.execute(message)
            if self.first_stage is not None:
                self.first_stage.execute(message)
            self._check_step(message, running)
            self.in_flight.append((message, result, self.worker.writes, self.worker.batch))
        self._take_ends()
        self.check()
        return message

    def scheduled(self) -> dict[str, int]:
        """Schedule one step; how many tokens each request computes in it, in batch order. Empty: none was possible."""
        return {} if self.schedule() is None else self.worker.scheduled

    def update(self) -> dict[int, EngineCoreOutputs]:
        """Give the scheduler the oldest result."""
        message, result, _, _ = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(message, result)
        self._take(outputs)
        self._take_ends()
        self.check()
        return outputs

    def crash(self, num_blocks: int | None = None) -> None:
        """The workers die with the steps in flight; new ones, perhaps with another pool, take over."""
        if num_blocks is not None:
            self.kv_config = KVCacheConfig(num_blocks, self.kv_config.groups)
        self.in_flight.clear()
        self.worker = FakeWorker(self.kv_config)
        self.first_stage = FakeWorker(self.kv_config, samples=False) if self.first_stage is not None else None
        self.scheduler.restart(self.kv_config, CRASH)
        self._take(self.scheduler.take_outputs())
        self.check()

    def step(self) -> SchedulerOutput | None:
        """As an engine does: fill the queue of steps in flight before draining it."""
        message = self.schedule() if len(self.in_flight) < self.depth else None
        if self.in_flight and (message is None or len(self.in_flight) == self.depth):
            self.update()
        return message

    def run(self, max_steps: int = 10_000) -> None:
        """Until everything has ended; then check all results and that nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), "requests do not end"
        self.check_results()
        self.check_nothing_left()

    def _take_ends(self) -> None:
        """Requests that their grammar ended."""
        if self.scheduler._ended_without_step:
            self._take(self.scheduler.take_outputs())

    # ---- what must hold

    def _fill_bitmask(self, message: SchedulerOutput) -> None:
        """As EngineCore, if the step has grammars. Each mask is that of the token after all known ones."""
        if not message.has_structured_output:
            return
        self.scheduler.fill_bitmask()
        assert self.grammars.filled
        for row, request_id in self.grammars.filled:
            request = self.scheduler._requests[request_id]
            assert request.row == row
            assert row in unpack_int32(message.rows)
            assert request.num_computed_tokens == len(request.token_ids), "the token before is not known"

    def expected(self, sent: Sent) -> tuple[tuple[int, ...], FinishReason, int | None]:
        """Tokens, reason and stop_reason of a request, from the reference."""
        params = sent.wire.sampling_params
        eos = set() if params.ignore_eos else set(sent.wire.eos_token_ids)
        stops = eos | set(params.stop_token_ids)
        length_limit = self.config.max_model_len - len(sent.prompt)
        if params.max_tokens is not None:
            length_limit = min(length_limit, params.max_tokens)
        limit = min(length_limit, self.scheduler._limits.pool_tokens + 1 - len(sent.prompt))
        form = None if params.structured_outputs is None else Form.of(params.structured_outputs)
        if form is not None and form.refused:
            return (), FinishReason.ERROR, None
        tokens = reference_tokens(
            sent.prompt, params.seed or 0, windows(self.kv_config), limit, frozenset(stops), params.min_tokens
        )
        for index, token in enumerate(tokens):
            if form is not None and index == form.fails_at:
                return tokens[:index], FinishReason.ERROR, None
            if token in stops and index + 1 >= params.min_tokens:
                return tokens[: index + 1], FinishReason.STOP, None if token in eos else token
            if form is not None and index + 1 == form.end:
                return tokens[: index + 1], FinishReason.STOP, None
        return tokens, FinishReason.LENGTH if limit == length_limit else FinishReason.ERROR, None

    def check_results(self) -> None:
        for request_id, sent in self.sent.items():
            assert sent.finished is not None, f"request {request_id} never ended"
            tokens, reason, stop_reason = self.expected(sent)
            crashed = CRASH in (sent.finished.error or "")
            if crashed or sent.finished.reason is FinishReason.ABORT:
                assert tuple(sent.tokens) == tokens[: len(sent.tokens)], f"request {request_id}"
            else:
                assert tuple(sent.tokens) == tokens, f"request {request_id}"
                assert (sent.finished.reason, sent.finished.stop_reason) == (reason, stop_reason)
                assert (sent.finished.error is not None) == (reason is FinishReason.ERROR)
            if sent.tokens:
                assert sent.events is not None
                assert sent.events.num_cached_tokens < len(sent.prompt)

    def check_nothing_left(self) -> None:
        scheduler = self.scheduler
        assert scheduler._batch.kv.pool.num_free == scheduler._batch.kv.pool.num_blocks - 1
        assert sorted(scheduler._batch.rows.free) == list(range(self.config.max_num_seqs))
        assert not scheduler._requests
        assert not scheduler._requests_of_client
        assert not scheduler._batch.running
        assert not len(scheduler._batch.waiting)
        assert not scheduler._batch.not_started
        assert not scheduler._batch.rows.retired
        assert not scheduler._batch.in_flight
        assert not scheduler._ended_without_step
        assert self.grammars.is_empty
        assert scheduler._num_waiting == 0

    def check(self) -> None:
        """The invariants between calls."""
        scheduler = self.scheduler
        pool, block_size = scheduler._batch.kv.pool, scheduler._batch.kv.block_size
        sequences = [request.kv for request in scheduler._batch.running] + [
            kv for _, kv, _ in scheduler._batch.rows.retired
        ]
        owners: Counter[int] = Counter()
        groups: dict[int, int] = {}
        for kv in sequences:
            for group, table in enumerate(kv.tables):
                used = [block for block in table if block != NULL_BLOCK]
                assert len(used) == len(set(used)), "a block twice in one table"
                owners.update(used)
                assert all(groups.setdefault(block, group) == group for block in used), "a block in two groups"
        # free + used = pool, counted from the tables; a block has several owners only if found by hash.
        assert pool.num_free == pool.num_blocks - 1 - len(owners)
        for block, count in owners.items():
            assert pool.ref_count(block) == count
            assert count == 1 or pool._hash_of[block] is not None
        assert len(scheduler._batch.running) <= self.config.max_num_seqs
        rows = [request.row for request in scheduler._batch.running]
        rows += [row for _, _, row in scheduler._batch.rows.retired] + scheduler._batch.rows.free
        assert sorted(rows) == list(range(self.config.max_num_seqs))
        assert scheduler._batch.stats.num_scheduled_tokens == self.num_scheduled_tokens
        for request in scheduler._batch.running:
            self._check_running(request, block_size)
        waiting = sum(request.status is RequestStatus.WAITING for request in scheduler._requests.values())
        assert len(scheduler._batch.waiting) + len(scheduler._gate.held) == waiting
        without_grammar = [
            request for request in scheduler._requests.values() if request.status is RequestStatus.WAITING_FOR_GRAMMAR
        ]
        assert scheduler._num_waiting == waiting + len(without_grammar)
        assert len(scheduler._requests) == scheduler._num_waiting + len(scheduler._batch.running)
        assert sum(scheduler._requests_of_client.values()) == len(scheduler._requests)

    def _check_running(self, request: Request, block_size: int) -> None:
        """It has exactly the blocks its tokens need; nothing is negative."""
        assert request.status is RequestStatus.RUNNING
        assert 0 < request.num_computed_tokens <= request.num_schedulable_tokens < request.max_total_tokens
        for table, window in zip(request.kv.tables, windows(self.kv_config), strict=True):
            assert len(table) == -(-request.num_computed_tokens // block_size)
            readable_from = 0 if window is None else max(0, request.num_computed_tokens - window + 1)
            assert NULL_BLOCK not in table[readable_from // block_size :]

    def _check_step(self, message: SchedulerOutput, running: dict[Request, int]) -> None:
        """Budget kept; nobody left out without need; nothing overwritten that a step in flight still writes."""
        rows = unpack_int32(message.rows)
        counts = list(unpack_int32(message.num_scheduled_tokens)) or [1] * len(rows)
        assert len(rows) > 0
        assert min(counts) > 0
        assert sum(counts) <= self.config.max_num_batched_tokens
        self.num_scheduled_tokens += sum(counts)
        for _, _, writes, batch in self.in_flight:
            for row, request_id in batch.items():
                assert self.worker.batch.get(row, request_id) == request_id, f"row {row} is taken from {request_id}"
            # Not so in window groups: a running request lets go of blocks behind its window that a step in flight may
            # still write. Workers run steps in order, so the next owner's writes come later.
            for block, request_id in writes.items():
                writer = self.worker.writes.get(block, request_id)
                assert writer == request_id, f"{writer} takes block {block} from {request_id}"
        # Every running decode has its token, unless blocks lack (prefills may free some behind windows afterwards), or
        # it is another batch's turn.
        if self.first_stage is None and self.worker.windows == (None,):
            scheduled = set(self.worker.batch.values())
            for request, remaining in running.items():
                left_out = remaining == 1 and request.request_id not in scheduled
                if left_out and request.status is RequestStatus.RUNNING:
                    assert self.scheduler._batch.kv.pool.num_free == 0, f"decode {request.request_id} left out"

    def _take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, output in outputs.items():
            assert output.num_tokens == []
            if output.stats is not None:
                self.num_preemptions += output.stats.num_preemptions
                self.num_scheduled_tokens -= output.stats.num_scheduled_tokens
            for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
                sent = self.sent[request_id]
                assert sent.wire.client_index == client
                assert sent.finished is None, f"{request_id} gets a token after its end"
                sent.tokens.append(token)
            for events in output.started:
                sent = self.sent[events.request_id]
                assert sent.events is None
                assert len(sent.tokens) == 1
                sent.events = events
            for finished in output.finished:
                sent = self.sent[finished.request_id]
                assert sent.wire.client_index == client
                assert sent.finished is None, f"{finished.request_id} ends twice"
                sent.finished = finished
