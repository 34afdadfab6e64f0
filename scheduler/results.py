"""What a step's tokens mean: whether they end a request, and what each client is told. Used by scheduler.scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from scheduler.logprobs import TokenLogprobs
from scheduler.output import EngineCoreOutputs, FinishedRequest, FinishReason, RequestEvents
from scheduler.request import Request
from scheduler.structured_output import GrammarFailure


def finished(
    request: Request,
    reason: FinishReason,
    stop_reason: int | None = None,
    error: str | None = None,
) -> FinishedRequest:
    """The end of a request as clients are told."""
    return FinishedRequest(
        request.request_id, reason, stop_reason, error, num_preemptions=request.num_preemptions
    )  # fmt: skip


def complete(request: Request) -> FinishedRequest:
    """The end of a request whose text its grammar completes."""
    return FinishedRequest(
        request.request_id, FinishReason.STOP, num_preemptions=request.num_preemptions, last_token_is_text=True
    )


def failed(request: Request, failure: GrammarFailure) -> FinishedRequest:
    """The end of a request by its grammar."""
    return FinishedRequest(
        request.request_id,
        FinishReason.ERROR,
        error=f"structured_outputs: {failure.error}",
        error_type=failure.error_type,
        num_preemptions=request.num_preemptions,
        error_field="structured_outputs",
    )


def end_of_request(request: Request, max_model_len: int) -> FinishedRequest | None:
    """Whether the last known token ends the request. A stop goes before a length that is reached with it."""
    token = request.token_ids[-1]
    num_output_tokens = request.num_output_tokens
    params = request.sampling_params
    if token in request.stop_token_ids and num_output_tokens >= params.min_tokens:
        return finished(request, FinishReason.STOP, None if token in request.eos_token_ids else token)
    if num_output_tokens == params.max_tokens or len(request.token_ids) == max_model_len:
        return finished(request, FinishReason.LENGTH)
    if len(request.token_ids) == request.max_total_tokens:
        error = (
            f"the KV cache holds {len(request.token_ids) - 1} tokens of one sequence, so it ends after "
            f"{num_output_tokens} generated tokens; max_tokens is {params.max_tokens}"
        )
        return finished(request, FinishReason.ERROR, error=error)
    return None


def collect_outputs(
    requests: list[Request],
    tokens: array[int],
    logprobs: TokenLogprobs | None,
    ended: Iterable[tuple[Request, FinishedRequest]],
    started: Iterable[Request],
    one_client: int | None,
    now_s: float,
) -> dict[int, EngineCoreOutputs]:
    """By client: new tokens (one for each of `requests`) with `logprobs`, ends, events of those with their first token.

    Args:
        one_client: The only client there is, or None: then requests are sorted by theirs.
    """
    if not requests:
        return {}
    outputs: dict[int, EngineCoreOutputs] = {}
    if one_client is not None:
        outputs[one_client] = EngineCoreOutputs(
            [request.request_id for request in requests], tokens.tolist(), timestamp_s=now_s, logprobs=logprobs
        )
    else:
        for request, token in zip(requests, tokens, strict=True):
            output = outputs.get(request.client_index)
            if output is None:
                output = outputs[request.client_index] = EngineCoreOutputs([], [], timestamp_s=now_s)
            output.request_ids.append(request.request_id)
            output.token_ids.append(token)
        if logprobs is not None:
            for client, output in outputs.items():
                output.logprobs = logprobs.select(
                    index for index, request in enumerate(requests) if request.client_index == client
                )
    for request, end in ended:
        outputs[request.client_index].finished.append(end)
    for request in started:
        events = RequestEvents(request.request_id, request.queued_s, request.scheduled_s, request.num_cached_tokens)
        outputs[request.client_index].started.append(events)
        if request.prompt_logprobs:
            outputs[request.client_index].prompt_logprobs[request.request_id] = request.prompt_logprobs
            request.prompt_logprobs = []
    return outputs
