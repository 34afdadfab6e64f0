"""`StructuredOutputsParams`: the form a request's text must take. Public API, a field of SamplingParams, a wire type.

Only shape and size are checked here, so that nothing that reaches the engine can exhaust a parser. Whether a schema,
a regular expression or a grammar can be enforced is decided by `engine_actors.structured_output.check`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from scheduler.values import is_text, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""A request names exactly one of them."""
MAX_TEXT_CHARS = {
    "json": 512 * 1024,
    "regex": 8 * 1024,
    "choice": 512 * 1024,
    "grammar": 128 * 1024,
    "structural_tag": 512 * 1024,
}
"""Longest text of each kind, in characters. Above every use we know of, and below what takes a parser seconds."""
MAX_CHOICES = 10_000
MAX_NESTING = 64
"""Deepest nesting of a JSON schema or structural tag, in objects and lists."""
MAX_WHITESPACE_PATTERN_CHARS = 256


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar is compiled from: the cache's key, and the message to the compiler process.

    Attributes:
        kind: One of KINDS.
        text: JSON for json, choice and structural_tag (member order as the user gave it: it is the order of the
            output); else the user's text.
        any_whitespace: Optional whitespace between the tokens of JSON.
        whitespace_pattern: Regular expression of that whitespace; None is the built-in, bounded one.
    """

    kind: str
    text: str
    any_whitespace: bool = True
    whitespace_pattern: str | None = None


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Exactly one of the six kinds, and options. Names are vLLM's; violations raise ValueError.

    Attributes:
        json: A JSON schema (draft 2020-12; older spellings of tuples, definitions and bounds are understood) as a
            dictionary, a boolean or text.
        regex: A regular expression that matches the whole text (Python's syntax, without what is not regular).
        choice: The text is one of these.
        grammar: EBNF with a rule `root`.
        json_object: True: any JSON object.
        structural_tag: Free text with tagged regions, each of a given form; a dictionary or JSON text.
        disable_any_whitespace: JSON gets ", " and ": " as separators, and no other whitespace.
        disable_additional_properties: Accepted for compatibility. Objects that list properties are closed in any
            case, unless the schema opens them with additionalProperties.
        whitespace_pattern: Regular expression for the optional whitespace between the tokens of JSON.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self._check_options()
        self.spec()

    @property
    def kind(self) -> str:
        """Which of KINDS this is."""
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must hold exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}"
            )
        return given[0]

    def spec(self) -> GrammarSpec:
        """The grammar to compile. Two requests with equal specs share one compilation."""
        kind = self.kind
        text = getattr(self, f"_{kind}_text")()
        limit = MAX_TEXT_CHARS.get(kind)
        if limit is not None and len(text) > limit:
            raise ValueError(f"structured_outputs.{kind} must be at most {limit} characters, got {len(text)}")
        if kind not in ("json", "json_object", "structural_tag"):
            return GrammarSpec(kind, text)
        return GrammarSpec(kind, text, not self.disable_any_whitespace, self.whitespace_pattern)

    def _check_options(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"structured_outputs.{name} must be true or false, got {shown(value)}")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"structured_outputs.json_object must be true or false, got {shown(self.json_object)}")
        pattern = self.whitespace_pattern
        if pattern is None:
            return
        if not is_text(pattern) or len(pattern) > MAX_WHITESPACE_PATTERN_CHARS:
            raise ValueError(
                f"structured_outputs.whitespace_pattern must be a regular expression of at most "
                f"{MAX_WHITESPACE_PATTERN_CHARS} characters, got {shown(pattern)}"
            )
        if self.disable_any_whitespace:
            raise ValueError("structured_outputs.whitespace_pattern cannot be used with disable_any_whitespace")
        if self.kind not in ("json", "json_object"):
            raise ValueError(f"structured_outputs.whitespace_pattern needs json or json_object, got {self.kind}")

    def _json_text(self) -> str:
        return _canonical_json("json", self.json, (dict, bool), "a JSON schema (an object, a boolean, or such text)")

    def _structural_tag_text(self) -> str:
        return _canonical_json("structural_tag", self.structural_tag, (dict,), "an object, or the JSON text of one")

    def _json_object_text(self) -> str:
        return ""

    def _regex_text(self) -> str:
        return _non_empty_text("regex", self.regex)

    def _grammar_text(self) -> str:
        return _non_empty_text("grammar", self.grammar)

    def _choice_text(self) -> str:
        choices = self.choice
        valid = isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices)
        if not valid or not choices:
            raise ValueError(f"structured_outputs.choice must be a list of non-empty strings, got {shown(choices)}")
        if len(choices) > MAX_CHOICES:
            raise ValueError(f"structured_outputs.choice must hold at most {MAX_CHOICES} strings, got {len(choices)}")
        return json.dumps(list(dict.fromkeys(choices)))


def _non_empty_text(name: str, value: Any) -> str:
    if not is_text(value) or not value.strip():
        raise ValueError(f"structured_outputs.{name} must be a non-empty string, got {shown(value)}")
    return str(value)


def _canonical_json(name: str, value: Any, types: tuple[type, ...], allowed: str) -> str:
    """`value`, or the JSON text it is, as compact JSON with members in the given order."""
    wrong = f"structured_outputs.{name} must be {allowed}, got {shown(value)}"
    if isinstance(value, str):
        if len(value) > MAX_TEXT_CHARS[name]:
            raise ValueError(
                f"structured_outputs.{name} must be at most {MAX_TEXT_CHARS[name]} characters, got {len(value)}"
            )
        try:
            # Not msgspec: numbers must keep their spelling as Python's json reads it, and NaN is refused below.
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{name} is not valid JSON: {error}") from None
    if not isinstance(value, types):
        raise ValueError(wrong)
    _check_nesting(name, value)
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ValueError(f"structured_outputs.{name} holds what JSON has not: {error}") from None


def _check_nesting(name: str, value: Any) -> None:
    """Level by level, so that no depth (nor a cycle) exhausts the stack."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node) if isinstance(child, (dict, list, tuple))]
        if not level:
            return
    raise ValueError(f"structured_outputs.{name} must be nested at most {MAX_NESTING} deep")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, (list, tuple)) else ()
