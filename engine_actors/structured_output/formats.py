"""The string formats of JSON schema that can be enforced, as regular expressions.

Each accepts a part of what its specification does: what every validator takes, and what a model may be expected to
write. Some come in tighter variants too, tried in order when a schema also limits the length.
"""

from __future__ import annotations

import functools

from engine_actors.structured_output.regex import Regex, is_empty_set, max_length, min_length, with_length
from engine_actors.structured_output.regex_parser import parse_full

# Years with four digits from 1000 on: validators disagree about year 0.
_LEAP_YEAR = r"(?:[12]\d(?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_DATE = (
    r"(?:[12]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|" + _LEAP_YEAR + r"-02-29)"
)
# RFC 3339 section 5.6, without leap seconds.
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_TIME = _CLOCK + r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DURATION_TIME = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_DURATION_DATE = r"(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D)"
_DURATION = rf"P(?:\d{{1,4}}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        *(
            rf"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?"
            for before in (1, 3, 5)
        ),
    ]
)
_HEX = "[0-9a-fA-F]"
_UUID = rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"


def _label(most: int) -> str:
    return rf"[A-Za-z0-9](?:[A-Za-z0-9-]{{0,{most - 2}}}[A-Za-z0-9])?"


def _hostname(labels: int, most: int) -> str:
    return rf"{_label(most)}(?:\.{_label(most)}){{0,{labels - 1}}}"


def _email(parts: int, part: int, labels: int, label: int) -> str:
    atom = rf"[A-Za-z0-9_%+-]{{1,{part}}}"
    return rf"{atom}(?:\.{atom}){{0,{parts - 1}}}@(?:{_label(label)}\.){{1,{labels}}}[A-Za-z]{{2,6}}"


_PATH_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F][0-9A-F])"


def _uri(host: str, segments: str, segment: str, rest: str) -> str:
    path = rf"(?:/{_PATH_CHAR}{segment}){segments}"
    return rf"(?:https?|ftp|wss?)://{host}(?::[1-9]\d{{0,3}})?{_tail(path, rest)}"


def _tail(path: str, rest: str) -> str:
    return rf"{path}(?:\?{_PATH_CHAR}{rest})?(?:#{_PATH_CHAR}{rest})?"


_ANY_URI = _uri(r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]+", "*", "*", "*")
_FORMATS: dict[str, tuple[str, ...]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (rf"{_DATE}T{_TIME}",),
    "duration": (_DURATION,),
    "email": (
        r"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}",
        _email(3, 20, 2, 24),
        _email(2, 12, 1, 14),
        _email(1, 12, 1, 10),
        _email(1, 4, 1, 4),
    ),
    "hostname": (_hostname(3, 20), _hostname(2, 12), _hostname(1, 12), _hostname(1, 3)),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uuid": (_UUID,),
    "uri": (
        _ANY_URI,
        _uri(_hostname(2, 16), "{0,4}", "{0,16}", "{0,16}"),
        _uri(_hostname(1, 8), "{0,2}", "{0,6}", "{0,4}"),
    ),
    "uri-reference": (
        rf"(?:{_ANY_URI}|{_tail(f'(?:/{_PATH_CHAR}*)+', '*')})",
        rf"{_tail(f'(?:/{_PATH_CHAR}{{0,8}}){{1,3}}', '{0,4}')}",
    ),
    "json-pointer": (r"(?:/(?:[^~/]|~[01])*)*", r"(?:/(?:[^~/]|~[01]){0,12}){0,3}"),
}
SUPPORTED_FORMATS = tuple(sorted(_FORMATS))


@functools.cache
def _parsed(name: str) -> tuple[Regex, ...]:
    return tuple(parse_full(text) for text in _FORMATS[name])


def format_regex(name: str, low: int, high: int | None) -> Regex | None:
    """Texts of a supported format, all with `low` to `high` characters. None: there are no such texts."""
    variants = _parsed(name)
    for variant in variants:
        longest = max_length(variant)
        if min_length(variant) >= low and (high is None or (longest is not None and longest <= high)):
            return variant
    bounded = (with_length(variant, low, high) for variant in variants)
    return next((regex for regex in bounded if not is_empty_set(regex)), None)
