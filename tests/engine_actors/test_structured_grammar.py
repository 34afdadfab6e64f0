"""User grammars in EBNF, choices and structural tags."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine_actors.structured_output.source import check
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import StructuredOutputsParams
from tests.engine_actors.structured_cases import accepts, compile_params, random_texts

JSON_EBNF = r"""
# JSON, as models are often asked for it
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" char* "\"" ws
char   ::= [^"\\\x00-\x1f] | "\\" ["\\/bfnrt]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ws
ws     ::= [ \t\n]{0,2}
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (JSON_EBNF, ['{"a": [1, 2.5, "x\\n"], "b": {}}', "{}"], ['{"a":}', "[]", '{"a": 01}']),
        (
            'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
            ["1+2", "(1+(2))+3"],
            ["(1", "1+", ""],
        ),
        ('root ::= [^"]* "é" ("x"|"y"){2}', ["abéxy", "éxx"], ["é", "éxz"]),
        ('root ::= a b c\na ::= "x"?\nb ::= ""\nc ::= () "z"', ["xz", "z"], ["x", ""]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= "a" root "b" | "ab"', ["ab", "aabb"], ["aab", ""]),
        ('root ::= ("a" x){2,3}\nx ::= "(" x ")" | ""', ["aa", "a(())aa"], ["a", "aaaa"]),
        (r'root ::= "\u00e9\x41\n\t\"\\" [\]\-\^a-c]', ['éA\n\t"\\]', 'éA\n\t"\\b'], ['éA\n\t"\\d']),
        ('root ::= "x" | [^\\x00-\\U0010ffff]', ["x"], ["y"]),
        ("root ::= \\d+ | x\nx ::= [\\w]".replace("\\d+", "[\\d]+"), ["12", "q"], ["é"]),
        ('root ::= list\r\nlist ::= "-" [^\\n]+ "\\n" list | "-" [^\\n]+', ["-a\n-b"], ["-\n", "a"]),
    ],
)
def test_grammars_mean_what_they_say(grammar: str, accepted: list[str], refused: list[str]) -> None:
    compiled = compile_params(grammar=grammar)
    for text in accepted:
        assert accepts(compiled, text), text
    for text in refused:
        assert not accepts(compiled, text), text


def test_random_texts_of_a_json_grammar_are_json() -> None:
    texts = list(random_texts(compile_params(grammar=JSON_EBNF), 30))
    assert texts
    for text in texts:
        assert isinstance(json.loads(text), dict)


def test_negated_sets_of_users_hold_only_characters() -> None:
    compiled = compile_params(grammar='root ::= [^"]')
    assert accepts(compiled, "é")
    for invalid in (b"\xed\xa0\x80", b"\xc0\x80", b"\xff"):
        assert not accepts(compiled, invalid)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x ::= "a"', "no rule 'root' to start from; rules are x"),
        ('root ::= "a" root', "no finite text matches rule 'root'"),
        ("root ::= a\na ::= b\nb ::= a", "no finite text matches rule 'root'"),
        ('root ::= "a" | b\nb ::= "c" b', "no finite text matches rule 'b'"),
        ("root ::= [^\\x00-\\U0010ffff]", "no finite text"),
        ("root ::= \n  foo", "line 2: rule 'foo' is not defined"),
        ('root ::= "a', "line 1, column 10: unexpected"),
        ("root ::= [a", "unexpected '\\['"),
        ('root ::= ("a"', "expected the \\) of the group"),
        ('root = "a"', "unexpected '='"),
        ('root ::= "a" |', "expected a string"),
        ("root ::=", "expected a string"),
        ('root ::= Regex("a")', "macro Regex"),
        ('root ::= TagDispatch(("a", b))', "macro TagDispatch"),
        ('root ::= "a" (= "b")', "lookahead"),
        ('root ::= "a"{3,1}', "reversed"),
        ('root ::= "a"{99999}', "exceeds 65536"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule 'root' is defined twice"),
        ("root ::= [z-a]", "range z-a"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "\\u12"', "hexadecimal"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nest more than 64"),
        ('root[max_tokens=3] ::= "a"', "expected ::="),
        ('start: "a"', "unexpected ':'"),
        ("\n".join(f'r{i} ::= "a"' for i in range(5001)), "more than 5000 rules"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(grammar: str, reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=reason):
        check(StructuredOutputsParams(grammar=grammar))


def test_long_chains_of_rules_are_no_recursion_of_ours() -> None:
    chain = "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(3000))
    assert accepts(compile_params(grammar=f'root ::= r0\n{chain}\nr3000 ::= "c"'), "aab")
    nested = "\n".join(f'r{i} ::= ("a" r{i + 1})*' for i in range(1000))
    assert accepts(compile_params(grammar=f'root ::= r0 "."\n{nested}\nr1000 ::= "c"'), "aaa.")


def test_rules_that_double_or_repeat_each_other_stay_small() -> None:
    doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1000))
    check(StructuredOutputsParams(grammar=f'root ::= r0\n{doubling}\nr1000 ::= "a"'))
    many = " ".join(["a"] * 20_000)
    check(StructuredOutputsParams(grammar=f'root ::= {many}\na ::= "{"x" * 1000}"'))


def test_a_choice_is_one_of_its_strings() -> None:
    choices = ["positive", "negative", "neutral", "pos", 'with "quotes"', "naïve €\n", "\\d"]
    compiled = compile_params(choice=choices)
    for choice in choices:
        assert accepts(compiled, choice)
    for text in ("", "posi", "positivenegative", "Positive"):
        assert not accepts(compiled, text)
    assert {text.decode() for text in random_texts(compiled, 60)} <= set(choices)


def test_a_choice_that_is_no_text_is_refused() -> None:
    with pytest.raises(StructuredOutputError, match="lone surrogate"):
        check(StructuredOutputsParams(choice=["a", "\ud800"]))


CITY = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["city"]}


def whole(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [
        {"begin": "<f=weather>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</f>"},
        {"begin": "<f=time>", "content": {"type": "regex", "pattern": r"\d\d:\d\d"}, "end": "</f>"},
    ]
    return whole({"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more})


def test_triggered_tags_constrain_what_is_inside_them() -> None:
    compiled = compile_params(structural_tag=triggered())
    for text in (
        "just text",
        'So: <f=weather>{"city": "rome"}</f> and <f=time>12:30</f>!',
        '<f=weather>{"city":"rome"}</f>',
    ):
        assert accepts(compiled, text), text
    for text in ('<f=weather>{"city": "ROME"}</f>', "<f=time>12:3</f>", "<f=other>", '<f=weather>{"city": "rome"}'):
        assert not accepts(compiled, text), text


def test_one_tag_at_least_and_a_stop_after_it() -> None:
    compiled = compile_params(structural_tag=triggered(at_least_one=True, stop_after_first=True))
    assert accepts(compiled, "<f=time>12:30</f>")
    assert not accepts(compiled, "just text")
    assert not accepts(compiled, "<f=time>12:30</f> more")


def test_formats_combine() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "A:"},
                {
                    "type": "or",
                    "elements": [{"type": "regex", "pattern": "[0-9]"}, {"type": "const_string", "value": "x"}],
                },
                {"type": "optional", "content": {"type": "const_string", "value": "!"}},
                {
                    "type": "repeat",
                    "min": 1,
                    "max": 2,
                    "content": {"type": "grammar", "grammar": 'root ::= "(" [a-b] ")"'},
                },
                {
                    "type": "tag",
                    "begin": "<t>",
                    "content": {"type": "any_text", "excludes": ["bad"]},
                    "end": "</t>",
                },
            ],
        },
    }
    compiled = compile_params(structural_tag=tag)
    assert accepts(compiled, "A:7(a)<t>some <b>text</t>")
    assert accepts(compiled, "A:x!(b)(a)<t></t>")
    for text in ("A:7<t></t>", "A:7(c)<t></t>", "A:7(a)(a)(a)<t></t>", "A:7(a)<t>bad</t>", "A:7(a)<t>"):
        assert not accepts(compiled, text), text


def test_the_older_form_of_structural_tags_is_read() -> None:
    structures = [{"begin": "<f=w>", "schema": CITY, "end": "</f>"}]
    compiled = compile_params(structural_tag={"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
    assert accepts(compiled, 'a <f=w>{"city": "x"}</f>')
    assert not accepts(compiled, "<f=w>{}</f>")


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"type": "x"}, '/type must be "structural_tag"'),
        ({"type": "structural_tag"}, "/format must be an object"),
        (whole({"type": "token", "token": 3}), "/format/type must be one of const_string"),
        (whole({"type": "const_string"}), "/format/value must be a non-empty string"),
        (whole({"type": "any_text", "max_tokens": 3}), "unknown 'max_tokens'"),
        (whole({"type": "sequence", "elements": []}), "/elements must be a non-empty"),
        (
            whole({"type": "json_schema", "json_schema": {"uniqueItems": True}}),
            "structural_tag/format: json: 'uniqueItems'",
        ),
        (whole({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "/style"),
        (whole({"type": "regex", "pattern": "(?=a)"}), "lookahead"),
        (whole({"type": "grammar", "grammar": "root ::= x"}), "not defined"),
        (whole({"type": "repeat", "min": 2, "max": 1, "content": {}}), "/max must be"),
        ({"type": "structural_tag", "structures": [], "triggers": ["a"]}, "/structures must be a non-empty list"),
        (triggered(triggers=["<g="]), "begin must be a text that exactly one of the triggers begins; 0 do"),
        (triggered(at_least_one=1), "/at_least_one must be true or false"),
    ],
)
def test_bad_structural_tags_are_refused_with_the_place(tag: dict[str, Any], reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=re.escape(reason).replace("\\.\\*", ".*")):
        check(StructuredOutputsParams(structural_tag=tag))
