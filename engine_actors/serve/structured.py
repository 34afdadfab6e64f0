"""`response_format`, `structured_outputs` and forced tools → StructuredOutputsParams. For chat.py and completions.py.

Shape and size are checked here and by StructuredOutputsParams; whether the grammar back end can express it, by the
engine before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_actors.serve.errors import BadRequest, shown
from engine_actors.serve.protocol import GenerationRequest, JsonObject
from engine_actors.serve.tools import ToolChoice, ToolUse
from scheduler.structured_params import StructuredOutputsParams

FIELDS = StructuredOutputsParams.__struct_fields__


@dataclass(frozen=True)
class Constraint:
    """What the text must look like.

    Attributes:
        param: The request field it came from.
    """

    params: StructuredOutputsParams
    param: str


def constraint(request: GenerationRequest, tools: ToolUse | None) -> Constraint | None:
    """The one constraint of a request.

    Raises:
        BadRequest: It is malformed or too large, or there are two.
    """
    found = {
        "response_format": _response_format(request.response_format),
        "structured_outputs": _structured_outputs(request.structured_outputs),
        "tool_choice": {"json": tools.schema()} if tools is not None and tools.is_forced else None,
    }
    given = {param: fields for param, fields in found.items() if fields is not None}
    if not given:
        return None
    param = list(given)[-1]
    if len(given) > 1:
        raise BadRequest(f"{' and '.join(given)} cannot be used together", param)
    if tools is not None and tools.choice is ToolChoice.AUTO:
        raise BadRequest(f'{param} cannot be used with tool_choice "auto": the answer could not be a call', param)
    try:
        return Constraint(StructuredOutputsParams(**given[param]), param)
    except (ValueError, TypeError) as error:
        raise BadRequest(str(error) if param in str(error) else f"{param}: {error}", param) from error


def _response_format(given: JsonObject | None) -> JsonObject | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": _json_schema(given.get("json_schema"))}
    if kind == "structural_tag":
        return {"structural_tag": given}
    raise BadRequest(
        f'response_format.type must be "text", "json_object", "json_schema" or "structural_tag", got {shown(kind)}',
        "response_format",
    )


def _json_schema(given: Any) -> JsonObject | bool:
    if not isinstance(given, dict):
        raise BadRequest(
            f"response_format.json_schema must be an object with name and schema, got {shown(given)}", "response_format"
        )
    schema = given.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise BadRequest(
            f"response_format.json_schema.schema must be a JSON schema, got {shown(schema)}", "response_format"
        )
    return schema


def _structured_outputs(given: JsonObject | None) -> JsonObject | None:
    if given is None:
        return None
    unknown = sorted(given.keys() - set(FIELDS))
    if unknown:
        raise BadRequest(
            f"structured_outputs must not hold {', '.join(unknown)}; known are {', '.join(FIELDS)}",
            "structured_outputs",
        )
    if given.get("json") == {}:
        raise BadRequest("structured_outputs.json must not be an empty schema", "structured_outputs")
    # Null and false ask for nothing, for options and kinds alike.
    return {name: value for name, value in given.items() if value is not None and value is not False}
