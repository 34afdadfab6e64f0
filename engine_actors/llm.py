"""`LLM`: offline generation from a script. Prompts in, all outputs back, in order."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from engine_actors.beam_search import BeamSearchOutput, BeamSearchParams, plan_beam_searches
from engine_actors.config import EngineConfig
from engine_actors.errors import InvalidRequestError, QueueFullError
from engine_actors.input_processor import ProcessedRequest, PromptType
from engine_actors.llm_engine import LLMEngine
from engine_actors.metric_snapshots import Metric, snapshots
from engine_actors.outputs import RequestOutput
from engine_actors.utilities import SyncUtilities
from executors.config import ModelConfig
from scheduler.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class LLM(SyncUtilities):
    """An engine for scripts.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Hello", "The sun is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Args:
        model: Local Hugging Face directory, or a hub id.
        **kwargs: Everything `EngineConfig.from_kwargs` takes: `dtype`, `tensor_parallel_size`, `max_model_len`, …

    Raises:
        TypeError, ValueError: An unknown or wrong option.
        EngineStartupError: The engine could not start; the text has the root cause.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.llm_engine = LLMEngine(EngineConfig.from_kwargs(model, **kwargs))
        self._ids = itertools.count()
        self._enqueued: list[ProcessedRequest] = []

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; all of them are checked before any is queued.

        Args:
            prompts: One prompt or a list: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: For all, or one for each prompt; None takes the model's defaults.
            priority: For all, or one for each; lower first, under the "priority" policy.
            tokenization_kwargs: More arguments for the tokenizer's call on texts, e.g. {"add_special_tokens": False}
                or {"truncation": True, "max_length": 100}.

        Returns:
            One finished output for each prompt, in their order. One that failed inside the engine has finish_reason
            "error" and the reason in `error`.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong; the text names field, value and what is allowed.
            EngineDeadError: The engine has failed.
            EnginePausedError: The engine is paused or asleep.
        """
        batch = as_prompt_list(prompts)
        requests = self._process(batch, sampling_params, priority, tokenization_kwargs=tokenization_kwargs)
        return self._complete(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template. Otherwise as `generate`.

        Args:
            chat_template_content_format: What the template finds as a message's content: "string" (and "auto") its
                text, "openai" a list of text parts.
        """
        texts = self._render(
            messages,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        requests = self._process(
            texts, sampling_params, priority, add_special_tokens=False, tokenization_kwargs=tokenization_kwargs
        )
        return self._complete(requests, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Check and tokenise prompts as `generate` does, for `wait_for_completion` to run. Their request ids."""
        batch = as_prompt_list(prompts)
        return self._enqueue(self._process(batch, sampling_params, priority, tokenization_kwargs=tokenization_kwargs))

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[str]:
        """Same, of conversations; `template_options` as for `InputProcessor.render_chat`."""
        texts = self._render(messages, **template_options)
        return self._enqueue(self._process(texts, sampling_params, priority, add_special_tokens=False))

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run everything enqueued; one finished output for each, in the order of enqueuing. Raises as `generate`."""
        requests, self._enqueued = self._enqueued, []
        return self._complete(requests, use_tqdm)

    def _enqueue(self, requests: Sequence[ProcessedRequest]) -> list[str]:
        self._enqueued += requests
        return [request.parent.request_id for request in requests]

    def _render(self, messages: Any, **options: Any) -> list[str]:
        render = self.llm_engine.input_processor.render_chat
        return [render(conversation, **options) for conversation in as_conversation_list(messages)]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt; see `BeamSearchParams`.

        Args:
            prompts: As for `generate`.
            concurrency_limit: Prompts searched at once; None is all.

        Raises:
            InvalidRequestError: A prompt is wrong; the text names field, value and what is allowed.
            EngineDeadError: The engine has failed.
        """
        outputs: list[BeamSearchOutput] = []
        batch = as_prompt_list(prompts)
        with _Progress(len(batch), use_tqdm) as progress:
            for searches in plan_beam_searches(batch, params, self.llm_engine.input_processor, concurrency_limit):
                while inputs := searches.next_prompts():
                    searches.advance(self._run_beams(inputs, searches.step_params))
                found = searches.results()
                outputs += found
                progress.advance(len(found))
        return outputs

    def _run_beams(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        requests = self._process(prompts, params, None, add_special_tokens=False, limit_logprobs=False)
        return self._complete(requests, use_tqdm=False)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: the model's generation_config.json over the usual defaults."""
        return self.llm_engine.input_processor.default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """The engine's figures so far: requests, tokens, times, KV cache; see `engine_actors.metric_snapshots`."""
        return snapshots(self.llm_engine.metrics)

    def get_world_size(self) -> int:
        """Workers: tensor times pipeline parallel ranks."""
        return self.llm_engine.config.parallel_config.world_size

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.config.model_config

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        return self.llm_engine.call_utility(name, *args, **kwargs)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop the engine and give everything back. Idempotent; also done at exit and by the context manager."""
        self.llm_engine.shutdown(timeout_s)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _process(
        self,
        prompts: Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        **options: Any,
    ) -> list[ProcessedRequest]:
        """`options`: of `InputProcessor.process_batch`."""
        params = [
            p.with_output_kind(RequestOutputKind.FINAL_ONLY) if isinstance(p, SamplingParams) else p
            for p in broadcast("sampling_params", sampling_params, len(prompts), self.get_default_sampling_params())
        ]
        priorities = broadcast("priority", priority, len(prompts), 0)
        request_ids = [str(next(self._ids)) for _ in prompts]
        return self.llm_engine.input_processor.process_batch(request_ids, prompts, params, priorities, **options)

    def _complete(self, requests: Sequence[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        request_ids = [request.parent.request_id for request in requests]
        try:
            with _Progress(len(requests), use_tqdm) as progress:
                outputs = self._drive(requests, progress)
        except BaseException:
            # KeyboardInterrupt among them: nothing of this call stays in the engine.
            self.llm_engine.drop_requests(request_ids)
            raise
        return [outputs[request_id] for request_id in request_ids]

    def _drive(self, requests: Sequence[ProcessedRequest], progress: _Progress) -> dict[str, RequestOutput]:
        """Run all to their end; no more at once than the engine's queue takes."""
        engine = self.llm_engine
        outputs: dict[str, RequestOutput] = {}
        unsent = deque(requests)
        limit = engine.config.scheduler_config.max_num_queued_requests
        while unsent or engine.has_unfinished_requests():
            room = len(unsent) if limit is None else max(limit, 1) - engine.get_num_unfinished_requests()
            if unsent and room > 0:
                engine.add_processed([unsent.popleft() for _ in range(min(room, len(unsent)))])
            for output in engine.step():
                if isinstance(output.error, (InvalidRequestError, QueueFullError)):
                    raise output.error
                if output.error is not None:
                    logger.warning("Request %s failed: %s", output.request_id, output.error)
                if output.finished:
                    outputs[output.request_id] = output
                    engine.metrics.request_meter().observe(0, output)
                    progress.note(output)
        return outputs


class _Progress:
    """The progress bar, with tokens per second."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=not show)
        self._started_s = time.perf_counter()
        self._num_input = self._num_output = 0

    def note(self, output: RequestOutput) -> None:
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = time.perf_counter() - self._started_s
        if not self._bar.disable:
            self._bar.set_postfix_str(
                f"input {self._num_input / elapsed_s:.1f} tokens/s, output {self._num_output / elapsed_s:.1f} tokens/s",
                refresh=False,
            )
        self._bar.update(1)

    def advance(self, count: int) -> None:
        """So many more are done, of which the tokens are not counted."""
        self._bar.update(count)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def as_prompt_list(prompts: Any) -> list[PromptType]:
    """One prompt, or a list of prompts, as a list. A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping, bytes)) or not isinstance(prompts, Sequence):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]
    return prompts


def as_conversation_list(messages: Any) -> list[Any]:
    """One conversation (a list of messages), or a list of conversations, as a list."""
    if isinstance(messages, Sequence) and messages and all(isinstance(m, Sequence) for m in messages):
        return list(messages)
    return [messages]


def broadcast(field: str, values: Any, count: int, default: Any) -> list[Any]:
    """One value for each of `count` prompts, from one for all, one for each, or None for the default.

    Raises:
        InvalidRequestError: A list of another length.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [default if values is None else values] * count
    if len(values) != count:
        raise InvalidRequestError(
            f"{field} holds {len(values)} values for {count} prompts; one for each is needed", field
        )
    return list(values)
