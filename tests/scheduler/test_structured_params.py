"""StructuredOutputsParams: exactly one form, of the right shape and size, and one spec for what is the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from scheduler.structured_params import MAX_NESTING, MAX_TEXT_CHARS, GrammarSpec, StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"json": {"b": 1, "a": [2]}}, GrammarSpec("json", '{"b":1,"a":[2]}')),
        ({"json": ' {"b": 1} '}, GrammarSpec("json", '{"b":1}')),
        ({"json": True}, GrammarSpec("json", "true")),
        ({"regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"choice": ["x", "y", "x"]}, GrammarSpec("choice", '["x", "y"]')),
        ({"grammar": 'root ::= "a"'}, GrammarSpec("grammar", 'root ::= "a"')),
        ({"json_object": True}, GrammarSpec("json_object", "")),
        ({"json_object": False, "regex": "a"}, GrammarSpec("regex", "a")),
        ({"structural_tag": {"type": "x"}}, GrammarSpec("structural_tag", '{"type":"x"}')),
        ({"structural_tag": '{"type": "x"}'}, GrammarSpec("structural_tag", '{"type":"x"}')),
        ({"json": {}, "disable_any_whitespace": True}, GrammarSpec("json", "{}", False)),
        ({"json": {}, "whitespace_pattern": " *"}, GrammarSpec("json", "{}", True, " *")),
        # Options of JSON make no other grammar of an expression.
        ({"regex": "a", "disable_any_whitespace": True}, GrammarSpec("regex", "a")),
        ({"json": {"a": 1}, "disable_additional_properties": True}, GrammarSpec("json", '{"a":1}')),
    ],
)
def test_spec_is_the_canonical_form(fields: dict[str, Any], spec: GrammarSpec) -> None:
    assert StructuredOutputsParams(**fields).spec() == spec


def test_equal_requests_share_a_hashable_spec() -> None:
    first = StructuredOutputsParams(json={"a": 1}).spec()
    second = StructuredOutputsParams(json='{ "a" : 1 }').spec()
    assert {first: 1}[second] == 1


def test_order_of_members_is_kept_since_it_is_the_order_of_the_output() -> None:
    assert (
        StructuredOutputsParams(json={"b": {}, "a": {}}).spec()
        != StructuredOutputsParams(json={"a": {}, "b": {}}).spec()
    )


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
        ({"json_object": False}, "exactly one of .*; got none"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*; got regex, choice"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": 3}, "json must be a JSON schema"),
        ({"json": []}, "json must be a JSON schema"),
        ({"json": "[" * 100_000}, "json is not valid JSON"),
        ({"json": {"a": float("nan")}}, "json holds what JSON has not"),
        ({"json": "NaN"}, "json must be a JSON schema"),
        ({"json": {"a": {1}}}, "json holds what JSON has not"),
        ({"regex": ""}, "regex must be a non-empty string, got ''"),
        ({"regex": 3}, "regex must be a non-empty string, got 3"),
        ({"grammar": " \n"}, "grammar must be a non-empty string"),
        ({"choice": []}, "choice must be a list of non-empty strings"),
        ({"choice": "abc"}, "choice must be a list of non-empty strings, got 'abc'"),
        ({"choice": ["a", ""]}, "choice must be a list of non-empty strings"),
        ({"choice": ["a", 1]}, "choice must be a list of non-empty strings"),
        ({"choice": [str(i) for i in range(10_001)]}, "choice must hold at most 10000 strings, got 10001"),
        ({"json_object": 1}, "json_object must be true or false, got 1"),
        ({"structural_tag": "[]"}, "structural_tag must be an object"),
        ({"structural_tag": True}, "structural_tag must be an object"),
        ({"regex": "a" * (MAX_TEXT_CHARS["regex"] + 1)}, "regex must be at most 8192 characters, got 8193"),
        ({"json": '"' + "a" * MAX_TEXT_CHARS["json"] + '"'}, "json must be at most 524288 characters"),
        ({"json": {}, "disable_any_whitespace": "no"}, "disable_any_whitespace must be true or false, got 'no'"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern must be a regular expression"),
        ({"json": {}, "whitespace_pattern": " " * 300}, "whitespace_pattern must be .* at most 256 characters"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern needs json or json_object, got regex"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "cannot be used with"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs.*{error}"):
        StructuredOutputsParams(**fields)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


def test_nesting_is_bounded_even_where_it_has_no_end() -> None:
    assert StructuredOutputsParams(json=nested(MAX_NESTING)).kind == "json"
    with pytest.raises(ValueError, match=f"nested at most {MAX_NESTING} deep"):
        StructuredOutputsParams(json=nested(MAX_NESTING + 1))
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(ValueError, match="nested at most"):
        StructuredOutputsParams(json=endless)


def test_params_travel_and_are_checked_on_arrival() -> None:
    params = StructuredOutputsParams(json={"b": 1, "a": [1, 2.5, None]}, disable_any_whitespace=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params
    with pytest.raises(msgspec.ValidationError, match="exactly one of"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"regex": "a", "choice": ["b"]}), type=StructuredOutputsParams)
    assert json.loads(msgspec.json.encode(params.spec()))[0] == "json"
