"""Text of a user's EBNF grammar → syntax trees. The dialect is GBNF's, which xgrammar reads too:

    root  ::= "a" item+ | [^0-9]* (item | "b"){2,3}    # comment
    item  ::= "\\u0041" "x"?

Not read: macros, lookahead, rule attributes. Called by `ebnf_grammar`, which writes the trees back in a form of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine_actors.structured_output import charset
from engine_actors.structured_output.charset import Ranges
from engine_actors.structured_output.regex import MAX_REPEAT, Chars, Regex, literal
from scheduler.structured_output import StructuredOutputError

MAX_GROUP_DEPTH = 64
MAX_RULES = 5000


@dataclass(frozen=True)
class Terminal:
    """Text by itself."""

    regex: Regex


@dataclass(frozen=True)
class Reference:
    """Another rule, named at (line, column)."""

    name: str
    line: int = 0


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    item: Node
    low: int
    high: int | None


Node = Terminal | Reference | Sequence | Choice | Repetition


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int
    column: int


_TOKENS = re.compile(
    r"""
      (?P<space>[ \t]+|\#[^\r\n]*)
    | (?P<newline>\r\n|\r|\n)
    | (?P<assign>::=)
    | (?P<name>[A-Za-z_.-][A-Za-z0-9_.-]*)
    | (?P<string>"(?:[^"\\\r\n]|\\.)*")
    | (?P<set>\[\^?(?:[^\]\\\r\n]|\\.)*\])
    | (?P<count>\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    | (?P<lookahead>\(=)
    | (?P<sign>[()|*+?])
    """,
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLASSES = {"d": charset.DIGITS, "w": charset.WORD, "s": charset.SPACE}
_CLASSES |= {"D": charset.complement(charset.ANY_DIGIT), "W": charset.complement(charset.ANY_WORD)}
_CLASSES |= {"S": charset.complement(charset.ANY_SPACE)}
_MACROS = ("Regex", "Token", "ExcludeToken", "TagDispatch", "TokenTagDispatch", "Substring", "ByteString")


def parse_ebnf(text: str) -> dict[str, Node]:
    """The rules by name.

    Raises:
        StructuredOutputError: A syntax error, or what is not supported, with its line and column.
    """
    return _Parser(_tokens(text)).rules()


def _error(what: str, line: int, column: int) -> StructuredOutputError:
    return StructuredOutputError(f"grammar, line {line}, column {column}: {what}")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position, line, line_start = 0, 1, 0
    while position < len(text):
        match = _TOKENS.match(text, position)
        column = position - line_start + 1
        if match is None:
            raise _error(f"unexpected {text[position]!r}", line, column)
        kind = str(match.lastgroup)
        if kind == "lookahead":
            raise _error("lookahead (= … ) is not supported", line, column)
        if match[0] in _MACROS and text.startswith("(", match.end()):
            raise _error(f"the macro {match[0]}(…) is not supported", line, column)
        if kind not in ("space", "newline"):
            tokens.append(_Token(kind, match[0], line, column))
        position = match.end()
        if kind == "newline":
            line, line_start = line + 1, position
    tokens.append(_Token("end", "the end", line, len(text) - line_start + 1))
    return tokens


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._index = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._here.kind != "end":
            name = self._take("name", "a rule name")
            self._take("assign", "::= after the rule name")
            if name.text in rules:
                raise _error(f"rule {name.text!r} is defined twice", name.line, name.column)
            rules[name.text] = self._choice()
            if len(rules) > MAX_RULES:
                raise StructuredOutputError(f"grammar: more than {MAX_RULES} rules")
        return rules

    @property
    def _here(self) -> _Token:
        return self._tokens[self._index]

    def _take(self, kind: str, expected: str) -> _Token:
        token = self._here
        if token.kind != kind:
            raise self._unexpected(expected)
        self._index += 1
        return token

    def _unexpected(self, expected: str) -> StructuredOutputError:
        token = self._here
        return _error(f"expected {expected}, got {token.text[:40]!r}", token.line, token.column)

    def _is_sign(self, sign: str) -> bool:
        return self._here.kind == "sign" and self._here.text == sign

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._is_sign("|"):
            self._index += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._starts_element():
            items.append(self._repeated(self._element()))
        if not items:
            raise self._unexpected("a string, a character class, a rule name or (")
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _starts_element(self) -> bool:
        if self._here.kind == "name":  # unless it begins the next rule
            return self._tokens[self._index + 1].kind != "assign"
        return self._here.kind in ("string", "set") or self._is_sign("(")

    def _element(self) -> Node:
        token = self._here
        self._index += 1
        if token.kind == "string":
            return Terminal(literal(_string(token)))
        if token.kind == "set":
            return Terminal(Chars(_set(token)))
        if token.kind == "name":
            return Reference(token.text, token.line)
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise _error(f"groups nest more than {MAX_GROUP_DEPTH} deep", token.line, token.column)
        if self._is_sign(")"):
            node: Node = Sequence(())
        else:
            node = self._choice()
        if not self._is_sign(")"):
            raise self._unexpected(f"the ) of the group at line {token.line}, column {token.column}")
        self._index += 1
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        token = self._here
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if token.kind == "sign" and token.text in bounds:
            self._index += 1
            return Repetition(node, *bounds[token.text])
        if token.kind != "count":
            return node
        self._index += 1
        first, comma, last = token.text[1:-1].partition(",")
        low = int(first)
        high = (int(last) if last.strip() else None) if comma else low
        if high is not None and low > high:
            raise _error(f"the bounds of {token.text} are reversed", token.line, token.column)
        if max(low, high or 0) > MAX_REPEAT:
            raise _error(f"{token.text} exceeds {MAX_REPEAT}", token.line, token.column)
        return Repetition(node, low, high)


def _string(token: _Token) -> str:
    chars = []
    body = token.text[1:-1]
    position = 0
    while position < len(body):
        char, position = _char(body, position, token, '"')
        chars.append(char)
    return "".join(chars)


def _set(token: _Token) -> Ranges:
    body = token.text[1:-1]
    negated = body.startswith("^")
    position = int(negated)
    found: list[Ranges] = []
    while position < len(body):
        if body[position] == "\\" and body[position + 1] in _CLASSES:
            found.append(_CLASSES[body[position + 1]])
            position += 2
            continue
        low, position = _char(body, position, token, "^$\\.*+?()[]{}|/-\"'")
        high = low
        if body[position : position + 1] == "-" and position + 1 < len(body):
            high, position = _char(body, position + 1, token, "^$\\.*+?()[]{}|/-\"'")
        if low > high:
            raise _error(f"the range {low}-{high} in {token.text[:40]} is reversed", token.line, token.column)
        found.append(charset.make_ranges([(ord(low), ord(high))]))
    ranges = charset.union(*found)
    return charset.complement(ranges) if negated else ranges


def _char(body: str, position: int, token: _Token, escapable: str) -> tuple[str, int]:
    """The character at `position`, and the position after it."""
    char = body[position]
    if char != "\\":
        return _checked(ord(char), token), position + 1
    escape = body[position + 1]
    if escape in _HEX_LENGTHS:
        digits = body[position + 2 : position + 2 + _HEX_LENGTHS[escape]]
        if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_LENGTHS[escape]}}}", digits):
            raise _error(f"\\{escape} needs {_HEX_LENGTHS[escape]} hexadecimal digits", token.line, token.column)
        return _checked(int(digits, 16), token), position + 2 + len(digits)
    if escape in _ESCAPES:
        return _ESCAPES[escape], position + 2
    if escape in escapable or escape in "\\'\"/":
        return escape, position + 2
    raise _error(f"unknown escape \\{escape}", token.line, token.column)


def _checked(code: int, token: _Token) -> str:
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise _error(f"U+{code:04X} is no character", token.line, token.column)
    return chr(code)
