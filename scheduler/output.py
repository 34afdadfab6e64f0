"""Wire types around one step: scheduler → workers → scheduler → clients.

All are encoded once with msgspec and sent as bytes. Integer columns are little-endian int32 packed in `bytes`
(`pack_int32` / `unpack_int32`), so that a steady decode step costs a few bytes per request.

A running request holds a *row* of the workers' persistent batch, an index below max_num_seqs that the scheduler
assigns. Workers keep token ids, block tables and sampling state by row, so after a request's first step only deltas
travel.
"""

from __future__ import annotations

import array
import enum
import sys
from collections.abc import Iterable

import msgspec

from scheduler.logprobs import PromptLogprobs, TokenLogprobs
from scheduler.sampling_params import SamplingParams


def pack_int32(values: Iterable[int]) -> bytes:
    """Little-endian int32 bytes of `values`."""
    packed = array.array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_int32(data: bytes) -> array.array[int]:
    """The inverse of `pack_int32`."""
    values = array.array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """A request's whole state, sent in the first step that schedules it, and again when it resumes after preemption.

    Attributes:
        row: Where workers keep the request from now on; whatever was there before is gone.
        request_id: For error texts.
        token_ids: int32 column: prompt, then tokens generated before a preemption.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        num_computed_tokens: Tokens whose KV is already in the cache (prefix hits).
        block_ids: Per KV group, int32 column of the request's blocks so far (this step's included).
        sampling_params: Always with a seed; the workers sample by it.
        stop_ids_until_min_tokens: Token ids masked while fewer than min_tokens are generated.
    """

    row: int
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[bytes]
    sampling_params: SamplingParams
    stop_ids_until_min_tokens: list[int] = []


class BlockAppends(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Blocks appended to block tables of one KV group: `block_ids[i]` goes to the end of row `rows[i]`'s table."""

    rows: bytes
    block_ids: bytes


class SchedulerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One step's work, sent by EngineCore to every worker.

    The worker derives the rest: it advances each row's num_computed_tokens by what was scheduled, and a row samples
    when that reaches the tokens it knows. Sampled tokens are kept at the worker; they are never sent back to it,
    except that under pipeline parallelism `known_tokens` tells the earlier stages.

    A worker applies, in this order: `new_requests` (each replaces whatever was in its row), then `known_tokens` (each
    is the next token of its row), then `new_blocks`; then it runs `rows`. Rows of ended and preempted requests are
    simply not named any more. In each layer all requests' K/V are written before any are read: a request may have a
    prefix hit on blocks that another one fills in the same step.

    Attributes:
        step: Counts from 1; workers refuse a gap.
        rows: int32 column [num_reqs], the batch order: rows that need one token, then the others.
        num_scheduled_tokens: int32 column [num_reqs]; empty means one token for each row.
        new_requests: Requests that enter (or re-enter) the persistent batch with this step.
        new_blocks: Per KV group, blocks appended to tables of requests already in the batch; empty means none.
        known_rows, known_tokens: int32 columns: tokens sampled by steps whose results came back since the last message,
            in order, for stages that do not sample (the sampling stage has them already). Only with
            `Scheduler(send_known_tokens=True)`; rows in `new_requests` are left out, whose tokens are complete.
        has_structured_output: The forward and the sampling are two calls; the second brings the masks of the rows that
            have a grammar (`GrammarBitmask`).
    """

    step: int
    rows: bytes
    num_scheduled_tokens: bytes = b""
    new_requests: list[NewRequestData] = []
    new_blocks: list[BlockAppends] = []
    known_rows: bytes = b""
    known_tokens: bytes = b""
    has_structured_output: bool = False


class RowFailure(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A row that cannot be sampled; it ends its request, and no other.

    Attributes:
        index: Into `sampled_token_ids`.
        error: Why, for the caller.
    """

    index: int
    error: str


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step produced, sent by rank 0 of the last pipeline stage to EngineCore.

    Attributes:
        step: The SchedulerOutput's.
        sampled_token_ids: int32 column, one for each row that sampled, in batch order.
        logprobs: Of these tokens; None when no row asked for any.
        prompt_logprobs: One for each row that asked for them and computed prompt tokens with successors in the prompt.
        without_choice: int32 column, indices into `sampled_token_ids`: rows that no token was left for once everything
            the request forbids was masked. Their tokens mean nothing.
        failures: Rows that got no token for another reason. Their tokens mean nothing.
    """

    step: int
    sampled_token_ids: bytes = b""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    without_choice: bytes = b""
    failures: list[RowFailure] = []


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the public name."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class FinishedRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """A request's end.

    Attributes:
        stop_reason: The stop token that ended it; None for EOS.
        error: Why, when the reason is ERROR.
        error_type: The class in `engine_actors.errors` the front end raises, e.g. "QueueFullError".
        num_preemptions: Times the request lost its blocks and was recomputed.
        error_field: The field at fault, where it is the request's own.
        last_token_is_text: It stopped because its grammar allows no more: the last token is no stop token.
    """

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    error_type: str | None = None
    num_preemptions: int = 0
    error_field: str | None = None
    last_token_is_text: bool = False


class RequestEvents(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Sent with a request's first output: monotonic times in seconds on EngineCore's clock, and its prefix hit."""

    request_id: str
    queued_s: float
    scheduled_s: float
    num_cached_tokens: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Gauges at the end of a step, and counters since the last report."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_scheduled_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One client's share of one step, sent by EngineCore. Columns, not rows: cheap to build and to encode.

    Attributes:
        request_ids: Requests with new tokens in this step.
        token_ids: Their tokens, flattened in that order.
        num_tokens: Tokens of each request; empty means one each.
        finished: Requests that ended with this step (after the tokens above), whether or not they had tokens.
        started: Events of requests whose first output this is.
        timestamp_s: Monotonic time of the step's end on EngineCore's clock.
        stats: Present at most once per step, for one of the clients.
        logprobs: Of `token_ids`; None when no request of the step asked for any.
        prompt_logprobs: By request id, with its first token; pieces may overlap after a preemption.
    """

    request_ids: list[str] = []
    token_ids: list[int] = []
    num_tokens: list[int] = []
    finished: list[FinishedRequest] = []
    started: list[RequestEvents] = []
    timestamp_s: float = 0.0
    stats: SchedulerStats | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[str, list[PromptLogprobs]] = {}
