"""Tool calls out of the text a model writes, streamed or whole: `feed` takes the text as it comes, `finish` its end.

The non-streamed answer is the concatenation of the streamed one, so there is one code path. Made by `make_parser`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from engine_actors.serve.tool_calls import WHITESPACE, CallArguments, CallScanner, CallStart, Content, ToolEvent
from engine_actors.serve.tools import ToolChoice, ToolUse

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(Protocol):
    """Splits an answer's text into content and calls."""

    num_calls: int

    def feed(self, text: str) -> list[ToolEvent]:
        """What the next piece of text makes sure."""

    def finish(self) -> list[ToolEvent]:
        """The text is complete: what was held back."""


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times, with text around."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._state = "content"
        self._held = ""
        self._scanner: CallScanner | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        self._held += text
        while self._held and self._step(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        held, self._held = self._held, ""
        if self._scanner is not None and self._scanner.name is None:
            return [Content(HERMES_OPEN + self._scanner.raw)]
        if self._state == "content" and held and not (self.num_calls and held.isspace()):
            return [Content(held)]
        return []

    def _step(self, events: list[ToolEvent]) -> bool:
        """Use up what can be; whether there may be more to do."""
        if self._state == "content":
            return self._read_content(events)
        if self._state == "call":
            return self._read_call(events)
        return self._read_close()

    def _read_content(self, events: list[ToolEvent]) -> bool:
        before, tag, after = self._held.partition(HERMES_OPEN)
        if tag:
            self._emit_content(before, events)
            self._held, self._state = after, "call"
            self._scanner = CallScanner(self.num_calls)
            return True
        keep = held_back(self._held, HERMES_OPEN)
        if self.num_calls and not self._held[: len(self._held) - keep].strip():
            return False  # white space after a call: drop it if another call follows
        self._emit_content(self._held[: len(self._held) - keep], events)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _emit_content(self, text: str, events: list[ToolEvent]) -> None:
        if text and not (self.num_calls and text.isspace()):
            events.append(Content(text))

    def _read_call(self, events: list[ToolEvent]) -> bool:
        scanner = self._scanner
        assert scanner is not None
        new, used = scanner.feed(self._held)
        events.extend(new)
        self._held = self._held[used:]
        if scanner.failed:
            self._emit_content(HERMES_OPEN + scanner.raw, events)
            self._scanner, self._state = None, "content"
        elif scanner.name is not None:
            self.num_calls = scanner.index + 1
        if scanner.done:
            self._scanner, self._state = None, "close"
        return bool(self._held)

    def _read_close(self) -> bool:
        """Skip to the closing tag, or to the next call of a model that forgot it."""
        close, again = self._held.find(HERMES_CLOSE), self._held.find(HERMES_OPEN)
        if close >= 0 and (again < 0 or close < again):
            self._held, self._state = self._held[close + len(HERMES_CLOSE) :], "content"
            return True
        if again >= 0:
            self._held, self._state = self._held[again:], "content"
            return True
        keep = max(held_back(self._held, HERMES_CLOSE), held_back(self._held, HERMES_OPEN))
        self._held = self._held[len(self._held) - keep :]
        return False


class JsonCallsParser:
    """An answer that is nothing but calls: JSON objects one after another, or in an array. Otherwise it is content.

    Args:
        names: Objects that name no function of these are content.
        opening: Characters that may stand before the first call.
    """

    def __init__(self, names: Collection[str], opening: str = "", prefix: str = "") -> None:
        self.num_calls = 0
        self._names = names
        self._skipped = WHITESPACE | set(opening) | set(";,]")
        self._prefix = prefix
        self._held = ""
        self._passed = ""
        self._is_content = False
        self._scanner: CallScanner | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        if self._is_content:
            return [Content(text)] if text else []
        events: list[ToolEvent] = []
        self._held += text
        while self._held and not self._is_content and self._step(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        scanner = self._scanner
        if self._is_content or (scanner is not None and scanner.name is not None):
            return []
        rest = (scanner.raw if scanner is not None else "") + self._held
        if self.num_calls:
            return []
        text = self._passed + rest
        return [Content(text)] if text else []

    def _step(self, events: list[ToolEvent]) -> bool:
        if self._scanner is None and not self._find_object(events):
            return False
        scanner = self._scanner
        if scanner is None:
            return False
        new, used = scanner.feed(self._held)
        events.extend(new)
        self._held = self._held[used:]
        if scanner.name is not None:
            self.num_calls = scanner.index + 1
        if scanner.failed:
            self._scanner = None
            self._become_content(scanner.raw, events)
        elif scanner.done:
            self._scanner = None
        return bool(self._held)

    def _find_object(self, events: list[ToolEvent]) -> bool:
        """Skip what may stand before a call; True when one begins."""
        if self._prefix and not self.num_calls:
            stripped = self._held.lstrip()
            if stripped.startswith(self._prefix):
                self._passed += self._held[: len(self._held) - len(stripped)] + self._prefix
                self._held, self._prefix = stripped[len(self._prefix) :], ""
            elif self._prefix.startswith(stripped):
                return False  # may become the prefix
        body = self._held.lstrip("".join(self._skipped))
        self._passed += self._held[: len(self._held) - len(body)]
        self._held = body
        if not body:
            return False
        if body[0] != "{":
            self._become_content("", events)
            return False
        self._scanner = CallScanner(self.num_calls, self._names)
        return True

    def _become_content(self, raw: str, events: list[ToolEvent]) -> None:
        self._is_content = True
        text = ("" if self.num_calls else self._passed) + raw + self._held
        self._held = ""
        if text:
            events.append(Content(text))


class NamedCallParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self.num_calls = 1
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[ToolEvent]:
        if not text:
            return []
        started, self._started = self._started, True
        piece = CallArguments(0, text)
        return [piece] if started else [CallStart(0, self._name), piece]

    def finish(self) -> list[ToolEvent]:
        return [] if self._started else [CallStart(0, self._name)]


def make_parser(tools: ToolUse, style: str) -> ToolParser | None:
    """The parser of one choice of an answer; None when there are no calls to look for.

    Args:
        style: "hermes" or "llama3_json", for calls that the model is free to make.
    """
    names = frozenset(tool["function"]["name"] for tool in tools.tools)
    if tools.choice is ToolChoice.NONE:
        return None
    if tools.choice is ToolChoice.NAMED:
        return NamedCallParser(tools.name or "")
    if tools.choice is ToolChoice.REQUIRED:
        return JsonCallsParser(names, opening="[")
    return HermesParser() if style == "hermes" else JsonCallsParser(names, prefix=PYTHON_TAG)


def held_back(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0


def detect_style(template: str | None) -> str:
    """The style a chat template teaches: llama3_json when it speaks of python_tag or "parameters", else hermes."""
    source = template or ""
    if HERMES_OPEN in source:
        return "hermes"
    if "python_tag" in source or '{"name": function name, "parameters"' in source:
        return "llama3_json"
    return "hermes"
