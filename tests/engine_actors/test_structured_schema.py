"""JSON schemas: what is generated is valid, what is valid in the promised form is accepted, the rest is refused."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from engine_actors.structured_output.formats import SUPPORTED_FORMATS
from engine_actors.structured_output.numbers import MAX_INTEGER, integers, numbers
from engine_actors.structured_output.regex import is_empty_set
from engine_actors.structured_output.source import check
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import StructuredOutputsParams
from tests.engine_actors.structured_cases import accepts, compile_params, random_texts
from tests.engine_actors.structured_keywords import KEYWORDS, REFUSED
from tests.engine_actors.structured_schemas import REALISTIC
from tests.engine_actors.test_structured_regex import as_python


def validator(schema: Any) -> Any:
    # Draft 4's boolean bounds and draft 7's tuples mean something else, or nothing, in 2020-12.
    is_old = "exclusiveMinimum" in schema or isinstance(schema.get("items"), list)
    kind = jsonschema.Draft4Validator if is_old else jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def assert_texts_are_valid(schema: Any, count: int = 15, **options: Any) -> None:
    grammar = compile_params(json=schema, **options)
    texts = list(random_texts(grammar, count, max_bytes=1500))
    assert texts, "no random text came to an end"
    for text in texts:
        error = next(validator(schema).iter_errors(json.loads(text)), None)
        assert error is None, f"{text!r}: {error}"


@pytest.mark.parametrize("name", REALISTIC)
def test_random_texts_of_realistic_schemas_are_valid(name: str) -> None:
    assert_texts_are_valid(REALISTIC[name])


@pytest.mark.parametrize("name", ["person_with_address", "arrays", "map_of_numbers", "tool_call", "sixty_optional"])
def test_without_optional_whitespace_texts_are_those_of_json_dumps(name: str) -> None:
    grammar = compile_params(json=REALISTIC[name], disable_any_whitespace=True)
    for text in random_texts(grammar, 15, max_bytes=1500):
        stripped = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text.decode())
        assert re.search(r"[,:](?! [^ ])| (?![^ ])|[\[{] | [\]}]|\n", stripped) is None, text


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"), KEYWORDS, ids=[json.dumps(case[0])[:60] for case in KEYWORDS]
)
def test_each_keyword_is_enforced(schema: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    grammar = compile_params(json=schema)
    for text in accepted:
        assert validator(schema).is_valid(json.loads(text)), f"the case itself is wrong: {text}"
        assert accepts(grammar, text), text
    for text in refused:
        assert not accepts(grammar, text), text
    for text in random_texts(grammar, 8):
        assert validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=reason):
        check(StructuredOutputsParams(json=schema))


def test_refusal_says_where() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "array", "uniqueItems": True}}}}
    with pytest.raises(StructuredOutputError, match=r"^json/properties/a/items: 'uniqueItems'"):
        check(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "integer", "minimum": 0.2, "maximum": 0.8},
        {"type": "string", "minLength": 5, "maxLength": 4},
        {"type": "string", "pattern": "^abc$", "maxLength": 2},
        {"enum": ["a"], "type": "integer"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        {"type": "object", "maxProperties": 1, "required": ["a", "b"]},
        {"type": "array", "prefixItems": [False], "minItems": 1},
    ],
)
def test_a_schema_without_finite_values_is_refused(schema: Any) -> None:
    with pytest.raises(StructuredOutputError, match="no finite value satisfies"):
        check(StructuredOutputsParams(json=schema))


def test_options_that_never_end_are_left_out() -> None:
    grammar = compile_params(json={"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"const": 1}]})
    assert accepts(grammar, "[[1], 1]")
    endless = {"$defs": {"e": {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}}}
    grammar = compile_params(json={**endless, "anyOf": [{"$ref": "#/$defs/e"}, {"const": 1}]})
    assert accepts(grammar, "1")
    assert not accepts(grammar, "[1]")
    grammar = compile_params(json={**endless, "type": "object", "properties": {"a": {"$ref": "#/$defs/e"}, "b": {}}})
    assert accepts(grammar, '{"b":1}')


def test_recursion_through_combined_schemas_ends() -> None:
    again = {"$ref": "#/$defs/n", "required": ["v"]}
    node = {"type": "object", "properties": {"next": again, "v": {"type": "null"}}}
    schema = {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    assert_texts_are_valid(schema)


def test_schemas_that_explode_when_combined_are_refused() -> None:
    options = [{"properties": {f"p{i}": {"const": i}}} for i in range(10)]
    with pytest.raises(StructuredOutputError, match="too many to combine"):
        check(StructuredOutputsParams(json={"allOf": [{"anyOf": options}, {"anyOf": options}]}))
    doubling: dict[str, Any] = {"$defs": {"d0": {"type": "null"}}, "$ref": "#/$defs/d30"}
    for i in range(30):
        pair = {"$ref": f"#/$defs/d{i}", "title": "x"}
        doubling["$defs"][f"d{i + 1}"] = {"type": "array", "prefixItems": [pair, pair]}
    assert_texts_are_valid(doubling)  # shared, so small
    wide = {
        "anyOf": [{"allOf": [{"anyOf": [{"minimum": i * j} for j in range(8)]}, {"maximum": i}]} for i in range(1000)]
    }
    with pytest.raises(StructuredOutputError, match="more than 20000 parts"):
        check(StructuredOutputsParams(json=wide))


def test_work_grows_with_a_schema_not_with_its_power() -> None:
    """Each of these once took time exponential or quadratic in its size."""
    nested: dict[str, Any] = {"type": "string", "maxLength": 3}
    for _ in range(30):
        nested = {"properties": {"a": nested}, "required": ["a"]}
    assert_texts_are_valid(nested, count=3)
    chain: dict[str, Any] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "minItems": 1} for i in range(3000)
    }
    check(StructuredOutputsParams(json={"$defs": {**chain, "d3000": {"type": "null"}}, "$ref": "#/$defs/d0"}))
    check(StructuredOutputsParams(json={"oneOf": [{"const": number, "title": "x"} for number in range(5000)]}))
    check(StructuredOutputsParams(json={f"vendor{number}": number for number in range(20_000)}))


def test_expressions_that_are_too_much_work_are_refused() -> None:
    properties = {f"p{i}": {"type": "number", "minimum": -i - 0.125, "maximum": i * i + 0.0625} for i in range(1, 1500)}
    with pytest.raises(StructuredOutputError, match="the grammar is too large"):
        check(StructuredOutputsParams(json={"type": "object", "properties": properties}))
    with pytest.raises(StructuredOutputError, match="of 9000 characters; at most 8192"):
        check(StructuredOutputsParams(json={"type": "string", "pattern": "a" * 9000}))


@pytest.mark.parametrize("name", SUPPORTED_FORMATS)
def test_formats_satisfy_their_checkers(name: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for limits in ({}, {"maxLength": 120}, {"minLength": 1, "maxLength": 340}):
        for text in random_texts(compile_params(json={"type": "string", "format": name, **limits}), 40):
            value = json.loads(text)
            checker.check(value, name)
            assert limits.get("minLength", 0) <= len(value) <= limits.get("maxLength", len(value))


def test_integer_ranges_are_exact() -> None:
    rng = random.Random(5)
    for _ in range(400):
        most = rng.choice([3, 12, 150, 5000, 10**6, 10**17])
        low = rng.choice([None, rng.randint(-most, most)])
        high = rng.choice([None, rng.randint(-most, most)])
        node = integers(low, high)
        assert is_empty_set(node) == (low is not None and high is not None and low > high)
        pattern = re.compile(as_python(node) if not is_empty_set(node) else "(?!)")
        near = {b + step for b in (low, high, 0) if b is not None for step in (-1, 0, 1)} | {10, 99, 100, -10}
        for value in near | {rng.randint(-2 * most, 2 * most) for _ in range(10)}:
            expected = (low is None or value >= low) and (high is None or value <= high) and abs(value) <= MAX_INTEGER
            assert bool(pattern.fullmatch(str(value))) == expected, (low, high, value)


def test_number_ranges_are_exact_once_read_as_doubles() -> None:
    rng = random.Random(6)
    for _ in range(300):
        most, digits = rng.choice([1, 3, 150, 5000, 10**6]), rng.choice([0, 1, 2, 3, 6])
        low, high = (rng.choice([None, round(rng.uniform(-most, most), digits)]) for _ in range(2))
        exclusive = rng.random() < 0.5, rng.random() < 0.5
        bounds = [None if bound is None else Decimal(repr(bound)) for bound in (low, high)]
        node = numbers(bounds[0], bounds[1], *exclusive)
        assert node is not None
        pattern = re.compile(as_python(node) if not is_empty_set(node) else "(?!)")
        for base in (low, high, 0.0, rng.uniform(-2 * most, 2 * most)):
            for step in (0, 1e-6, -1e-6, 0.1, -0.1, 1, -1):
                if base is None:
                    continue
                text = f"{base + step:.6f}"
                value = json.loads(text)
                above = low is None or (value > low if exclusive[0] else value >= low)
                below = high is None or (value < high if exclusive[1] else value <= high)
                if value:  # minus zero has a spelling of its own
                    assert bool(pattern.fullmatch(text)) == (above and below), (low, high, exclusive, text)


def test_whitespace_is_bounded_by_default() -> None:
    grammar = compile_params(json={"type": "array", "items": {"const": 1}})
    for text in ("[1,1]", "[1, 1]", "[\n  1,\n  1\n]", "[\n" + " " * 24 + "1]", "[\n\t\t1]"):
        assert accepts(grammar, text), text
    for text in ("[  1]", "[\n\n1]", "[\n" + " " * 25 + "1]", " [1]", "[1] ", "[1 ,1]"):
        assert not accepts(grammar, text), text


def test_whitespace_pattern_replaces_the_default() -> None:
    grammar = compile_params(json={"type": "array", "items": {"const": 1}}, whitespace_pattern=r"[ \n]{0,2}")
    assert accepts(grammar, "[ \n1,1]")
    assert not accepts(grammar, "[   1]")
    with pytest.raises(StructuredOutputError, match="whitespace_pattern must match spaces"):
        compile_params(json=True, whitespace_pattern=r"[ x]*")
    with pytest.raises(StructuredOutputError, match=r"whitespace_pattern: .*lookahead"):
        compile_params(json_object=True, whitespace_pattern=r"(?= )")


def test_json_object_is_any_object_and_nothing_else() -> None:
    grammar = compile_params(json_object=True)
    for text in ("{}", '{"a": [1, {"b": null}], "a": "x"}'):
        assert accepts(grammar, text)
    for text in ("[]", "1", "", '{"a"}'):
        assert not accepts(grammar, text)
    for text in random_texts(grammar, 20):
        assert isinstance(json.loads(text), dict)
