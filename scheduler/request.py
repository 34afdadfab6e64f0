"""A request: its wire form from the front end (`EngineCoreRequest`) and its state in the scheduler (`Request`)."""

from __future__ import annotations

import msgspec

from scheduler.sampling_params import SamplingParams


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
    """

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []
    arrival_time_s: float = 0.0
    client_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
