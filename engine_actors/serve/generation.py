"""One HTTP request's prompts in the engine: outputs merged, counted and timed. Used by completions.py and chat.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from engine_actors.engine_metrics import RequestMeter
from engine_actors.outputs import RequestOutput
from engine_actors.serve.errors import generation_failed
from engine_actors.serve.inflight import InflightRequest
from engine_actors.serve.prompts import Prompt
from scheduler.sampling_params import SamplingParams

OUTPUTS_AHEAD = 2
"""Outputs per prompt that may wait for a slow client; what comes after them is merged by the engine's front end."""


class EngineClient(Protocol):
    """What the HTTP server needs of an engine. `AsyncLLM` is one."""

    @property
    def errored(self) -> bool: ...

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def abort(self, request_id: str | Sequence[str]) -> None: ...

    async def check_health(self) -> None: ...

    async def reset_prefix_cache(self) -> bool: ...


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. Each prompt counts once, whatever n is.

    Attributes:
        hides_generated: What is generated is dropped (echo with max_tokens 0), and reported as none.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    hides_generated: bool = False

    def as_json(self) -> dict[str, Any]:
        num_generated = 0 if self.hides_generated else self.num_generated
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + num_generated,
            "completion_tokens": num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(slots=True)
class Generation:
    """An HTTP request's work in the engine.

    Attributes:
        prompts, params: One of each per prompt.
        record: Its entry among the server's requests in flight, kept up to date here.
        meter: Feeds the metrics.
    """

    llm: EngineClient
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    priority: int
    record: InflightRequest
    meter: RequestMeter
    usage: Usage = field(default_factory=Usage)
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.usage.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        self.record.num_prompt_tokens = self.usage.num_prompt_tokens
        self.record.llm = self.llm
        # Clients may repeat their request ids; the engine's must be unique.
        suffix = uuid4().hex[:8]
        self.record.engine_ids = [f"{self.record.request_id}-{index}-{suffix}" for index in range(len(self.prompts))]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt index, output) as they come; closing or cancelling it aborts what is unfinished.

        Raises:
            Exception: Whatever the engine raises for one of the prompts; the others are aborted.
        """
        try:
            if len(self.prompts) == 1:
                # The usual case: each generator in between costs every token.
                async with aclosing(self._start(0)) as outputs:
                    async for output in outputs:
                        self._count(0, output)
                        yield 0, output
                return
            async with aclosing(self._merged()) as merged:
                async for index, output in merged:
                    self._count(index, output)
                    yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            self.meter.end("abort")
            raise
        except Exception:
            self.meter.end("error")
            raise

    async def final_outputs(self) -> list[RequestOutput]:
        """The finished output of each prompt, for FINAL_ONLY requests."""
        finals: list[RequestOutput | None] = [None] * len(self.prompts)
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                if output.finished:
                    finals[index] = output
        complete = [output for output in finals if output is not None]
        if len(complete) != len(finals):
            raise generation_failed(self.record.request_id)
        return complete

    def _start(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        return self.llm.generate(
            self.prompts[index].engine_input(),
            self.params[index],
            request_id=self.record.engine_ids[index],
            priority=self.priority,
        )

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue(OUTPUTS_AHEAD * len(self.prompts))

        async def pump(index: int) -> None:
            async with aclosing(self._start(index)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put((index, None))

        pumps = [asyncio.create_task(pump(index)) for index in range(len(self.prompts))]
        try:
            async for item in _until_all_end(queue, pumps):
                yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _count(self, index: int, output: RequestOutput) -> None:
        record, usage = self.record, self.usage
        if record.first_output_s is None:
            record.first_output_s = time.monotonic()
        if index not in self._seen:
            self._seen.add(index)
            usage.num_cached_tokens += output.num_cached_tokens or 0
            record.num_cached_tokens = usage.num_cached_tokens
        num_new = 0
        for completion in output.outputs:
            num_new += len(completion.token_ids)
            if completion.finish_reason == "error":
                raise output.error or generation_failed(record.request_id)
        usage.num_generated += num_new
        record.num_generated = usage.num_generated
        self.meter.observe(index, output)


async def _until_all_end(
    queue: asyncio.Queue[tuple[int, RequestOutput | None]], pumps: Sequence[asyncio.Task[None]]
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Items of the queue until each pump has put its end; raises what a pump raised as soon as it does."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not failed.done():
            failed.set_result(None)

    for task in pumps:
        task.add_done_callback(note)
    running = len(pumps)
    while running:
        getter = asyncio.ensure_future(queue.get())
        try:
            waiting: set[asyncio.Future[Any]] = {getter, failed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not getter.done():
                raise next(error for task in pumps if task.done() and (error := task.exception()) is not None)
            index, output = getter.result()
        finally:
            getter.cancel()
        if output is None:
            running -= 1
        else:
            yield index, output
