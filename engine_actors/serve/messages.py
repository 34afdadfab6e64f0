"""Chat messages as clients send them → as chat templates read them. Called by chat_template.py only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine_actors.serve.errors import BadRequest, shown

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and where each keeps it."""
PASSED_ON = ("name", "tool_call_id", "reasoning", "reasoning_content")

TOOLS_PREAMBLE = """You can call functions. Their signatures, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object between these tags, one pair of tags for each call:
<tool_call>
{{"name": <function name>, "arguments": <arguments object>}}
</tool_call>"""
"""Tells a model whose chat template has no place for tools about them, in the style the hermes parser reads."""


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check each message; contents become strings, and tool calls' arguments objects.

    Raises:
        BadRequest: Naming the message and part at fault; `param` is "messages".
    """
    if not messages:
        raise BadRequest("messages must hold at least one message, it is missing or empty", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def with_parts(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For templates that read contents as lists of parts."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in conversation]


def with_tools_as_text(
    conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """For templates that know no tools: describe them in the system message, and write calls and results as text."""
    told = [_tool_talk_as_text(message) for message in conversation]
    if not tools:
        return told
    signatures = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in tools)
    preamble = TOOLS_PREAMBLE.format(tools=signatures)
    if told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{preamble}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": preamble}, *told]


def _tool_talk_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"<tool_call>\n{msgspec.json.encode(function).decode()}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(texts)}


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a non-empty string, got {shown(role)}", "messages")
    if "content" not in message and role != "assistant":
        raise BadRequest(f"{where}.content is missing", "messages")
    plain: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    for name in PASSED_ON:
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    if "reasoning" in plain or "reasoning_content" in plain:  # templates differ in which of the two they read
        plain.setdefault("reasoning", plain.get("reasoning_content"))
        plain.setdefault("reasoning_content", plain["reasoning"])
    calls = message.get("tool_calls")
    if calls is not None:
        plain_calls = _tool_calls(calls, f"{where}.tool_calls")
        if plain_calls:
            plain["tool_calls"] = plain_calls
    return plain


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string, null or a list of text parts, got {shown(content)}", "messages")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise BadRequest(f"{where} must be a text part, got type {shown(kind)}: only text models are served",
                         "messages")  # fmt: skip
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{TEXT_PARTS[kind]} must be a string, got {shown(text)}", "messages")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list, got {shown(calls)}", "messages")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must be an object with function.name, got {shown(call)}", "messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadRequest(f"{where}.function.arguments must be JSON, got {shown(arguments)}", "messages") from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.function.arguments must be a JSON object, got {shown(arguments)}", "messages")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
