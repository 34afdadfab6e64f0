"""Request body bytes → a protocol struct, or a 400 whose one line names the field. Called by routes.py."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from engine_actors.serve.errors import BadRequest, bad_value, shown
from engine_actors.serve.protocol import NEUTRAL_VALUES, REFUSED_FIELDS

T = TypeVar("T", bound=msgspec.Struct)

_LOCATION = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`$")
_TYPE_NAMES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "an array",
    "object": "an object",
}  # fmt: skip


def decode_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object.

    Raises:
        BadRequest: It is empty, no JSON, nested too deeply, or no object.
    """
    if not body.strip():
        raise BadRequest("the request body is empty; a JSON object is expected")
    try:
        decoded = msgspec.json.decode(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _non_finite_number(body) or BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise BadRequest(f"the request body must be a JSON object, got {type(decoded).__name__}")
    return decoded


def to_struct(decoded: dict[str, Any], kind: type[T]) -> T:
    """`decoded` as `kind`. Numbers and booleans written as strings are accepted where the field is one.

    Raises:
        BadRequest: A field has the wrong type, or is one of REFUSED_FIELDS with an effect.
    """
    _refuse_dangerous_fields(decoded)
    try:
        return msgspec.convert(decoded, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _describe(str(error), decoded) from None
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None


def _refuse_dangerous_fields(decoded: dict[str, Any]) -> None:
    for name in REFUSED_FIELDS.keys() & decoded.keys():
        value = decoded[name]
        if value is None or value is False or value in ([], {}) or value in NEUTRAL_VALUES.get(name, ()):
            continue
        raise BadRequest(f"{name} is not supported: {REFUSED_FIELDS[name]}; got {shown(value)}", name)


def _non_finite_number(body: bytes) -> BadRequest | None:
    """NaN and Infinity are no JSON, but Python's json module writes them: name the field that holds one."""
    if b"NaN" not in body and b"Infinity" not in body:
        return None
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if isinstance(decoded, dict):
        for name, value in decoded.items():
            if isinstance(value, float) and not math.isfinite(value):
                return bad_value(name, value, "a finite number")
    return None


def _describe(message: str, decoded: dict[str, Any]) -> BadRequest:
    """msgspec's "Expected `x`, got `y` - at `$.path`" with path and value, and the top field as `param`."""
    located = _LOCATION.match(message)
    path = ((located["path"] if located else None) or "").lstrip(".")
    what = located["what"] if located else message
    param = re.split(r"[.\[]", path)[0] or None
    expected = _EXPECTED.match(what)
    if expected is None:
        return BadRequest(f"{path}: {what}" if path else what, param)
    types = [t.strip() for t in expected["expected"].split("|")]
    allowed = " or ".join(_TYPE_NAMES.get(t, t) for t in types if t != "null")
    return BadRequest(f"{path} must be {allowed}, got {shown(_lookup(decoded, path))}", param)


def _lookup(decoded: Any, path: str) -> Any:
    """The value at "messages[0].role"; None where the path has parts that a message hides, as `[...]`."""
    value = decoded
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, ValueError, IndexError, TypeError):
            return None
    return value
