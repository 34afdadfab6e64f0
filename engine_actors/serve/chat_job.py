"""The answers of chat completions: messages, deltas, tool calls. Made by chat.py, run by endpoints.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from engine_actors.outputs import CompletionOutput, RequestOutput
from engine_actors.serve.chunks import ChunkEncoder, PendingChoice, to_json
from engine_actors.serve.generation import Generation
from engine_actors.serve.job import Job, RequestInfo, StreamShape
from engine_actors.serve.logprobs import LogprobFormatter, prompt_logprobs
from engine_actors.serve.models import ServedModel
from engine_actors.serve.protocol import ChatCompletionRequest
from engine_actors.serve.structured import Constraint
from engine_actors.serve.tool_calls import CallStart, Content, ToolEvent
from engine_actors.serve.tool_parsers import ToolParser, make_parser
from engine_actors.serve.tools import ToolChoice, ToolUse


class ChatJob(Job):
    """A checked chat request."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatCompletionRequest,
        info: RequestInfo,
        model: ServedModel,
        generation: Generation,
        shape: StreamShape,
        tools: ToolUse,
        tool_style: str,
        limit: Constraint | None,
        prompt_text: str,
    ) -> None:
        renamed = {
            "structured_outputs": limit.param if limit is not None else "structured_outputs",
            "max_tokens": "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
            "prompt": "messages",
        }
        super().__init__(request, info, model, generation, shape, renamed)
        self._tools = tools
        self._tool_style = tool_style
        self._parsers: dict[int, ToolParser] = {}
        self._is_open = False
        last = (request.messages or [{}])[-1]
        self._role = str(last.get("role")) if request.continue_final_message else "assistant"
        self._prompt_text = prompt_text if request.return_prompt_text else None
        self._logprobs = None
        if request.logprobs:
            # Those asked for by id are all of a position's.
            num_alternatives = -1 if request.logprob_token_ids else request.top_logprobs or 0
            self._logprobs = LogprobFormatter(
                model.tokenization, num_alternatives, bool(request.return_tokens_as_token_ids)
            )

    # Whole answers

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        content, calls = self._split(completion.text)
        message: dict[str, Any] = {
            "role": self._role,
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._chat_logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": self._finish_reason(completion.finish_reason, len(calls)),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._returns_token_ids else None,
            "routed_experts": None,
        }

    def _more_fields(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {
            "prompt_logprobs": prompt_logprobs(outputs[0].prompt_logprobs),
            "prompt_token_ids": self.generation.prompts[0].token_ids if self._returns_token_ids else None,
            "prompt_text": self._prompt_text,
        }

    def _split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """An answer's content and its tool calls."""
        parser = make_parser(self._tools, self._tool_style)
        if parser is None:
            return text, []
        content = ""
        calls: list[dict[str, Any]] = []
        for event in self._kept([*parser.feed(text), *parser.finish()]):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                calls.append({"id": _call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}})
            else:
                calls[event.index]["function"]["arguments"] += event.text
        return (content or None) if calls else content, calls

    def _kept(self, events: list[ToolEvent]) -> list[ToolEvent]:
        """Without calls after the first when parallel calls are not wanted."""
        if self._tools.parallel:
            return events
        return [event for event in events if isinstance(event, Content) or event.index == 0]

    def _finish_reason(self, finish_reason: str | None, num_calls: int) -> str | None:
        """OpenAI's servers say "stop" when the caller has named the function."""
        if finish_reason == "stop" and num_calls and self._tools.choice is not ToolChoice.NAMED:
            return "tool_calls"
        return finish_reason

    def _chat_logprobs(self, token_ids: list[int], positions: Sequence[Any] | None) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.chat(token_ids, positions or [])

    # Streams

    def _opening(
        self, prompt_index: int, output: RequestOutput, pending: list[PendingChoice], encoder: ChunkEncoder
    ) -> bytes:
        """With the first output of all, a chunk with the role for each choice: clients time the first token by it."""
        if self._is_open:
            return b""
        self._is_open = True
        prompt_ids = self.generation.prompts[0].token_ids if self._returns_token_ids else None
        more = b',"prompt_token_ids":%b,"prompt_text":%b' % (to_json(prompt_ids), to_json(self._prompt_text))
        delta = to_json({"role": self._role, "content": ""})
        return b"".join(
            encoder.opening_chunk(
                b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (choice.index, delta), more
            )
            for choice in pending
        )

    def _chunk(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        choice: PendingChoice,
        encoder: ChunkEncoder,
    ) -> bytes:
        text, token_ids, positions = choice.take()
        finish_reason = completion.finish_reason
        if self._tools.choice is ToolChoice.NONE:
            deltas = [b'{"content":%b}' % to_json(text)]
        else:
            deltas, finish_reason = self._tool_deltas(choice.index, text, finish_reason)
        logprobs = to_json(self._chat_logprobs(token_ids, positions))
        returned = to_json(token_ids) if self._returns_token_ids else b"null"
        if not deltas:
            if finish_reason is None and logprobs == returned == b"null":
                return b""  # nothing is sure yet
            deltas = [b"{}"]
        *earlier, last = deltas
        data = b"".join(
            encoder.chunk(
                b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null,"token_ids":null}' % (choice.index, delta)
            )
            for delta in earlier
        )
        if finish_reason is None:
            return data + encoder.chunk(
                b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null,"token_ids":%b}'
                % (choice.index, last, logprobs, returned)
            )
        return data + encoder.chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b,"token_ids":%b}'
            % (choice.index, last, logprobs, to_json(finish_reason), to_json(completion.stop_reason), returned),
            b',"system_fingerprint":null',
        )

    def _tool_deltas(self, index: int, text: str, finish_reason: str | None) -> tuple[list[bytes], str | None]:
        """What the text makes sure, as deltas, and the reason with which the choice ends."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._new_parser()
        events = parser.feed(text)
        if finish_reason is not None:
            events += parser.finish()
            finish_reason = self._finish_reason(finish_reason, parser.num_calls)
        return [_delta(event) for event in self._kept(events)], finish_reason

    def _new_parser(self) -> ToolParser:
        parser = make_parser(self._tools, self._tool_style)
        if parser is None:
            raise RuntimeError("a request without tools has no tool parser")
        return parser


def _delta(event: ToolEvent) -> bytes:
    if isinstance(event, Content):
        return to_json({"content": event.text})
    if isinstance(event, CallStart):
        function: dict[str, Any] = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": _call_id(), "type": "function", "function": function}
    else:
        call = {"index": event.index, "function": {"arguments": event.text}}
    return to_json({"tool_calls": [call]})


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid4().hex}"
