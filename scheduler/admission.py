"""What is refused at the door. Used by `Scheduler.add_request`."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.errors import QueueFullError, RequestRefusedError
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Fixed limits of an engine.

    Attributes:
        max_model_len: Prompt and output together.
        pool_tokens: Tokens of one sequence whose KV the pool holds.
        max_prompt_tokens: That one step can compute when prompts may not be cut; None when they may.
        max_num_queued_requests: See SchedulerConfig.
    """

    max_model_len: int
    pool_tokens: int
    max_prompt_tokens: int | None
    max_num_queued_requests: int | None

    def check_request(self, request: Request) -> None:
        """Raises RequestRefusedError for a request that could never run."""
        prompt, name = request.num_prompt_tokens, f"request {request.request_id}"
        if prompt == 0:
            raise RequestRefusedError(f"{name}: the prompt has no tokens")
        if prompt >= self.max_model_len:
            raise RequestRefusedError(
                f"{name}: a prompt of {prompt} tokens leaves no room for output; prompt and output together may have "
                f"max_model_len = {self.max_model_len}"
            )
        known = len(request.token_ids)  # a replayed request has more than its prompt
        if known > self.pool_tokens:
            raise RequestRefusedError(
                f"{name}: a prompt of {known} tokens is more than the {self.pool_tokens} tokens of one sequence that "
                f"the KV cache holds"
            )
        if self.max_prompt_tokens is not None and prompt > self.max_prompt_tokens:
            raise RequestRefusedError(
                f"{name}: a prompt of {prompt} tokens does not fit in one step of max_num_batched_tokens = "
                f"{self.max_prompt_tokens}, and chunked prefill is off"
            )

    def check_queue(self, num_waiting: int, num_free_rows: int) -> None:
        """Raises QueueFullError when too many wait, besides those that free rows can take in the next step."""
        limit = self.max_num_queued_requests
        if limit is not None and num_waiting >= limit + num_free_rows:
            raise QueueFullError(
                f"{num_waiting} requests are waiting, {num_free_rows} of them for the next step; "
                f"max_num_queued_requests is {limit}"
            )

    def max_total_tokens(self, request: Request) -> int:
        """Where the request ends for its length: its own limit, the context, or the last token that the pool allows
        (whose KV nobody needs)."""
        limit = min(self.max_model_len, self.pool_tokens + 1)
        max_tokens = request.sampling_params.max_tokens
        return limit if max_tokens is None else min(limit, request.num_prompt_tokens + max_tokens)
