"""Settings of the scheduler. Owned by scheduler/, composed into EngineConfig by engine_actors/."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of continuous batching. Names are vLLM's where the concept is the same.

    Attributes:
        max_num_seqs: Requests that may hold a batch row (run) at once.
        max_num_batched_tokens: Token budget of one step; at least max_num_seqs, so that each running request can have
            a token in each step.
        max_model_len: Longest prompt + output, in tokens.
        enable_chunked_prefill: A prompt may be computed over several steps.
        policy: "fcfs", or "priority" (lower value first, ties by arrival).
        long_prefill_token_threshold: Prompts longer than this are long; 0 makes no distinction. While others have
            prompts to compute, a long one gets at most this many tokens a step.
        max_long_partial_prefills: Long prompts that may be partly computed at once; short ones pass the others.
        max_num_queued_requests: Requests that may wait beyond those that could start at once; more are refused with
            QueueFullError. None is unlimited.
        async_scheduling: Dispatch step N+1 of a request before its token of step N is known. None leaves the choice
            to the engine; the Scheduler takes None for False.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    max_num_queued_requests: int | None = None
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_long_partial_prefills"):
            _check_int(name, getattr(self, name), at_least=1)
        _check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, at_least=0)
        if self.max_num_queued_requests is not None:
            _check_int("max_num_queued_requests", self.max_num_queued_requests, at_least=0)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {self.policy!r}")
        if self.async_scheduling not in (None, True, False):
            raise ValueError(f"async_scheduling must be True, False or None, got {self.async_scheduling!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one token of the budget"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at "
                f"least max_model_len ({self.max_model_len}): a whole prompt is computed in one step"
            )


def _check_int(name: str, value: object, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
