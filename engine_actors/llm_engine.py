"""`LLMEngine`: requests in, RequestOutputs out, one step at a time. The synchronous front end; `LLM` drives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_actors.clients import EngineCoreClient
from engine_actors.config import EngineConfig
from engine_actors.engine_metrics import EngineMetrics
from engine_actors.errors import EngineDeadError, InvalidRequestError
from engine_actors.input_processor import InputProcessor, ProcessedRequest, PromptType, load_tokenizer
from engine_actors.output_processor import OutputProcessor
from engine_actors.outputs import RequestOutput
from engine_actors.utilities import SyncUtilities
from scheduler.sampling_params import SamplingParams


class LLMEngine(SyncUtilities):
    """One engine and one synchronous caller.

        engine = LLMEngine(EngineConfig.from_kwargs("path/to/model"))
        engine.add_request("a", "Hello", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step(): ...

    Attributes:
        metrics: Fed with the scheduler's reports; with ended requests by whoever takes their outputs.

    Raises:
        EngineStartupError: The engine could not start; the text has the root cause.
        ValueError: The tokenizer cannot be loaded, or the model's files are wrong.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config)
        self.client = EngineCoreClient.make_client(config)
        try:
            self.input_processor = InputProcessor(
                config, self.tokenizer, self.client.info.max_model_len, self.client.client_index
            )
        except BaseException:
            self.client.shutdown(0.0)
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self.metrics = EngineMetrics(config.model_config.model, self.client.info.max_model_len)

    @staticmethod
    def from_kwargs(model: str, **kwargs: Any) -> LLMEngine:
        """Same, from flat keyword arguments; see `EngineConfig.from_kwargs`."""
        return LLMEngine(EngineConfig.from_kwargs(model, **kwargs))

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | None = None, *, priority: int = 0
    ) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: It can never be served; the text names the field, the value and what is allowed.
            EngineDeadError: The engine has failed.
        """
        self.add_processed([self.input_processor.process(request_id, prompt, params, priority=priority)])

    def add_processed(self, requests: Sequence[ProcessedRequest]) -> None:
        """Queue what the input processor made, in one message."""
        seen: set[str] = set()
        for request in requests:
            request_id = request.parent.request_id
            if request_id in seen or self.output_processor.is_unfinished(request_id):
                raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
            seen.add(request_id)
        self.client.add_requests([child for request in requests for child in request.children])
        for request in requests:
            self.output_processor.add(request.parent, request.children)

    def step(self) -> list[RequestOutput]:
        """Wait for what the engine does next. Empty when nothing is unfinished, or nothing is to be told.

        Raises:
            EnginePausedError: Nothing more comes before `resume` or `wake_up`.
            EngineDeadError: The engine has failed; the unfinished requests are gone.
        """
        if not self.output_processor.num_unfinished:
            return []
        try:
            batches = self.client.get_output()
            results: list[RequestOutput] = []
            for outputs in batches:
                if outputs.stats is not None:
                    self.metrics.observe_stats(outputs.stats)
                processed = self.output_processor.process(outputs)
                if processed.aborts:
                    self.client.abort_requests(processed.aborts)
                results += processed.request_outputs
            return results
        except EngineDeadError:
            self.output_processor.finish_all(None)
            raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests early. Each ends with an output whose finish_reason is "abort"; unknown ids are ignored."""
        children = self.output_processor.take_children(request_ids)
        if children:
            self.client.abort_requests(children)

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests and expect nothing more of them."""
        request_ids = list(request_ids)
        children = self.output_processor.take_children(request_ids)
        self.output_processor.forget(request_ids)
        if children and self.client.dead_error is None:
            self.client.abort_requests(children)

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self.output_processor.num_unfinished

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of EngineCore by name; raises what it raises."""
        result = self.client.call_utility(name, *args, **kwargs)
        if name == "update_config":
            self.config = self.config.with_runtime_options(result)
        return result

    def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is alive."""
        self.client.check_health()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop the engine and give everything back. Idempotent."""
        self.client.shutdown(timeout_s)
        self.output_processor.finish_all(None)
