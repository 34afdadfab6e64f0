"""Writes EBNF in xgrammar's dialect: literals, regular expressions, rules. Used for JSON schemas, regex and choice.

How a language is spelled decides what its masks cost. A small expression becomes an automaton (`automaton.py`) of one
rule per state, whose masks are ready before the first token. A repeated set of characters, written `[…]{m,n}`, is
cheap at any count, but only outside of automata; a repeated rule is the most expensive to match. So large expressions
are taken apart until their pieces are small or repeated sets. (Measured with xgrammar 0.2.9.)
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_actors.structured_output import charset
from engine_actors.structured_output.automaton import State, determinise
from engine_actors.structured_output.charset import Ranges
from engine_actors.structured_output.regex import Alt, Chars, Regex, Repeat, Seq, seq
from scheduler.structured_output import StructuredOutputError

MAX_GRAMMAR_CHARS = 4 * 1024 * 1024
"""Longest grammar text. Far above any real schema's; the compile time limit comes first."""
MAX_WORK = 150_000
"""Most states of all automata of a grammar, those of large expressions counted more: about a second's work."""
_MAX_WEIGHT = 256
_MAX_STATES = 512
_WIDE_SET = 128
_NEGATED_SET = 0x8000
_WIDE_SET_WEIGHT = 8


class GrammarWriter:
    """Collects rules. Expressions are strings that may stand in any rule's body, as one item of a sequence."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._known: dict[tuple[Regex, str], str] = {}
        self._num_chars = 0
        self._work = 0

    def add_rule(self, hint: str, body: str, lookahead: str = "") -> str:
        """A new rule; returns its name. `lookahead`: what must follow, a hint that makes masks smaller."""
        name = self.reserve_rule(hint)
        self.define_rule(name, body, lookahead)
        return name

    def reserve_rule(self, hint: str) -> str:
        """A name for a rule that is defined later, for recursion."""
        name = f"{hint}{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define_rule(self, name: str, body: str, lookahead: str = "") -> None:
        if lookahead:
            body = f"({body}) (= {lookahead})"
        self._num_chars += len(name) + len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise StructuredOutputError(f"the grammar is too large: more than {MAX_GRAMMAR_CHARS} characters")
        self._rules[name] = body

    def grammar(self, root: str) -> str:
        """The whole text; `root` is the expression of the root rule."""
        lines = [f"root ::= {root}"]
        lines += (f"{name} ::= {body}" for name, body in self._rules.items())
        return "\n".join(lines) + "\n"

    def regex(self, node: Regex, lookahead: str = "") -> str:
        """An expression for the language of `node`, which must match something."""
        known = self._known.get((node, lookahead))
        if known is None:
            known = self._known[node, lookahead] = self._regex(node, lookahead)
        return known

    def _regex(self, node: Regex, lookahead: str) -> str:
        if isinstance(node, Seq) and node.items and all(isinstance(item, Chars) for item in node.items):
            # As its automaton would be written, a single chain.
            self._count_work(len(node.items))
            return self.add_rule("re", _chain_text(_ranges_of(node.items)), lookahead)
        weight = _weight(node)
        if weight <= _MAX_WEIGHT and not _holds_wide_repeat(node):
            states = determinise(node, _MAX_STATES)
            self._count_work((_MAX_STATES if states is None else len(states)) * max(1, weight // 8))
            if states is not None:
                return self.automaton(states, lookahead)
        return self.add_rule("re", self._taken_apart(node), lookahead)

    def _taken_apart(self, node: Regex) -> str:
        match node:
            case Chars(ranges):
                return char_class(ranges)
            case Seq(items):
                return " ".join(self._sequence_items(items)) or '""'
            case Alt(options):
                return "(" + " | ".join(self.regex(option) for option in options) + ")"
            case Repeat(item, low, high):
                text = char_class(item.ranges) if isinstance(item, Chars) else self.regex(item)
                return text + count_text(low, high)

    def _sequence_items(self, items: tuple[Regex, ...]) -> list[str]:
        """Neighbours that are small enough together are one item."""
        weights = [_MAX_WEIGHT + 1 if _holds_wide_repeat(item) else _weight(item) for item in items]
        if sum(weights) <= _MAX_WEIGHT:  # small, but its automaton is not
            return [self.regex(item) for item in items]
        result: list[str] = []
        start = 0
        while start < len(items):
            end, weight = start + 1, weights[start]
            while end < len(items) and weight + weights[end] <= _MAX_WEIGHT:
                weight += weights[end]
                end += 1
            run = items[start:end]
            if weight > _MAX_WEIGHT:  # one item; in this rule, so that a repeated set is one
                result.append(self._taken_apart(run[0]))
            elif all(isinstance(item, Chars) for item in run):
                # In this rule too: xgrammar has fast masks for a repeated set before a string it cannot run into.
                result.append(_chain_text(_ranges_of(run)))
            else:
                result.append(self.regex(seq(*run)))
            start = end
        return result

    def automaton(self, states: list[State], lookahead: str = "") -> str:
        """An expression for what the automaton accepts: one rule per state, but states with one way in and one way
        on are written into their predecessor's."""
        self._count_work(len(states))
        num_ways_in = [0] * len(states)
        for state in states:
            for _, target in state.edges:
                num_ways_in[target] += 1
        names: dict[int, str] = {0: self.reserve_rule("re")}
        todo = [0]
        for number in todo:
            options = ['""'] if states[number].is_final else []
            for ranges, target in states[number].edges:
                chain = [ranges]
                while _is_passage(states[target]) and num_ways_in[target] == 1:
                    ((following, target),) = states[target].edges
                    chain.append(following)
                options.append(_chain_text(chain))
                if states[target].edges:
                    if target not in names:
                        names[target] = self.reserve_rule("re")
                        todo.append(target)
                    options[-1] += f" {names[target]}"
            self.define_rule(names[number], " | ".join(options), lookahead)
        return names[0]

    def _count_work(self, num_states: int) -> None:
        self._work += num_states
        if self._work > MAX_WORK:
            raise StructuredOutputError(f"the grammar is too large: its expressions exceed {MAX_WORK} states")


def quote(text: str) -> str:
    """A string literal of the dialect. Everything but printable ASCII is escaped.

    Raises:
        StructuredOutputError: A lone surrogate, which no text can hold.
    """
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise StructuredOutputError(f"{text!r:.100} holds a lone surrogate, which UTF-8 cannot encode")
    return '"' + "".join(map(_quoted_char, text)) + '"'


def char_class(ranges: Ranges) -> str:
    """A character class of the dialect. Wide sets by what they exclude: that is what xgrammar has fast masks for."""
    excluded = _complement_with_surrogates(ranges)
    if charset.size(ranges) > _NEGATED_SET and len(excluded) < 2 * len(ranges):
        return "[^" + "".join(_range_text(low, high) for low, high in excluded) + "]"
    return "[" + "".join(_range_text(low, high) for low, high in ranges) + "]"


def _complement_with_surrogates(ranges: Ranges) -> Ranges:
    return tuple(sorted((*charset.complement(ranges), (0xD800, 0xDFFF))))


def _quoted_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if 0x20 <= ord(char) < 0x7F else _escape(ord(char))


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _range_text(low: int, high: int) -> str:
    first, last = (chr(code) if code < 0x80 and chr(code).isalnum() else _escape(code) for code in (low, high))
    if low == high:
        return first
    return first + ("-" if high > low + 1 else "") + last


def _chain_text(chain: list[Ranges]) -> str:
    """Sets of characters one after the other; single characters in a row become a string."""
    parts: list[str] = []
    text = ""
    for ranges in chain:
        if charset.size(ranges) == 1:
            text += chr(ranges[0][0])
            continue
        if text:
            parts.append(quote(text))
        text = ""
        parts.append(char_class(ranges))
    if text:
        parts.append(quote(text))
    return " ".join(parts)


def _ranges_of(items: Iterable[Regex]) -> list[Ranges]:
    """Of items that are all `Chars`."""
    return [item.ranges for item in items if isinstance(item, Chars)]


def _is_passage(state: State) -> bool:
    return not state.is_final and len(state.edges) == 1


def count_text(low: int, high: int | None) -> str:
    """The quantifier that repeats from `low` to `high` times; high None is unbounded."""
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _holds_wide_repeat(node: Regex) -> bool:
    """A counted, wide set at the top: an automaton would have a slow state for each count."""
    match node:
        case Repeat(Chars(ranges), low, high):
            return charset.size(ranges) > _WIDE_SET and (high or low) > 2
        case Seq(parts) | Alt(parts):
            return any(map(_holds_wide_repeat, parts))
        case _:
            return False


def _weight(node: Regex) -> int:
    """About the number of states, wide sets counted more: the time to compile grows with it."""
    match node:
        case Chars(ranges):
            return 1 if charset.size(ranges) <= _WIDE_SET else _WIDE_SET_WEIGHT
        case Seq(items):
            return sum(map(_weight, items))
        case Alt(options):
            return sum(map(_weight, options))
        case Repeat(item, low, high):
            return _weight(item) * (high or low + 1)
