"""JSON schemas that must hold together: `allOf`, and keywords beside `$ref` or `anyOf`, as one schema.

All functions work on schemas after `schema_keywords.normalise`: no `const`, tuples in `prefixItems`, numeric exclusive
bounds. A boolean stands for everything or nothing, as in JSON schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine_actors.structured_output.schema_nodes import constant_text
from scheduler.structured_output import StructuredOutputError

JsonSchema = dict[str, Any] | bool
_MAX_PRODUCT = 64

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def all_of(a: JsonSchema, b: JsonSchema) -> JsonSchema:
    """Both, without looking inside."""
    if a is False or b is False:
        return False
    if a is True or a == b:
        return b
    return a if b is True else {"allOf": [a, b]}


def merge(a: dict[str, Any], b: dict[str, Any], path: str) -> JsonSchema:
    """Both as one; neither has `$ref` or `allOf` at its top. False: nothing satisfies both.

    Raises:
        StructuredOutputError: One schema cannot say it, e.g. two different patterns.
    """
    merged = {**a, **b}
    for keyword in a.keys() & b.keys():
        if keyword in _OBJECT or keyword in _ARRAY:
            continue
        combine = _COMBINE.get(keyword)
        if combine is not None:
            value = combine(a[keyword], b[keyword], path)
            if value is None:
                return False
            merged[keyword] = value
        elif a[keyword] != b[keyword]:
            raise StructuredOutputError(
                f"json{path}: two different {keyword!r} that must hold together cannot be enforced"
            )
    if any(keyword in a and keyword in b for keyword in _OBJECT) or _restricts_others(a, b):
        _merge_objects(a, b, merged, path)
    if any(keyword in a and keyword in b for keyword in _ARRAY) or ("prefixItems" in merged and "items" in merged):
        _merge_arrays(a, b, merged)
    return merged


# Values of one keyword


def _types(a: Any, b: Any, path: str) -> list[str] | None:
    both = []
    for name in a:
        if name in b or (name == "integer" and "number" in b):
            both.append(name)
        elif name == "number" and "integer" in b:
            both.append("integer")
    return both or None


def _enums(a: Any, b: Any, path: str) -> list[Any] | None:
    known = {constant_text(value) for value in b}
    return [value for value in a if constant_text(value) in known] or None


def _multiples(a: Any, b: Any, path: str) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    if a != b:
        raise StructuredOutputError(f"json{path}: two different 'multipleOf' cannot be enforced together")
    return a


def _products(a: Any, b: Any, path: str) -> list[JsonSchema]:
    """`anyOf` and `anyOf`: any pair of options. For `oneOf` as well, once the options are known to be disjoint."""
    if len(a) * len(b) > _MAX_PRODUCT:
        raise StructuredOutputError(
            f"json{path}: {len(a)} and {len(b)} options that must hold together are too many to combine; "
            f"at most {_MAX_PRODUCT} pairs"
        )
    return [all_of(x, y) for x in a for y in b]


_COMBINE: dict[str, Callable[[Any, Any, str], Any]] = {
    "type": _types,
    "enum": _enums,
    "multipleOf": _multiples,
    "anyOf": _products,
    "oneOf": _products,
    "required": lambda a, b, path: list(dict.fromkeys([*a, *b])),
    "uniqueItems": lambda a, b, path: a or b,
    **{keyword: lambda a, b, path: max(a, b) for keyword in _LARGER},
    **{keyword: lambda a, b, path: min(a, b) for keyword in _SMALLER},
}

# Objects: additionalProperties looks at the properties of its own schema only

_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")


def _restricts_others(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(
        "additionalProperties" in x and ("properties" in y or "patternProperties" in y) for x, y in ((a, b), (b, a))
    )


def _merge_objects(a: dict[str, Any], b: dict[str, Any], merged: dict[str, Any], path: str) -> None:
    patterns = [x.get("patternProperties", {}) for x in (a, b)]
    closed = ["additionalProperties" in x and x["additionalProperties"] is not True for x in (a, b)]
    if (patterns[0] and (patterns[1] or closed[1])) or (patterns[1] and closed[0]):
        raise StructuredOutputError(
            f"json{path}: patternProperties that must hold together with another schema's patternProperties or "
            f"additionalProperties cannot be enforced"
        )
    names = dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})])
    if names:
        merged["properties"] = {name: all_of(_property(a, name), _property(b, name)) for name in names}
    if "additionalProperties" in a or "additionalProperties" in b:
        merged["additionalProperties"] = all_of(
            a.get("additionalProperties", True), b.get("additionalProperties", True)
        )


def _property(schema: dict[str, Any], name: str) -> JsonSchema:
    """What `schema` asks of the property, its patternProperties aside."""
    properties = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _merge_arrays(a: dict[str, Any], b: dict[str, Any], merged: dict[str, Any]) -> None:
    length = max(len(x.get("prefixItems", ())) for x in (a, b))
    if length:
        merged["prefixItems"] = [all_of(_item(a, index), _item(b, index)) for index in range(length)]
    if "items" in a or "items" in b:
        merged["items"] = all_of(a.get("items", True), b.get("items", True))


def _item(schema: dict[str, Any], index: int) -> JsonSchema:
    prefix = schema.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else schema.get("items", True)
