"""`Engine`: AsyncLLM in a Ray actor, for `ray.get(engine.generate.remote(...))` from anywhere in the cluster.

The actor owns its EngineCore, which owns its workers: when one ends, those below it end too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import ray

from engine_actors.async_llm import AsyncLLM
from engine_actors.config import EngineConfig
from engine_actors.input_processor import PromptType
from engine_actors.llm import as_conversation_list
from engine_actors.outputs import RequestOutput
from engine_actors.ray_places import place_of_this_process
from engine_actors.ray_sigterm import on_sigterm
from engine_actors.replay import RecoveryStats
from engine_actors.utilities import AsyncUtilities
from scheduler.sampling_params import RequestOutputKind, SamplingParams

MAX_CONCURRENT_CALLS = 10_000


class EngineActor(AsyncUtilities):
    """The class behind `Engine`. Every method is called with `.remote(...)`.

        engine = Engine.remote(model="path/to/model", tensor_parallel_size=2)
        outputs = ray.get(engine.generate.remote(["Hello"], SamplingParams(max_tokens=32)))
        for ref in engine.stream.remote("Hello"):
            print(ray.get(ref).outputs[0].text)
        ray.get(engine.shutdown.remote())

    If the engine cannot start, the actor dies with EngineStartupError, and each call raises Ray's ActorDiedError with
    that text. Later errors arrive as what they are: `except EngineDeadError` around `ray.get` works.

    The requests of a caller whose process dies run to their ends, for Ray does not tell an actor who calls it. Where
    that matters, let a supervisor `abort` them.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        # Blocking calls of Ray happen in threads here, not on the event loop.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        config = EngineConfig.from_kwargs(model, **kwargs)
        self._llm = AsyncLLM.from_config(config)
        self._stopping: asyncio.Task[None] | None = None
        on_sigterm(self._stop)

    def _stop(self) -> None:
        self._stopping = asyncio.get_running_loop().create_task(self._llm.shutdown_async())

    async def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list: a finished output for each, in order. All are checked before any is queued.

        Cancelling the call (`ray.cancel`) aborts its requests.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong.
            EngineDeadError: The engine has failed; the text has the cause.
        """
        return await self._llm.generate_all(prompts, sampling_params, priority=priority)

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; see `LLM.chat`."""
        texts = [
            self._llm.render_chat(conversation, **template_options) for conversation in as_conversation_list(messages)
        ]
        return await self._llm.generate_all(texts, sampling_params, priority=priority, add_special_tokens=False)

    @ray.method(num_returns="streaming")
    async def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request as they come, each with what is new since the one before. Cancelling aborts it."""
        async for output in self._stream(prompt, sampling_params, request_id, priority, True):
            yield output

    @ray.method(num_returns="streaming")
    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """The answer to one conversation as it comes; as `stream`."""
        text = self._llm.render_chat(messages, **template_options)
        async for output in self._stream(text, sampling_params, request_id, priority, False):
            yield output

    async def _stream(
        self,
        prompt: PromptType,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        add_special_tokens: bool,
    ) -> AsyncIterator[RequestOutput]:
        if params is None:
            params = self._llm.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = params.with_output_kind(RequestOutputKind.DELTA)
        stream = await self._llm.add_request(
            prompt, params, request_id, priority=priority, add_special_tokens=add_special_tokens
        )
        try:
            async for output in stream:
                yield output
        finally:
            self._llm.drop(stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests early (ids given to `stream`); unknown ids are ignored."""
        await self._llm.abort(request_id)

    async def health(self) -> bool:
        """True; raises EngineDeadError when the engine has failed or its step loop is stuck."""
        await self._llm.check_health()
        return True

    async def recovery_stats(self) -> RecoveryStats:
        """What recoveries cost so far (`recovery="replay"`), and whether one is under way."""
        return self._llm.recovery_stats

    async def where(self) -> dict[str, str]:
        """Node and process of each part."""
        return {"Engine": place_of_this_process(), **await self._llm.where()}

    async def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        return await self._llm.call_utility(name, *args, **kwargs)

    async def get_default_sampling_params(self) -> SamplingParams:
        return self._llm.get_default_sampling_params()

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop EngineCore and the workers; requests in flight are aborted, or finish within the timeout. Idempotent."""
        await self._llm.shutdown_async(timeout_s)

    def __ray_shutdown__(self) -> None:
        """Ray calls this when the last handle is gone, and on SIGTERM (see `_stop`), once no call is pending.

        It would end EngineCore and workers by itself, but not give back their placement group.
        """
        self._llm.client.link.close()


Engine = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=MAX_CONCURRENT_CALLS)(EngineActor)
"""The actor class: `Engine.remote(model=..., ...)`, with every option of `EngineConfig.from_kwargs`."""
