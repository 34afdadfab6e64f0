"""A JSON schema as a tree of the values it allows: what `schema_parser` makes and `schema_grammar` writes as EBNF.

`is_loose` marks nodes of schemas that name no type, such as `{"minimum": 0}`: values of any other type are allowed as
well. They are never generated, but count when two options must not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeVar

from engine_actors.structured_output.regex import Regex, is_empty_set
from scheduler.structured_output import StructuredOutputError

T = TypeVar("T")


@dataclass(frozen=True)
class Anything:
    """Any JSON value."""


@dataclass(frozen=True)
class Constants:
    """One of these values, as JSON texts. Also null and booleans."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class String:
    """A string that matches; None is any string."""

    regex: Regex | None = None
    is_loose: bool = False


@dataclass(frozen=True)
class Integer:
    """An integer within inclusive bounds that is a multiple."""

    low: int | None = None
    high: int | None = None
    multiple_of: int = 1
    is_loose: bool = False


@dataclass(frozen=True)
class Number:
    """A number within bounds, each of which may itself be excluded."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_exclusive: bool = False
    high_exclusive: bool = False
    is_loose: bool = False


@dataclass(frozen=True)
class Array:
    """Items by position, then more of `items` (None: no more); `low` to `high` in all."""

    prefix: tuple[Node, ...] = ()
    items: Node | None = Anything()
    low: int = 0
    high: int | None = None
    is_loose: bool = False


@dataclass(frozen=True)
class Property:
    name: str
    node: Node
    is_required: bool


@dataclass(frozen=True)
class Object:
    """Declared properties in their order, then others (`values` None: no others) whose keys match `keys` (None: any
    but the declared ones); `low` to `high` in all."""

    properties: tuple[Property, ...] = ()
    values: Node | None = Anything()
    keys: Regex | None = None
    low: int = 0
    high: int | None = None
    is_loose: bool = False


@dataclass(frozen=True)
class Union:
    """Any of the options. No options: no value at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Ref:
    """A named definition, perhaps recursive."""

    name: str


Node = Anything | Constants | String | Integer | Number | Array | Object | Union | Ref
NOTHING = Union(())
NULL = Constants(("null",))
BOOLEAN = Constants(("true", "false"))


@dataclass(frozen=True)
class Schema:
    root: Node
    definitions: Mapping[str, Node]


def union(options: list[Node]) -> Node:
    """Flattened, without duplicates."""
    flat: list[Node] = []
    for option in options:
        flat.extend(option.options if isinstance(option, Union) else (option,))
    unique = tuple(dict.fromkeys(flat))
    return unique[0] if len(unique) == 1 else Union(unique)


def constant_text(value: Any) -> str:
    """The text by which equal JSON values are equal: 1.0 is 1, the order of members does not count."""
    return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def find_finite(definitions: Mapping[str, T], is_finite: Callable[[T, set[str]], bool]) -> set[str]:
    """The definitions with a finite value, given how to tell from those that are known.

    Last ones first: definitions follow those that name them, so one round does for most.

    Raises:
        StructuredOutputError: It takes more rounds than anything reasonable.
    """
    finite: set[str] = set()
    for _ in range(_MAX_ROUNDS):
        before = len(finite)
        for name in reversed(list(definitions)):
            if name not in finite and is_finite(definitions[name], finite):
                finite.add(name)
        if len(finite) == before:
            return finite
    raise StructuredOutputError(f"the definitions depend on each other in more than {_MAX_ROUNDS} steps")


_MAX_ROUNDS = 64


def prune(schema: Schema) -> Schema | None:
    """The same values without what can never be completed: an option or an optional property whose only values are
    infinite or contradictory. None: no finite value is left at all."""
    finite = find_finite(schema.definitions, _is_finite)
    if not _is_finite(schema.root, finite):
        return None
    definitions = {name: _pruned(schema.definitions[name], finite) for name in schema.definitions if name in finite}
    return Schema(_pruned(schema.root, finite), definitions)


def _is_finite(node: Node, known: set[str]) -> bool:
    """Some finite value is allowed, given the definitions known to allow one."""
    match node:
        case Constants(texts):
            return bool(texts)
        case String(regex):
            return regex is None or not is_empty_set(regex)
        case Array(prefix, items, low):
            needed = prefix[:low] if items is None else (*prefix[:low], *((items,) if low > len(prefix) else ()))
            return (items is not None or low <= len(prefix)) and all(_is_finite(each, known) for each in needed)
        case Object(properties, values, _, low):
            # Each is asked once: asking twice would double at every level.
            possible = {each.name: _is_finite(each.node, known) for each in properties if each.is_required or low}
            if not all(possible[each.name] for each in properties if each.is_required):
                return False
            return low <= sum(possible.values()) or (values is not None and _is_finite(values, known))
        case Union(options):
            return any(_is_finite(option, known) for option in options)
        case Ref(name):
            return name in known
        case _:
            return True


def _pruned(node: Node, finite: set[str]) -> Node:
    match node:
        case Union(options):
            return union([_pruned(option, finite) for option in options if _is_finite(option, finite)])
        case Array(prefix, items, _, high):
            kept = 0
            while kept < len(prefix) and _is_finite(prefix[kept], finite):
                kept += 1
            if kept < len(prefix):
                items, high = None, kept if high is None else min(high, kept)
            elif items is not None and not _is_finite(items, finite):
                items = None
            new_items = None if items is None else _pruned(items, finite)
            new_prefix = tuple(_pruned(each, finite) for each in prefix[:kept])
            return replace(node, prefix=new_prefix, items=new_items, high=high)
        case Object(properties, values):
            kept_properties = tuple(
                replace(each, node=_pruned(each.node, finite)) for each in properties if _is_finite(each.node, finite)
            )
            if values is not None:
                values = _pruned(values, finite) if _is_finite(values, finite) else None
            return replace(node, properties=kept_properties, values=values)
        case _:
            return node


def are_disjoint(a: Node, b: Node, definitions: Mapping[str, Node]) -> bool:
    """Proven: no value that one of them generates is allowed by the other, whatever unlisted members objects have.
    False: not proven."""
    return _disjoint(a, b, definitions, 0)


_MAX_PROOF_DEPTH = 16


def _disjoint(a: Node, b: Node, definitions: Mapping[str, Node], depth: int) -> bool:
    if depth > _MAX_PROOF_DEPTH:
        return False
    if isinstance(a, Ref):
        target = definitions.get(a.name)
        return target is not None and _disjoint(target, b, definitions, depth + 1)
    if isinstance(b, Ref):
        return _disjoint(b, a, definitions, depth + 1)
    if isinstance(a, Union):
        return all(_disjoint(option, b, definitions, depth + 1) for option in a.options)
    if isinstance(b, Union):
        return _disjoint(b, a, definitions, depth)
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if not kinds_a & kinds_b:
        return True
    match a, b:
        case Constants(texts_a), Constants(texts_b):
            known = {constant_text(json.loads(text)) for text in texts_a}
            return not any(constant_text(json.loads(text)) in known for text in texts_b)
        case Object(), Object():
            nodes_a = {each.name: each.node for each in a.properties if each.is_required}
            nodes_b = {each.name: each.node for each in b.properties if each.is_required}
            return any(
                _disjoint(nodes_a[name], nodes_b[name], definitions, depth + 1) for name in nodes_a & nodes_b.keys()
            )
        case ((Integer() | Number()), (Integer() | Number())):
            return _is_below(a, b) or _is_below(b, a)
    return False


def _kinds(node: Node) -> set[str]:
    if isinstance(node, Constants):
        return {_kind_of_value(json.loads(text)) for text in node.texts}
    if isinstance(node, (String, Integer, Number, Array, Object)) and not node.is_loose:
        return {"number" if isinstance(node, Integer) else type(node).__name__.lower()}
    return {"null", "boolean", "number", "string", "array", "object"}


def _kind_of_value(value: Any) -> str:
    for kinds, name in (((bool,), "boolean"), ((int, float), "number"), ((str,), "string"), ((list,), "array")):
        if isinstance(value, kinds):
            return name
    return "null" if value is None else "object"


def _is_below(a: Integer | Number, b: Integer | Number) -> bool:
    """All of `a` is below all of `b`."""
    if a.high is None or b.low is None:
        return False
    touching = (isinstance(a, Number) and a.high_exclusive) or (isinstance(b, Number) and b.low_exclusive)
    return a.high < b.low or (a.high == b.low and touching)
