"""A deterministic stand-in for AsyncLLM: it says what its script says, with the real tokenizer and detokenizer.

Everything a test may want to steer is an attribute; `reset` brings the defaults back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from engine_actors.detokenizer import Detokenizer, TokenDecoder
from engine_actors.errors import EngineDeadError
from engine_actors.outputs import CompletionOutput, RequestOutput, RequestStateStats
from scheduler.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_REPLY = "The quick brown fox jumps over the lazy dog."


@dataclass
class Logprob:
    """As `engine_actors.outputs` will have it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Call:
    """One use of `generate`."""

    token_ids: list[int]
    cache_salt: str | None
    params: SamplingParams
    request_id: str
    priority: int


class FakeLLM:
    """See the module's docstring.

    Attributes:
        reply: Text, or token ids, of every completion; or a function (prompt ids, completion index) → one of them.
        gate: When set, each token of each request needs one `release`.
        refusal: Raised by `generate` before anything else.
        failure_after: (number of tokens, exception): raised in the middle.
        calls: What `generate` was asked.
        running: Request ids being generated; `idle` is set while there are none.
        dropped: Ids of requests that were closed or cancelled before their end.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.idle = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.reply: str | list[int] | Callable[[list[int], int], str | list[int]] = DEFAULT_REPLY
        self.gate: asyncio.Semaphore | None = None
        self.refusal: Exception | None = None
        self.failure_after: tuple[int, Exception] | None = None
        self.error_output: Exception | None = None
        self.dead: str | None = None
        self.num_cached = 0
        self.calls: list[Call] = []
        self.running: set[str] = set()
        self.dropped: list[str] = []
        self.aborted: set[str] = set()
        self.aborting: dict[str, asyncio.Event] = {}
        self.num_cache_resets = 0
        self.started = threading.Event()
        self.idle.set()

    # What the server uses

    @property
    def errored(self) -> bool:
        return self.dead is not None

    async def check_health(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    async def reset_prefix_cache(self) -> bool:
        self.num_cache_resets += 1
        return not self.running

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.aborted.update(ids)
        for each in ids:
            if each in self.aborting:
                self.aborting[each].set()

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        token_ids = prompt["prompt_token_ids"]
        self.calls.append(Call(token_ids, prompt.get("cache_salt"), sampling_params, request_id, priority))
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.refusal is not None:
            raise self.refusal
        self.running.add(request_id)
        self.idle.clear()
        self.aborting[request_id] = asyncio.Event()
        self.started.set()
        finished = False
        try:
            async for output in self._run(token_ids, sampling_params, request_id):
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.dropped.append(request_id)
            self.running.discard(request_id)
            del self.aborting[request_id]
            if not self.running:
                self.idle.set()

    # Inside

    async def _run(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        now = time.monotonic()
        stats = RequestStateStats(time.time(), now, now)
        writers = [_Writer(self, prompt, params, index) for index in range(params.n)]
        for num_tokens in count(1):
            await self._wait(request_id)
            if self.failure_after is not None and num_tokens > self.failure_after[0]:
                raise self.failure_after[1]
            stats.last_token_ts = time.monotonic()
            if num_tokens == 1:
                stats.first_token_ts, stats.first_token_latency = stats.last_token_ts, 0.001
            for writer in writers:
                if writer.finish_reason is None:
                    writer.step(request_id in self.aborted)
                    if params.output_kind is RequestOutputKind.DELTA:
                        done = all(w.finish_reason for w in writers)
                        yield self._output(prompt, params, request_id, [writer.delta()], stats, done)
            if all(writer.finish_reason for writer in writers):
                break
        if params.output_kind is not RequestOutputKind.DELTA:
            yield self._output(prompt, params, request_id, [writer.final() for writer in writers], stats, True)

    async def _wait(self, request_id: str) -> None:
        if self.gate is None:
            await asyncio.sleep(0)
            return
        waits = [asyncio.ensure_future(self.gate.acquire()), asyncio.ensure_future(self.aborting[request_id].wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _output(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        completions: list[CompletionOutput],
        stats: RequestStateStats,
        finished: bool,
    ) -> RequestOutput:
        error = self.error_output
        if error is not None:
            completions[0].finish_reason, finished = "error", True
        return RequestOutput(
            request_id,
            None,
            prompt,
            completions,
            finished,
            prompt_logprobs=self._prompt_logprobs(prompt, getattr(params, "prompt_logprobs", None)),
            metrics=stats,
            num_cached_tokens=self.num_cached,
            error=error,
        )

    def _prompt_logprobs(self, prompt: list[int], num: int | None) -> list[dict[int, Logprob] | None] | None:
        if num is None:
            return None
        return [None, *(self.logprobs_of(token, num) for token in prompt[1:])]

    def logprobs_of(self, token_id: int, num: int) -> dict[int, Logprob]:
        """The token itself with -0.5, then the following ids, each less likely by 1."""
        found = {token_id: Logprob(-0.5, 1, self.tokenizer.decode([token_id]))}
        for rank in range(2, num + 1):
            other = token_id + rank - 1
            found[other] = Logprob(0.5 - rank, rank, self.tokenizer.decode([other]))
        return found

    def script(self, prompt: list[int], index: int) -> list[int]:
        """Tokens of a completion."""
        reply = self.reply(prompt, index) if callable(self.reply) else self.reply
        return self.tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else list(reply)


class _Writer:
    """One completion being written."""

    def __init__(self, llm: FakeLLM, prompt: list[int], params: SamplingParams, index: int) -> None:
        self._llm, self._params, self._index = llm, params, index
        self._eos = llm.tokenizer.eos_token_id
        self._script = llm.script(prompt, index)
        self._limit = min(params.max_tokens or llm.max_model_len, llm.max_model_len - len(prompt))
        decoder = TokenDecoder(llm.tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
        self._text = Detokenizer(decoder, prompt, params.stop, params.include_stop_str_in_output, params.min_tokens)
        self._token_ids: list[int] = []
        self._num_taken = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def step(self, is_aborted: bool) -> None:
        params = self._params
        if is_aborted:
            self._end("abort", None)
            return
        position = len(self._token_ids)
        token_id = self._script[position] if position < len(self._script) else self._eos
        if params.ignore_eos and token_id == self._eos:
            token_id = self._script[position % len(self._script)]
        self._token_ids.append(token_id)
        if token_id in params.stop_token_ids or (token_id == self._eos and not params.ignore_eos):
            self._end("stop", token_id if token_id in params.stop_token_ids else None)
            return
        self._text.push([token_id])
        if self._text.stop is not None:
            self._end("stop", self._text.stop)
        elif len(self._token_ids) >= self._limit:
            self._end("length", None)

    def delta(self) -> CompletionOutput:
        new = self._token_ids[self._num_taken :]
        self._num_taken = len(self._token_ids)
        return self._completion(self._text.take_delta(), new)

    def final(self) -> CompletionOutput:
        return self._completion(self._text.text, self._token_ids)

    def _completion(self, text: str, token_ids: list[int]) -> CompletionOutput:
        num, asked_ids = self._params.logprobs, self._params.logprob_token_ids
        logprobs = None
        if asked_ids is not None:
            others = {each: Logprob(-2.0, 7, self._llm.tokenizer.decode([each])) for each in asked_ids}
            logprobs = [{**self._llm.logprobs_of(token, 0), **others} for token in token_ids]
        elif num is not None:
            logprobs = [self._llm.logprobs_of(token, num) for token in token_ids]
        return CompletionOutput(
            self._index,
            text,
            list(token_ids),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self._text.finish()
        if self._text.stop is not None:
            finish_reason, stop_reason = "stop", self._text.stop
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
