"""What completions and chat completions have in common once a request is checked. Run by endpoints.py."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from engine_actors.outputs import CompletionOutput, RequestOutput
from engine_actors.serve.chunks import ChunkEncoder, PendingChoice
from engine_actors.serve.generation import Generation
from engine_actors.serve.models import ServedModel
from engine_actors.serve.protocol import GenerationRequest


@dataclass(frozen=True)
class RequestInfo:
    """Who asks.

    Attributes:
        request_id: As clients see it, "chatcmpl-…".
        external_id: X-Request-Id, given or made.
        priority_header: X-Vllm-Priority.
    """

    request_id: str
    external_id: str
    priority_header: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class StreamShape:
    """How a stream is cut.

    Attributes:
        interval: Tokens per chunk, at least.
    """

    include_usage: bool
    usage_in_each_chunk: bool
    interval: int


class Job(ABC):
    """A checked request, ready to run.

    Attributes:
        renamed: Engine field → the request's own name for it, for errors that the engine raises.
    """

    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        request: GenerationRequest,
        info: RequestInfo,
        model: ServedModel,
        generation: Generation,
        shape: StreamShape,
        renamed: Mapping[str, str],
    ) -> None:
        self.info = info
        self.model = model
        self.generation = generation
        self.renamed = renamed
        self._name = request.model or model.names[0]
        self._n = generation.params[0].n
        self._shape = shape
        self._returns_token_ids = bool(request.return_token_ids)

    @property
    def usage(self) -> Any:
        return self.generation.usage

    async def response(self) -> dict[str, Any]:
        """The body of an answer that does not stream."""
        outputs = await self.generation.final_outputs()
        choices = [
            self._choice(prompt_index, output, completion)
            for prompt_index, output in enumerate(outputs)
            for completion in sorted(output.outputs, key=lambda completion: completion.index)
        ]
        return {
            "id": self.info.request_id,
            "object": self.object_name,
            "created": self.info.created,
            "model": self._name,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage.as_json(),
            **self._more_fields(outputs),
            "kv_transfer_params": None,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events, without the final [DONE]."""
        fields = {
            "id": self.info.request_id,
            "object": self.chunk_object_name,
            "created": self.info.created,
            "model": self._name,
        }
        encoder = ChunkEncoder(fields, self.usage if self._shape.usage_in_each_chunk else None)
        pending = [PendingChoice(index) for index in range(self._n * len(self.generation.prompts))]
        interval = self._shape.interval
        async with aclosing(self.generation.outputs()) as outputs:
            async for prompt_index, output in outputs:
                data = self._opening(prompt_index, output, pending, encoder)
                for completion in output.outputs:
                    choice = pending[prompt_index * self._n + completion.index]
                    choice.add(completion.text, completion.token_ids, completion.logprobs)
                    if choice.is_due(interval, completion.finish_reason):
                        data += self._chunk(prompt_index, output, completion, choice, encoder)
                if data:
                    yield data
        if self._shape.include_usage:
            yield encoder.usage_chunk(self.usage)

    @abstractmethod
    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def _chunk(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        choice: PendingChoice,
        encoder: ChunkEncoder,
    ) -> bytes:
        """The events of what `choice` has got: usually one."""

    def _opening(
        self, prompt_index: int, output: RequestOutput, pending: list[PendingChoice], encoder: ChunkEncoder
    ) -> bytes:
        """Events before those of an output's tokens."""
        return b""

    def _more_fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Top-level fields of the endpoint's own."""
        return {}
