"""Checks of single values that users give, and how errors show them. Used wherever parameters are checked."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

MAX_INT = 2**63 - 1
MAX_SHOWN_CHARS = 200


def shown(value: Any) -> str:
    """`value` for an error's text: never long, and whatever it is."""
    try:
        text = repr(value)
    except Exception:  # Nested too deeply, an integer of too many digits, or a broken __repr__.
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def check_int(name: str, value: Any, low: int, high: int | None, allowed: str | None = None) -> None:
    """Refuse what is not an integer from `low` to `high` (None: of 64 bits); `allowed` says so in the error."""
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < low or value > (MAX_INT if high is None else high):
        limits = allowed or (f"{low} to {high}" if high is not None else f"at least {low}")
        raise ValueError(f"{name} must be an integer, {limits}; got {shown(value)}")


def check_token_ids(name: str, token_ids: Collection[Any], allowed: str | None = None) -> None:
    """Refuse a collection that holds anything but integers of at least 0. Tens of thousands take a millisecond: each
    process that a request passes checks them, beside other requests' steps."""
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= MAX_INT:
        return
    for token_id in token_ids:
        check_int(name, token_id, 0, None, allowed)


def check_float(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """Refuse what is not a number in [low, high]; with `above`, `low` itself too."""
    if not is_finite(value) or value > high or value < low or (above and value == low):
        raise ValueError(f"{name} must be a number in {'(' if above else '['}{low}, {high}], got {shown(value)}")


def is_finite(value: Any) -> bool:
    """A number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # Integers may be larger; NaN never is smaller.


def is_text(value: Any) -> bool:
    """A string that can be sent: one with half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
