"""`schema_nodes.Schema` → EBNF: how the allowed values are spelled as JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine_actors.structured_output import charset
from engine_actors.structured_output.automaton import State
from engine_actors.structured_output.charset import Ranges
from engine_actors.structured_output.ebnf_writer import GrammarWriter, quote
from engine_actors.structured_output.json_text import ANY_STRING, string_text
from engine_actors.structured_output.numbers import integers, numbers
from engine_actors.structured_output.regex import Alt, Chars, Regex, Repeat, Seq
from engine_actors.structured_output.regex_parser import parse_full
from engine_actors.structured_output.schema_members import EMPTY, Members, other_key
from engine_actors.structured_output.schema_nodes import (
    Anything,
    Array,
    Constants,
    Integer,
    Node,
    Number,
    Object,
    Ref,
    Schema,
    String,
    Union,
)
from scheduler.structured_output import StructuredOutputError

# After whitespace comes a value, a key, or a closing bracket.
_AFTER_WHITESPACE = r'["\u005b\u005d\u007b\u007dtfn0-9\u002d]'
_WHITESPACE = parse_full(r" ?|\n(?: {0,24}|\t{0,12})")
"""A space, or a line end and an indent: room for every way of printing JSON, but none to run in circles."""


@dataclass(frozen=True)
class Spacing:
    """The optional whitespace of JSON, after brackets, commas and colons.

    Attributes:
        whitespace: None: there is none, and the separators are ", " and ": ".
    """

    whitespace: Regex | None = _WHITESPACE


def spacing(any_whitespace: bool, pattern: str | None) -> Spacing:
    """What a request's options ask for.

    Raises:
        StructuredOutputError: The pattern matches more than whitespace.
    """
    if not any_whitespace:
        return Spacing(None)
    if pattern is None:
        return Spacing()
    try:
        regex = parse_full(pattern)
    except StructuredOutputError as error:
        raise StructuredOutputError(f"whitespace_pattern: {error}") from None
    if charset.difference(_chars_of(regex), charset.of_chars(" \t\n\r")):
        raise StructuredOutputError(
            f"whitespace_pattern must match spaces, tabs and line ends only, which JSON allows; got {pattern!r}"
        )
    return Spacing(regex)


def _chars_of(node: Regex) -> Ranges:
    match node:
        case Chars(ranges):
            return ranges
        case Seq(parts) | Alt(parts):
            return charset.union(*map(_chars_of, parts))
        case Repeat(item):
            return _chars_of(item)


def schema_to_ebnf(schema: Schema, space: Spacing) -> str:
    """The grammar of the JSON texts of all values of `schema`."""
    writer = GrammarWriter()
    return writer.grammar(_SchemaWriter(writer, schema, space).write())


class _SchemaWriter:
    def __init__(self, writer: GrammarWriter, schema: Schema, space: Spacing) -> None:
        self._writer = writer
        self._schema = schema
        self._rules: dict[Node, str] = {}
        self._references: dict[str, str] = {}
        self._todo: list[str] = []
        if space.whitespace is None:
            self._ws, self._comma, self._colon = "", '", "', ": "
        else:
            ws = writer.regex(space.whitespace, _AFTER_WHITESPACE)
            self._ws, self._comma, self._colon = ws, f'"," {ws}', ":"

    def write(self) -> str:
        """An expression for the root; rules for all it leads to."""
        root = self.value(self._schema.root)
        for name in self._todo:  # grows; not by recursion, which would go as deep as definitions name each other
            self._writer.define_rule(self._references[name], self.value(self._schema.definitions[name]))
        return root

    def value(self, node: Node) -> str:
        """An expression for the texts of `node`; the same for equal nodes."""
        known = self._rules.get(node)
        if known is None:
            if isinstance(node, (Anything, Array, Object)):
                # Named before it is written: Anything holds itself.
                known = self._rules[node] = self._writer.reserve_rule("v")
                self._writer.define_rule(known, self._body(node))
            else:
                known = self._rules[node] = self._body(node)
        return known

    def _body(self, node: Node) -> str:
        match node:
            case Anything():
                values: tuple[Node, ...] = (Object(), Array(), String(), Number(), Constants(("true", "false", "null")))
                return " | ".join(map(self.value, values))
            case Constants(texts):
                return self._writer.add_rule("c", " | ".join(quote(self._constant(text)) for text in texts))
            case String(regex):
                return self._writer.regex(ANY_STRING if regex is None else string_text(regex))
            case Integer():
                return self._integer(node)
            case Number(low, high, low_exclusive, high_exclusive):
                regex = numbers(low, high, low_exclusive, high_exclusive)
                if regex is None:
                    raise StructuredOutputError(
                        f"json: a number between {low} and {high} needs more than 15 digits to be compared exactly"
                    )
                return self._writer.regex(regex)
            case Array():
                return self._array(node)
            case Object():
                return self._object(node)
            case Union(options):
                return self._writer.add_rule("u", " | ".join(map(self.value, options)))
            case Ref(name):
                return self._reference(name)

    def _constant(self, text: str) -> str:
        return json.dumps(json.loads(text), ensure_ascii=False, separators=(", ", ": "))

    def _reference(self, name: str) -> str:
        rule = self._references.get(name)
        if rule is None:
            rule = self._references[name] = self._writer.reserve_rule("d")
            self._todo.append(name)
        return rule

    def _integer(self, node: Integer) -> str:
        if node.multiple_of == 1:
            return self._writer.regex(integers(node.low, node.high))
        return self._writer.automaton(_multiples(node.multiple_of, node.low))

    # Arrays

    def _array(self, node: Array) -> str:
        """Written from the last position to the first: each position has the rest of the array as its rule."""
        rest = self._more_items(node)
        for index in range(len(node.prefix) - 1, -1, -1):
            separator = f"{self._comma} " if index else ""
            here = f"{separator}{self.value(node.prefix[index])} {rest}"
            rest = self._writer.add_rule("a", here if index < node.low else f'{here} | ""')
        return self._bracketed("[", rest, "]")

    def _more_items(self, node: Array) -> str:
        """Items after the prefix. Each has a separator before it, but for the first of all."""
        num_prefix = len(node.prefix)
        low = max(0, node.low - num_prefix)
        high = None if node.high is None else node.high - num_prefix
        if node.items is None or high == 0:
            return EMPTY
        item = self.value(node.items)
        if num_prefix:
            return self.repeated(f"{self._comma} {item}", low, high)
        more = self.repeated(f"{self._comma} {item}", max(0, low - 1), None if high is None else high - 1)
        some = f"{item} {more}"
        return some if low else self._writer.add_rule("a", f"{some} | {EMPTY}")

    def repeated(self, expression: str, low: int, high: int | None) -> str:
        if high == 0:
            return EMPTY
        if (low, high) == (0, None):
            rule = self._writer.reserve_rule("m")
            self._writer.define_rule(rule, f"{expression} {rule} | {EMPTY}")
            return rule
        return f"({expression}){{{low},{'' if high is None else high}}}"

    def _bracketed(self, opening: str, content: str, closing: str) -> str:
        inner = [self._ws] if content == EMPTY else [self._ws, content, self._ws]
        return " ".join(filter(None, [quote(opening), *inner, quote(closing)]))

    # Objects

    def _object(self, node: Object) -> str:
        pairs = [self._pair(quote(json.dumps(each.name, ensure_ascii=False) + self._colon), each.node)
                 for each in node.properties]  # fmt: skip
        free_pair = "" if node.values is None else self._pair(self._free_key(node), node.values)
        members = Members(self._writer, self._comma, node, pairs, free_pair, self.repeated)
        return self._bracketed("{", members.expression(), "}")

    def _pair(self, key: str, node: Node) -> str:
        """One member as a rule: its key with the colon, and its value."""
        return self._writer.add_rule("p", " ".join(filter(None, (key, self._ws, self.value(node)))))

    def _free_key(self, node: Object) -> str:
        if node.keys is None and node.properties:
            key = self._writer.automaton(other_key([each.name for each in node.properties]))
        else:
            key = self._writer.regex(ANY_STRING if node.keys is None else string_text(node.keys))
        return f"{key} {quote(self._colon)}"


def _multiples(divisor: int, low: int | None) -> list[State]:
    """The automaton of the multiples from `low` (0 or 1 for positive ones, None for all), by their remainders."""
    # States: the start, after a minus sign, zero, then the remainders.
    first_remainder = 3

    def digits(remainder: int, lowest: int) -> tuple[tuple[Ranges, int], ...]:
        return tuple(
            (charset.of_chars(str(digit)), first_remainder + (10 * remainder + digit) % divisor)
            for digit in range(lowest, 10)
        )

    zero = () if low is not None and low > 0 else ((charset.of_chars("0"), 2),)
    minus = () if low is not None else ((charset.of_chars("-"), 1),)
    states = [State(False, (*minus, *zero, *digits(0, 1))), State(False, digits(0, 1)), State(True, ())]
    return states + [State(remainder == 0, digits(remainder, 0)) for remainder in range(divisor)]
