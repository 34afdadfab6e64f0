"""JSON schema → `schema_nodes.Schema`. Everything a schema says is kept or refused; nothing is dropped.

What is generated may be narrower than what the schema allows: properties come in their declared order, objects that
list properties hold no others unless `additionalProperties` says so, a schema without type makes only values of the
type its keywords speak of, strings and numbers have sane lengths.
"""

from __future__ import annotations

import itertools
import json
import math
from decimal import Decimal
from typing import Any

from engine_actors.structured_output import schema_keywords as keywords
from engine_actors.structured_output.numbers import MAX_INTEGER
from engine_actors.structured_output.schema_keywords import unsupported, wrong
from engine_actors.structured_output.schema_merge import JsonSchema, merge
from engine_actors.structured_output.schema_nodes import (
    BOOLEAN,
    NOTHING,
    NULL,
    Anything,
    Array,
    Constants,
    Integer,
    Node,
    Number,
    Ref,
    Schema,
    String,
    are_disjoint,
    constant_text,
    prune,
    union,
)
from engine_actors.structured_output.schema_objects import make_object
from engine_actors.structured_output.schema_refs import References
from engine_actors.structured_output.schema_strings import make_string
from scheduler.structured_output import StructuredOutputError

MAX_SCHEMAS = 20_000
"""Most schema objects that are looked at, combinations of allOf and anyOf included."""
MAX_EXCLUSIVE = 256
"""Most options of oneOf, constants aside, that are compared with each other."""
MAX_MULTIPLES = 1000
"""Most multiples between two bounds; they are listed one by one."""
MAX_MULTIPLE_OF = 256
"""Largest multipleOf without bounds: the grammar has a rule for each remainder."""
_NUMBER_FORMATS = ("float", "double", "decimal")


def parse_schema(schema: JsonSchema) -> Schema:
    """The values that `schema` allows and that will be generated.

    Raises:
        StructuredOutputError: It is malformed, cannot be enforced, or allows no finite value.
    """
    parser = _Parser(schema)
    root = parser.parse_all()
    pruned = prune(Schema(root, parser.definitions))
    if pruned is None:
        raise StructuredOutputError("json: no finite value satisfies the schema")
    return pruned


class _Parser:
    def __init__(self, root: JsonSchema) -> None:
        self._root = root
        self._references = References(root)
        self.definitions: dict[str, Node] = {}
        self._todo: list[tuple[str, JsonSchema, str]] = []
        self._named: dict[str, str] = {}
        self._exclusive: list[tuple[list[Node], str]] = []
        self._num_schemas = 0

    def parse_all(self) -> Node:
        root = self.parse(self._root, "")
        # Definitions are parsed one by one rather than where they are met: recursion in a schema is none here.
        while self._todo:
            name, schema, path = self._todo.pop()
            self.definitions[name] = self.parse(schema, path)
        for options, path in self._exclusive:
            self._check_exclusive(options, path)
        return root

    def parse(self, schema: JsonSchema, path: str) -> Node:
        if isinstance(schema, bool):
            return Anything() if schema else NOTHING
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise StructuredOutputError(f"json: the schema has more than {MAX_SCHEMAS} parts once it is combined")
        own = keywords.normalise(schema, path)
        if own.keys() == {"$ref"}:
            return self._reference(own["$ref"], path)
        if "$ref" in own or "allOf" in own:
            merged = self._flatten(schema, path)
            return self._name(merged, path)
        return self._parse_flat(own, path)

    # References and conjunctions

    def _reference(self, ref: str, path: str) -> Node:
        target = self._references.resolve(ref, path)
        return self._define(f"$ref {ref}", target, ref if ref != "#" else "")

    def _name(self, schema: JsonSchema, path: str) -> Node:
        """Combined schemas are definitions too: they may lead back to themselves."""
        return self._define(json.dumps(schema, sort_keys=False), schema, path)

    def _define(self, key: str, schema: JsonSchema, path: str) -> Node:
        name = self._named.get(key)
        if name is None:
            name = self._named[key] = str(len(self._named))
            self._todo.append((name, schema, path))
        return Ref(name)

    def _flatten(self, schema: dict[str, Any], path: str) -> JsonSchema:
        """One schema without `$ref` and `allOf` at its top."""
        result: JsonSchema = True
        todo: list[JsonSchema] = [schema]
        seen: set[str] = set()
        for part in todo:
            if isinstance(part, bool):
                if not part:
                    return False
                continue
            self._num_schemas += 1
            if self._num_schemas > MAX_SCHEMAS:
                raise StructuredOutputError(f"json: the schema has more than {MAX_SCHEMAS} parts once it is combined")
            own = keywords.normalise(part, path)
            if part is not schema and own.get("unevaluatedProperties", True) is not True:
                # It would have to tell this part's properties from those of the others.
                raise unsupported(path, "unevaluatedProperties", "in a schema that is combined with others")
            ref = own.pop("$ref", None)
            if ref is not None and ref not in seen:
                seen.add(ref)
                todo.append(self._references.resolve(ref, path))
            todo.extend(own.pop("allOf", ()))
            merged = own if isinstance(result, bool) else merge(result, own, path)
            if merged is False:
                return False
            result = merged
        return result

    # Alternatives

    def _parse_flat(self, schema: dict[str, Any], path: str) -> Node:
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._options(schema, keyword, path)
        if "enum" in schema:
            return self._constants(schema, path)
        kinds = schema.get("type")
        if kinds is not None:
            return union([self._of_type(schema, kind, path, is_loose=False) for kind in kinds])
        spoken_of = [kind for kind in keywords.OF_TYPE if keywords.has_keyword_of(schema, kind)]
        if "format" in schema and not spoken_of:
            spoken_of = ["string"]
        if not spoken_of:
            return Anything()
        return union([self._of_type(schema, kind, path, is_loose=True) for kind in spoken_of])

    def _options(self, schema: dict[str, Any], keyword: str, path: str) -> Node:
        """Keywords beside the options hold for each of them."""
        rest = {key: value for key, value in schema.items() if key != keyword}
        # Looks at the properties of the rest and of the option alike.
        whole = {"unevaluatedProperties": rest.pop("unevaluatedProperties")} if "unevaluatedProperties" in rest else {}
        nodes: list[Node] = []
        for index, option in enumerate(schema[keyword]):
            combined = {**whole, "allOf": [rest, option]} if rest or whole else option
            nodes.append(self.parse(combined, f"{path}/{keyword}/{index}"))
        if keyword == "oneOf":
            self._exclusive.append((nodes, path))
        return union(nodes)

    def _check_exclusive(self, options: list[Node], path: str) -> None:
        others: list[Node] = []
        texts: list[str] = []
        for option in options:
            if isinstance(option, Constants):
                texts += [constant_text(json.loads(text)) for text in option.texts]
            else:
                others.append(option)
        if len(others) > MAX_EXCLUSIVE:
            raise unsupported(path, "oneOf", f"more than {MAX_EXCLUSIVE} options that are not constants; use anyOf")
        constants = Constants(tuple(dict.fromkeys(texts)))
        pairs = itertools.combinations([*others, constants], 2)
        if len(constants.texts) < len(texts) or not all(are_disjoint(a, b, self.definitions) for a, b in pairs):
            raise unsupported(
                path,
                "oneOf",
                "two of its options may both hold, as far as their types, constants, bounds and required constant "
                "properties tell; use anyOf, or give each option its own constant",
            )

    def _constants(self, schema: dict[str, Any], path: str) -> Node:
        kinds = schema.get("type", keywords.TYPES)
        texts = []
        for value in schema["enum"]:
            kind = _kind(value)
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                continue
            family = "number" if kind == "integer" else kind
            beside = [key for key in keywords.OF_TYPE.get(family, ()) if key in schema]
            if "format" in schema and family in ("string", "number"):
                beside.append("format")
            if beside:
                raise unsupported(path, beside[0], "beside enum or const; leave out the values it excludes")
            texts.append(json.dumps(value, ensure_ascii=False))
        return Constants(tuple(dict.fromkeys(texts)))

    # Types

    def _of_type(self, schema: dict[str, Any], kind: str, path: str, is_loose: bool) -> Node:
        keywords.check_type_keywords(schema, kind, path)
        match kind:
            case "null":
                return NULL
            case "boolean":
                return BOOLEAN
            case "string":
                return String(make_string(schema, path), is_loose)
            case "array":
                return self._array(schema, path, is_loose)
            case "object":
                return make_object(schema, path, self.parse, is_loose)
            case _:
                return self._number(schema, kind, path, is_loose)

    def _array(self, schema: dict[str, Any], path: str, is_loose: bool) -> Node:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("uniqueItems") and (high is None or high > 1):
            raise unsupported(path, "uniqueItems")
        if high is not None and low > high:
            return NOTHING
        prefix = [self.parse(each, f"{path}/prefixItems/{i}") for i, each in enumerate(schema.get("prefixItems", ()))]
        # Like objects with properties, tuples are closed unless the schema opens them.
        default = "prefixItems" not in schema or low > len(prefix)
        items = schema.get("items", default)
        node = None if items is False else self.parse(items, f"{path}/items")
        if high is not None and high < len(prefix):
            prefix, node = prefix[:high], None
        if node is None and high is not None and high >= len(prefix):
            high = None
        return Array(tuple(prefix), node, low, high, is_loose)

    def _number(self, schema: dict[str, Any], kind: str, path: str, is_loose: bool) -> Node:
        low, high, low_exclusive, high_exclusive = _bounds(schema)
        multiple = schema.get("multipleOf")
        if multiple is not None:
            if multiple != int(multiple):
                raise unsupported(path, "multipleOf", f"only whole numbers are supported, got {multiple!r}")
            kind = "integer"
        name = schema.get("format")
        if kind == "integer":
            first = None if low is None else math.floor(low) + 1 if low_exclusive else math.ceil(low)
            last = None if high is None else math.ceil(high) - 1 if high_exclusive else math.floor(high)
            first, last = _format_bounds(name, first, last, path)
            return _integer(first, last, int(multiple or 1), path, is_loose)
        if name is not None and name not in _NUMBER_FORMATS:
            raise wrong(path, "format", name, f"one of {', '.join(_NUMBER_FORMATS)} for a number")
        if low is not None and high is not None and (low > high or (low == high and (low_exclusive or high_exclusive))):
            return NOTHING
        return Number(low, high, low_exclusive, high_exclusive, is_loose)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _bounds(schema: dict[str, Any]) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """low, high, and whether each is excluded: the stricter of the inclusive and the exclusive bound."""
    low, high = _decimal(schema.get("minimum")), _decimal(schema.get("maximum"))
    above, below = _decimal(schema.get("exclusiveMinimum")), _decimal(schema.get("exclusiveMaximum"))
    low_exclusive = above is not None and (low is None or above >= low)
    high_exclusive = below is not None and (high is None or below <= high)
    return above if low_exclusive else low, below if high_exclusive else high, low_exclusive, high_exclusive


def _decimal(value: Any) -> Decimal | None:
    """The shortest decimal that reads as this number."""
    return None if value is None else Decimal(repr(value))


def _format_bounds(name: Any, low: int | None, high: int | None, path: str) -> tuple[int | None, int | None]:
    """OpenAPI's integer formats as bounds."""
    if name is None:
        return low, high
    sign, _, digits = name.partition("int")
    if sign not in ("", "u") or digits not in ("8", "16", "32", "64"):
        raise wrong(path, "format", name, "int8 to int64 or uint8 to uint64 for an integer")
    bits = int(digits)
    first, last = (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return first if low is None else max(low, first), last if high is None else min(high, last)


def _integer(low: int | None, high: int | None, multiple: int, path: str, is_loose: bool) -> Node:
    if low is not None and high is not None and low > high:
        return NOTHING
    if (low is not None and low > MAX_INTEGER) or (high is not None and high < -MAX_INTEGER):
        raise unsupported(path, "minimum" if low is not None and low > MAX_INTEGER else "maximum",
                          "integers have at most 18 digits")  # fmt: skip
    if multiple == 1:
        return Integer(low, high, 1, is_loose)
    if low is not None and high is not None:
        values = range(-(-low // multiple) * multiple, high + 1, multiple)
        if len(values) > MAX_MULTIPLES:
            raise unsupported(path, "multipleOf", f"the bounds hold {len(values)} multiples; at most {MAX_MULTIPLES}")
        if is_loose:
            raise unsupported(path, "multipleOf", 'without a type; add "type": "integer"')
        return Constants(tuple(map(str, values)))
    if high is not None or (low is not None and not 0 <= low <= multiple) or multiple > MAX_MULTIPLE_OF:
        raise unsupported(
            path,
            "multipleOf",
            f"needs both bounds, or none (or a minimum from 0 to {multiple}) and a value up to {MAX_MULTIPLE_OF}",
        )
    return Integer(low, high, multiple, is_loose)
