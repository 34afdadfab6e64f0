"""Forms of structured output that are malformed, recursive without end, or explosive."""

from __future__ import annotations

from typing import Any


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


_ALTERNATIVES = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(12)]}

EXPLOSIVE_FORMS: dict[str, dict[str, Any]] = {
    "nested repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential automaton": {"regex": "(a|b)*a(a|b){40}"},
    "ambiguous": {"grammar": 'root ::= part part part part\npart ::= ("a" | "aa" | part part)*'},
    "wide": {"grammar": "\n".join(["root ::= " + "r? " * 300, 'r ::= "a"+'])},
    "big bounds": {"json": {"type": "array", "minItems": 5000, "items": {"type": "string", "maxLength": 5000}}},
}
"""Not wrong, but a lot of work: each is refused, or fails alone, or gives a text that is valid as far as it goes."""

BAD_FORMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "two kinds": {"regex": "a", "choice": ["a"]},
    "unknown kind": {"yaml": "a"},
    "regex: open group": {"regex": "(a"},
    "regex: lookahead": {"regex": "(?=a)b"},
    "regex: backreference": {"regex": r"(a)\1"},
    "regex: a billion repeats": {"regex": "a{1000000000}"},
    "regex: too long": {"regex": "a" * 10_000},
    "grammar: syntax": {"grammar": 'root ::= ("a"'},
    "grammar: no root": {"grammar": 'start ::= "a"'},
    "grammar: undefined rule": {"grammar": 'root ::= "a" other'},
    "grammar: endless": {"grammar": "root ::= root"},
    "grammar: endless in two": {"grammar": 'root ::= "a" b\nb ::= "b" root'},
    "grammar: a billion repeats": {"grammar": 'root ::= "a"{1000000000}'},
    "json: no JSON": {"json": '{"type": '},
    "json: no type of that name": {"json": {"type": "text"}},
    "json: misspelt": {"json": {"type": "object", "propertes": {}}},
    "json: not": {"json": {"not": {"type": "string"}}},
    "json: dangling reference": {"json": {"$ref": "#/$defs/a"}},
    "json: circle of references": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "json: endless": {
        "json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    },
    "json: too deep": {"json": _deep(100)},
    "json: exponential": {"json": {"allOf": [_ALTERNATIVES] * 12}},
    "json: nothing satisfies it": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "json: pattern": {"json": {"type": "string", "pattern": "("}},
    "choice: none": {"choice": []},
    "choice: not text": {"choice": ["a", 1]},
    "structural_tag: no tag": {"structural_tag": {"type": "tag"}},
    "structural_tag: bad content": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "("}, "end": ">"},
        }
    },
    "whitespace: not a regex": {"json_object": True, "whitespace_pattern": "("},
}
