"""The string keywords of JSON schema → one regular expression over the value."""

from __future__ import annotations

from typing import Any

from engine_actors.structured_output.formats import SUPPORTED_FORMATS, format_regex
from engine_actors.structured_output.regex import ANY_CHAR, NOTHING, Regex, repeat, with_length
from engine_actors.structured_output.regex_parser import parse_search
from engine_actors.structured_output.schema_keywords import unsupported
from scheduler.structured_output import StructuredOutputError

MAX_LENGTH = 65536
"""Longest bounded string. A larger maxLength counts as this, a larger minLength is refused."""
_HINTS = ("password", "path", "file-path", "directory-path")
"""Formats that ask nothing of the text."""


def make_string(schema: dict[str, Any], path: str) -> Regex | None:
    """The strings allowed; None for all. NOTHING where the bounds contradict each other.

    Raises:
        StructuredOutputError: A pattern or format that cannot be enforced.
    """
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if high is not None and low > high:
        return NOTHING
    if low > MAX_LENGTH:
        raise unsupported(path, "minLength", f"at most {MAX_LENGTH}, got {low}")
    if high is not None:
        high = min(high, MAX_LENGTH)
    name = schema.get("format")
    if name is not None and name not in _HINTS:
        if "pattern" in schema:
            raise unsupported(path, "pattern", f"beside format {name!r}")
        if name not in SUPPORTED_FORMATS:
            raise unsupported(path, "format", f"{name!r:.100} is none of {', '.join(SUPPORTED_FORMATS)}")
        regex = format_regex(name, low, high)
        if regex is None:
            lengths = f"minLength {low}" + ("" if high is None else f" and maxLength {high}")
            raise unsupported(path, "format", f"{name!r} with {lengths}")
        return regex
    if "pattern" in schema:
        try:
            return with_length(parse_search(schema["pattern"]), low, high)
        except StructuredOutputError as error:
            raise StructuredOutputError(f"json{path}/pattern: {error}") from None
    return None if low == 0 and high is None else repeat(ANY_CHAR, low, high)
