"""Sets of Unicode characters as sorted ranges. Used by the regular expressions and the EBNF writer of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive ranges of code points, without surrogates."""

_FIRST_SURROGATE, _LAST_SURROGATE = 0xD800, 0xDFFF


def make_ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any inclusive pairs as Ranges. Surrogates are dropped: UTF-8 has no encoding for them."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(pairs)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _without_surrogates(pairs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for low, high in pairs:
        if low < _FIRST_SURROGATE:
            yield low, min(high, _FIRST_SURROGATE - 1)
        if high > _LAST_SURROGATE:
            yield max(low, _LAST_SURROGATE + 1), high


def of_chars(chars: str) -> Ranges:
    """The set of these characters."""
    if len(chars) == 1 and not _FIRST_SURROGATE <= ord(chars) <= _LAST_SURROGATE:
        return ((ord(chars), ord(chars)),)  # by far the most frequent case
    return make_ranges((ord(char), ord(char)) for char in chars)


def union(*sets: Ranges) -> Ranges:
    return make_ranges(pair for each in sets for pair in each)


def complement(ranges: Ranges) -> Ranges:
    """Every other character."""
    result = []
    start = 0
    for low, high in ranges:
        if low > start:
            result.append((start, low - 1))
        start = high + 1
    if start <= sys.maxunicode:
        result.append((start, sys.maxunicode))
    return make_ranges(result)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(union(complement(a), complement(b)))


def difference(a: Ranges, b: Ranges) -> Ranges:
    return intersection(a, complement(b))


def size(ranges: Ranges) -> int:
    """Number of characters."""
    return sum(high - low + 1 for low, high in ranges)


ALL = complement(())
DIGITS = make_ranges([(0x30, 0x39)])
WORD = union(DIGITS, make_ranges([(0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]))
SPACE = of_chars(" \t\n\r\f\v")
LINE_ENDS = of_chars("\n\r\u2028\u2029")

# What \d, \w and \s match in *some* dialect: ECMAScript's \d and \w are ASCII, Python's are Unicode. Their negations
# must avoid all of it. The first two are generous above ASCII, which only narrows \D and \W.
ANY_DIGIT = union(DIGITS, make_ranges([(0x660, sys.maxunicode)]))
ANY_WORD = union(WORD, make_ranges([(0x80, sys.maxunicode)]))
ANY_SPACE = union(
    SPACE,
    of_chars("\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2028\u2029\u202f\u205f\u3000\ufeff"),
    make_ranges([(0x2000, 0x200A)]),
)
