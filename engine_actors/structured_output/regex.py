"""Regular expressions as syntax trees: the dialect that Python and ECMAScript share, minus what is not regular.

Used for `regex` requests (the whole text matches), for JSON schema patterns (the text contains a match), formats and
number ranges. What the two dialects read differently is refused, or narrowed to what both accept, so that a text made
from the tree satisfies `re` and ECMA-262 alike: \\d \\w \\s are ASCII, `.` excludes every line end.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_actors.structured_output import charset
from engine_actors.structured_output.charset import Ranges

MAX_REPEAT = 65536
"""Largest count in a quantifier."""


def _hash_once(node: Regex) -> int:
    """Trees are looked up in dictionaries again and again; hashing one takes as long as it is large."""
    known = node.__dict__.get("_hash")
    if known is None:
        known = hash((type(node), *node.__dict__.values()))
        object.__setattr__(node, "_hash", known)
    return int(known)


@dataclass(frozen=True)
class Chars:
    """One character of a set. The empty set matches nothing at all."""

    ranges: Ranges

    __hash__ = _hash_once


@dataclass(frozen=True)
class Seq:
    """All items, one after the other. No items: the empty text."""

    items: tuple[Regex, ...]

    __hash__ = _hash_once


@dataclass(frozen=True)
class Alt:
    """One of the options."""

    options: tuple[Regex, ...]

    __hash__ = _hash_once


@dataclass(frozen=True)
class Repeat:
    """`low` to `high` times the item; high None is unbounded."""

    item: Regex
    low: int
    high: int | None

    __hash__ = _hash_once


Regex = Chars | Seq | Alt | Repeat

EMPTY = Seq(())
NOTHING = Chars(())
ANY_CHAR = Chars(charset.ALL)
ANY_TEXT = Repeat(ANY_CHAR, 0, None)
DIGIT = Chars(charset.DIGITS)


def literal(text: str) -> Regex:
    """Exactly this text."""
    return seq(*(Chars(charset.of_chars(char)) for char in text))


def seq(*items: Regex) -> Regex:
    """The items in order, flattened."""
    flat: list[Regex] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Seq) else (item,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*options: Regex) -> Regex:
    """One of the options, without duplicates and impossible ones; single characters are joined into one set."""
    flat: list[Regex] = []
    for option in options:
        flat.extend(option.options if isinstance(option, Alt) else (option,))
    chars = charset.union(*(each.ranges for each in flat if isinstance(each, Chars)))
    rest = [each for each in dict.fromkeys(flat) if not isinstance(each, Chars) and not is_empty_set(each)]
    kept = ([Chars(chars)] if chars else []) + rest
    if not kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Alt(tuple(kept))


def repeat(item: Regex, low: int, high: int | None) -> Regex:
    if high == 0:
        return EMPTY
    return item if (low, high) == (1, 1) else Repeat(item, low, high)


def is_empty_set(node: Regex) -> bool:
    """No text matches."""
    match node:
        case Chars(ranges):
            return not ranges
        case Seq(items):
            return any(map(is_empty_set, items))
        case Alt(options):
            return all(map(is_empty_set, options))
        case Repeat(item, low, _):
            return low > 0 and is_empty_set(item)


def min_length(node: Regex) -> int:
    """Length of the shortest match, in characters."""
    match node:
        case Chars():
            return 1
        case Seq(items):
            return sum(map(min_length, items))
        case Alt(options):
            return min(map(min_length, options))
        case Repeat(item, low, _):
            return low * min_length(item)


def max_length(node: Regex) -> int | None:
    """Length of the longest match; None if there is no longest."""
    match node:
        case Chars():
            return 1
        case Seq(items):
            parts = [max_length(item) for item in items]
            return None if None in parts else sum(part for part in parts if part is not None)
        case Alt(options):
            parts = [max_length(option) for option in options]
            return None if None in parts else max(part for part in parts if part is not None)
        case Repeat(item, _, high):
            longest = max_length(item)
            if longest == 0:
                return 0
            return None if high is None or longest is None else high * longest


def with_length(node: Regex, low: int, high: int | None) -> Regex:
    """Matches of `node` that have `low` to `high` characters; NOTHING if there are none.

    All of them where the bounds hold anyway or one repeated set of characters takes up the slack. Else a part of
    them, found by bounding the repeats: all would take a product automaton, of size states times `high`.
    """
    exact = _with_length_exact(node, low, high)
    if exact is not None:
        return exact
    raised = _raise_min(node, low)
    if raised is None:
        return NOTHING
    capped = raised if high is None else _cap_max(raised, high)
    return NOTHING if capped is None else capped


def _with_length_exact(node: Regex, low: int, high: int | None) -> Regex | None:
    shortest, longest = min_length(node), max_length(node)
    if (high is not None and shortest > high) or (longest is not None and longest < low):
        return NOTHING
    if shortest >= low and (high is None or (longest is not None and longest <= high)):
        return node
    items: list[Regex] = list(node.items) if isinstance(node, Seq) else [node]
    flexible = [i for i, item in enumerate(items) if min_length(item) != max_length(item)]
    if len(flexible) != 1:
        return None
    loop = items[flexible[0]]
    if not isinstance(loop, Repeat) or min_length(loop.item) != 1 or max_length(loop.item) != 1:
        return None
    fixed = shortest - loop.low
    new_low = max(loop.low, low - fixed)
    new_high = loop.high if high is None else high - fixed if loop.high is None else min(loop.high, high - fixed)
    items[flexible[0]] = repeat(loop.item, new_low, new_high)
    return seq(*items)


def _raise_min(node: Regex, low: int) -> Regex | None:
    """Some matches of at least `low` characters: the longest that the first parts allow are asked of them."""
    if min_length(node) >= low:
        return node
    longest = max_length(node)
    if longest is not None and longest < low:
        return None
    match node:
        case Seq(items):
            missing = low - min_length(node)
            raised = []
            for item in items:
                most = max_length(item)
                slack = missing if most is None else min(missing, most - min_length(item))
                better = _raise_min(item, min_length(item) + slack)
                raised.append(item if better is None else better)
                missing -= min_length(raised[-1]) - min_length(item)
            return seq(*raised) if missing <= 0 else None
        case Alt(options):
            fitting = [better for option in options if (better := _raise_min(option, low)) is not None]
            return alt(*fitting) if fitting else None
        case Repeat(item, _, high):
            unit = min_length(item) or 1
            count = -(-low // unit)
            if high is not None and count > high:
                unit, count = -(-low // high), high
            better = _raise_min(item, unit)
            return None if better is None else repeat(better, count, high)
    return None


def _cap_max(node: Regex, high: int) -> Regex | None:
    """Some matches of at most `high` characters: the slack is shared out evenly."""
    longest = max_length(node)
    if longest is not None and longest <= high:
        return node
    if min_length(node) > high:
        return None
    match node:
        case Seq(items):
            slack = high - min_length(node)
            num_flexible = sum(min_length(item) != max_length(item) for item in items)
            capped: list[Regex] = []
            for item in items:
                shortest = min_length(item)
                if shortest == max_length(item):
                    capped.append(item)
                    continue
                capped.append(_cap_max(item, shortest + slack // num_flexible) or item)
                slack -= (max_length(capped[-1]) or 0) - shortest
                num_flexible -= 1
            return seq(*capped)
        case Alt(options):
            fitting = [better for option in options if (better := _cap_max(option, high)) is not None]
            return alt(*fitting) if fitting else None
        case Repeat(item, low, most):
            share = high // max(low, 1)
            if low < 2 and max_length(item) is None:
                share = max(min_length(item), high // 2)
            better = _cap_max(item, share)
            if better is None:
                return EMPTY if low == 0 else None
            count = max(low, high // max(max_length(better) or 1, 1))
            return repeat(better, low, count if most is None else min(count, most))
    return None
