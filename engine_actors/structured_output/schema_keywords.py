"""The keywords of JSON schema: which are enforced, which are refused, which say nothing; and older spellings.

Called by `schema_parser` for each schema object before it looks at one.
"""

from __future__ import annotations

from typing import Any

from engine_actors.structured_output.schema_nodes import constant_text
from scheduler.structured_output import StructuredOutputError

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$vocabulary", "$defs", "definitions", "$anchor", "$id", "id"),
        # OpenAPI: explain an enforced oneOf, or allow more than is generated.
        *("example", "discriminator", "nullable", "externalDocs", "xml"),
    }
)
"""Keywords without influence on what is generated."""

OF_TYPE: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "contentEncoding", "contentMediaType", "contentSchema"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    ),
}
"""Keywords that constrain values of one type only. `format` belongs to strings and numbers."""

_REFUSED_ANYWHERE = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
_REFUSED_OF_TYPE = {
    "string": ("contentEncoding", "contentMediaType", "contentSchema"),
    "array": ("contains", "minContains", "maxContains", "unevaluatedItems"),
    "object": ("dependentRequired", "dependentSchemas", "dependencies"),
}
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords with schemas for the same value."""
KNOWN = ANNOTATIONS.union(IN_PLACE, ("type", "enum", "const", "format"), _REFUSED_ANYWHERE, *OF_TYPE.values())
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "propertyNames", "items", "additionalItems", "unevaluatedProperties")


def wrong(path: str, keyword: str, value: Any, allowed: str) -> StructuredOutputError:
    """The error of a keyword whose value JSON schema does not allow."""
    return StructuredOutputError(f"json{path}/{keyword} must be {allowed}, got {value!r:.100}")


def unsupported(path: str, keyword: str, hint: str = "") -> StructuredOutputError:
    """The error of a keyword that cannot be enforced."""
    return StructuredOutputError(
        f"json{path}: {keyword!r} cannot be enforced during generation{': ' if hint else ''}{hint}"
    )


def normalise(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy without annotations and in one spelling, its values checked.

    `type` becomes a list, `const` a one-element `enum`, draft 7 tuples `prefixItems` with `items`, draft 4's boolean
    exclusive bounds numbers.

    Raises:
        StructuredOutputError: Unsupported, misspelled or malformed keywords.
    """
    if path and isinstance(schema.get("$id"), str):
        raise unsupported(path, "$id", "a schema inside the schema must not have a base of its own")
    result = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    for keyword, value in result.items():
        _check_keyword(keyword, value, path)
    if "const" in result:
        constant = result.pop("const")
        allowed = result.get("enum", [constant])
        result["enum"] = [value for value in allowed if constant_text(value) == constant_text(constant)]
    if isinstance(result.get("type"), str):
        result["type"] = [result["type"]]
    _normalise_bounds(result, path)
    if isinstance(result.get("items"), list):
        if "prefixItems" in result:
            raise wrong(path, "items", result["items"], "a schema beside prefixItems")
        result["prefixItems"] = result["items"]
        result["items"] = result.pop("additionalItems", True)
    result.pop("additionalItems", None)  # without a tuple it says nothing
    if "unevaluatedProperties" in result and not any(keyword in result for keyword in IN_PLACE):
        # Nothing but this object's own keywords evaluates properties, so the two say the same.
        others = result.pop("unevaluatedProperties")
        result.setdefault("additionalProperties", others)
    return result


def check_type_keywords(schema: dict[str, Any], kind: str, path: str) -> None:
    """Refuse keywords that constrain values of this type and cannot be enforced."""
    for keyword in _REFUSED_OF_TYPE.get(kind, ()):
        if keyword in schema:
            raise unsupported(path, keyword)


def has_keyword_of(schema: dict[str, Any], kind: str) -> bool:
    return any(keyword in schema for keyword in OF_TYPE[kind])


def _check_keyword(keyword: str, value: Any, path: str) -> None:
    if keyword in _REFUSED_ANYWHERE:
        raise unsupported(path, keyword)
    if keyword not in KNOWN:
        if keyword.startswith("x-"):
            return
        meant = _misspelt(keyword)
        if meant is not None:
            raise StructuredOutputError(f"json{path}: unknown keyword {keyword!r}; did you mean {meant!r}?")
        return
    if keyword in _COUNTS and not (_is_number(value) and value == int(value) and value >= 0):
        raise wrong(path, keyword, value, "a non-negative integer")
    if keyword in _BOUNDS and not (_is_number(value) or (keyword.startswith("excl") and isinstance(value, bool))):
        raise wrong(path, keyword, value, "a number")
    if keyword == "multipleOf" and value <= 0:
        raise wrong(path, keyword, value, "a number above 0")
    if keyword in ("pattern", "format", "$ref") and not isinstance(value, str):
        raise wrong(path, keyword, value, "a string")
    if keyword in _SCHEMA_MAPS and not (isinstance(value, dict) and all(map(_is_schema, value.values()))):
        raise wrong(path, keyword, value, "an object of schemas")
    if keyword in _SCHEMA_LISTS and not (isinstance(value, list) and value and all(map(_is_schema, value))):
        raise wrong(path, keyword, value, "a non-empty list of schemas")
    if keyword in _SCHEMAS and not _is_schema(value) and not (keyword == "items" and _is_schema_list(value)):
        raise wrong(path, keyword, value, "a schema (an object or a boolean)")
    if keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise wrong(path, keyword, value, "a list of property names")
    if keyword == "enum" and not (isinstance(value, list) and value):
        raise wrong(path, keyword, value, "a non-empty list")
    if keyword == "uniqueItems" and not isinstance(value, bool):
        raise wrong(path, keyword, value, "true or false")
    if keyword == "type":
        names = [value] if isinstance(value, str) else value
        if not (isinstance(names, list) and names and all(name in TYPES for name in names if isinstance(name, str))):
            raise wrong(path, keyword, value, f"one or more of {', '.join(TYPES)}")
        if not all(isinstance(name, str) for name in names):
            raise wrong(path, keyword, value, f"one or more of {', '.join(TYPES)}")


def _misspelt(keyword: str) -> str | None:
    """The keyword that differs from this one by a letter, or by two that are swapped."""
    if len(keyword) > _LONGEST_KEYWORD:
        return None
    variants = _without_one_letter(keyword)
    return next((_KNOWN_VARIANTS[variant] for variant in variants if variant in _KNOWN_VARIANTS), None)


def _without_one_letter(word: str) -> list[str]:
    lower = word.lower()
    return [lower, *(lower[:i] + lower[i + 1 :] for i in range(len(lower)))]


_KNOWN_VARIANTS = {variant: word for word in KNOWN if len(word) > 4 for variant in _without_one_letter(word)}
_LONGEST_KEYWORD = max(map(len, KNOWN)) + 1


def _normalise_bounds(schema: dict[str, Any], path: str) -> None:
    for keyword in _COUNTS:
        if keyword in schema:
            schema[keyword] = int(schema[keyword])
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):
            is_exclusive = schema.pop(exclusive)
            if is_exclusive and bound not in schema:
                raise wrong(path, exclusive, True, f"a number, or a boolean beside {bound}")
            if is_exclusive:
                schema[exclusive] = schema.pop(bound)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))
