"""The text of JSON strings as regular expressions: what may stand between the quotes, and how a value is spelled.

Every text these trees make is read by any JSON parser, in particular: no raw control characters, no lone surrogates.
"""

from __future__ import annotations

import json

from engine_actors.structured_output import charset
from engine_actors.structured_output.regex import (
    Alt,
    Chars,
    Regex,
    Repeat,
    Seq,
    alt,
    literal,
    repeat,
    seq,
)

_MUST_ESCAPE = charset.union(charset.make_ranges([(0, 0x1F)]), charset.of_chars('"\\'))
RAW_CHARS = charset.complement(_MUST_ESCAPE)
"""Characters that stand for themselves in a JSON string."""
_WIDE_SET = 256
_SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_QUOTE = literal('"')


def _hex(first: str) -> Regex:
    return Chars(charset.of_chars(first))


_HEX = _hex("0123456789abcdefABCDEF")
_UNICODE_ESCAPE = seq(
    literal("u"),
    alt(
        seq(_hex("0123456789abcefABCEF"), repeat(_HEX, 3, 3)),
        seq(_hex("dD"), _hex("01234567"), repeat(_HEX, 2, 2)),
        # The two halves of a surrogate pair, always together.
        seq(
            *(_hex("dD"), _hex("89abAB"), repeat(_HEX, 2, 2)),
            *(literal("\\u"), _hex("dD"), _hex("cdefCDEF"), repeat(_HEX, 2, 2)),
        ),
    ),
)
ANY_STRING = seq(
    _QUOTE,
    repeat(alt(Chars(RAW_CHARS), seq(literal("\\"), alt(_hex('"\\/bfnrt'), _UNICODE_ESCAPE))), 0, None),
    _QUOTE,
)
"""Any JSON string with its quotes."""


def string_text(value: Regex) -> Regex:
    """The quoted JSON text of every string that `value` matches.

    Of sets with more than 256 characters (`.`, `[^,]`, `\\S`) only those that need no escape are kept: escapes would
    make masks slow, and nobody asks for quotes or control characters by such a set. The rest has one spelling each.
    """
    return seq(_QUOTE, _spelled(value), _QUOTE)


def value_text(value: object, item_separator: str, key_separator: str) -> str:
    """The JSON text of a constant."""
    return json.dumps(value, ensure_ascii=False, separators=(item_separator, key_separator), allow_nan=False)


def _spelled(node: Regex) -> Regex:
    match node:
        case Chars(ranges):
            raw = charset.intersection(ranges, RAW_CHARS)
            if charset.size(ranges) > _WIDE_SET or raw == ranges:
                return Chars(raw)
            escaped = charset.difference(ranges, RAW_CHARS)
            chars = (chr(code) for low, high in escaped for code in range(low, high + 1))
            return alt(Chars(raw), *(literal(_escape(char)) for char in chars))
        case Seq(items):
            return seq(*map(_spelled, items))
        case Alt(options):
            return alt(*map(_spelled, options))
        case Repeat(item, low, high):
            return repeat(_spelled(item), low, high)


def _escape(char: str) -> str:
    return "\\" + _SHORT_ESCAPES.get(char, f"u{ord(char):04x}")
