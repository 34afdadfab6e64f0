"""One function call in JSON, read as it is generated: the pieces that tool_parsers.py puts together.

`CallScanner` sees a text character by character, however it is cut, and tells the call's name and arguments as early
as they are sure.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

WHITESPACE = frozenset(" \t\r\n")
NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, JSON text."""

    index: int
    text: str


ToolEvent = Content | CallStart | CallArguments


@dataclass(slots=True)
class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`, in either order, other keys ignored.

    Attributes:
        index: The call's number in the answer.
        names: Acceptable function names; None accepts any.
        raw: All that was read, for the case that it turns out to be no call.
        done: The object is complete and was a call.
        failed: It is no call. Never set once an event was given: what is malformed later ends the call as it is.
    """

    index: int
    names: Collection[str] | None = None
    raw: str = ""
    done: bool = False
    failed: bool = False
    name: str | None = None
    _state: str = "start"
    _text: str = ""
    _key: str = ""
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _streams: bool = False
    _arguments: str = ""
    _has_arguments: bool = False
    _events: list[ToolEvent] = field(default_factory=list)

    def feed(self, text: str) -> tuple[list[ToolEvent], int]:
        """Read on; the events, and how many characters were used (all, unless `done` or `failed`)."""
        used = 0
        for character in text:
            used += 1
            self._read(character)
            if self.done or self.failed:
                break
        self.raw += text[:used]
        self._flush_arguments()
        events, self._events = self._events, []
        return events, used

    def _read(self, character: str) -> None:
        state = self._state
        if state == "value":
            self._read_value(character)
        elif state == "key":
            self._read_key(character)
        elif character in WHITESPACE:
            return
        elif state == "start" and character == "{":
            self._state = "next"
        elif state in ("next", "comma") and character == "}":
            self._end_object()
        elif state == "comma" and character == ",":
            self._state = "next"
        elif state == "next" and character == '"':
            self._state, self._text, self._escaped = "key", '"', False
        elif state == "colon" and character == ":":
            self._state = "before value"
        elif state == "before value":
            self._begin_value(character)
        else:
            self._fail()

    def _read_key(self, character: str) -> None:
        self._text += character
        if self._ends_string(character):
            key = _loads(self._text)
            self._key = key if isinstance(key, str) else ""
            self._state = "colon"

    def _begin_value(self, character: str) -> None:
        self._state, self._text, self._depth = "value", "", 0
        self._in_string = self._escaped = False
        self._streams = self._key in ARGUMENT_KEYS and character == "{" and not self._has_arguments
        self._read_value(character)

    def _read_value(self, character: str) -> None:
        if self._in_string:
            self._append(character)
            if self._ends_string(character):
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
            return
        if self._depth == 0 and self._text and character in ",}] \t\r\n":  # after a number, true, false or null
            self._end_value()
            if character not in WHITESPACE:
                self._read(character)
            return
        self._append(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _append(self, character: str) -> None:
        if self._streams:
            self._arguments += character
            self._text = "{"  # not empty, which is all that is asked of it
        else:
            self._text += character

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            return character == '"'
        return False

    def _end_value(self) -> None:
        self._state = "comma"
        if self._streams:
            self._streams, self._has_arguments = False, True
            return
        if self._key == NAME_KEY and self.name is None:
            name = _loads(self._text)
            if not isinstance(name, str) or not name or (self.names is not None and name not in self.names):
                self._fail()
                return
            self.name = name
            self._events.append(CallStart(self.index, name))
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            # Not an object. Models write the arguments' JSON as a string now and then, or null for none.
            value = _loads(self._text)
            self._arguments += value if isinstance(value, str) else "{}" if value is None else self._text
            self._has_arguments = True

    def _end_object(self) -> None:
        if self.name is None:
            self._fail()
            return
        if not self._has_arguments:
            self._arguments += "{}"
        self.done = True

    def _flush_arguments(self) -> None:
        if self._arguments and self.name is not None:
            self._events.append(CallArguments(self.index, self._arguments))
            self._arguments = ""

    def _fail(self) -> None:
        if self.name is None:
            self.failed = True
        else:
            self.done = True


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
