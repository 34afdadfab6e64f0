"""POST /v1/completions: the request checked, and its answer's shapes. Run by endpoints.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engine_actors.outputs import CompletionOutput, RequestOutput
from engine_actors.serve.chunks import ChunkEncoder, PendingChoice, to_json
from engine_actors.serve.errors import BadRequest, bad_value
from engine_actors.serve.generation import Generation
from engine_actors.serve.inflight import InflightRequest
from engine_actors.serve.job import Job, RequestInfo, StreamShape
from engine_actors.serve.logprobs import LogprobFormatter, prompt_logprobs
from engine_actors.serve.models import ServedModel
from engine_actors.serve.params import (
    check_stream_options,
    effective_priority,
    effective_stream_interval,
    fit_to_prompt,
    sampling_params,
)
from engine_actors.serve.prompts import Prompt, split_prompt_field, to_prompt
from engine_actors.serve.protocol import CompletionRequest
from engine_actors.serve.settings import ServerSettings
from engine_actors.serve.structured import constraint
from scheduler.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
PROMPTS_PER_TURN = 16
"""Prompts tokenised before other requests get a turn on the event loop."""


async def prepare_completion(
    request: CompletionRequest, info: RequestInfo, model: ServedModel, settings: ServerSettings
) -> CompletionJob:
    """Check everything about a request.

    Raises:
        BadRequest: Naming the field at fault.
    """
    include_usage, usage_in_each_chunk = check_stream_options(request)
    given = split_prompt_field(request.prompt, model.limits.max_prompts)
    params = _params(request, model, settings)
    if len(given) * params.n > settings.max_sequences:
        raise BadRequest(
            f"n times the number of prompts must be at most {settings.max_sequences}, got {params.n} x {len(given)}",
            "n",
        )
    prompts: list[Prompt] = []
    for index, each in enumerate(given):
        prompts.append(await to_prompt(each, request, model.tokenization, model.limits, add_special_tokens=True,
                                       param="prompt"))  # fmt: skip
        if index % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1:
            await asyncio.sleep(0)
    if request.echo:
        for prompt in prompts:
            if prompt.text is None:
                skip = request.skip_special_tokens is not False
                prompt.text = await model.tokenization.decode(prompt.token_ids, skip)
    fitted = [
        fit_to_prompt(params, len(prompt.token_ids), model.limits, model.server_max_tokens, prompt is prompts[-1])
        for prompt in prompts
    ]
    record = InflightRequest(info.request_id, info.external_id, "completion", model.names[0], bool(request.stream))
    priority = effective_priority(request, info.priority_header)
    generation = Generation(model.llm, prompts, fitted, priority, record, model.metrics.request_meter())
    shape = StreamShape(include_usage, usage_in_each_chunk, effective_stream_interval(request, settings))
    return CompletionJob(request, info, model, generation, shape)


def _params(request: CompletionRequest, model: ServedModel, settings: ServerSettings) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1  # the engine always generates; the token is dropped
    elif max_tokens < 1:
        raise bad_value("max_tokens", max_tokens, "at least 1, or 0 with echo")
    if request.stream and request.prompt_logprobs:
        raise BadRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    wanted = request.prompt_logprobs
    if request.echo and request.logprobs is not None and wanted is None:
        wanted = request.logprobs
    return sampling_params(
        request,
        max_tokens=max_tokens,
        max_tokens_field="max_tokens",
        logprobs=request.logprobs,
        logprobs_field="logprobs",
        prompt_logprobs=wanted,
        constraint=constraint(request, None),
        defaults=model.defaults,
        limits=model.limits,
        settings=settings,
    )


class CompletionJob(Job):
    """A checked completions request."""

    object_name = chunk_object_name = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        info: RequestInfo,
        model: ServedModel,
        generation: Generation,
        shape: StreamShape,
    ) -> None:
        source = "response_format" if request.response_format is not None else "structured_outputs"
        super().__init__(request, info, model, generation, shape, {"structured_outputs": source})
        self._echoes = bool(request.echo)
        self._drops_output = self._echoes and request.max_tokens == 0
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        generation.usage.hides_generated = self._drops_output
        self._logprobs = None
        if request.logprobs is not None:
            self._logprobs = LogprobFormatter(
                model.tokenization, request.logprobs, bool(request.return_tokens_as_token_ids)
            )

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        prompt = self.generation.prompts[prompt_index]
        text, token_ids, positions = completion.text, completion.token_ids, completion.logprobs
        logprobs, _ = self._completion_logprobs(prompt, output, token_ids, positions, 0, True)
        return {
            "index": prompt_index * self._n + completion.index,
            "text": self._with_echo(prompt, text),
            "logprobs": logprobs,
            "finish_reason": "length" if self._drops_output else completion.finish_reason,
            "stop_reason": None if self._drops_output else completion.stop_reason,
            "token_ids": self._shown_token_ids(token_ids) if self._returns_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if self._wants_prompt_logprobs else None,
            "prompt_token_ids": prompt.token_ids if self._returns_token_ids else None,
            "routed_experts": None,
        }

    def _chunk(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        choice: PendingChoice,
        encoder: ChunkEncoder,
    ) -> bytes:
        is_first = choice.is_first
        text, token_ids, positions = choice.take()
        finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
        prompt = self.generation.prompts[prompt_index]
        logprobs = b"null"
        if self._logprobs is not None:
            shape, choice.text_offset = self._completion_logprobs(
                prompt, output, token_ids, positions, choice.text_offset, is_first
            )
            logprobs = to_json(shape)
        if is_first:
            text = self._with_echo(prompt, text)
        elif self._drops_output:
            text = ""
        if self._drops_output and finish_reason is not None:
            finish_reason, stop_reason = "length", None
        returned = prompt_ids = b"null"
        if self._returns_token_ids:
            returned = to_json(self._shown_token_ids(token_ids))
            prompt_ids = to_json(prompt.token_ids) if is_first else b"null"
        return encoder.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":%b,'
            b'"token_ids":%b}'
            % (
                choice.index,
                to_json(text),
                logprobs,
                b"null" if finish_reason is None else to_json(finish_reason),
                b"null" if stop_reason is None else to_json(stop_reason),
                prompt_ids,
                returned,
            )
        )

    def _with_echo(self, prompt: Prompt, text: str) -> str:
        if not self._echoes:
            return text
        return (prompt.text or "") + ("" if self._drops_output else text)

    def _shown_token_ids(self, token_ids: list[int]) -> list[int]:
        return [] if self._drops_output else token_ids

    def _completion_logprobs(
        self,
        prompt: Prompt,
        output: RequestOutput,
        token_ids: list[int],
        positions: Sequence[Any] | None,
        text_offset: int,
        is_first: bool,
    ) -> tuple[dict[str, Any] | None, int]:
        """Of the answer's tokens, after the prompt's when it is echoed."""
        if self._logprobs is None:
            return None, text_offset
        if self._drops_output:
            token_ids, positions = [], []
        if self._echoes and is_first:
            token_ids = prompt.token_ids + token_ids
            positions = list(output.prompt_logprobs or ()) + list(positions or ())
        return self._logprobs.completion(token_ids, positions or [], text_offset)
