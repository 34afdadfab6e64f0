"""The members of an object as EBNF: optional and required ones in order, free ones after them, counts within bounds."""

from __future__ import annotations

from collections.abc import Callable

from engine_actors.structured_output import charset
from engine_actors.structured_output.automaton import State
from engine_actors.structured_output.ebnf_writer import GrammarWriter
from engine_actors.structured_output.json_text import RAW_CHARS
from engine_actors.structured_output.schema_nodes import Object
from scheduler.structured_output import StructuredOutputError

EMPTY = '""'


class Members:
    """Writes the members of one object.

    `_rest[count]` is what may follow, from some property on, once members have been written; it is moved from the
    last property to the first. Counts are told apart only as far as a bound needs it.

    Args:
        comma: Expression of the separator.
        pairs: Expressions of the declared members. free_pair: of a free one.
        repeated: Expression of (expression, low, high).
    """

    def __init__(
        self,
        writer: GrammarWriter,
        comma: str,
        node: Object,
        pairs: list[str],
        free_pair: str,
        repeated: Callable[[str, int, int | None], str],
    ) -> None:
        self._writer = writer
        self._comma = comma
        self._node = node
        self._pairs = pairs
        self._free_pair = free_pair
        self._repeated = repeated
        self._largest = node.low if node.high is None else node.high

    def expression(self) -> str:
        """All members, the separators between them included."""
        node = self._node
        options: list[str] = []
        num_first = next((i + 1 for i, each in enumerate(node.properties) if each.is_required), None)
        rest = [self._free(count) for count in range(self._largest + 1)]
        if num_first is None:
            if node.values is not None:
                self._add(options, self._free_pair, self._next(rest, 0))
            if node.low == 0:
                options.append(EMPTY)
        for index in range(len(node.properties) - 1, -1, -1):
            if num_first is None or index < num_first:
                self._add(options, self._pairs[index], self._next(rest, 0))
            if index:
                rest = [self._with(index, rest, count) for count in range(len(rest))]
        expression = self._choice(options)
        if expression is None:
            raise StructuredOutputError("json: no number of members satisfies minProperties and maxProperties")
        return expression

    def _with(self, index: int, rest: list[str | None], count: int) -> str | None:
        """What may follow from property `index` on, given what may follow after it."""
        options: list[str] = []
        self._add(options, f"{self._comma} {self._pairs[index]}", self._next(rest, count))
        skipped = rest[count]
        if not self._node.properties[index].is_required and skipped is not None:
            options.append(skipped)
        return self._choice(options)

    def _next(self, rest: list[str | None], count: int) -> str | None:
        """What may follow after one member more. None: that would be too many."""
        if count < self._largest:
            return rest[count + 1]
        return rest[count] if self._node.high is None else None

    def _free(self, count: int) -> str | None:
        node = self._node
        if node.values is None:
            return EMPTY if count >= node.low else None
        high = None if node.high is None else node.high - count
        return self._repeated(f"{self._comma} {self._free_pair}", max(0, node.low - count), high)

    @staticmethod
    def _add(options: list[str], member: str, following: str | None) -> None:
        if following is not None:
            options.append(member if following == EMPTY else f"{member} {following}")

    def _choice(self, options: list[str]) -> str | None:
        if not options:
            return None
        if len(options) == 1 and options[0] != EMPTY:
            return self._writer.add_rule("o", options[0])
        return options[0] if len(options) == 1 else self._writer.add_rule("o", " | ".join(options))


def other_key(names: list[str]) -> list[State]:
    """The automaton of quoted keys without escapes, but these. Escapes would spell a name another way."""
    end, rest, root = 1, 2, 3
    quote = charset.of_chars('"')
    children: list[dict[str, int]] = [{}]
    taken: set[int] = set()
    for name in names:
        node = 0
        for char in name:
            if char not in children[node]:
                children.append({})
                children[node][char] = len(children) - 1
            node = children[node][char]
        taken.add(node)
    states = [State(False, ((quote, root),)), State(True, ()), State(False, ((quote, end), (RAW_CHARS, rest)))]
    for node, branches in enumerate(children):
        edges = [] if node in taken else [(quote, end)]
        edges += [(charset.of_chars(char), root + child) for char, child in branches.items() if _is_raw(char)]
        edges.append((charset.difference(RAW_CHARS, charset.of_chars("".join(branches))), rest))
        states.append(State(False, tuple(edges)))
    return states


def _is_raw(char: str) -> bool:
    return bool(charset.intersection(charset.of_chars(char), RAW_CHARS))
