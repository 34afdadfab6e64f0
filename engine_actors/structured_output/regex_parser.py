"""Text of a regular expression → tree (`regex.py`). Refuses, with the position, what is not regular or ambiguous."""

from __future__ import annotations

import re
import string
from functools import lru_cache

from engine_actors.structured_output import charset
from engine_actors.structured_output.charset import Ranges
from engine_actors.structured_output.regex import (
    ANY_TEXT,
    EMPTY,
    MAX_REPEAT,
    Chars,
    Regex,
    alt,
    is_empty_set,
    repeat,
    seq,
)
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import MAX_TEXT_CHARS

MAX_GROUP_DEPTH = 64
_MAX_CODE = 0x10FFFF

# (narrow, wide): what the escape matches in both dialects, and what it matches in either.
_CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (charset.DIGITS, charset.ANY_DIGIT),
    "w": (charset.WORD, charset.ANY_WORD),
    "s": (charset.SPACE, charset.ANY_SPACE),
}
_CLASSES |= {
    name.upper(): (charset.complement(wide), charset.complement(narrow)) for name, (narrow, wide) in _CLASSES.items()
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_DOT = charset.difference(charset.ALL, charset.LINE_ENDS)
_QUANTIFIER = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_QUANTIFIER_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP_NAME = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_REFUSED_GROUPS = {
    "(?=": "lookahead",
    "(?!": "negative lookahead",
    "(?<=": "lookbehind",
    "(?<!": "negative lookbehind",
    "(?P=": "a backreference",
    "(?>": "an atomic group",
    "(?(": "a conditional",
    "(?#": "a comment",
}
_REFUSED_ESCAPES = {
    "b": "a word boundary",
    "B": "a word boundary",
    "k": "a backreference",
    "p": "a Unicode property",
    "P": "a Unicode property",
    "A": "\\A (write ^)",
    "Z": "\\Z (write $)",
    "z": "\\z (write $)",
    "c": "a control escape (write \\xHH)",
}


class _Anchor:
    """`^` or `$` before it is resolved."""

    def __init__(self, sign: str, position: int) -> None:
        self.sign = sign
        self.position = position


def parse_full(text: str) -> Regex:
    """The texts that match from start to end (`re.fullmatch`).

    Raises:
        StructuredOutputError: Not a supported expression, or nothing matches it.
    """
    return _parse(text, search=False)


def parse_search(text: str) -> Regex:
    """The texts that contain a match (`re.search`), which is what a JSON schema's pattern asks for."""
    return _parse(text, search=True)


def _parse(text: str, search: bool) -> Regex:
    if len(text) > MAX_TEXT_CHARS["regex"]:
        raise StructuredOutputError(
            f"a regular expression of {len(text)} characters; at most {MAX_TEXT_CHARS['regex']} are allowed"
        )
    parser = _Parser(text)
    alternatives = parser.alternatives()
    if parser.position < len(text):
        raise parser.error("unbalanced )")
    node = alt(*(parser.resolve(items, search) for items in _flatten(alternatives)))
    if is_empty_set(node):
        raise StructuredOutputError(f"no text matches the regular expression {_shown(text)}")
    return node


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Group:
    """A parenthesised list of alternatives before anchors are resolved."""

    def __init__(self, alternatives: list[list[Regex | _Anchor | _Group]]) -> None:
        self.alternatives = alternatives


def _flatten(alternatives: list[list[Regex | _Anchor | _Group]]) -> list[list[Regex | _Anchor | _Group]]:
    """`(^a|b$)` as `^a|b$`: groups that are a whole alternative give theirs, so that their anchors are at an end."""
    flat: list[list[Regex | _Anchor | _Group]] = []
    for items in alternatives:
        if len(items) == 1 and isinstance(items[0], _Group):
            flat.extend(_flatten(items[0].alternatives))
        else:
            flat.append(items)
    return flat


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def error(self, what: str, position: int | None = None) -> StructuredOutputError:
        where = self.position if position is None else position
        return StructuredOutputError(f"regular expression {_shown(self.text)}: {what} at position {where}")

    def refused(self, what: str, position: int) -> StructuredOutputError:
        return self.error(f"{what} is not supported,", position)

    # Anchors

    def resolve(self, items: list[Regex | _Anchor | _Group], search: bool) -> Regex:
        """One top-level alternative. Anchors count at its ends only; elsewhere they are refused."""
        start, end = 0, len(items)
        while start < end and _is_anchor(items[start], "^"):
            start += 1
        while end > start and _is_anchor(items[end - 1], "$"):
            end -= 1
        node = seq(*(self.plain(item) for item in items[start:end]))
        if not search:
            return node
        return seq(EMPTY if start else ANY_TEXT, node, EMPTY if end < len(items) else ANY_TEXT)

    def plain(self, item: Regex | _Anchor | _Group) -> Regex:
        if isinstance(item, _Anchor):
            raise self.refused(f"{item.sign} that is not at an end of the expression", item.position)
        if isinstance(item, _Group):
            return alt(*(seq(*(self.plain(each) for each in items)) for items in item.alternatives))
        return item

    # Grammar

    def alternatives(self) -> list[list[Regex | _Anchor | _Group]]:
        self.depth += 1
        if self.depth > MAX_GROUP_DEPTH:
            raise self.error(f"groups nest more than {MAX_GROUP_DEPTH} deep")
        result = [self.sequence()]
        while self.peek() == "|":
            self.position += 1
            result.append(self.sequence())
        self.depth -= 1
        return result

    def sequence(self) -> list[Regex | _Anchor | _Group]:
        items: list[Regex | _Anchor | _Group] = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.quantified())
        return items

    def quantified(self) -> Regex | _Anchor | _Group:
        start = self.position
        item = self.atom()
        bounds = self.quantifier()
        if bounds is None:
            return item
        if isinstance(item, _Anchor):
            raise self.error(f"nothing to repeat: {item.sign} is followed by a quantifier", start)
        if self.peek() == "?":  # lazy: the same set of texts
            self.position += 1
        elif self.peek() == "+":
            raise self.refused("a possessive quantifier", self.position)
        if self.peek() in ("*", "+", "?") or self.peek_quantifier():
            raise self.error("multiple quantifiers")
        low, high = bounds
        return repeat(self.plain(item), low, high)

    def atom(self) -> Regex | _Anchor | _Group:
        char = self.peek()
        start = self.position
        if char == "(":
            return self.group()
        if char == "[":
            return Chars(self.char_class())
        if char == "\\":
            narrow, _ = self.escape(in_class=False)
            return Chars(narrow)
        if char in "*+?" or (char == "{" and self.peek_quantifier()):
            raise self.error("nothing to repeat")
        self.position += 1
        if char in "^$":
            return _Anchor(char, start)
        if char == ".":
            return Chars(_DOT)
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self.error("a lone surrogate", start)
        return _one_char(char)

    def group(self) -> _Group:
        start = self.position
        name = _GROUP_NAME.match(self.text, start)
        if name:
            self.position = name.end()
        elif self.text.startswith("(?:", start):
            self.position += 3
        elif self.text.startswith("(?", start):
            for prefix, what in _REFUSED_GROUPS.items():
                if self.text.startswith(prefix, start):
                    raise self.refused(what, start)
            raise self.refused("an inline flag or extension group", start)
        else:
            self.position += 1
        alternatives = self.alternatives()
        if self.peek() != ")":
            raise self.error("the group is not closed", start)
        self.position += 1
        return _Group(alternatives)

    def quantifier(self) -> tuple[int, int | None] | None:
        char = self.peek()
        if char in _QUANTIFIER_SIGNS:
            self.position += 1
            return _QUANTIFIER_SIGNS[char]
        match = self.peek_quantifier()
        if match is None:
            return None
        low = int(match[1] or 0)
        high = low if match[2] is None else int(match[3]) if match[3] else None
        if high is not None and low > high:
            raise self.error(f"the quantifier {match[0]} has its bounds reversed")
        if max(low, high or 0) > MAX_REPEAT:
            raise self.error(f"the quantifier {match[0]} exceeds {MAX_REPEAT}")
        self.position = match.end()
        return low, high

    def peek_quantifier(self) -> re.Match[str] | None:
        match = _QUANTIFIER.match(self.text, self.position) if self.peek() == "{" else None
        # A brace that begins no quantifier is literal in both dialects.
        if match is None or (not match[1] and not match[2]):
            return None
        if len(match[1]) > 9 or len(match[3] or "") > 9:
            raise self.error(f"the quantifier {match[0][:24]} exceeds {MAX_REPEAT}")
        return match

    # Characters

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def escape(self, in_class: bool) -> tuple[Ranges, Ranges]:
        """After a backslash: (narrow, wide) sets."""
        start = self.position
        char = self.text[start + 1 : start + 2]
        self.position += 2
        if not char:
            raise self.error("the expression ends with a backslash", start)
        if char in _CLASSES:
            return _CLASSES[char]
        if char == "b" and in_class:
            return (charset.of_chars("\b"),) * 2
        if char in _REFUSED_ESCAPES:
            raise self.refused(_REFUSED_ESCAPES[char], start)
        if char in _HEX_LENGTHS:
            return (charset.of_chars(self.hex_char(_HEX_LENGTHS[char], start)),) * 2
        if char == "0" and self.peek().isdigit():
            raise self.refused("an octal escape", start)
        if char in _CONTROLS:
            return (charset.of_chars(_CONTROLS[char]),) * 2
        if char in string.digits:
            raise self.refused("a backreference", start)
        if char in string.ascii_letters:
            raise self.error(f"unknown escape \\{char}", start)
        return (charset.of_chars(char),) * 2

    def hex_char(self, length: int, start: int) -> str:
        digits = self.text[self.position : self.position + length]
        if len(digits) < length or any(digit not in string.hexdigits for digit in digits):
            raise self.error(f"an escape needs {length} hexadecimal digits", start)
        self.position += length
        code = int(digits, 16)
        if code > _MAX_CODE or 0xD800 <= code <= 0xDFFF:
            raise self.error(f"the escape names no character (U+{code:04X})", start)
        return chr(code)

    def char_class(self) -> Ranges:
        start = self.position
        self.position += 1
        negated = self.peek() == "^"
        self.position += negated
        if self.peek() == "]":
            raise self.error("a class that begins with ] is read differently by Python and ECMAScript; write \\]")
        narrow: list[Ranges] = []
        wide: list[Ranges] = []
        while self.peek() != "]":
            if not self.peek():
                raise self.error("the character class is not closed", start)
            low = self.class_char()
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] not in ("]", ""):
                self.position += 1
                high = self.class_char()
                low = self.char_range(low, high)
            narrow.append(low[0])
            wide.append(low[1])
        self.position += 1
        return charset.complement(charset.union(*wide)) if negated else charset.union(*narrow)

    def class_char(self) -> tuple[Ranges, Ranges]:
        char = self.peek()
        if char == "\\":
            return self.escape(in_class=True)
        if not char:
            raise self.error("the character class is not closed")
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self.error("a lone surrogate")
        self.position += 1
        return (charset.of_chars(char),) * 2

    def char_range(self, low: tuple[Ranges, Ranges], high: tuple[Ranges, Ranges]) -> tuple[Ranges, Ranges]:
        if charset.size(low[0]) != 1 or charset.size(high[0]) != 1:
            raise self.error("a range needs a character at both ends")
        first, last = low[0][0][0], high[0][0][0]
        if first > last:
            raise self.error(f"the range {chr(first)}-{chr(last)} is reversed")
        return (charset.make_ranges([(first, last)]),) * 2


@lru_cache(1024)
def _one_char(char: str) -> Chars:
    return Chars(charset.of_chars(char))


def _is_anchor(item: Regex | _Anchor | _Group, sign: str) -> bool:
    return isinstance(item, _Anchor) and item.sign == sign
