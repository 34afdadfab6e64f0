"""Regular expressions: the grammar's language is that of `re`, in plain text and inside JSON strings."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

import engine_actors.structured_output.ebnf_writer as ebnf_writer
from engine_actors.structured_output import charset
from engine_actors.structured_output.ebnf_writer import GrammarWriter, char_class, count_text
from engine_actors.structured_output.json_text import ANY_STRING, string_text
from engine_actors.structured_output.regex import (
    Alt,
    Chars,
    Regex,
    Repeat,
    Seq,
    alt,
    is_empty_set,
    max_length,
    min_length,
    repeat,
    seq,
    with_length,
)
from engine_actors.structured_output.regex_parser import parse_full, parse_search
from scheduler.structured_output import StructuredOutputError
from tests.engine_actors.structured_cases import accepts, compile_ebnf, language, random_texts

PATTERNS = [
    r"\d{4}-\d{2}-\d{2}",
    r"(\+\d{1,3} )?\(?\d{3}\)?[- ]\d{3}-\d{4}",
    r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    r"(ab|cd)*x",
    r".*\d.*",
    r"[^,]{1,300}",
    r"(a|b)*a(a|b){12}",
    r"(a{1,100}){1,100}",
    r"é+[\u00e0-\u00ff]*",
    r"(?:ab)+",
    r"[\d\s]+",
    r"x{,3}y{2,}z{2}",
    r"x*?y+?",
    r"(?P<name>a)b",
    r"\x41\u0042\t\0",
    r"",
    r"a|",
    r"\/\-\_\.",
    r"[\w-]+",
    r"\W\S\D",
    r"[^\W]",
    r"^(foo|bar)$",
    r"^a|b$",
    r"(^a|b$)",
    r"[^\d\s]{2}",
    r"\S+ \D+",
    r"[\]\\^-]+",
    r"😀{2}|[😀-😎]+",
    r"{x}a{x}a{}",
    r"(\w+,){1,100}",
    r"[A-Z]{1,100}-.{0,100}",
    r'\\"\n',
    r"((a?){3}){2}",
    r"0(x[0-9]+)?",
    r"[ab]|[ab]{0,2}",
]


def grammar_of(node: Regex) -> object:
    writer = GrammarWriter()
    return compile_ebnf(writer.grammar(writer.regex(node)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generated_texts_match_as_a_whole(pattern: str) -> None:
    for text in random_texts(grammar_of(parse_full(pattern)), 20):
        assert re.fullmatch(pattern, text.decode()), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generated_json_strings_contain_a_match(pattern: str) -> None:
    for text in random_texts(grammar_of(string_text(parse_search(pattern))), 20):
        assert re.search(pattern, json.loads(text)), text


@pytest.mark.parametrize(("low", "high"), [(0, 5), (3, 10), (8, None), (20, 20), (0, 70)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_lengths_hold_together_with_a_pattern(pattern: str, low: int, high: int | None) -> None:
    node = with_length(parse_search(pattern), low, high)
    if is_empty_set(node):  # no text of that length matches
        shortest, longest = min_length(parse_search(pattern)), max_length(parse_search(pattern))
        assert (high is not None and shortest > high) or (longest is not None and longest < low)
        return
    for text in random_texts(grammar_of(string_text(node)), 5):
        value = json.loads(text)
        assert re.search(pattern, value)
        assert low <= len(value) <= (high or len(value))


def random_regex(rng: random.Random, depth: int) -> Regex:
    kind = rng.random()
    if depth == 0 or kind < 0.15:
        return Chars(charset.of_chars(rng.choice(["a", "b", "c", "ab", "bc", "abc"])))
    if kind < 0.45:
        return seq(*(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))))
    if kind < 0.65:
        return alt(*(random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))))
    low, high = rng.choice([(0, 1), (0, 1), (0, None), (1, None), (0, 2), (1, 3), (2, 2), (2, None)])
    return repeat(random_regex(rng, depth - 1), low, high)


def as_python(node: Regex) -> str:
    match node:
        case Chars(ranges):
            return "[" + "".join(chr(code) for low, high in ranges for code in range(low, high + 1)) + "]"
        case Seq(items):
            return "".join(f"(?:{as_python(item)})" for item in items)
        case Alt(options):
            return "(?:" + "|".join(map(as_python, options)) + ")"
        case Repeat(item, low, high):
            return f"(?:{as_python(item)})" + count_text(low, high)


@pytest.mark.parametrize(("max_weight", "max_states"), [(256, 512), (256, 2), (6, 512)])
def test_language_is_exact_however_it_is_written(
    max_weight: int, max_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As automata, as operators where the automaton is too large, and taken apart."""
    monkeypatch.setattr(ebnf_writer, "_MAX_WEIGHT", max_weight)
    monkeypatch.setattr(ebnf_writer, "_MAX_STATES", max_states)
    words = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]
    rng = random.Random(max_states + max_weight)
    for _ in range(150):
        node = random_regex(rng, 3)
        expected = {word for word in words if re.fullmatch(as_python(node), word)}
        assert language(grammar_of(node), "abc", 5) == expected, as_python(node)


def test_character_sets_are_exact_and_valid_utf8() -> None:
    rng = random.Random(3)
    planes = [0x7F, 0x7FF, 0xFFF, 0xFFFF, 0x10FFFF]
    for _ in range(60):
        pairs = []
        for _ in range(rng.randint(1, 5)):
            low = rng.randint(0, rng.choice(planes))
            pairs.append((low, min(0x10FFFF, low + rng.choice([0, 1, 5, 60, 300, 5000, 100000, 0x10FFFF]))))
        ranges = charset.make_ranges(pairs)
        ranges = charset.complement(ranges) if rng.random() < 0.3 else ranges
        if not ranges:
            continue
        grammar = compile_ebnf(f"root ::= {char_class(ranges)}")
        edges = {edge + step for pair in ranges for edge in pair for step in (-1, 0, 1)} | {0xD800, 0xDFFF}
        for code in edges:
            if 0 <= code <= 0x10FFFF:
                expected = any(low <= code <= high for low, high in ranges)
                assert accepts(grammar, chr(code).encode(errors="surrogatepass")) == expected, hex(code)
        for overlong in (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xff"):
            assert not accepts(grammar, overlong)


@pytest.mark.parametrize(("low", "high"), [(0, 200), (1, 129), (127, 130), (150, 150), (200, None), (129, None)])
@pytest.mark.parametrize("item", ["[a-z]", "[^\\n]", "(ab|c)"])
def test_counted_repeats_are_exact_beyond_what_xgrammar_unrolls(item: str, low: int, high: int | None) -> None:
    grammar = grammar_of(parse_full(f"<{item}{count_text(low, high)}>"))
    for count in {0, 1, low - 1, low, low + 1, 128, 129, (high or 300) - 1, high or 300, (high or 300) + 1}:
        if count >= 0:
            expected = low <= count and (high is None or count <= high)
            assert accepts(grammar, "<" + "c" * count + ">") == expected, count


def test_any_json_string_is_read_by_strict_parsers() -> None:
    grammar = grammar_of(ANY_STRING)
    for text in random_texts(grammar, 60):
        json.loads(text).encode()  # no lone surrogates
    for text in (r'"\ud83d\ude00"', r'"\n\"\\\/\u00e9"', '"é😀"', '""'):
        assert accepts(grammar, text)
    for text in (r'"\ud800"', r'"\udc00"', r'"\ud83d\u0041"', '"\t"', '"\x00"', r'"\x41"', '"a', '"a""'):
        assert not accepts(grammar, text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a++", "possessive"),
        (r"(?=a)b", "lookahead"),
        (r"(?<!a)b", "negative lookbehind"),
        (r"a^b", r"\^ that is not at an end"),
        (r"(a$)b", r"\$ that is not at an end"),
        (r"\bx", "word boundary"),
        (r"(a)\1", "backreference"),
        (r"(?P<n>a)(?P=n)", "backreference"),
        (r"\p{L}", "Unicode property"),
        (r"[]a]", "read differently"),
        (r"a{2,1}", "reversed"),
        (r"(a", "not closed"),
        (r"a)", "unbalanced"),
        (r"[z-a]", "reversed"),
        (r"[a", "not closed"),
        (r"[\d-z]", "both ends"),
        (r"(?i)a", "inline flag"),
        (r"*a", "nothing to repeat"),
        (r"a**", "multiple quantifiers"),
        (r"a{2}{3}", "multiple quantifiers"),
        (r"^*", "nothing to repeat"),
        ("a\\", "ends with a backslash"),
        (r"\q", "unknown escape"),
        (r"\x4", "hexadecimal"),
        (r"\ud800", "no character"),
        ("\ud800", "surrogate"),
        (r"a{99999}", "exceeds 65536"),
        (r"a{99999999999}", "exceeds 65536"),
        (r"[^\x00-\U0010ffff]", "no text matches"),
        ("(" * 70 + ")" * 70, "nest more than 64"),
        (r"(?(1)a|b)", "conditional"),
        (r"(?>a)", "atomic group"),
    ],
)
def test_what_is_not_regular_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=reason):
        parse_full(pattern)


def test_refusal_names_the_position() -> None:
    with pytest.raises(StructuredOutputError, match=r"'ab\\\\bc': a word boundary is not supported, at position 2"):
        parse_full(r"ab\bc")


def test_negated_classes_avoid_what_either_dialect_matches() -> None:
    """Python's \\d, \\w and \\s are Unicode, ECMAScript's \\d and \\w are not."""
    assert not accepts(grammar_of(parse_full(r"\D")), "\u0663")
    assert not accepts(grammar_of(parse_full(r"\W")), "é")
    assert not accepts(grammar_of(parse_full(r"[^\s]")), "\u3000")
    assert not accepts(grammar_of(parse_full(r"\d")), "\u0663")
    assert accepts(grammar_of(parse_full(r"\S")), "é")
    spaces = {chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and chr(code).isspace()}
    wide = {chr(code) for low, high in charset.ANY_SPACE for code in range(low, high + 1)}
    assert spaces <= wide
