"""`AsyncLLM`: the asyncio front end. One async generator per request, one task that reads the outputs of all."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from engine_actors.beam_search import BeamSearchOutput, BeamSearchParams, plan_beam_searches
from engine_actors.clients import EngineCoreClient
from engine_actors.config import EngineConfig
from engine_actors.errors import EngineDeadError, InvalidRequestError
from engine_actors.input_processor import InputProcessor, ProcessedRequest, PromptType, load_tokenizer
from engine_actors.llm import as_prompt_list, broadcast
from engine_actors.off_loop import compute_beside_loop
from engine_actors.output_processor import OutputProcessor
from engine_actors.outputs import RequestOutput
from engine_actors.ray_places import place_of_worker
from engine_actors.replay import RecoveryStats
from engine_actors.request_stream import RequestStream
from engine_actors.utilities import AsyncUtilities
from scheduler.output import SchedulerStats
from scheduler.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

THREAD_TOKENISE_CHARS = 20_000
"""Longer texts are tokenised in a thread, so that the event loop goes on."""
OUTPUTS_PER_TURN = 256
"""Requests whose outputs are processed before other tasks get a turn."""


class AsyncLLM(AsyncUtilities):
    """An engine for asyncio programs. Construct it anywhere, use it from one event loop at a time.

        engine = AsyncLLM("path/to/model")
        async for output in engine.generate("Hello", SamplingParams(max_tokens=32)): ...
        engine.shutdown()

    Args:
        model: Local Hugging Face directory, or a hub id.
        **kwargs: Everything `EngineConfig.from_kwargs` takes. `engine_core` must be "actor".

    Raises:
        TypeError, ValueError: An unknown or wrong option.
        EngineStartupError: The engine could not start; the text has the root cause.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._start(EngineConfig.from_kwargs(model, **kwargs))

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """Same, from a config made before."""
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    from_engine_args = from_config
    """vLLM's name of `from_config`."""

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.client = EngineCoreClient.make_client(config, asyncio_mode=True)
        try:
            self.input_processor = InputProcessor(
                config, self.tokenizer, self.client.info.max_model_len, self.client.client_index
            )
        except BaseException:
            self.client.shutdown(0.0)
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self._streams: dict[str, RequestStream] = {}
        self._stats_listeners: list[Callable[[SchedulerStats], None]] = []
        self._drained: asyncio.Event | None = None
        self._ids = itertools.count()
        self._output_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request. Leaving, closing or cancelling the iteration aborts the request in the engine.

        Raises:
            InvalidRequestError: At the first iteration, before anything reached the engine.
            EngineDeadError: The engine has failed.
        """
        stream = await self.add_request(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            self.drop(stream)

    async def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Queue a request; it is checked when this returns. Pass the stream to `drop` if you stop reading it early."""
        ids = None if request_id is None else [request_id]
        streams = await self.add_requests([prompt], sampling_params, ids, priority, add_special_tokens)
        return streams[0]

    async def add_requests(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        add_special_tokens: bool = True,
        limit_logprobs: bool = True,
    ) -> list[RequestStream]:
        """Queue several requests in one message; if one of them is wrong, none.

        Args:
            limit_logprobs: EngineConfig.max_logprobs holds for them.
        """
        self._start_output_task()
        params = broadcast("sampling_params", sampling_params, len(prompts), None)
        priorities = broadcast("priority", priority, len(prompts), 0)
        ids = list(request_ids or (f"request-{next(self._ids)}" for _ in prompts))
        process = partial(
            self.input_processor.process_batch, ids, list(prompts), params, priorities,
            add_special_tokens=add_special_tokens, limit_logprobs=limit_logprobs,
        )  # fmt: skip
        if _num_chars(prompts) > THREAD_TOKENISE_CHARS or not self.input_processor.is_quick(params):
            requests = await compute_beside_loop(process)
        else:
            requests = process()
        return self._submit(requests)

    async def generate_all(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """One finished output for each prompt, in their order. Cancelling aborts all of them."""
        batch = as_prompt_list(prompts)
        default = self.input_processor.default_sampling_params()
        params = [
            p.with_output_kind(RequestOutputKind.FINAL_ONLY) if isinstance(p, SamplingParams) else p
            for p in broadcast("sampling_params", sampling_params, len(batch), default)
        ]
        return await self._run_to_end(await self.add_requests(batch, params, None, priority, add_special_tokens))

    async def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, as `LLM.beam_search`; other requests go on beside it.
        Cancelling aborts it."""
        outputs: list[BeamSearchOutput] = []
        for searches in plan_beam_searches(as_prompt_list(prompts), params, self.input_processor, concurrency_limit):
            step = searches.step_params.with_output_kind(RequestOutputKind.FINAL_ONLY)
            while inputs := searches.next_prompts():
                streams = await self.add_requests(inputs, step, limit_logprobs=False)
                searches.advance(await self._run_to_end(streams))
            outputs += searches.results()
        return outputs

    async def _run_to_end(self, streams: Sequence[RequestStream]) -> list[RequestOutput]:
        """The one output of each of these final-only requests; whatever happens, none is left behind."""
        try:
            return [await anext(stream) for stream in streams]
        finally:
            for stream in streams:
                self.drop(stream)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as prompt text; see `InputProcessor.render_chat`. Add no special tokens to it."""
        return self.input_processor.render_chat(messages, **options)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests early; their streams end with finish_reason "abort". Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        children = self.output_processor.take_children(request_ids)
        if children:
            self.client.abort_requests(children)

    def drop(self, stream: RequestStream) -> None:
        """Abort a request nobody reads any more, unless it has ended."""
        self._streams.pop(stream.request_id, None)
        if stream.finished or not self.output_processor.is_unfinished(stream.request_id):
            return
        children = self.output_processor.take_children([stream.request_id])
        self.output_processor.forget([stream.request_id])
        self._note_if_drained()
        if children and self.client.dead_error is None:
            try:
                self.client.abort_requests(children)
            except EngineDeadError:
                logger.debug("Request %s was dropped after the engine's end", stream.request_id)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300.0) -> None:
        """Return when no request of this front end is unfinished. Others may be added meanwhile, and are waited for.

        Raises:
            TimeoutError: Some are still unfinished after `drain_timeout` seconds.
            EngineDeadError: The engine has failed, now or before.
        """
        try:
            async with asyncio.timeout(drain_timeout):
                while self.output_processor.num_unfinished:
                    self._drained = self._drained or asyncio.Event()
                    await self._drained.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{self.output_processor.num_unfinished} requests are unfinished after {drain_timeout:g} s"
            ) from None
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error.__cause__

    def _note_if_drained(self) -> None:
        if self._drained is not None and not self.output_processor.num_unfinished:
            self._drained.set()
            self._drained = None

    # The engine

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it lives."""
        return self.client.dead_error

    @property
    def errored(self) -> bool:
        return self.client.dead_error is not None

    @property
    def is_running(self) -> bool:
        return self.client.dead_error is None

    @property
    def is_stopped(self) -> bool:
        return self.client.dead_error is not None

    @property
    def recovery_stats(self) -> RecoveryStats:
        """What recoveries cost so far, and whether one is under way. All zero without `recovery="replay"`."""
        return self.client.recovery_stats

    def add_stats_listener(self, listener: Callable[[SchedulerStats], None]) -> None:
        """Call `listener` on the event loop with each report of the scheduler, about once per step."""
        self._stats_listeners.append(listener)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.input_processor.default_sampling_params()

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is alive and its step loop not stuck."""
        await self.client.check_health_async()

    async def where(self) -> dict[str, str]:
        """Node and process of each part of the engine: EngineCore and the workers, by rank."""
        workers = await self.collective_rpc(place_of_worker)
        core = {"EngineCore": await self.client.link.actor.where.remote()}
        return core | {f"Worker {rank}": place for rank, place in enumerate(workers)}

    async def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        self._start_output_task()
        result = await self.client.call_utility_async(name, *args, **kwargs)
        if name == "update_config":
            self.config = self.config.with_runtime_options(result)
        return result

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """vLLM's name of `pause`."""
        await self.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """vLLM's name of `resume`."""
        await self.resume()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop the engine and give everything back. Idempotent. Blocks; on an event loop prefer `shutdown_async`.

        Requests in flight are aborted, or with a timeout go on for up to so long; their streams then end.
        """
        self.client.shutdown(timeout_s)
        self._after_shutdown()

    async def shutdown_async(self, timeout_s: float | None = None) -> None:
        """Same, while the event loop goes on; returns when the streams have ended."""
        await self.client.shutdown_async(timeout_s)
        self._after_shutdown()
        if self._output_task is not None:
            await asyncio.wait([self._output_task])

    # Inside

    def _submit(self, requests: Sequence[ProcessedRequest]) -> list[RequestStream]:
        ids = [request.parent.request_id for request in requests]
        for index, request_id in enumerate(ids):
            if self.output_processor.is_unfinished(request_id) or request_id in ids[:index]:
                raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        streams = [RequestStream(request) for request in requests]
        self.client.add_requests([child for request in requests for child in request.children])
        for request, stream in zip(requests, streams, strict=True):
            self.output_processor.add(request.parent, request.children)
            self._streams[stream.request_id] = stream
        return streams

    def _start_output_task(self) -> None:
        loop = asyncio.get_running_loop()
        if self._output_task is not None and self._loop is loop and not self._output_task.done():
            return
        if self._output_task is not None and not self._output_task.done() and not self._loop_is_closed():
            raise RuntimeError("AsyncLLM is in use by another event loop; use it from one at a time")
        error = self.client.dead_error
        if error is not None:
            raise EngineDeadError(str(error)) from error.__cause__
        self._loop = loop
        self._output_task = loop.create_task(self._read_outputs(), name="engine-actors-outputs")

    def _loop_is_closed(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    async def _read_outputs(self) -> None:
        """The output task: give each request its outputs, until the engine ends."""
        try:
            while True:
                for outputs in await self.client.get_output_async():
                    if outputs.stats is not None:
                        self._tell_listeners(outputs.stats)
                    processed = self.output_processor.process(outputs)
                    if processed.aborts:
                        self.client.abort_requests(processed.aborts)
                    self._note_if_drained()
                    if len(outputs.request_ids) > OUTPUTS_PER_TURN:
                        await asyncio.sleep(0)
        except EngineDeadError as error:
            self._fail_streams(error)
        except Exception as error:
            logger.exception("The output task failed")
            self._fail_streams(EngineDeadError(f"reading the engine's outputs failed: {error!r}"))
            self.client.shutdown(0.0)

    def _tell_listeners(self, stats: SchedulerStats) -> None:
        """One that raises is not called again: figures must not end requests."""
        for listener in list(self._stats_listeners):
            try:
                listener(stats)
            except Exception:
                logger.exception("The stats listener %r failed and is removed", listener)
                self._stats_listeners.remove(listener)

    def _fail_streams(self, error: EngineDeadError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        self.output_processor.forget([stream.request_id for stream in streams])
        self._note_if_drained()
        for stream in streams:
            if not stream.finished:
                failure = EngineDeadError(str(error))
                failure.__cause__ = error.__cause__
                stream.fail(failure)

    def _after_shutdown(self) -> None:
        """When nothing more can come, end what still waits."""
        task = self._output_task
        if task is not None and not task.done() and not self.client.link.is_connected:
            if not self._loop_is_closed():
                task.cancel()
            self._fail_streams(EngineDeadError("the engine was shut down"))


def _num_chars(prompts: Sequence[Any]) -> int:
    total = 0
    for prompt in prompts:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        total += len(text) if isinstance(text, str) else 0
    return total
