"""A request: its wire form from the front end (`EngineCoreRequest`) and its state in the scheduler (`Request`)."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from kv.hashing import root_hash
from kv.manager import KVSequence
from scheduler.errors import RequestRefusedError
from scheduler.logprobs import PromptLogprobs
from scheduler.output import unpack_int32
from scheduler.sampling_params import SamplingParams

Rank = tuple[Any, ...]
"""Sorts requests: the lowest runs first, the highest is preempted first."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A validated, tokenised request, sent by a front end to EngineCore (message ADD).

    Attributes:
        request_id: Unique in the engine.
        prompt_token_ids: int32 column.
        sampling_params: n is 1 here (fan-out happens in the front end); seed and max_tokens are set.
        eos_token_ids: Ids that end the text unless ignore_eos; reported with stop_reason None.
        arrival_time_s: Wall time of arrival, `time.time()`.
        client_index: Which client gets the outputs.
        priority: Lower runs first under the priority policy.
        cache_salt: Separates prefix-cache entries of different tenants.
        output_token_ids: int32 column. Tokens it generated in an engine that died; it goes on after them.
    """

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []
    arrival_time_s: float = 0.0
    client_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: bytes = b""


class RequestStatus(enum.Enum):
    """Where a request is: without its grammar, in the waiting queue, in a batch row, or gone."""

    WAITING_FOR_GRAMMAR = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """The scheduler's state of one request; only `scheduler.scheduler` writes it.

    Its tokens are prompt, then output. Each step computes the KV of some tokens; `num_computed_tokens` catches up with
    `num_schedulable_tokens`, and the step that brings them level samples the next token.

    Attributes:
        token_ids: All known tokens.
        num_computed_tokens: Tokens whose KV is computed by dispatched steps or came from the prefix cache.
        num_schedulable_tokens: Tokens whose KV may be computed now: the known ones and, under async scheduling, the
            ones that steps in flight will sample. Never the last token before the length limit: nothing reads its KV.
        max_total_tokens: Where the request ends for its length, prompt included.
        num_slots: Tokens for which KV blocks are allocated.
        row: In the workers' persistent batch, while running.
        admitted_step: The step that (last) brought the request into the batch.
        last_step: The latest dispatched step that computes something of it; 0 before any.
        stop_token_ids: Tokens that end it, EOS included unless ignored.
        num_preemptions: Times it had to give everything back.
        has_started: It has its first token.
        has_grammar: A grammar says which tokens may come next, so each step needs to know the token before.
        prompt_logprobs: Those computed so far, kept for the first output.
        is_long: Its prompt counts as long (SchedulerConfig.long_prefill_token_threshold).
        sequence_number: Of its arrival at this scheduler.
    """

    __slots__ = (
        "admitted_step",
        "arrival_time_s",
        "client_index",
        "eos_token_ids",
        "has_grammar",
        "has_started",
        "is_long",
        "kv",
        "last_step",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_schedulable_tokens",
        "num_slots",
        "priority",
        "prompt_logprobs",
        "queued_s",
        "rank",
        "request_id",
        "row",
        "sampling_params",
        "scheduled_s",
        "sequence_number",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, wire: EngineCoreRequest, sequence_number: int, block_size: int, queued_s: float) -> None:
        """
        Raises:
            RequestRefusedError: `prompt_token_ids` or `output_token_ids` is not a column of int32.
        """
        for name in ("prompt_token_ids", "output_token_ids"):
            column = getattr(wire, name)
            if len(column) % 4:
                raise RequestRefusedError(f"{name} must be int32 packed in bytes, got {len(column)} bytes")
        params = wire.sampling_params
        self.request_id = wire.request_id
        self.client_index = wire.client_index
        self.priority = wire.priority
        self.arrival_time_s = wire.arrival_time_s
        self.sequence_number = sequence_number
        self.queued_s = queued_s
        self.scheduled_s = 0.0
        self.sampling_params = params
        self.eos_token_ids = frozenset(() if params.ignore_eos else wire.eos_token_ids)
        self.stop_token_ids = self.eos_token_ids.union(params.stop_token_ids)
        self.token_ids = unpack_int32(wire.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(unpack_int32(wire.output_token_ids))
        self.max_total_tokens = 0
        self.num_computed_tokens = 0
        self.num_schedulable_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        self.num_slots = 0
        self.kv = KVSequence(self.token_ids, root_hash(block_size, cache_salt=wire.cache_salt))
        self.status = RequestStatus.WAITING
        self.row = -1
        self.admitted_step = 0
        self.last_step = 0
        self.has_started = len(self.token_ids) > self.num_prompt_tokens
        self.has_grammar = params.structured_outputs is not None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.is_long = False
        self.num_preemptions = 0
        self.rank: Rank = ()

    def wait(self) -> None:
        """It has given back row and blocks, and is to be computed anew, with the tokens it has."""
        self.kv = self.kv.restarted()
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = self.num_slots = 0
        self.num_schedulable_tokens = len(self.token_ids)

    def restart(self) -> None:
        """Its workers are gone, and with them what steps in flight would have brought."""
        self.wait()
        self.last_step = 0
        self.prompt_logprobs = []

    @property
    def num_output_tokens(self) -> int:
        """Known generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may be computed now."""
        return self.num_schedulable_tokens - self.num_computed_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Every prompt token must be computed anew: outputs need its logits, or the user says so."""
        return self.needs_prompt_logprobs or bool(self.sampling_params.skip_reading_prefix_cache)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Log-probabilities of its prompt are asked for, and not delivered yet."""
        return self.sampling_params.prompt_logprobs is not None and not self.has_started

    @property
    def stop_ids_until_min_tokens(self) -> list[int]:
        """Tokens the sampler must mask for now; see NewRequestData."""
        return sorted(self.stop_token_ids) if self.num_output_tokens < self.sampling_params.min_tokens else []
