"""`tools` and `tool_choice` of a chat request: checked, and what they ask of the answer. Called by chat.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from engine_actors.serve.errors import BadRequest, bad_value, shown
from engine_actors.serve.protocol import ChatCompletionRequest, JsonObject

NAME = re.compile(r"^[a-zA-Z0-9_.-]{1,128}$")
DEFINITIONS = ("$defs", "definitions")


class ToolChoice(Enum):
    """What the model may or must do."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True)
class ToolUse:
    """A request's tools.

    Attributes:
        choice: See ToolChoice; NONE also when there are no tools.
        tools: As the chat template reads them.
        name: The function that must be called, when `choice` is NAMED.
        parallel: More than one call is allowed.
    """

    choice: ToolChoice = ToolChoice.NONE
    tools: tuple[JsonObject, ...] = field(default=())
    name: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    def for_template(self) -> tuple[JsonObject, ...]:
        """Tools the prompt tells of: none when the model may not call any."""
        return () if self.choice is ToolChoice.NONE else self.tools

    def schema(self) -> JsonObject:
        """The JSON schema of a forced answer: the named function's arguments, or a list of calls."""
        if self.choice is ToolChoice.NAMED:
            tool = next(tool for tool in self.tools if tool["function"]["name"] == self.name)
            return _parameters(tool)
        hoisted: JsonObject = {}
        calls = [_call_schema(tool, hoisted) for tool in self.tools]
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        schema: JsonObject = {"type": "array", "minItems": 1, "items": items, **hoisted}
        if not self.parallel:
            schema["maxItems"] = 1
        return schema


def tool_use(request: ChatCompletionRequest, max_tools: int) -> ToolUse:
    """Check `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        BadRequest: They are malformed or do not fit together.
    """
    tools = _tools(request.tools, max_tools)
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return ToolUse(tools=tools)
    if not tools:
        raise BadRequest("tool_choice needs tools, which are missing", "tool_choice")
    parallel = request.parallel_tool_calls is not False
    if choice in ("auto", "required"):
        return ToolUse(ToolChoice(choice), tools, parallel=parallel)
    if isinstance(choice, str):
        raise bad_value("tool_choice", choice, '"none", "auto", "required" or {"type": "function", "function": '
                        '{"name": …}}')  # fmt: skip
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_value("tool_choice", choice, '{"type": "function", "function": {"name": …}}')
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise BadRequest(f"tool_choice names {shown(name)}, which is not among the tools {shown(names)}", "tool_choice")
    return ToolUse(ToolChoice.NAMED, tools, name, parallel=False)


def _tools(tools: list[JsonObject] | None, max_tools: int) -> tuple[JsonObject, ...]:
    if tools is None:
        return ()
    if not tools:
        raise BadRequest("tools must not be an empty list; leave the field out instead", "tools")
    if len(tools) > max_tools:
        raise BadRequest(f"tools must hold at most {max_tools} tools, got {len(tools)}", "tools")
    checked = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(f"tools must have different names, {shown(twice)} is there twice", "tools")
    return checked


def _tool(tool: JsonObject, where: str) -> JsonObject:
    if tool.get("type") != "function":
        raise BadRequest(f'{where}.type must be "function", got {shown(tool.get("type"))}', "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function must be an object, got {shown(function)}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.match(name):
        raise BadRequest(f"{where}.function.name must be 1 to 128 letters, digits, _, . and -, got {shown(name)}",
                         "tools")  # fmt: skip
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{where}.function.description must be a string, got {shown(description)}", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequest(f"{where}.function.parameters must be a JSON schema, got {shown(parameters)}", "tools")
    for keyword in DEFINITIONS:
        if not isinstance((parameters or {}).get(keyword, {}), dict):
            raise BadRequest(f"{where}.function.parameters.{keyword} must be an object", "tools")
    kept: JsonObject = {"name": name}
    if description is not None:
        kept["description"] = description
    kept["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": kept}


def _call_schema(tool: JsonObject, hoisted: JsonObject) -> JsonObject:
    parameters = _without_definitions(_parameters(tool), hoisted)
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(tool: JsonObject) -> JsonObject:
    parameters: JsonObject = tool["function"]["parameters"]
    return parameters or {"type": "object"}


def _without_definitions(parameters: JsonObject, hoisted: JsonObject) -> JsonObject:
    """`parameters` with its `$defs` moved to `hoisted`: nested, its `#/$defs/…` references point to the whole's top.

    Raises:
        BadRequest: Another function defines one of the names differently.
    """
    for keyword in DEFINITIONS:
        for name, definition in (parameters.get(keyword) or {}).items():
            if hoisted.setdefault(keyword, {}).setdefault(name, definition) != definition:
                raise BadRequest(f"tools define {shown(name)} in {keyword} in two different ways", "tools")
    return {key: value for key, value in parameters.items() if key not in DEFINITIONS}
