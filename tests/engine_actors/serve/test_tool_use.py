"""Tools through the unmodified openai client: prompts that tell of them, and calls in answers, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai

from tests.engine_actors.serve.server import MODEL, RunningServer, running

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def gathered(chunks: Iterable[Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """A stream's content, calls (name, arguments) and finish reason."""
    content, reason = "", None
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.id.startswith("chatcmpl-tool-")
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [(name, arguments) for name, arguments in calls.values()], reason


def ask(client: openai.OpenAI, **options: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Same of a whole answer, after checking that streaming gives the same."""
    options = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **options}
    choice = client.chat.completions.create(**options).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    streamed = gathered(client.chat.completions.create(stream=True, **options))
    assert streamed == (choice.message.content or "", calls, choice.finish_reason)
    return choice.message.content, calls, choice.finish_reason


def test_a_free_call_is_found(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = CALL
    assert ask(client) == (None, [("weather", '{"city": "Oslo"}')], "tool_calls")


def test_text_before_calls_and_several_calls(client: openai.OpenAI, server: RunningServer) -> None:
    second = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    server.llm.reply = f"Let me look.\n{CALL}\n{second}"
    content, calls, reason = ask(client)
    assert content == "Let me look.\n"
    assert calls == [("weather", '{"city": "Oslo"}'), ("time", "{}")]
    assert reason == "tool_calls"


def test_only_the_first_call_without_parallel_calls(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = CALL + CALL
    assert len(ask(client, parallel_tool_calls=False)[1]) == 1


def test_an_answer_without_a_call_is_plain(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = "It is <b>cold</b> & {windy}."
    assert ask(client) == ("It is <b>cold</b> & {windy}.", [], "stop")


def test_choice_none_leaves_text_and_prompt_alone(client: openai.OpenAI, server: RunningServer, tokenizer: Any) -> None:
    server.llm.reply = CALL
    assert ask(client, tool_choice="none") == (CALL, [], "stop")
    assert "weather" not in tokenizer.decode(server.llm.calls[0].token_ids)


def test_a_cut_call_keeps_its_beginning(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = CALL
    content, calls, reason = ask(client, max_tokens=18)
    assert not content
    assert calls[0][0] == "weather"
    assert '{"city": "Oslo"}'.startswith(calls[0][1])
    assert reason == "length"


def test_named_choice_constrains_to_the_functions_arguments(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = '{"city": "Oslo"}'
    choice = {"type": "function", "function": {"name": "weather"}}
    assert ask(client, tool_choice=choice) == (None, [("weather", '{"city": "Oslo"}')], "stop")
    assert server.llm.calls[0].params.structured_outputs.json == PARAMETERS


def test_required_choice_constrains_to_a_list_of_calls(client: openai.OpenAI, server: RunningServer) -> None:
    server.llm.reply = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "time", "parameters": {}}]'
    content, calls, reason = ask(client, tool_choice="required")
    assert content is None
    assert calls == [("weather", '{"city": "Oslo"}'), ("time", "{}")]
    assert reason == "tool_calls"
    schema = server.llm.calls[0].params.structured_outputs.json
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    names = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
    assert names == ["weather", "time"]


def test_required_without_parallel_calls_allows_one(http: httpx.Client, server: RunningServer) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.llm.calls[0].params.structured_outputs.json["maxItems"] == 1


def test_definitions_of_a_function_stay_reachable_in_the_list(http: httpx.Client, server: RunningServer) -> None:
    parameters = {"$defs": {"A": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    schema = server.llm.calls[0].params.structured_outputs.json
    assert schema["$defs"] == {"A": {"type": "integer"}}
    assert "$defs" not in schema["items"]["properties"]["parameters"]


def test_a_template_without_tools_gets_them_in_the_system_message(
    client: openai.OpenAI, server: RunningServer, tokenizer: Any
) -> None:
    system = {"role": "system", "content": "Be brief."}
    client.chat.completions.create(model=MODEL, messages=[system, *MESSAGES], tools=TOOLS)  # type: ignore[list-item]
    prompt = tokenizer.decode(server.llm.calls[0].token_ids)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '{"name":"weather","description":"Tells it"' in prompt
    assert prompt.count("<|im_start|>system") == 1


def test_calls_and_results_of_earlier_turns_are_told(
    client: openai.OpenAI, server: RunningServer, tokenizer: Any
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    prompt = tokenizer.decode(server.llm.calls[0].token_ids)
    assert '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo"}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\ncold\n</tool_response><|im_end|>" in prompt


LLAMA_TEMPLATE = """{% if tools %}python_tag tools: {{ tools | tojson }}\n{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"""


def test_llama_style_is_taken_from_the_template(tokenizer: Any) -> None:
    with (
        running(tokenizer, chat_template=LLAMA_TEMPLATE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        server.llm.reply = '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time", "parameters": {}}'
        expected = [("weather", '{"city": "Oslo"}'), ("time", "{}")]
        assert ask(client) == (None, expected, "tool_calls")
        prompt = tokenizer.decode(server.llm.calls[0].token_ids)
        told = json.loads(prompt.split("tools: ")[1].split("\nuser")[0])
        assert [tool["function"]["name"] for tool in told] == ["weather", "time"]
        server.llm.reply = '{"name": "Bob", "age": 3} is an object'
        assert ask(client) == ('{"name": "Bob", "age": 3} is an object', [], "stop")


def test_arguments_reach_the_template_as_objects(tokenizer: Any) -> None:
    with running(tokenizer, chat_template=LLAMA_TEMPLATE) as server, httpx.Client(base_url=server.url) as http:
        call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"zone": [1, 2]}'}}
        messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        assert http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).status_code == 200
        prompt = tokenizer.decode(server.llm.calls[0].token_ids)
        assert '"arguments": {"zone": [1, 2]}' in prompt


def test_streamed_calls_need_no_look_ahead(client: openai.OpenAI, server: RunningServer) -> None:
    """The name is told before the arguments are complete."""
    server.llm.reply = CALL
    server.hold()
    chunks = iter(client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True))
    server.release(1)
    next(chunks)
    server.release(12)
    seen = next(chunk for chunk in chunks if chunk.choices[0].delta.tool_calls)
    assert seen.choices[0].delta.tool_calls is not None
    assert seen.choices[0].delta.tool_calls[0].function is not None
    assert seen.choices[0].delta.tool_calls[0].function.name == "weather"
    server.release(100)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
