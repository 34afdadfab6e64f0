"""JSON numbers within bounds as regular expressions over their text.

Integers have at most 18 digits, so that they fit 64 bits everywhere. Numbers with bounds are written without exponent
and with at most 15 significant digits around the bounds, where decimal text and double compare alike (DBL_DIG), so
that a text inside the bounds stays inside them once it is read.
"""

from __future__ import annotations

from decimal import Decimal

from engine_actors.structured_output import charset
from engine_actors.structured_output.regex import (
    DIGIT,
    EMPTY,
    NOTHING,
    Chars,
    Regex,
    alt,
    is_empty_set,
    literal,
    repeat,
    seq,
)

MAX_INTEGER = 10**18 - 1
MAX_NUMBER = 10**15 - 1
_SIGNIFICANT_DIGITS = 15
_FRACTION_DIGITS = 6
_NON_ZERO = Chars(charset.of_chars("123456789"))
_SIGN = repeat(literal("-"), 0, 1)

ANY_INTEGER = alt(literal("0"), seq(_SIGN, _NON_ZERO, repeat(DIGIT, 0, 17)))
ANY_NUMBER = seq(
    _SIGN,
    alt(literal("0"), seq(_NON_ZERO, repeat(DIGIT, 0, 17))),
    repeat(seq(literal("."), repeat(DIGIT, 1, 17)), 0, 1),
    repeat(seq(Chars(charset.of_chars("eE")), repeat(Chars(charset.of_chars("+-")), 0, 1), repeat(DIGIT, 1, 2)), 0, 1),
)
"""Any finite number that a double can hold."""


def integers(low: int | None, high: int | None) -> Regex:
    """The integers from `low` to `high` with at most 18 digits; NOTHING if there are none."""
    low = -MAX_INTEGER if low is None else max(low, -MAX_INTEGER)
    high = MAX_INTEGER if high is None else min(high, MAX_INTEGER)
    if (low, high) == (-MAX_INTEGER, MAX_INTEGER):
        return ANY_INTEGER
    negative = seq(literal("-"), _magnitudes(max(1, -high), -low)) if low < 0 else NOTHING
    return alt(negative, _magnitudes(max(0, low), high))


def numbers(
    low: Decimal | None, high: Decimal | None, low_exclusive: bool = False, high_exclusive: bool = False
) -> Regex | None:
    """Decimals between the bounds; NOTHING if there are none; None if the bounds need more than 15 digits."""
    if low is None and high is None:
        return ANY_NUMBER
    bounds = [bound for bound in (low, high) if bound is not None]
    num_integer_digits = max(len(str(abs(int(bound)))) for bound in bounds)
    num_fraction_digits = max(_num_fraction_digits(bound) for bound in bounds)
    if num_integer_digits + num_fraction_digits > _SIGNIFICANT_DIGITS:
        return None
    digits = max(num_fraction_digits, min(_FRACTION_DIGITS, _SIGNIFICANT_DIGITS - num_integer_digits))
    scale = 10**digits
    # On the grid of that many digits, where every bound lies, exclusive is the next point.
    first = -MAX_NUMBER * scale if low is None else int(low * scale) + low_exclusive
    last = MAX_NUMBER * scale if high is None else int(high * scale) - high_exclusive
    negative = seq(literal("-"), _decimals(max(1, -last), -first, digits)) if first < 0 else NOTHING
    return alt(negative, _decimals(max(0, first), last, digits))


def _num_fraction_digits(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _magnitudes(low: int, high: int) -> Regex:
    """Decimal integers from `low` to `high` without sign or leading zeros; `low` >= 0."""
    if low > high:
        return NOTHING
    parts: list[Regex] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = min(high, 10**length - 1)
        parts.append(_between(str(first), str(last)))
    return alt(*parts)


def _between(low: str, high: str) -> Regex:
    """Digit strings between two of the same length."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return seq(literal(low[0]), _between(low[1:], high[1:]))
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts: list[Regex] = []
    if set(low[1:]) - {"0"}:
        parts.append(seq(literal(low[0]), _between(low[1:], "9" * rest)))
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(seq(literal(high[0]), _between("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(seq(_digits(first, last), _between("0" * rest, "9" * rest)))
    return alt(*parts)


def _digits(first: int, last: int) -> Regex:
    return Chars(charset.make_ranges([(0x30 + first, 0x30 + last)]))


def _decimals(low: int, high: int, digits: int) -> Regex:
    """Decimals from low / 10^digits to high / 10^digits with up to `digits` fraction digits; `low` >= 0."""
    if low > high:
        return NOTHING
    scale = 10**digits
    (low_whole, low_rest), (high_whole, high_rest) = divmod(low, scale), divmod(high, scale)
    if low_whole == high_whole:
        return seq(literal(str(low_whole)), _fractions(low_rest, high_rest, digits))
    parts = [
        seq(literal(str(low_whole)), _fractions(low_rest, scale - 1, digits)),
        seq(literal(str(high_whole)), _fractions(0, high_rest, digits)),
    ]
    between = _magnitudes(low_whole + 1, high_whole - 1)
    if not is_empty_set(between):
        parts.append(seq(between, _fractions(0, scale - 1, digits)))
    return alt(*parts)


def _fractions(low: int, high: int, digits: int) -> Regex:
    """`` or `.ddd` of a fraction from low / 10^digits to high / 10^digits."""
    if not digits:
        return EMPTY
    first, last = f"{low:0{digits}}", f"{high:0{digits}}"
    point = seq(literal("."), _prefixes(first, last, may_stop=False))
    return repeat(point, 0, 1) if low == 0 else point


def _prefixes(low: str, high: str, may_stop: bool) -> Regex:
    """Digit strings, at most as long as the bounds, that lie between them once they are padded with zeros."""
    stop = [EMPTY] if may_stop and not set(low) - {"0"} else []
    if not low:
        return EMPTY
    if not set(low) - {"0"} and not set(high) - {"9"}:
        return repeat(DIGIT, 0 if may_stop else 1, len(low))
    first, last = int(low[0]), int(high[0])
    rest = len(low) - 1
    if first == last:
        return alt(*stop, seq(literal(low[0]), _prefixes(low[1:], high[1:], may_stop=True)))
    parts = [
        seq(literal(low[0]), _prefixes(low[1:], "9" * rest, may_stop=True)),
        seq(literal(high[0]), _prefixes("0" * rest, high[1:], may_stop=True)),
    ]
    if first + 1 <= last - 1:
        parts.append(seq(_digits(first + 1, last - 1), repeat(DIGIT, 0, rest)))
    return alt(*stop, *parts)
