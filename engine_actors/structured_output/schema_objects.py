"""The object keywords of JSON schema → `schema_nodes.Object`. Called by `schema_parser`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine_actors.structured_output.automaton import State, determinise
from engine_actors.structured_output.regex import NOTHING as NO_TEXT
from engine_actors.structured_output.regex import Regex, alt, is_empty_set, literal
from engine_actors.structured_output.regex_parser import parse_search
from engine_actors.structured_output.schema_keywords import unsupported
from engine_actors.structured_output.schema_merge import JsonSchema, all_of
from engine_actors.structured_output.schema_nodes import NOTHING, Anything, Constants, Node, Object, Property, String
from scheduler.structured_output import StructuredOutputError

MAX_COUNTED_RULES = 4000
"""Most rules that counting properties may take: properties times the bound."""
MAX_EXCLUDED_CHARS = 8192
"""Most characters of declared names that free keys must differ from."""
_MAX_KEY_STATES = 4096
_Parse = Callable[[JsonSchema, str], Node]


def make_object(schema: dict[str, Any], path: str, parse: _Parse, is_loose: bool) -> Node:
    """The objects allowed; NOTHING where the bounds contradict each other.

    An object that lists properties or patterns holds no others, unless the schema opens it: that is always allowed,
    and what people mean. One that lists none is open.

    Raises:
        StructuredOutputError: Keywords that cannot be enforced together.
    """
    others = _others(schema, path)
    patterns: dict[str, JsonSchema] = schema.get("patternProperties", {})
    automata = {pattern: _automaton(_pattern(pattern, path), path, "patternProperties") for pattern in patterns}
    declared = _declared(schema, automata, others)
    if others is None:
        others = "properties" not in schema and not patterns
    keys: Regex | None = None
    if patterns:
        keys, others = _free_keys(patterns, automata, declared, others, path)
    names = _property_names(schema, path, parse)
    if names is not None:
        keys = _with_names(names, keys, declared, others, path)
        others = False if is_empty_set(keys) else others
    if others is not False and sum(map(len, declared)) > MAX_EXCLUDED_CHARS:
        raise unsupported(
            path, "additionalProperties", f"beside properties of more than {MAX_EXCLUDED_CHARS} characters"
        )
    required = schema.get("required", ())
    properties = tuple(
        Property(name, parse(each, f"{path}/properties/{name}"), name in required) for name, each in declared.items()
    )
    values = None if others is False else parse(others, f"{path}/additionalProperties")
    return _counted(schema, path, properties, values, keys, is_loose)


def _others(schema: dict[str, Any], path: str) -> JsonSchema | None:
    """What members must be that neither properties nor patternProperties name; None: the schema does not say."""
    if "additionalProperties" in schema:
        return schema["additionalProperties"]
    others = schema.get("unevaluatedProperties")
    if isinstance(others, dict) and others:
        raise unsupported(path, "unevaluatedProperties", "only true and false")
    # Left from a schema with allOf and the like, whose properties are all here by now: it looks at those as well.
    return None if others is None else others is not False


def _declared(
    schema: dict[str, Any], automata: dict[str, list[State]], others: JsonSchema | None
) -> dict[str, JsonSchema]:
    """Every property with a name of its own, the required ones included; patterns that match it hold as well."""
    declared: dict[str, JsonSchema] = dict(schema.get("properties", {}))
    for name in schema.get("required", ()):
        if name not in declared:
            is_matched = any(_matches(automaton, name) for automaton in automata.values())
            declared[name] = True if is_matched or others is None else others
    for pattern, automaton in automata.items():
        for name in declared:
            if _matches(automaton, name):
                declared[name] = all_of(declared[name], schema["patternProperties"][pattern])
    return declared


def _free_keys(
    patterns: dict[str, JsonSchema],
    automata: dict[str, list[State]],
    declared: dict[str, JsonSchema],
    others: JsonSchema,
    path: str,
) -> tuple[Regex | None, JsonSchema]:
    """The keys besides the declared ones, and what their values must be."""
    values = list(patterns.values())
    if others is not False or any(value != values[0] for value in values):
        raise unsupported(path, "patternProperties",
                          "only with one value schema for all patterns, and without additionalProperties")  # fmt: skip
    if any(_matches(automaton, name) for automaton in automata.values() for name in declared):
        return None, False  # a free key might repeat a declared one
    return alt(*(_pattern(pattern, path) for pattern in patterns)), values[0]


def _property_names(schema: dict[str, Any], path: str, parse: _Parse) -> Regex | None:
    """The keys that propertyNames allow; None for all."""
    if "propertyNames" not in schema:
        return None
    node = parse(schema["propertyNames"], f"{path}/propertyNames")
    match node:
        case Anything() | String(None):
            return None
        case String(regex) if regex is not None:
            return regex
        case Constants(texts):
            return alt(*(literal(_text(text)) for text in texts if text.startswith('"')))
        case _ if node == NOTHING:
            return NO_TEXT
        case _:
            raise unsupported(path, "propertyNames", "only string keywords, const and enum")


def _with_names(
    names: Regex, keys: Regex | None, declared: dict[str, JsonSchema], others: JsonSchema, path: str
) -> Regex:
    """Declared names that are not allowed become impossible; the free keys are `names`."""
    if keys is not None:
        raise unsupported(path, "propertyNames", "beside patternProperties")
    automaton = [] if is_empty_set(names) else _automaton(names, path, "propertyNames")
    for name in declared:
        if not automaton or not _matches(automaton, name):
            declared[name] = False
    if others is not False and any(value is not False for value in declared.values()):
        raise unsupported(path, "propertyNames", "beside properties, unless additionalProperties is false")
    return names


def _counted(
    schema: dict[str, Any],
    path: str,
    properties: tuple[Property, ...],
    values: Node | None,
    keys: Regex | None,
    is_loose: bool,
) -> Node:
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    num_required = sum(each.is_required for each in properties)
    if high is not None and max(low, num_required) > high:
        return NOTHING
    if values is None and high is not None and high >= len(properties):
        high = None
    if low <= num_required:
        low = 0
    if low > 1 and values is not None:
        raise unsupported(path, "minProperties", "above 1 with free keys: a repeated key would count once only")
    if (len(properties) + 1) * max(low, high or 0) > MAX_COUNTED_RULES:
        raise unsupported(path, "minProperties" if high is None else "maxProperties", "too large to count")
    return Object(properties, values, keys, low, high, is_loose)


def _pattern(pattern: str, path: str) -> Regex:
    try:
        return parse_search(pattern)
    except StructuredOutputError as error:
        raise StructuredOutputError(f"json{path}/patternProperties: {error}") from None


def _automaton(regex: Regex, path: str, keyword: str) -> list[State]:
    states = determinise(regex, _MAX_KEY_STATES)
    if states is None:
        raise unsupported(path, keyword, "the regular expression is too large")
    return states


def _matches(states: list[State], text: str) -> bool:
    current = 0
    for char in text:
        code = ord(char)
        for ranges, target in states[current].edges:
            if any(low <= code <= high for low, high in ranges):
                current = target
                break
        else:
            return False
    return states[current].is_final


def _text(json_string: str) -> str:
    return str(json.loads(json_string))
