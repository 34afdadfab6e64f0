"""Settings of the scheduler. Owned by scheduler/, composed into EngineConfig by engine_actors/."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of continuous batching. Names and meanings are vLLM's.

    Attributes:
        max_num_seqs: Requests that may hold a batch row (run) at once.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Longest prompt + output, in tokens.
        enable_chunked_prefill: A prompt may be computed over several steps.
        policy: "fcfs", or "priority" (lower value first, ties by arrival).
        max_num_partial_prefills: Prompts that may be partly computed at once.
        long_prefill_token_threshold: Prompts longer than this count as long; 0 disables the distinction. While a
            short prompt waits, a long one gets at most this many tokens a step.
        max_long_partial_prefills: Long prompts that may be partly computed at once.
        max_num_queued_requests: Waiting requests admitted before QueueFullError; None is unlimited.
        async_scheduling: Dispatch step N+1 before the tokens of step N are known; None lets the engine decide.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    max_num_queued_requests: int | None = None
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_partial_prefills",
                     "max_long_partial_prefills"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold!r}")
        if self.max_num_queued_requests is not None and self.max_num_queued_requests < 0:
            raise ValueError(f"max_num_queued_requests must be at least 0, got {self.max_num_queued_requests!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {self.policy!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one token of the budget")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at "
                f"least max_model_len ({self.max_model_len}): a whole prompt is computed in one step")
